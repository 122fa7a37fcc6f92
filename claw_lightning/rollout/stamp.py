"""Stamp: what is written into a row beside what the simulator showed, gathered so that a row is written in one pass.

Of a row of 4,096 lanes, each field that is written on its own touches as many cache lines as the whole row has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Optional

import numpy as np
import torch

from claw_lightning.rollout.ring import RowLayout


@lru_cache(maxsize=None)
def _weights(count: int) -> np.ndarray:
    """Of a sum that tells whether all numbers are finite: small, so that none can bring it to overflow."""
    return np.full(count, 2.0**-20, np.float32)


def all_finite(*parts: Optional[np.ndarray]) -> np.ndarray:
    """Which rows of float32 [N, any] hold finite numbers alone, over all parts [N] bool; None counts as finite.

    A weighted sum is finite exactly if all its numbers are; it is one pass without a table of flags.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        sums = [part @ _weights(part.shape[1]) for part in parts if part is not None]
        return np.isfinite(sum(sums[1:], sums[0]))


class Stamp:
    """All words of N rows but those of observation, states and image.

    Args:
        layout: of the rows.
        num_lanes: N.
    """

    def __init__(self, layout: RowLayout, num_lanes: int) -> None:
        self.layout = layout
        self._first = layout.fields["action"][0]
        #: Words of the image, which are written when it is shown; empty where there is none.
        self._gap = layout.fields.get("image_place", layout.fields.get("image", (layout.words, layout.words)))
        self._words = np.zeros((num_lanes, layout.words - self._first), np.float32)
        self._views = {
            name: layout.cut(self._words, name, start - self._first, stop - self._first)
            for name, (start, stop) in layout.fields.items()
            if start >= self._first and (start, stop) != self._gap
        }

    def __getitem__(self, name: str) -> np.ndarray:
        """Field [N, size], or [N] for one-word fields; to be written into."""
        return self._views[name]

    @property
    def floats(self) -> np.ndarray:
        """All float32 fields [N, any]: action, reward, logarithms of probabilities."""
        return self._words[:, : self.layout.fields["log_prob_option"][1] - self._first]

    def write(self, rows: np.ndarray, obs: np.ndarray, states: Optional[np.ndarray]) -> None:
        """Fill rows [N, W]; the image in them stays."""
        first, last = self._gap
        parts = [obs] if states is None else [obs, states]
        parts.append(self._words[:, : first - self._first])
        # Of torch, because it copies narrow parts side by side a quarter faster.
        torch.cat([torch.from_numpy(part) for part in parts], 1, out=torch.from_numpy(rows[:, :first]))
        if last < self.layout.words:
            rows[:, last:] = self._words[:, last - self._first :]
