"""ReplayMemory: uniform batches out of all workers' rings, without copies on the way in and without locks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from claw_lightning.replay.batch import ReplayBatch
from claw_lightning.rollout.normalizer import Moments, RunningMoments, batch_moments
from claw_lightning.rollout.ring import HAS_FINAL, QUARANTINED, LaneRing, usable


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

    def sample(self, num_updates: int, batch_size: int) -> ReplayBatch:
        """Uniform sample with replacement of usable rows.

        Raises:
            RuntimeError: nearly no stored row is usable (for example all are quarantined).
        """
        n = num_updates * batch_size
        rows = torch.empty(n, self.layout.words)
        successors = torch.empty(n, self.layout.words)
        # Places are dealt to the rings in runs; shuffled, so that every update sees all workers.
        missing = np.arange(n) if len(self.rings) == 1 else self.rng.permutation(n)
        for _ in range(64):
            bad = self._draw(missing, rows, successors)
            missing = missing[bad]
            if len(missing) == 0:
                break
        else:
            raise RuntimeError(
                f"replay: {len(missing)} of {n} samples could not be drawn; nearly all stored steps are unusable "
                "(quarantined or at episode borders); look at replay/quarantined and the workers' logs"
            )
        obs_size = self.layout.obs_size
        return ReplayBatch(
            rows.view(num_updates, batch_size, -1),
            successors[:, :obs_size].reshape(num_updates, batch_size, obs_size),
            self.layout,
            self.new_moments(),
            self.inserted,
        )

    def _draw(self, places: np.ndarray, rows: Tensor, successors: Tensor) -> np.ndarray:
        """Fill the given places of ``rows`` and ``successors``; returns which must be drawn anew [len(places)] bool."""
        spans = [ring.readable() for ring in self.rings]
        sizes = np.array([(b - a) * r.num_lanes for (a, b), r in zip(spans, self.rings, strict=True)], dtype=np.float64)
        if sizes.sum() <= 0:
            raise RuntimeError("replay: nothing to sample yet")
        counts = self.rng.multinomial(len(places), sizes / sizes.sum()) if len(sizes) > 1 else [len(places)]
        bad = np.zeros(len(places), bool)
        start = 0
        for ring, flat, (first, last), count in zip(self.rings, self._flat, spans, counts, strict=True):
            stop = start + int(count)
            if stop > start:
                bad[start:stop] = self._draw_from(ring, flat, first, last, places[start:stop], rows, successors)
            start = stop
        return bad

    def _draw_from(
        self, ring: LaneRing, flat: Tensor, first: int, last: int, places: np.ndarray, rows: Tensor, successors: Tensor
    ) -> np.ndarray:
        steps = self.rng.integers(first, last, len(places))
        lanes = self.rng.integers(0, ring.num_lanes, len(places))
        here = torch.from_numpy((steps % ring.num_steps) * ring.num_lanes + lanes)
        after = torch.from_numpy(((steps + 1) % ring.num_steps) * ring.num_lanes + lanes)
        if len(places) == len(rows) and len(self.rings) == 1:  # all places, in order
            torch.index_select(flat, 0, here, out=rows)
            torch.index_select(flat, 0, after, out=successors)
            got, got_after = rows, successors
        else:
            got, got_after = flat[here], flat[after]
            index = torch.from_numpy(places)
            rows[index], successors[index] = got, got_after
        view = self.layout.view
        flags = view(got.numpy(), "flags")
        bad = ~usable(flags, view(got_after.numpy(), "flags"))
        if self.layout.has_finals:
            bad |= self._attach_finals(ring, flags, got, places, successors)
        # After the copies: a step that the writer may have reached in the meantime is not trusted.
        return bad | ~ring.intact(steps)

    def _attach_finals(
        self, ring: LaneRing, flags: np.ndarray, got: Tensor, places: np.ndarray, successors: Tensor
    ) -> np.ndarray:
        """Put true final observations in place of successors; returns rows whose entry was overwritten."""
        wanted = (flags & HAS_FINAL) != 0
        index = self.layout.view(got.numpy(), "final_index").astype(np.int64)
        finals = torch.from_numpy(ring.finals[index[wanted] % ring.num_finals])
        successors[torch.from_numpy(places[wanted]), : finals.shape[1]] = finals
        # Up to one entry per lane may be in the writing without being counted yet.
        return wanted & (index < ring.finals_written - ring.num_finals + ring.num_lanes)

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
