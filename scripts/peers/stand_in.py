"""A simulator for benchmarks. A file of its own: workers import what it imports, and their memory is measured."""

from __future__ import annotations

import time

import numpy as np

from claw_lightning.rollout.envs.base import EnvSpec, StepResult, VectorEnv

#: Of HandReach, as serve.py has them.
OBS, ACTION = 93, 20
EPISODE = 50


class StandIn(VectorEnv):
    """Rows of HandReach's sizes from a simulator that computes as long as the hand's does, once the memory is filled.

    Args:
        task: a name.
        num_envs: lanes.
        seed: of the rows.
        fill: environment steps that cost nothing, so that a memory is full in seconds.
        pause: seconds of computing per environment step after those.
    """

    may_be_built_twice = True
    reuses_buffers = False

    def __init__(self, task: str, num_envs: int = 1, seed: int = 0, fill: int = 0, pause: float = 7e-4) -> None:
        self.num_envs, self.free, self.pause, self.step_count = num_envs, fill, pause, 0
        bound = [1.0] * ACTION
        self.spec = EnvSpec(task, OBS, ACTION, [-1.0] * ACTION, bound, max_episode_steps=EPISODE)
        rng = np.random.default_rng(seed)
        self.obs = rng.standard_normal((64, num_envs, OBS), np.float32)
        self.reward = rng.standard_normal((64, num_envs), np.float32)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """First rows."""
        return self.obs[0]

    def step(self, action: np.ndarray) -> StepResult:
        """The next rows; episodes of all lanes end together, a border follows."""
        if self.free > 0:
            self.free -= self.num_envs
        else:
            until = time.perf_counter() + self.pause * self.num_envs
            while time.perf_counter() < until:
                pass
        place = self.step_count % (EPISODE + 1)
        self.step_count += 1
        row, no = self.step_count % 64, np.zeros(self.num_envs, bool)
        ends, border = no | (place == EPISODE - 1), no | (place == EPISODE)
        return StepResult(self.obs[row], self.reward[row], no, ends, None, None, border, {})
