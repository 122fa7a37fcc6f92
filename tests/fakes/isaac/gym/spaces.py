"""Box as old gym had it."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np


class Space:
    """Base of all spaces."""

    shape: Tuple[int, ...]
    dtype: Any


class Box(Space):
    """Bounds per element, float32 whatever the dtype of the bounds."""

    def __init__(self, low: Any, high: Any, shape: Optional[Tuple[int, ...]] = None, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape) if shape is not None else np.shape(low)
        self.low = np.broadcast_to(np.asarray(low, dtype=self.dtype), self.shape).copy()
        self.high = np.broadcast_to(np.asarray(high, dtype=self.dtype), self.shape).copy()
