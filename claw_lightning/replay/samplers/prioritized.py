"""Prioritized: rows in proportion to their latest TD error, with importance weights (Schaul et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored
from claw_lightning.replay.samplers.sum_tree import RowSlots, SumTree
from claw_lightning.rollout.noise import linear_decay
from claw_lightning.rollout.ring import LaneRing

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


class Prioritized(Sampler):
    """Proportional prioritisation (Schaul et al. 2016, arXiv 1511.05952, equation 1 and section 3.4).

    A row i with priority p_i = (abs(error_i) + epsilon)^alpha is drawn with P(i) = p_i / sum p. Usable rows enter at
    the largest priority seen so far, so that each is soon looked at; rows that are not usable, were overwritten or lie
    in the guard band have none.

    The weights are w_i = (N P(i))^-beta, where N is the number of rows with a priority. They are not divided by their
    largest value, as is often done: under beta = 1 their mean is 1 and any weighted mean over batches is an unbiased
    estimate of the mean over usable rows; under a smaller beta their mean is at most 1, so updates only get smaller.

    The priorities are part of checkpoints (4 bytes per row that is stored). Where the replay comes back into rings of
    other shapes, or not at all, all rows enter anew at the largest priority, which is kept.

    Args:
        alpha: how much errors count, 0 (not at all: uniform) to 1 (in proportion).
        beta: how much of the bias the weights correct at the beginning, 0 (nothing) to 1 (all of it).
        final_beta: the same from ``anneal_steps`` on.
        anneal_steps: environment steps of the linear way from ``beta`` to ``final_beta``.
        epsilon: keeps rows without error in the draw. The paper gives no number; its first author named 0.01 when the
            authors of ChainerRL asked (chainer/chainerrl#301). In units of the critics' errors: lower it where returns
            are far below 1.
    """

    follows = True
    knows_usable = True
    wants_errors = True
    bytes_per_row = 5.2

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 0.4,
        final_beta: float = 1.0,
        anneal_steps: int = 1_000_000,
        epsilon: float = 0.01,
    ) -> None:
        group = "data.sampler.init_args"
        for name, value in {"alpha": alpha, "beta": beta, "final_beta": final_beta}.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{group}.{name} is {value}; it must lie in [0, 1]")
        check_numbers(group, {"anneal_steps": anneal_steps}, least=1)
        check_numbers(group, {"epsilon": epsilon}, above=0.0)
        self.alpha, self.epsilon = alpha, epsilon
        self.beta, self.final_beta, self.anneal_steps = beta, final_beta, anneal_steps
        self._rings: list[LaneRing] = []
        self._max_priority = 1.0
        self._present_beta = beta
        self._num_rows = 0  # with a priority
        self._restored: tuple[np.ndarray, np.ndarray] | None = None  # priorities [slots], of steps below these [rings]

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._rings = list(rings)
        self._slots = RowSlots(rings)
        self._tree = SumTree(self._slots.size, np.float32)
        self._num_rows = 0

    def follow(self, arrivals: Arrivals) -> None:
        """See :meth:`Sampler.follow`."""
        for start, stop in self._slots.follow(arrivals):
            self._enter(start, stop, 0.0)
        priorities = np.where(arrivals.usable, np.float32(self._max_priority), np.float32(0.0))
        self._recall(arrivals, priorities)
        for start, stop, rows in self._slots.fill(arrivals, priorities):
            self._enter(start, stop, rows)

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        self._restored = None  # all that was restored has been followed
        for start, stop in self._slots.expire(stored):
            self._enter(start, stop, 0.0)
        total = self._tree.total
        if self._num_rows == 0:
            raise RuntimeError("replay: nothing to sample yet: no usable row is stored")
        self._present_beta = beta = linear_decay(stored.env_steps, self.beta, self.final_beta, self.anneal_steps)
        scale = self._num_rows / total

        def choose(number: int) -> Places:
            mass = rng.random(number)
            mass.sort()  # neighbours in the tree are then neighbours in memory, and rings come one after another
            mass *= total
            slot = self._tree.find(mass)
            weight = (self._tree.get(slot) * scale) ** -beta
            return self._slots.places(slot)._replace(weight=weight.astype(np.float32))

        return self._slots.choose(stored, count, choose)

    def update(self, places: Places, errors: np.ndarray) -> None:
        """See :meth:`Sampler.update`. Errors that are not finite leave the priority as it is."""
        slot, there = self._slots.slots(places)
        priorities = (np.abs(errors).astype(np.float64) + self.epsilon) ** self.alpha
        # Rows that have left, or never had a priority, must not get one.
        fine = there & np.isfinite(errors) & (self._tree.get(slot) > 0)
        if not fine.all():
            slot, priorities = slot[fine], priorities[fine]
        if len(slot) == 0:
            return
        priorities = np.clip(priorities, _SMALLEST, _LARGEST)
        self._tree.set(slot, priorities)
        self._max_priority = max(self._max_priority, float(priorities.max()))

    def metrics(self) -> dict[str, float]:
        """See :meth:`Sampler.metrics`."""
        return {"replay/priority_max": self._max_priority, "replay/beta": self._present_beta}

    def state_dict(self) -> dict[str, Any]:
        """The largest priority seen, and all others up to the last slot that has one."""
        state: dict[str, Any] = {"max_priority": float(self._max_priority)}
        if self._rings:
            used = np.flatnonzero(self._tree[:])
            state["priorities"] = torch.from_numpy(self._tree[: used[-1] + 1 if len(used) else 0].copy())
            state["ends"] = self._slots.ends.tolist()
            state["shapes"] = [[ring.num_steps, ring.num_lanes] for ring in self._rings]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Sampler.load_state_dict`; call before the restored rows are followed."""
        self._max_priority = float(state["max_priority"])
        ends = state.get("ends", ())
        shapes = [[ring.num_steps, ring.num_lanes] for ring in self._rings]
        if ends and state["shapes"] == shapes and all(r.head >= e for r, e in zip(self._rings, ends, strict=True)):
            priorities = np.zeros(self._slots.size, np.float32)
            priorities[: len(state["priorities"])] = state["priorities"].numpy()
            self._restored = priorities, np.array(ends, np.int64)

    def _recall(self, arrivals: Arrivals, priorities: np.ndarray) -> None:
        """Put restored priorities in place of those [S, N] with which new rows enter."""
        if self._restored is None:
            return
        restored, ends = self._restored
        last = int(ends[arrivals.ring])
        if arrivals.first >= last:
            return
        known = np.zeros_like(priorities)
        begin = 0
        for start, stop, step in self._slots.runs(arrivals.ring, arrivals.first, arrivals.first + len(known)):
            begin = step - arrivals.first
            rows = known[begin : begin + (stop - start) // known.shape[1]]
            rows[:] = restored[start:stop].reshape(rows.shape)
        known[max(0, last - arrivals.first) :] = 0.0
        fine = (known > 0) & (priorities > 0)
        priorities[fine] = known[fine]

    def _enter(self, start: int, stop: int, priorities: np.ndarray | float) -> None:
        self._num_rows -= int(np.count_nonzero(self._tree[start:stop]))
        self._tree.set_range(start, stop, priorities)
        self._num_rows += int(np.count_nonzero(self._tree[start:stop]))
