"""Stand-in for the tensor helpers, with the alias of numpy that newer versions no longer have."""

from __future__ import annotations

from typing import Any, Sequence, Union

import numpy as np
import torch


def to_torch(
    x: Any, dtype: torch.dtype = torch.float, device: str = "cuda:0", requires_grad: bool = False
) -> torch.Tensor:
    """``x`` as a tensor; the default device is a GPU."""
    return torch.tensor(x, dtype=dtype, device=device, requires_grad=requires_grad)


# `np.float` is gone from numpy 1.24 on, and defaults are evaluated at import: the import then fails.
def get_axis_params(value: float, axis: int, x: float = 0.0, dtype: Any = np.float, size: int = 3) -> Any:  # type: ignore[attr-defined]  # noqa: NPY001
    """A vector of ``size`` with ``value`` at ``axis``."""
    vector = np.zeros((size,))
    vector[0] = x
    vector[axis] = value
    return list(vector.astype(dtype))


def torch_rand_float(
    lower: float, upper: float, shape: Sequence[int], device: Union[str, torch.device]
) -> torch.Tensor:
    """Uniform in [lower, upper)."""
    return (upper - lower) * torch.rand(*shape, device=device) + lower


def tensor_clamp(t: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Clamp with tensors as bounds."""
    return torch.max(torch.min(t, high), low)
