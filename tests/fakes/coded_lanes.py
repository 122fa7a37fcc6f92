"""Lanes whose numbers say where they come from, for stand-ins of other simulators; judged by ``check_rows``."""

import numpy as np

from claw_lightning.rollout.envs.diagnostic import BY_TERMINATION, LENGTH, STEP, CodedEnv, coded_reward

OBS_SIZE, ACTION_SIZE = 16, 2


class CodedLanes:
    """N lanes of :class:`CodedEnv`, whose ends and resets are up to the simulator around them."""

    def __init__(self, num_lanes, seed=0, min_length=2, max_length=7):
        self._env = CodedEnv(
            num_envs=num_lanes, seed=seed, min_length=min_length, max_length=max_length, mark_process=False
        )
        self._led = np.zeros(num_lanes, np.float32)
        self.open(np.ones(num_lanes, bool))

    @property
    def header(self):
        return self._env._header

    def open(self, lanes):
        """Begin new episodes in the lanes [N] bool."""
        self._env._open(lanes)
        self._led[lanes] = 0.0

    def advance(self, action, lanes=None):
        """Step the lanes [N] bool (None: all); returns (reward, terminated, truncated), each [N]."""
        lanes = np.ones(len(self._led), bool) if lanes is None else lanes
        reward = np.where(lanes, coded_reward(self.header), 0.0).astype(np.float32)
        self.header[lanes, STEP] += 1
        self._led[lanes] = np.asarray(action, np.float32)[lanes, 0]
        ended = lanes & (self.header[:, STEP] == self.header[:, LENGTH])
        by_termination = self.header[:, -1] == BY_TERMINATION
        return reward, ended & by_termination, ended & ~by_termination

    def obs(self):
        """[N, O] float32, a new array."""
        return self._env._obs(self._led)
