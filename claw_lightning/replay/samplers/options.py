"""OptionSegments: whole executions of options, each from the step at which it was selected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored
from claw_lightning.replay.samplers.sum_tree import RowSlots, SumTree
from claw_lightning.rollout.ring import SWITCHED, LaneRing


class OptionSegments(Sampler):
    """Segments that begin where an option was selected and end where it did, or at the segment's length.

    Every usable row with a SWITCHED flag is a beginning, all alike: an option is drawn as often as it was selected, not
    as long as it lasted, which is the distribution that an update of the selection (SMDP) needs. An option that was
    selected again at once begins anew.
    """

    follows = True
    knows_usable = True
    within_option = True
    needs_segments = True
    bytes_per_row = 2.2

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._slots = RowSlots(rings)
        self._tree = SumTree(self._slots.size, np.uint8)

    def follow(self, arrivals: Arrivals) -> None:
        """See :meth:`Sampler.follow`."""
        for start, stop in self._slots.follow(arrivals):
            self._tree.set_range(start, stop, 0)
        for start, stop, rows in self._slots.fill(arrivals, arrivals.usable & ((arrivals.flags & SWITCHED) != 0)):
            self._tree.set_range(start, stop, rows)

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        for start, stop in self._slots.expire(stored):
            self._tree.set_range(start, stop, 0)
        total = self._tree.total
        if total == 0:
            raise RuntimeError("replay: nothing to sample yet: no usable row at which an option began is stored")

        def choose(number: int) -> Places:
            mass = rng.random(number)
            mass.sort()
            mass *= total
            return self._slots.places(self._tree.find(mass))

        return self._slots.choose(stored, count, choose)
