"""ReplayMemory: uniform batches out of all workers' rings, without copies on the way in and without locks.

Rows are read while workers write; why none is ever half old and half new: :mod:`claw_lightning.rollout.ring`. What a
batch depends on besides its seed, namely how far the writers had come, is kept as a :class:`Draw` and can be given
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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

ROUNDS = 64  # of drawing places anew, before the stored steps are called unusable
ATTEMPTS = 64  # at one call, before the rings are called too short


class Draw(NamedTuple):
    """All that a call of :meth:`ReplayMemory.sample` read of the writers' progress; numbers of rings, in their order.

    A memory of the same seed and the same calls so far, whose rings hold the same steps and have just published those
    of ``heads``, gives the same batch to the bit when it is given this as ``script``.

    Attributes:
        heads: steps published when the call began. What it draws, the count of steps and the moments are seen from
            here.
        checks: per round of drawing, the heads read after the round's copies: which of them were overtaken, and from
            which step on the next round draws. A ring of which a round took nothing keeps its number.
        finals: per round, the final observations written, read after their copies. Zeros without a side table.
        moments: the heads read after copying for the moments: which rows they do without.
    """

    heads: tuple[int, ...]
    checks: tuple[tuple[int, ...], ...]
    finals: tuple[tuple[int, ...], ...]
    moments: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Lists of integers by name."""
        return {
            "heads": list(self.heads),
            "checks": [list(heads) for heads in self.checks],
            "finals": [list(written) for written in self.finals],
            "moments": list(self.moments),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Draw:
        """Inverse of :meth:`to_json`."""
        checks, finals = (tuple(tuple(numbers) for numbers in values[name]) for name in ("checks", "finals"))
        return cls(tuple(values["heads"]), checks, finals, tuple(values["moments"]))


class _Progress:
    """The writers' progress as one call reads it, or, with a script, as it was read when that was recorded."""

    def __init__(self, rings: Sequence[LaneRing], script: Draw | None = None) -> None:
        self.rings, self.script = rings, script
        self.heads = tuple(ring.head for ring in rings)
        if script is not None:
            if len(script.heads) != len(rings) or self.heads != script.heads:
                raise ValueError(f"the script is of rings at steps {script.heads}, these are at {self.heads}")
            self.heads = script.heads
        self.checks: list[list[int]] = []
        self.finals: list[list[int]] = []
        self.moments = list(self.heads)

    def begin_round(self) -> tuple[int, ...]:
        """Heads after the latest copies of every ring; from now on, checks are those of another round."""
        latest = tuple(self.checks[-1]) if self.checks else self.heads
        if self.script is not None and len(self.checks) == len(self.script.checks):
            raise ValueError("the script is of another draw: it ends before this one")
        self.checks.append(list(latest))
        self.finals.append([0] * len(self.rings))
        return latest

    def check(self, index: int) -> int:
        """Head of a ring after the round's copies of it."""
        script, round_ = self.script, len(self.checks) - 1
        head = self.rings[index].head if script is None else script.checks[round_][index]
        self.checks[round_][index] = head
        return head

    def check_finals(self, index: int) -> int:
        """Final observations written in a ring after the round's copies of them."""
        script, round_ = self.script, len(self.finals) - 1
        written = self.rings[index].finals_written if script is None else script.finals[round_][index]
        self.finals[round_][index] = written
        return written

    def check_moments(self, index: int) -> int:
        """Head of a ring after the copies for the moments."""
        self.moments[index] = self.rings[index].head if self.script is None else self.script.moments[index]
        return self.moments[index]

    def draw(self) -> Draw:
        """What was read."""
        checks, finals = (tuple(map(tuple, numbers)) for numbers in (self.checks, self.finals))
        return Draw(self.heads, checks, finals, tuple(self.moments))


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

    Attributes:
        last_draw: what the latest call of :meth:`sample` read of the writers' progress; None before the first.
    """

    def __init__(self, rings: Sequence[LaneRing], seed: int) -> None:
        self.rings = list(rings)
        self.layout = rings[0].layout
        self.rng = np.random.default_rng(seed)
        self._flat = [torch.from_numpy(ring.rows.reshape(-1, self.layout.words)) for ring in self.rings]
        self._seen = [ring.head for ring in self.rings]
        self.last_draw: Draw | None = None

    @property
    def inserted(self) -> int:
        """Environment steps published by all workers since their rings were made."""
        return sum(ring.head * ring.num_lanes for ring in self.rings)

    @property
    def stored(self) -> int:
        """Rows that can be read now."""
        spans = [ring.readable() for ring in self.rings]
        return sum((last - first) * ring.num_lanes for (first, last), ring in zip(spans, self.rings, strict=True))

    def sample(self, num_updates: int, batch_size: int, length: int = 1, script: Draw | None = None) -> ReplayBatch:
        """Uniform sample with replacement of usable rows, or of segments of consecutive rows that begin at such rows.

        How far the writers are is read once, at the beginning; steps that they publish during the call wait for the
        next one. Rows that they overtake during the call are drawn anew from what is left.

        Args:
            num_updates: U.
            batch_size: B.
            length: L, rows of a segment. Row k of a segment that begins at step t is the row of step t + k of the
                same lane. The beginnings are the same draws for every L: one near the write head or near an end gives
                a segment with fewer valid steps and is not passed over, which would favour old rows.
            script: :attr:`last_draw` of the call that is to be repeated; see :class:`Draw`.

        Returns:
            Batch of shapes [U, B, ...] for length 1, else [U, B, L, ...] with :attr:`ReplayBatch.valid`. Step 0 is
            always valid. Step k is valid if step k - 1 is valid and ended no episode, and row k is usable, opens no
            episode and was readable at the beginning of the call. Rows and next observations of invalid steps are zero.

        Raises:
            ValueError: ``length`` is below 1, or ``script`` is not of these rings as they stand.
            RuntimeError: nothing is stored yet, nearly no stored row is usable (for example all are quarantined), or
                the writers overtake every attempt (rings far too short for the batch).
        """
        if length < 1:
            raise ValueError(f"a segment has at least one row, got length {length}")
        drawn = _Segments.empty(num_updates * batch_size, length, self.layout)
        state = self.rng.bit_generator.state
        for _ in range(ATTEMPTS):
            progress = _Progress(self.rings, script)
            if self._fill(drawn, progress):
                break
            # As if the call began now: the draw then depends on one snapshot of the heads, however often it failed.
            self.rng.bit_generator.state = state
        else:
            raise RuntimeError("replay: the writers overtake the sampler each time; the rings are too short")
        shape: tuple[int, ...] = (num_updates, batch_size)
        if length > 1:
            shape = (num_updates, batch_size, length)
            # A loss masks by multiplication, and 0 * NaN of a quarantined or half-written row would still be NaN.
            # NumPy writes by mask at a tenth of torch's cost.
            invalid = ~drawn.valid.numpy()
            drawn.rows.numpy()[invalid] = 0.0
            drawn.next_obs.numpy()[invalid] = 0.0
        moments = self._moments(progress)
        self.last_draw = progress.draw()
        return ReplayBatch(
            drawn.rows.view(*shape, -1),
            drawn.next_obs.view(*shape, -1),
            self.layout,
            moments,
            sum(head * ring.num_lanes for head, ring in zip(progress.heads, self.rings, strict=True)),
            drawn.valid.view(shape) if length > 1 else None,
        )

    def _fill(self, drawn: _Segments, progress: _Progress) -> bool:
        """Fill all places of ``drawn``; False if the writers overtook too much of what was stored at the beginning."""
        n = len(drawn.rows)
        # Places are dealt to the rings in runs; shuffled, so that every update sees all workers.
        missing = np.arange(n) if len(self.rings) == 1 else self.rng.permutation(n)
        stored = 0.0
        for _ in range(ROUNDS):
            latest = progress.begin_round()
            spans = [
                (ring.readable(now)[0], ring.readable(head)[1])
                for ring, head, now in zip(self.rings, progress.heads, latest, strict=True)
            ]
            sizes = np.array(
                [max(0, b - a) * r.num_lanes for (a, b), r in zip(spans, self.rings, strict=True)], dtype=np.float64
            )
            left = float(sizes.sum())
            stored = stored or left
            if stored <= 0:
                raise RuntimeError("replay: nothing to sample yet")
            if 2 * left <= stored:  # would favour what is left, and that may be a border that stays
                return False
            counts = self.rng.multinomial(len(missing), sizes / left) if len(sizes) > 1 else [len(missing)]
            bad = np.zeros(len(missing), bool)
            start = 0
            for index, count in enumerate(counts):
                stop = start + int(count)
                if stop > start:
                    bad[start:stop] = self._draw_from(index, spans[index], missing[start:stop], drawn, progress)
                start = stop
            missing = missing[bad]
            if len(missing) == 0:
                return True
        raise RuntimeError(
            f"replay: {len(missing)} of {n} samples could not be drawn; nearly all stored steps are unusable "
            "(quarantined or at episode borders); look at replay/quarantined and the workers' logs"
        )

    def _draw_from(
        self, index: int, span: tuple[int, int], places: np.ndarray, drawn: _Segments, progress: _Progress
    ) -> np.ndarray:
        """Fill the given places of ``drawn`` from one ring; returns which must be drawn anew [len(places)] bool."""
        ring = self.rings[index]
        steps = self.rng.integers(*span, len(places))
        lanes = self.rng.integers(0, ring.num_lanes, len(places))
        if len(places) == len(drawn.rows) and len(self.rings) == 1:  # all places, in order
            return ~self._copy(index, steps, lanes, span[1], drawn, progress)
        got = _Segments.empty(len(places), drawn.rows.shape[1], self.layout)
        trusted = self._copy(index, steps, lanes, span[1], got, progress)
        where = torch.from_numpy(places)
        for target, part in zip(drawn, got, strict=True):
            target.index_copy_(0, where, part)
        return ~trusted

    def _copy(
        self, ring_index: int, begin: np.ndarray, lanes: np.ndarray, last: int, got: _Segments, progress: _Progress
    ) -> np.ndarray:
        """Copy the segments that begin at the given steps [M] and lanes [M] into ``got``.

        Returns which of them may be used [M] bool: step 0 is valid and no valid step was overtaken by the writer.
        """
        ring, flat = self.rings[ring_index], self._flat[ring_index]
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
            fine &= self._attach_finals(ring_index, flags[:, :-1], fine, got, progress)
        # Nothing crosses the end of an episode, nor a beginning without an end before it (worker restart).
        fine[:, 1:] &= ((flags[:, :-2] & (TERMINATED | TRUNCATED)) == 0) & ((flags[:, 1:-1] & FIRST) == 0)
        valid = np.logical_and.accumulate(fine, axis=1)
        got.valid.copy_(torch.from_numpy(valid))
        # After the copies: a step that the writer may have reached in the meantime is not trusted. The writer overtakes
        # steps in their order, so all of a segment is intact if its oldest step is; the newest valid step and its
        # successor were published before the draw. Flags of an overtaken segment mean nothing: it is drawn anew whole.
        return valid[:, 0] & ring.intact(begin, progress.check(ring_index))

    def _attach_finals(
        self, ring_index: int, flags: np.ndarray, fine: np.ndarray, got: _Segments, progress: _Progress
    ) -> np.ndarray:
        """Put true final observations in place of next ones; returns [M, L] which did not ask for a lost one."""
        ring = self.rings[ring_index]
        wanted = ((flags & HAS_FINAL) != 0) & fine
        index = self.layout.view(got.rows.numpy(), "final_index").astype(np.int64)
        got.next_obs.numpy()[wanted] = ring.finals[index[wanted] % ring.num_finals]
        return ~wanted | ring.finals_intact(index, progress.check_finals(ring_index))

    def new_moments(self) -> Moments:
        """Moments of the observations that were published since the last call.

        Quarantined rows do not count, nor do rows that were overwritten before they could be read.
        """
        return self._moments(_Progress(self.rings))

    def _moments(self, progress: _Progress) -> Moments:
        merged = RunningMoments(self.layout.obs_size)
        for i, (ring, head) in enumerate(zip(self.rings, progress.heads, strict=True)):
            first = max(self._seen[i], ring.readable(head)[0])
            self._seen[i] = head
            copied = []
            for start, stop in _pieces(first, head, ring.num_steps):
                rows = ring.rows[start:stop].reshape(-1, self.layout.words)
                fine = np.flatnonzero((self.layout.view(rows, "flags") & QUARANTINED) == 0)
                copied.append((first + fine // ring.num_lanes, self.layout.view(rows, "obs")[fine]))
                first += stop - start
            check = progress.check_moments(i)
            for steps, observations in copied:
                lost = len(steps) - np.count_nonzero(ring.intact(steps, check))  # the oldest, hence the first of them
                merged.update(batch_moments(observations[lost:]))
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
