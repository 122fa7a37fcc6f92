"""Stand-in for the tensor bridge, whose import compiles an extension and may take a minute the first time."""

from __future__ import annotations

import os
import time
from typing import Any

from isaacgym import gymapi  # noqa: F401  (the native module must be there first)

import torch  # isort: skip

#: Seconds that the import takes.
SLOW_IMPORT = "CLAW_FAKE_ISAAC_SLOW_IMPORT"

print("Using %s as PyTorch extensions root..." % os.path.expanduser("~/.cache/torch_extensions"))
print("Emitting ninja build file, building extension module gymtorch...", flush=True)
time.sleep(float(os.environ.get(SLOW_IMPORT) or 0.0))
print("Loading extension module gymtorch...", flush=True)


def wrap_tensor(tensor: Any) -> torch.Tensor:
    """A native tensor as a torch tensor; the stand-in has torch tensors only."""
    return torch.as_tensor(tensor)


def unwrap_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The other way; raises as the real one does for views that are not contiguous."""
    if not tensor.is_contiguous():
        raise RuntimeError("Input tensor must be contiguous")
    return tensor
