"""Mixture: several samplers, each with a fixed share of every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored
from claw_lightning.replay.samplers.by_option import systematic_counts
from claw_lightning.replay.samplers.sum_tree import ROUNDS, RowSlots, by_ring
from claw_lightning.rollout.ring import LaneRing


class Mixture(Sampler):
    """Each place of a batch is chosen by one of several samplers.

    The number of places of each is its share of the batch, rounded down or up at random such that it is exact in
    expectation. So that it stays exact, places whose rows are not usable are chosen anew here, by the same sampler:
    left to the memory, they would make the shares of those samplers grow that know beforehand what is usable.

    Importance weights are those of the sampler that chose the place, for its own distribution: where each sampler's
    weighted mean is unbiased, so is the mixture's. Errors go back to the sampler that chose the place.

    Args:
        samplers: at least one. Either all or none of them end segments with the option (OptionSegments does).
        shares: one number above 0 per sampler; divided by their sum.
    """

    def __init__(self, samplers: Sequence[Sampler], shares: Sequence[float]) -> None:
        group = "data.sampler.init_args"
        if len(samplers) == 0:
            raise ConfigError(f"{group}.samplers is empty; give at least one sampler")
        if len(shares) != len(samplers):
            raise ConfigError(
                f"{group}.shares has {len(shares)} numbers for {len(samplers)} samplers; give one share per sampler"
            )
        check_numbers(group, {f"shares[{i}]": share for i, share in enumerate(shares)}, above=0.0)
        if any(isinstance(sampler, Mixture) for sampler in samplers):
            raise ConfigError(f"{group}.samplers holds a Mixture; list its samplers here instead")
        if len({sampler.within_option for sampler in samplers}) > 1:
            names = ", ".join(type(sampler).__name__ for sampler in samplers if sampler.within_option)
            raise ConfigError(
                f"{group}.samplers: {names} ends segments with the option and the others do not; mix samplers of one "
                "kind only"
            )
        self.samplers = list(samplers)
        self.shares = [float(share) for share in shares]
        self._shares = np.array(self.shares) / np.sum(self.shares)
        self.bytes_per_row = 1.0 + sum(sampler.bytes_per_row for sampler in samplers)
        self.follows = len(samplers) > 1 or samplers[0].follows
        self.knows_usable = len(samplers) > 1 or samplers[0].knows_usable
        self.wants_errors = any(sampler.wants_errors for sampler in samplers)
        self.within_option = samplers[0].within_option
        self.needs_segments = any(sampler.needs_segments for sampler in samplers)

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._slots = RowSlots(rings)
        self._usable = np.zeros(self._slots.size, bool)
        for sampler in self.samplers:
            sampler.bind(rings, num_options)

    def follow(self, arrivals: Arrivals) -> None:
        """See :meth:`Sampler.follow`."""
        for start, stop in self._slots.follow(arrivals):
            self._usable[start:stop] = False
        for start, stop, rows in self._slots.fill(arrivals, arrivals.usable):
            self._usable[start:stop] = rows
        for sampler in self.samplers:
            if sampler.follows:
                sampler.follow(arrivals)

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`. ``source`` is the sampler's index."""
        parts = []
        for source, number in enumerate(systematic_counts(self._shares, count, rng)):
            if number > 0:
                for part in self._draw_usable(self.samplers[source], stored, int(number), rng):
                    parts.append(part._replace(source=np.full(len(part.ring), source, np.int64)))
        return by_ring(Places.join(parts))

    def _draw_usable(self, sampler: Sampler, stored: Stored, count: int, rng: np.random.Generator) -> Iterator[Places]:
        if len(self.samplers) == 1:
            yield sampler.draw(stored, count, rng)
            return
        for _ in range(ROUNDS):
            places = sampler.draw(stored, count, rng)
            slot, there = self._slots.slots(places)
            fine = there & self._usable[slot]
            places = places if fine.all() else places.take(fine)
            yield places
            count -= len(places.ring)
            if count == 0:
                return
        raise RuntimeError(
            f"replay: {count} samples of {type(sampler).__name__} could not be drawn: nearly all rows that it chooses "
            "are unusable (quarantined or at episode borders); look at replay/quarantined and the workers' logs"
        )

    def update(self, places: Places, errors: np.ndarray) -> None:
        """See :meth:`Sampler.update`."""
        if places.source is None:
            raise ValueError("these places were not chosen by a mixture: they have no source")
        for source, sampler in enumerate(self.samplers):
            if sampler.wants_errors:
                mine = np.flatnonzero(places.source == source)
                if len(mine):
                    sampler.update(places.take(mine), errors[mine])

    def metrics(self) -> dict[str, float]:
        """All samplers' values; where two have one name, it becomes ``replay/sampler_<index>/...``."""
        values = [sampler.metrics() for sampler in self.samplers]
        times = Counter(name for each in values for name in each)
        return {
            name if times[name] == 1 else f"replay/sampler_{source}/{name.removeprefix('replay/')}": value
            for source, each in enumerate(values)
            for name, value in each.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`."""
        return {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Sampler.load_state_dict`."""
        states = state["samplers"]
        if len(states) != len(self.samplers):
            raise ConfigError(
                f"data.sampler.init_args.samplers has {len(self.samplers)} entries; the checkpoint's mixture has "
                f"{len(states)}; use the same samplers"
            )
        for sampler, each in zip(self.samplers, states, strict=True):
            sampler.load_state_dict(each)
