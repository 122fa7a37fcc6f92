"""The seeding that ``make`` leaves to its caller."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def set_seed(seed: int, torch_deterministic: bool = False, rank: int = 0) -> int:
    """Seeds random, numpy and torch; -1 draws a seed. Returns the one in use."""
    if seed == -1:
        seed = 42 + rank if torch_deterministic else int(np.random.randint(0, 10000))  # noqa: NPY002
    else:
        seed += rank
    print("Setting seed: %d" % seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the tasks draw from the global generators)
    torch.manual_seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    return seed
