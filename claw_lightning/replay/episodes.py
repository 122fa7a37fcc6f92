"""EpisodeIndex: where the episode of each stored row begins and ends, without walking through the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from claw_lightning.replay.samplers import Arrivals
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, TRUNCATED, LaneRing

OPEN = -2  # the episode goes on, or nothing is known; an episode of row 0 without a next observation ends at -1


class EpisodeIndex:
    """First and last step of every stored row's episode, 8 bytes per row.

    The last step is the last one whose true next observation is stored: the step of the end itself, or the one before
    where a worker's restart left the end without its observation. Episodes are counted by ring and lane; a restart, a
    border and an end close them. Quarantined rows belong to the episode around them.

    Args:
        rings: one per worker.
    """

    bytes_per_row = 8

    def __init__(self, rings: Sequence[LaneRing]) -> None:
        # int32: a ring that publishes ten thousand vector steps per second would overflow after two and a half days
        # of a single lane, any real one after years.
        self._begin = [np.full((ring.num_steps, ring.num_lanes), OPEN, np.int32) for ring in rings]
        self._end = [np.full((ring.num_steps, ring.num_lanes), OPEN, np.int32) for ring in rings]
        self._open = [np.full(ring.num_lanes, OPEN, np.int64) for ring in rings]
        #: Steps below this are known.
        self.known = [0 for _ in rings]

    def follow(self, arrivals: Arrivals) -> None:
        """Take note of complete rows."""
        begin, end = self._begin[arrivals.ring], self._end[arrivals.ring]
        begun, num_steps = self._open[arrivals.ring], len(begin)
        flags = arrivals.flags
        if arrivals.first != self.known[arrivals.ring]:  # steps were lost in between: what was open is not any more
            begun[:] = OPEN
        for t, row in enumerate(flags):
            step = arrivals.first + t
            slot = step % num_steps
            is_border = (row & BORDER) != 0
            starts = (row & FIRST) != 0
            closed = np.flatnonzero((starts | is_border) & (begun != OPEN))
            if len(closed):  # no end was seen: a restart, after a row whose next observation is unknown
                self._close(arrivals.ring, closed, step - 2, step - 1)
            begun[starts | ((begun == OPEN) & ~is_border)] = step
            begun[is_border] = OPEN
            begin[slot], end[slot] = begun, OPEN
            ended = np.flatnonzero(((row & (TERMINATED | TRUNCATED)) != 0) & ~is_border)
            if len(ended):
                fine = arrivals.usable[t, ended]
                self._close(arrivals.ring, ended[fine], step, step)
                self._close(arrivals.ring, ended[~fine], step - 1, step)
        self.known[arrivals.ring] = arrivals.first + len(flags)

    def _close(self, ring: int, lanes: np.ndarray, end: int, last: int) -> None:
        """Write the end into all rows of the lanes' open episodes, up to ``last``."""
        begun, table = self._open[ring], self._end[ring]
        for lane in lanes:
            first = max(int(begun[lane]), last - len(table) + 1)
            table[np.arange(first, last + 1) % len(table), lane] = end
            begun[lane] = OPEN

    def spans(self, ring: int, steps: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First and last step [M], [M] int64 of the episodes of rows, as far as they are known, and which [M] are.

        Of an episode that goes on, the last step is the latest known one. Rows of no episode and rows that are not
        known yet are False.
        """
        slots = steps % len(self._begin[ring])
        begin = self._begin[ring][slots, lanes].astype(np.int64)
        end = self._end[ring][slots, lanes].astype(np.int64)
        end = np.where(end == OPEN, self.known[ring] - 1, end)
        return begin, end, (steps < self.known[ring]) & (begin != OPEN) & (end >= steps)
