"""ReplayMemory: uniform batches out of all workers' rings, without copies on the way in and without locks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from claw_lightning.replay.batch import ReplayBatch
from claw_lightning.rollout.normalizer import Moments, RunningMoments, batch_moments
from claw_lightning.rollout.ring import (
    FIRST,
    HAS_FINAL,
    QUARANTINED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
    RowLayout,
    usable,
)


class _Segments(NamedTuple):
    """Segments of consecutive rows while they are drawn: rows [M, L, W], next_obs [M, L, O], valid [M, L] bool."""

    rows: Tensor
    next_obs: Tensor
    valid: Tensor

    @classmethod
    def empty(cls, count: int, length: int, layout: RowLayout) -> _Segments:
        """Uninitialised room for ``count`` segments."""
        valid = torch.empty(count, length, dtype=torch.bool)
        return cls(torch.empty(count, length, layout.words), torch.empty(count, length, layout.obs_size), valid)


class ReplayMemory:
    """The rings of all workers as one memory.

    Args:
        rings: one per worker, equal layouts.
        seed: of the sampler.
    """

    def __init__(self, rings: Sequence[LaneRing], seed: int) -> None:
        self.rings = list(rings)
        self.layout = rings[0].layout
        self.rng = np.random.default_rng(seed)
        self._flat = [torch.from_numpy(ring.rows.reshape(-1, self.layout.words)) for ring in self.rings]
        self._seen = [ring.head for ring in self.rings]

    @property
    def inserted(self) -> int:
        """Environment steps published by all workers since their rings were made."""
        return sum(ring.head * ring.num_lanes for ring in self.rings)

    @property
    def stored(self) -> int:
        """Rows that can be read now."""
        spans = [ring.readable() for ring in self.rings]
        return sum((last - first) * ring.num_lanes for (first, last), ring in zip(spans, self.rings, strict=True))

    def sample(self, num_updates: int, batch_size: int, length: int = 1) -> ReplayBatch:
        """Uniform sample with replacement of usable rows, or of segments of consecutive rows that begin at such rows.

        Args:
            num_updates: U.
            batch_size: B.
            length: L, rows of a segment. Row k of a segment that begins at step t is the row of step t + k of the
                same lane. The beginnings are the same draws for every L: one near the write head or near an end gives
                a segment with fewer valid steps and is not passed over, which would favour old rows.

        Returns:
            Batch of shapes [U, B, ...] for length 1, else [U, B, L, ...] with :attr:`ReplayBatch.valid`. Step 0 is
            always valid. Step k is valid if step k - 1 is valid and ended no episode, and row k is usable, opens no
            episode and was readable at the draw. Rows and next observations of invalid steps are zero.

        Raises:
            ValueError: ``length`` is below 1.
            RuntimeError: nearly no stored row is usable (for example all are quarantined).
        """
        if length < 1:
            raise ValueError(f"a segment has at least one row, got length {length}")
        n = num_updates * batch_size
        drawn = _Segments.empty(n, length, self.layout)
        # Places are dealt to the rings in runs; shuffled, so that every update sees all workers.
        missing = np.arange(n) if len(self.rings) == 1 else self.rng.permutation(n)
        for _ in range(64):
            bad = self._draw(missing, drawn)
            missing = missing[bad]
            if len(missing) == 0:
                break
        else:
            raise RuntimeError(
                f"replay: {len(missing)} of {n} samples could not be drawn; nearly all stored steps are unusable "
                "(quarantined or at episode borders); look at replay/quarantined and the workers' logs"
            )
        shape: tuple[int, ...] = (num_updates, batch_size)
        if length > 1:
            shape = (num_updates, batch_size, length)
            # A loss masks by multiplication, and 0 * NaN of a quarantined or half-written row would still be NaN.
            # NumPy writes by mask at a tenth of torch's cost.
            invalid = ~drawn.valid.numpy()
            drawn.rows.numpy()[invalid] = 0.0
            drawn.next_obs.numpy()[invalid] = 0.0
        return ReplayBatch(
            drawn.rows.view(*shape, -1),
            drawn.next_obs.view(*shape, -1),
            self.layout,
            self.new_moments(),
            self.inserted,
            drawn.valid.view(shape) if length > 1 else None,
        )

    def _draw(self, places: np.ndarray, drawn: _Segments) -> np.ndarray:
        """Fill the given places of ``drawn``; returns which must be drawn anew [len(places)] bool."""
        spans = [ring.readable() for ring in self.rings]
        sizes = np.array([(b - a) * r.num_lanes for (a, b), r in zip(spans, self.rings, strict=True)], dtype=np.float64)
        if sizes.sum() <= 0:
            raise RuntimeError("replay: nothing to sample yet")
        counts = self.rng.multinomial(len(places), sizes / sizes.sum()) if len(sizes) > 1 else [len(places)]
        bad = np.zeros(len(places), bool)
        start = 0
        for ring, flat, span, count in zip(self.rings, self._flat, spans, counts, strict=True):
            stop = start + int(count)
            if stop > start:
                bad[start:stop] = self._draw_from(ring, flat, span, places[start:stop], drawn)
            start = stop
        return bad

    def _draw_from(
        self, ring: LaneRing, flat: Tensor, span: tuple[int, int], places: np.ndarray, drawn: _Segments
    ) -> np.ndarray:
        steps = self.rng.integers(*span, len(places))
        lanes = self.rng.integers(0, ring.num_lanes, len(places))
        if len(places) == len(drawn.rows) and len(self.rings) == 1:  # all places, in order
            return ~self._copy(ring, flat, steps, lanes, span[1], drawn)
        got = _Segments.empty(len(places), drawn.rows.shape[1], self.layout)
        trusted = self._copy(ring, flat, steps, lanes, span[1], got)
        index = torch.from_numpy(places)
        for target, part in zip(drawn, got, strict=True):
            target.index_copy_(0, index, part)
        return ~trusted

    def _copy(
        self, ring: LaneRing, flat: Tensor, begin: np.ndarray, lanes: np.ndarray, last: int, got: _Segments
    ) -> np.ndarray:
        """Copy the segments that begin at the given steps [M] and lanes [M] into ``got``.

        Returns which of them may be used [M] bool: step 0 is valid and no valid step was overtaken by the writer.
        """
        obs_size, length = self.layout.obs_size, got.rows.shape[1]
        steps = begin[:, None] + np.arange(length + 1)
        index = torch.from_numpy((steps % ring.num_steps) * ring.num_lanes + lanes[:, None])
        torch.index_select(flat, 0, index[:, :-1].flatten(), out=got.rows.view(-1, self.layout.words))
        # Of the last row only; the successors of the others are rows of the segment.
        successor = torch.index_select(flat, 0, index[:, -1])
        got.next_obs[:, :-1] = got.rows[:, 1:, :obs_size]
        got.next_obs[:, -1] = successor[:, :obs_size]

        view = self.layout.view
        flags = np.column_stack([view(got.rows.numpy(), "flags"), view(successor.numpy(), "flags")])
        # Slots from `last` on hold steps of the round before, or are being written, or repeat the segment (L > T).
        fine = usable(flags[:, :-1], flags[:, 1:]) & (steps[:, :-1] < last)
        if self.layout.has_finals:
            fine &= self._attach_finals(ring, flags[:, :-1], fine, got)
        # Nothing crosses the end of an episode, nor a beginning without an end before it (worker restart).
        fine[:, 1:] &= ((flags[:, :-2] & (TERMINATED | TRUNCATED)) == 0) & ((flags[:, 1:-1] & FIRST) == 0)
        valid = np.logical_and.accumulate(fine, axis=1)
        got.valid.copy_(torch.from_numpy(valid))
        # After the copies: a step that the writer may have reached in the meantime is not trusted. The writer overtakes
        # steps in their order, so all of a segment is intact if its oldest step is; the newest valid step and its
        # successor were published before the draw. Flags of an overtaken segment mean nothing: it is drawn anew whole.
        return valid[:, 0] & ring.intact(begin)

    def _attach_finals(self, ring: LaneRing, flags: np.ndarray, fine: np.ndarray, got: _Segments) -> np.ndarray:
        """Put true final observations in place of next ones; returns [M, L] which did not ask for a lost one."""
        wanted = ((flags & HAS_FINAL) != 0) & fine
        index = self.layout.view(got.rows.numpy(), "final_index").astype(np.int64)
        got.next_obs.numpy()[wanted] = ring.finals[index[wanted] % ring.num_finals]
        # Up to one entry per lane may be in the writing without being counted yet.
        return ~wanted | (index >= ring.finals_written - ring.num_finals + ring.num_lanes)

    def new_moments(self) -> Moments:
        """Moments of the observations that were published since the last call (quarantined rows do not count)."""
        merged = RunningMoments(self.layout.obs_size)
        for i, ring in enumerate(self.rings):
            head = ring.head
            first = max(self._seen[i], head - ring.num_steps + ring.guard)
            self._seen[i] = head
            for start, stop in _pieces(first, head, ring.num_steps):
                rows = ring.rows[start:stop].reshape(-1, self.layout.words)
                fine = (self.layout.view(rows, "flags") & QUARANTINED) == 0
                merged.update(batch_moments(self.layout.view(rows, "obs")[fine]))
        return float(merged.count), merged.mean.numpy(), merged.squares.numpy()


def _pieces(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Slot ranges of the steps [first, last) of a ring of ``size`` slots."""
    if last <= first:
        return []
    start, length = first % size, last - first
    end = min(start + length, size)
    pieces = [(start, end)]
    if start + length > size:
        pieces.append((0, start + length - size))
    return pieces
