"""Random states as plain containers and tensors, fit for checkpoints that are loaded as weights alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def global_state() -> dict[str, Any]:
    """States of the generators that belong to nobody: torch's (of all devices in use), NumPy's and Python's."""
    legacy: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]  # noqa: NPY002
    numpy = {
        "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "pos": int(legacy["state"]["pos"]),
        "has_gauss": int(legacy["has_gauss"]),
        "gauss": float(legacy["gauss"]),
    }
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if has_gpu else [],
        "numpy": numpy,
        "python": random.getstate(),
    }


def set_global_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`global_state`; states of devices that are not here are left out."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each.cpu(), device)
    numpy = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        ("MT19937", numpy["key"].numpy().astype(np.uint32), numpy["pos"], numpy["has_gauss"], numpy["gauss"])
    )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def derived_seed(seed: int, env_steps: int) -> int:
    """Seed of what is begun after so many environment steps; ``seed`` itself at the beginning of a run.

    With the run's own seed again, the simulators of a resumed run would play the same episodes as at its beginning.
    """
    return seed if env_steps <= 0 else int(np.random.SeedSequence([seed, env_steps]).generate_state(1)[0]) >> 2
