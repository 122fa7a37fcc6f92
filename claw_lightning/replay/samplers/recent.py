"""Recent and Fresh: young rows more often than old ones, by their age or by the policy that acted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from claw_lightning.checks import check_numbers
from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored
from claw_lightning.replay.samplers.sum_tree import ROUNDS, RowSlots, by_ring
from claw_lightning.rollout.ring import LaneRing

MOST_SINGLE = 64  # newest steps that Fresh looks at one by one; beyond, a bin spans this part of its age
ALL_SINGLE = 256  # the same for all rings together, so that many rings do not make many bins


class Recent(Sampler):
    """Rows with a weight that halves every ``half_life`` environment steps.

    Emphasises recent experience as Wang & Ross do (ERE, arXiv 1906.04009), who draw each update of an episode from a
    shorter end of the memory, but as one distribution, which needs no episode and no order of updates: an age of A
    environment steps (vector steps of the row's ring since, times the lanes of all rings) has the weight
    2^(-A / half_life). The truncated geometric distribution over vector steps is inverted in closed form, so a draw
    costs the same for any capacity.

    Args:
        half_life: environment steps after which a row is drawn half as often as a new one.
    """

    exchangeable = True

    def __init__(self, half_life: float = 200_000.0) -> None:
        check_numbers("data.sampler.init_args", {"half_life": half_life}, above=0.0)
        self.half_life = half_life
        self._begin: np.ndarray | None = None
        self._rings: list[LaneRing] = []

    def _set_back(self, last: np.ndarray) -> np.ndarray:
        """By how many vector steps a ring is older than the others that does not grow as they do: one of the past."""
        if self._begin is None:
            self._begin = last.copy()
        grown = last - self._begin
        return np.where(grown > 0, 0, grown.max())

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._rings, self._begin = list(rings), None

    def state_dict(self) -> dict[str, Any]:
        """Where the rings ended at the first draw: it says how much older than the others one of the past is."""
        return {} if self._begin is None else {"begin": self._begin.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Sampler.load_state_dict`; rings that came back otherwise than they were begin anew."""
        begin = state.get("begin", ())
        if len(begin) == len(self._rings) and all(ring.head >= b for ring, b in zip(self._rings, begin, strict=True)):
            self._begin = np.array(begin, np.int64) if begin else None

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        first, last = np.array(stored.spans, np.int64).reshape(-1, 2).T
        lanes = np.array(stored.lanes, np.int64)
        num_steps = np.maximum(last - first, 0)
        if not num_steps.any():
            raise RuntimeError("replay: nothing to sample yet")
        # A step of age a has the weight r^a, r = exp(-rate): the first a ages together (1 - r^a) / (1 - r).
        rate = min(max(math.log(2.0) * int(lanes.sum()) / self.half_life, 1e-300), 1e300)
        together = -np.expm1(-rate * num_steps)
        mass = together * lanes * np.exp(-rate * self._set_back(last))
        ring = np.repeat(np.arange(len(lanes)), rng.multinomial(count, mass / mass.sum()))
        age = np.floor(np.log1p(-rng.random(count) * together[ring]) / -rate).astype(np.int64)
        np.minimum(age, num_steps[ring] - 1, out=age)
        lane = (rng.random(count) * lanes[ring]).astype(np.int64)
        return Places(ring, last[ring] - 1 - age, lane)


class Fresh(Sampler):
    """Rows with a weight that falls with their staleness, the updates done since the policy that acted was published.

    The weight is 1 / (1 + staleness / scale). All lanes of a vector step are taken to be of one version, and versions
    not to fall along the steps of a ring; rows of the warm-up are of version 0.

    The distribution is exact, yet a draw looks at a few hundred bins of steps only: within a bin, which is never
    longer than a fixed part of its age, a step is accepted in proportion to its weight. As weights fall with the age,
    the bins' bounds exceed their sum by that part at most, and nearly every step is accepted.

    Args:
        scale: updates after which a row is drawn half as often as one of the present policy.
        max_staleness: rows staler than this are not drawn, in updates; null: all are. While no usable row is that
            fresh, those of the freshest version that is stored are drawn instead, since nothing would stop the run.
    """

    follows = True
    bytes_per_row = 5.0  # with one lane per ring; less with more

    def __init__(self, scale: float = 10_000.0, max_staleness: int | None = None) -> None:
        group = "data.sampler.init_args"
        check_numbers(group, {"scale": scale}, above=0.0)
        check_numbers(group, {"max_staleness": max_staleness}, least=0)
        self.scale, self.max_staleness = scale, max_staleness

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._slots = _StepSlots(rings)
        self._version = np.zeros(self._slots.size, np.int32)
        self._usable = np.zeros(self._slots.size, bool)  # whether any row of the step is
        num_single = min(MOST_SINGLE, max(4, ALL_SINGLE // len(rings)))
        ages = [_bin_ages(ring.num_steps, num_single) for ring in rings]
        self._bin_ring = np.repeat(np.arange(len(rings)), [len(each) for each in ages])
        self._bin_age = np.concatenate(ages)  # the youngest of the bin
        self._bin_stop = np.concatenate([np.append(each[1:], np.iinfo(np.int64).max) for each in ages])

    def follow(self, arrivals: Arrivals) -> None:
        """See :meth:`Sampler.follow`."""
        slots, ring = self._slots, arrivals.ring
        # Steps that were skipped are never drawn; their versions only must not break the order.
        end = int(slots.ends[ring])
        before = self._version[slots.slot(ring, end - 1)] if end > 0 else 0
        for start, stop in slots.follow(arrivals):
            self._version[start:stop] = before
            self._usable[start:stop] = False
        for start, stop, version in slots.fill(arrivals, arrivals.version[:, :1]):
            self._version[start:stop] = version
        for start, stop, usable in slots.fill(arrivals, np.logical_or.reduce(arrivals.usable, axis=1)[:, None]):
            self._usable[start:stop] = usable

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        first, last = np.array(stored.spans, np.int64).reshape(-1, 2).T
        last = np.minimum(last, self._slots.ends)  # slots of later steps tell of the steps that lay there before
        if self.max_staleness is not None:
            first = self._fresh_enough(first, last, stored.updates - self.max_staleness)
        lanes = np.array(stored.lanes, np.int64)
        stop = np.minimum(self._bin_stop, (last - first)[self._bin_ring])
        length = np.maximum(stop - self._bin_age, 0)
        youngest = (last - 1)[self._bin_ring] - self._bin_age
        bound = self._weight(self._bin_ring, youngest, stored.updates)
        cumulative = np.cumsum(bound * length * lanes[self._bin_ring])
        if not cumulative[-1] > 0:
            raise RuntimeError("replay: nothing to sample yet")
        parts, missing = [], count
        for _ in range(ROUNDS):
            mass = rng.random(missing)
            mass.sort()
            mass *= cumulative[-1]
            which = cumulative.searchsorted(mass, side="right")
            # The last bin with steps is the last that the sum grows at: nothing is found beyond it.
            np.minimum(which, cumulative.searchsorted(cumulative[-1]), out=which)
            step = youngest[which] - (rng.random(missing) * length[which]).astype(np.int64)
            ring = self._bin_ring[which]
            weight = self._weight(ring, step, stored.updates)
            accepted = np.flatnonzero(rng.random(missing) * bound[which] < weight)
            ring, step = ring[accepted], step[accepted]
            parts.append(Places(ring, step, (rng.random(len(ring)) * lanes[ring]).astype(np.int64)))
            missing -= len(ring)
            if missing == 0:
                return by_ring(Places.join(parts))
        raise RuntimeError(f"replay: {missing} samples could not be drawn: versions fall along the steps of a ring")

    def _weight(self, ring: np.ndarray, step: np.ndarray, updates: int) -> np.ndarray:
        staleness = np.maximum(np.int64(updates) - self._version[self._slots.slot(ring, step)], 0)
        return self.scale / (self.scale + staleness)

    def _fresh_enough(self, first: np.ndarray, last: np.ndarray, least: int) -> np.ndarray:
        """First steps [R] of the given version or a later one; of the freshest usable one if none is usable."""
        begin = self._since(first, last, least)
        newest = [self._newest_usable(ring, int(begin[ring]), int(last[ring])) for ring in range(len(last))]
        if max(newest) >= 0:
            return begin
        newest = [self._newest_usable(ring, int(first[ring]), int(last[ring])) for ring in range(len(last))]
        if max(newest) < 0:
            return first
        versions = [self._version[self._slots.slot(ring, step)] for ring, step in enumerate(newest) if step >= 0]
        return self._since(first, last, int(max(versions)))

    def _since(self, first: np.ndarray, last: np.ndarray, version: int) -> np.ndarray:
        found = last.copy()
        least = np.int32(max(version, 0))  # a number of another type would have all versions converted
        for ring in range(len(last)):
            for start, stop, step in self._slots.runs(ring, int(first[ring]), int(last[ring])):
                position = int(self._version[start:stop].searchsorted(least))
                if position < stop - start:
                    found[ring] = step + position
                    break
        return found

    def _newest_usable(self, ring: int, first: int, last: int) -> int:
        """Newest step of [first, last) with a usable row, or -1."""
        for start, stop, step in reversed(list(self._slots.runs(ring, first, last))):
            end, size = stop, 64  # nearly always one of the newest
            while end > start:
                begin = max(start, end - size)
                found = np.flatnonzero(self._usable[begin:end])
                if len(found):
                    return step + begin - start + int(found[-1])
                end, size = begin, 4 * size
        return -1


class _StepSlots(RowSlots):
    """Slots of whole vector steps: lanes do not count."""

    def __init__(self, rings: Sequence[LaneRing]) -> None:
        super().__init__(rings)
        self._num_lanes = np.ones(len(rings), np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self._num_steps)])
        self.size = int(self._offsets[-1])

    def slot(self, ring: np.ndarray | int, step: np.ndarray | int) -> np.ndarray:
        """Slots of steps of rings."""
        return self._offsets[ring] + step % self._num_steps[ring]


def _bin_ages(num_steps: int, num_single: int) -> np.ndarray:
    """Youngest ages of bins of steps, ascending from 0: single ones, then longer ones, by a part of their age."""
    ages, age = list(range(min(num_single, num_steps))), num_single
    while age < num_steps:
        ages.append(age)
        age += age // num_single
    return np.array(ages, np.int64)
