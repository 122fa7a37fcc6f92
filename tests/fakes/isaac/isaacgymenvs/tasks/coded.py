"""The lanes that stand-ins of other simulators have, within Isaac Gym's loop; for this checkout's own interpreter."""

from __future__ import annotations

from typing import Any, Dict

from isaacgymenvs.tasks.base.vec_task import VecTask  # isort: skip  (isaacgym before torch)
import numpy as np
import torch

from tests.fakes.coded_lanes import ACTION_SIZE, OBS_SIZE, CodedLanes


class Coded(VecTask):
    """Lanes end on their own, half of them by a time limit; states are observations with the other sign."""

    def __init__(self, cfg: Dict[str, Any], *places: Any) -> None:
        self.cfg = cfg
        cfg["env"].update(numObservations=OBS_SIZE, numStates=OBS_SIZE, numActions=ACTION_SIZE)
        self.max_episode_length = int(cfg["env"]["episodeLength"])
        super().__init__(cfg, *places)
        self.lanes = CodedLanes(self.num_envs, torch.initial_seed())
        self.successes = torch.zeros(self.num_envs)

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        """The action of a step that resets acts in the new episode."""
        flagged = self.reset_buf != 0
        self.lanes.open(flagged.numpy())
        self.progress_buf[flagged] = 0
        self.reward, self.falls, self.late = self.lanes.advance(actions.numpy())

    def post_physics_step(self) -> None:
        """A time limit is told by the loop, from the number of steps: those of an episode that ends so jump to it."""
        self.progress_buf += 1
        late = torch.from_numpy(self.late)
        self.progress_buf[late] = self.max_episode_length - 1
        self.obs_buf[:] = torch.from_numpy(self.lanes.obs())
        self.states_buf[:] = -self.obs_buf
        self.rew_buf[:] = torch.from_numpy(self.reward)
        self.reset_buf[:] = torch.from_numpy(np.logical_or(self.falls, self.late))
        self.successes[:] = torch.from_numpy(self.falls)
