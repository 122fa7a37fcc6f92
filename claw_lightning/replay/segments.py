"""Segments: consecutive rows while they are drawn, and how much of them belongs together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from claw_lightning.rollout.ring import FIRST, SWITCHED, TERMINATED, TRUNCATED, RowLayout


class Segments(NamedTuple):
    """Segments of consecutive rows while they are drawn: rows [M, L, W], next_obs [M, L, O], valid [M, L] bool.

    Of tasks with images also next_images [M, L, bytes] uint8, and images likewise where the rows hold them compressed.
    ``valid`` always lies in the host's memory: it is computed there.
    """

    rows: Tensor
    next_obs: Tensor
    valid: Tensor
    next_images: Tensor | None = None
    images: Tensor | None = None

    @classmethod
    def empty(cls, count: int, length: int, layout: RowLayout, device: torch.device | None = None) -> Segments:
        """Uninitialised room for ``count`` segments, in the host's memory or on a device."""
        valid = torch.empty(count, length, dtype=torch.bool)

        def pixels(wanted: object) -> Tensor | None:
            if not wanted:
                return None
            return torch.empty(count, length, layout.image_size, dtype=torch.uint8, device=device)

        return cls(
            torch.empty(count, length, layout.words, device=device),
            torch.empty(count, length, layout.obs_size, device=device),
            valid,
            pixels(layout.image_size),
            pixels(layout.has_arena),
        )

    def put(self, where: np.ndarray, part: Segments) -> None:
        """Write segments [m] to the places [m] of these; both on the same device."""
        for whole, new in zip(self, part, strict=True):
            if whole is not None and new is not None:
                whole.index_copy_(0, torch.from_numpy(where).to(whole.device), new)


def connected(fine: np.ndarray, flags: np.ndarray, within_option: bool) -> np.ndarray:
    """Which steps of segments belong to them: a prefix of each, [M, L] bool.

    Nothing crosses the end of an episode, nor a beginning without an end before it (worker restart), nor, with
    ``within_option``, the selection of another option.

    Args:
        fine: [M, L] bool, rows that may be learned from.
        flags: [M, L] int32 of the rows.
        within_option: whether a segment ends with the option of its first row.
    """
    fine = fine.copy()
    fine[:, 1:] &= ((flags[:, :-1] & (TERMINATED | TRUNCATED)) == 0) & ((flags[:, 1:] & FIRST) == 0)
    if within_option:
        fine[:, 1:] &= (flags[:, 1:] & SWITCHED) == 0
    return np.logical_and.accumulate(fine, axis=1)
