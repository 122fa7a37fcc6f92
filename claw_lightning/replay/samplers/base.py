"""Sampler: which stored rows a batch is made of. The interface, and the uniform one.

At every ``sample``, :class:`~claw_lightning.replay.memory.ReplayMemory` calls :meth:`Sampler.follow` once per ring with
what was published since the last call, then :meth:`Sampler.draw` for as many places as are missing, and again for those
that turned out to be unusable or overtaken by a writer. The learner answers with :meth:`Sampler.update` where
:attr:`Sampler.wants_errors`.

A sampler must be deterministic given the generator that it is handed, what it has followed and what it was told:
recorded runs are run again by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from claw_lightning.rollout.ring import LaneRing


class Places(NamedTuple):
    """Where M samples begin.

    Attributes:
        ring: [M] int64, index of the ring.
        step: [M] int64, vector step since the beginning of the run, not the slot.
        lane: [M] int64.
        weight: [M] float32 importance weights, or None: all one.
        source: [M] int64, for a mixture: which of its samplers chose the place; else None.
    """

    ring: np.ndarray
    step: np.ndarray
    lane: np.ndarray
    weight: np.ndarray | None = None
    source: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Places:
        """Some of them, by index [m] or mask [M]."""
        return Places(*(None if values is None else values[index] for values in self))  # type: ignore[arg-type]

    def put(self, index: np.ndarray, other: Places) -> None:
        """Replace the places at index [m] by others, m in number, of the same sampler."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine[index] = theirs

    @classmethod
    def join(cls, parts: Sequence[Places]) -> Places:
        """All places of some parts; weights (1) and sources (0) are filled in where only some parts have them."""
        if len(parts) == 1:
            return parts[0]
        ring, step, lane = (np.concatenate([getattr(p, name) for p in parts]) for name in ("ring", "step", "lane"))
        weight = source = None
        if any(part.weight is not None for part in parts):
            one = np.float32(1.0)
            weight = np.concatenate([np.full(len(p.ring), one) if p.weight is None else p.weight for p in parts])
        if any(part.source is not None for part in parts):
            source = np.concatenate([np.zeros_like(p.ring) if p.source is None else p.source for p in parts])
        return cls(ring, step, lane, weight, source)


class Stored(NamedTuple):
    """What may be drawn at this call.

    Attributes:
        spans: per ring, the steps [first, last): stored, outside the guard band and with a published successor.
        lanes: per ring, its number of lanes.
        env_steps: environment steps inserted so far.
        updates: updates done so far, the version of the present policy.
    """

    spans: Sequence[tuple[int, int]]
    lanes: Sequence[int]
    env_steps: int = 0
    updates: int = 0

    @property
    def total(self) -> int:
        """Rows of all rings."""
        return sum(max(0, last - first) * n for (first, last), n in zip(self.spans, self.lanes, strict=True))

    def sizes(self) -> np.ndarray:
        """Rows per ring, float64."""
        rows = [max(0, last - first) * n for (first, last), n in zip(self.spans, self.lanes, strict=True)]
        return np.array(rows, dtype=np.float64)


class Arrivals(NamedTuple):
    """Rows of one ring that became complete (their successors were published) since the last call, S steps of N lanes.

    Attributes:
        ring: index of the ring.
        first: step of the first of them. Usually the one after the last of the call before; later if the writer has
            overwritten some unseen, or lies beyond a restored part.
        flags: [S, N] int32.
        usable: [S, N] bool, which of them may be learned from.
        option: [S, N] int32, executed.
        version: [S, N] int32, updates at publication of the policy that acted.
    """

    ring: int
    first: int
    flags: np.ndarray
    usable: np.ndarray
    option: np.ndarray
    version: np.ndarray


class Sampler:
    """Chooses the places of samples. Subclasses implement :meth:`draw` and what else they need.

    Attributes:
        follows: whether :meth:`follow` is to be called (copying the new rows' flags costs a little).
        knows_usable: whether only usable rows are ever drawn; else the memory looks at their flags.
        wants_errors: whether the learner is to answer with :meth:`update`.
        within_option: whether a segment ends where the option of its first row does.
        needs_segments: whether it is of use for segments of several rows only.
        bytes_per_row: memory for each row of the rings' capacity.
        exchangeable: whether places of one ring come in no particular order, so that they need not be shuffled.
    """

    follows = False
    knows_usable = False
    wants_errors = False
    within_option = False
    needs_segments = False
    bytes_per_row = 0.0
    exchangeable = False

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """Learn of the rings, once and before anything else. May allocate."""

    def follow(self, arrivals: Arrivals) -> None:
        """Take note of new rows. Slots of the ring hold these now: what was known of them before is void."""

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """Choose ``count`` places within ``stored``, independently, with replacement.

        Places may turn out unusable (a border, a quarantined row); those are drawn anew one by one, so that the
        distribution is the stated one on usable rows. Places of one ring should follow one another: they are copied
        ring by ring. The caller shuffles.

        Raises:
            RuntimeError: there is nothing to draw of.
        """
        raise NotImplementedError

    def update(self, places: Places, errors: np.ndarray) -> None:
        """Learn how wrong the critics were at places [M]: absolute TD errors [M] float32.

        Places whose rows have been overwritten since are to be ignored.
        """

    def metrics(self) -> dict[str, float]:
        """Values for the logger, by their full name (``replay/...``)."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints: plain containers, numbers and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; called after :meth:`bind`."""


class Uniform(Sampler):
    """Every usable row alike. The default."""

    exchangeable = True

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        counts: Sequence[int] = [count]
        if len(stored.spans) > 1:
            sizes = stored.sizes()
            counts = rng.multinomial(count, sizes / sizes.sum()).tolist()
        parts = []
        for index, ((first, last), lanes, number) in enumerate(zip(stored.spans, stored.lanes, counts, strict=True)):
            if number:
                # Scaled doubles take a quarter of the time of integers(), and 53 bits are enough for any ring.
                row = (rng.random(number) * ((last - first) * lanes)).astype(np.int64)
                step = row // lanes
                row -= step * lanes
                step += first
                parts.append(Places(np.full(number, index), step, row))
        return Places.join(parts)
