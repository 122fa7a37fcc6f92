"""LockStep: collection in the learner's process, step by step, which a resumed run takes up exactly where it was.

Simulators cannot be stored: EnvPool's live in compiled code. But they repeat themselves. A checkpoint therefore holds
the seed that a simulator was built with and the actions that it was given since; a resumed run builds it anew, gives it
the same actions, and has it where it was, down to its generators. What it returns on the way is held against the rows
that are stored: a simulator that does not repeat itself is found out, and begins new episodes.

So that this does not take longer and longer, a simulator is built anew with another seed now and then: at the first
step behind :data:`SPAN` vector steps at which all lanes begin an episode anyway, at the latest behind twice as many.
That depends on the steps taken alone, not on when checkpoints are written, so that those disturb nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from claw_lightning.process import SEED_STRIDE
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Collector, Episode
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.base import VectorEnv
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing

#: Vector steps after which a simulator is built anew; fewer where so many actions would take more than LOG_BYTES.
SPAN = 10_000
LOG_BYTES = 8 << 20

#: Builds a simulator from a seed and from settings that were changed since the configuration.
MakeEnv = Callable[[int, dict[str, Any]], VectorEnv]


class LockStep:
    """One collector of all lanes. :meth:`begin` or :meth:`restore` comes before anything else.

    Args:
        make_env: builds the simulator.
        make_agent: builds what acts, from a seed.
        ring: of all lanes.
        mailbox: with the policy.
        on_episodes: see :class:`Collector`.
        pull_every: see :class:`Collector`.

    Attributes:
        collector: steps the present simulator.
    """

    collector: Collector

    def __init__(
        self,
        make_env: MakeEnv,
        make_agent: Callable[[int], OptionAgent],
        ring: LaneRing,
        mailbox: Mailbox,
        on_episodes: Callable[[list[Episode]], None],
        pull_every: int = 1,
    ) -> None:
        self._make_env, self._make_agent, self.ring, self.mailbox = make_env, make_agent, ring, mailbox
        self._on_episodes, self._pull_every = on_episodes, pull_every
        self.control = Control()
        step_bytes = 4 * ring.num_lanes * max(1, ring.layout.action_size)
        self._span = max(1, min(SPAN, LOG_BYTES // step_bytes))

    @property
    def env(self) -> VectorEnv:
        """The present simulator."""
        return self.collector.env

    def begin(self, seed: int, configured: dict[str, Any]) -> None:
        """Begin new episodes in all lanes."""
        self._open(seed, configured, self._make_agent(seed))

    def _open(self, seed: int, configured: dict[str, Any], agent: OptionAgent, before: Collector | None = None) -> None:
        self.seed = seed
        #: Settings of the simulator when it was built, and those changed since, by the vector step before which.
        self._base, self._changes = dict(configured), list[tuple[int, dict[str, Any]]]()
        self._actions: list[np.ndarray] = []
        self.collector = Collector(
            self._make_env(seed, self._base), agent, self.ring, self.mailbox, self.control, self._on_episodes, seed,
            self._pull_every,
        )  # fmt: skip
        if before is not None:
            self.collector.take_over(before)

    @property
    def configured(self) -> dict[str, Any]:
        """Settings of the simulator that are not those of the configuration."""
        found = dict(self._base)
        for _, settings in self._changes:
            found.update(settings)
        return found

    def configure(self, **settings: Any) -> None:
        """Change settings of the simulator from the next step on."""
        self.env.configure(**settings)
        self._changes.append((self.ring.head, dict(settings)))

    def step(self) -> None:
        """One vector step of all lanes."""
        taken = len(self._actions)
        if taken >= 2 * self._span or (taken >= self._span and self.collector.is_between_episodes):
            self.env.close()
            self._open(self.seed + SEED_STRIDE, self.configured, self.collector.agent, self.collector)
        self.collector.step()
        ring = self.ring
        rows = ring.rows[(ring.head - 1) % ring.num_steps]
        self._actions.append(ring.layout.view(rows, "action").copy())

    def close(self) -> None:
        """Release the simulator."""
        self.env.close()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where simulator and agent are, in plain containers and tensors."""
        agent, ring = self.collector.agent, self.ring
        shape = (0, ring.num_lanes, ring.layout.action_size)
        policies = [(agent.version, torch.from_numpy(agent.policy.flatten()))]
        letter = self.mailbox.read()
        if letter is not None and self.collector.puller.has_mail:
            policies.append((letter[1], torch.from_numpy(letter[2])))
        return {
            "head": ring.head,
            "finals": ring.finals_written,
            "seed": self.seed,
            "configured": dict(self._base),
            "changes": [[step, dict(settings)] for step, settings in self._changes],
            "actions": torch.from_numpy(np.stack(self._actions) if self._actions else np.zeros(shape, np.float32)),
            "steps": self.collector.steps,
            "agent": agent.state_dict(),
            "has_pulled": self.collector.puller.has_pulled,
            "policies": policies,
        }

    def restore(self, state: dict[str, Any], seed: int, known: int) -> bool:
        """Take up :meth:`state_dict`, on a ring that holds the steps from ``known`` up to there.

        Returns whether the simulator repeated itself; where it did not, all is left for :meth:`begin`.
        """
        agent = self._make_agent(seed)
        agent.load_state_dict(state["agent"])
        self._open(state["seed"], state["configured"], agent)
        self._changes = [(int(step), dict(settings)) for step, settings in state["changes"]]
        self._actions = list(state["actions"].numpy())
        changes: dict[int, list[dict[str, Any]]] = {}
        for step, settings in self._changes:
            changes.setdefault(step, []).append(settings)
        if not self.collector.retrace(self._actions, changes, known):
            self.env.close()
            return False
        self.collector.steps = state["steps"]
        # What the agent acts with, and what it has not pulled yet.
        (version, values), *newer = state["policies"]
        if state["has_pulled"]:
            self.mailbox.publish(values.numpy(), version)
            self.collector.puller.pull()
        for version, values in newer:
            self.mailbox.publish(values.numpy(), version)
        return True
