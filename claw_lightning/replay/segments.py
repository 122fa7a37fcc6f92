"""Segments: consecutive rows while they are drawn, and how much of them belongs together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from claw_lightning.rollout.ring import FIRST, SWITCHED, TERMINATED, TRUNCATED, RowLayout


class Segments(NamedTuple):
    """Segments of consecutive rows while they are drawn: rows [M, L, W], next_obs [M, L, O], valid [M, L] bool.

    With next states, next_obs is [M, L, O + S]: both lie side by side in a row, and are gathered as one.

    Of tasks with images also next_images [M, L, bytes] uint8, and images likewise where the rows hold them compressed.
    ``valid`` always lies in the host's memory: it is computed there. Of segments of several rows, rows and next_obs
    are views of ``whole`` [M, L + 1, W], into which the rows and their successor are gathered at once: what follows a
    row is its next observation, and nothing is copied twice.
    """

    rows: Tensor
    next_obs: Tensor
    valid: Tensor
    next_images: Tensor | None = None
    images: Tensor | None = None
    whole: Tensor | None = None

    @classmethod
    def empty(
        cls, count: int, length: int, layout: RowLayout, device: torch.device | None = None, with_states: bool = False
    ) -> Segments:
        """Uninitialised room for ``count`` segments, in the host's memory or on a device; or with next states."""
        seen = layout.final_size if with_states else layout.obs_size
        valid = torch.empty(count, length, dtype=torch.bool)

        def pixels(wanted: object) -> Tensor | None:
            if not wanted:
                return None
            return torch.empty(count, length, layout.image_size, dtype=torch.uint8, device=device)

        whole: Tensor | None = None
        if length > 1:
            whole = torch.empty(count, length + 1, layout.words, device=device)
            rows, next_obs = whole[:, :-1], whole[:, 1:, :seen]
        else:
            rows = torch.empty(count, 1, layout.words, device=device)
            next_obs = torch.empty(count, 1, seen, device=device)
        return cls(rows, next_obs, valid, pixels(layout.image_size), pixels(layout.has_arena), whole)

    def put(self, where: np.ndarray, part: Segments) -> None:
        """Write segments [m] to the places [m] of these; both on the same device."""
        for mine, new in zip(self._stored(), part._stored(), strict=True):
            mine.index_copy_(0, torch.from_numpy(where).to(mine.device), new)

    def blank(self) -> None:
        """Set the numbers of invalid steps to zero: a loss masks by multiplication, and 0 * NaN would still be NaN.

        What stays is the observation behind the last valid step, its next one, and its states where they are wanted.
        Nothing of single rows is invalid.
        """
        if self.whole is None:
            return
        valid, seen = self.valid.numpy(), self.next_obs.shape[-1]
        samples, behind = np.arange(len(valid)), valid.sum(axis=1)
        if self.whole.device.type == "cpu":  # NumPy writes by mask at a tenth of torch's cost
            whole = self.whole.numpy()
            whole[:, 1:][~valid] = 0.0
            whole[samples, behind, seen:] = 0.0
            for pixels in (self.next_images, self.images):
                if pixels is not None:
                    pixels.numpy()[~valid] = 0
            return
        device = self.whole.device
        invalid = torch.from_numpy(~valid).to(device)[..., None]
        self.whole[:, 1:].masked_fill_(invalid, 0.0)
        self.whole[torch.from_numpy(samples).to(device), torch.from_numpy(behind).to(device), seen:] = 0.0
        for pixels in (self.next_images, self.images):
            if pixels is not None:
                pixels.masked_fill_(invalid, 0)

    def _stored(self) -> list[Tensor]:
        """Each number once."""
        tensors = (self.rows, self.next_obs) if self.whole is None else (self.whole,)
        return [t for t in (*tensors, self.valid, self.next_images, self.images) if t is not None]


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
