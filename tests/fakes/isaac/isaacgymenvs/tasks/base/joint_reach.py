"""The task of the stand-in under the names of the real hands; its arithmetic is in ``isaac_joints``."""

from __future__ import annotations

from typing import Any, Dict

from isaacgymenvs.tasks.base.vec_task import VecTask, require  # isort: skip  (isaacgym before torch)
import isaac_closed_form as form
import isaac_joints
import torch

#: What the real hands read without a default.
HAND_SETTINGS = [
    "numEnvs", "envSpacing", "aggregateMode", "distRewardScale", "rotRewardScale", "actionPenaltyScale",
    "successTolerance", "reachGoalBonus", "fallDistance", "fallPenalty", "rotEps", "resetPositionNoise",
    "resetRotationNoise", "resetDofPosRandomInterval", "resetDofVelRandomInterval", "dofSpeedScale",
    "useRelativeControl", "actionsMovingAverage", "enableDebugVis", "episodeLength", "printNumSuccesses",
    "maxConsecutiveSuccesses", "objectType", "observationType", "asymmetric_observations",
]  # fmt: skip


class JointReach(isaac_joints.Joints, VecTask):
    """Joints in a ``VecTask``. Subclasses give sizes and, where theirs differ, metrics.

    Raises:
        KeyError: a setting is missing that the real task reads.
    """

    #: Observation type -> size.
    SIZES: Dict[str, int] = {}
    STATES = 0
    ACTIONS = 0
    SETTINGS = HAND_SETTINGS

    def __init__(
        self,
        cfg: Dict[str, Any],
        rl_device: str,
        sim_device: str,
        graphics_device_id: int,
        headless: bool,
        virtual_screen_capture: bool,
        force_render: bool,
    ) -> None:
        self.cfg = cfg
        env = cfg["env"]
        require(env, self.SETTINGS)
        self._read_settings()
        self.obs_type = env["observationType"]
        if self.obs_type not in self.SIZES:
            raise Exception("observationType must be one of %s, not %r" % (list(self.SIZES), self.obs_type))
        print("Obs type:", self.obs_type)
        env["numObservations"] = self.SIZES[self.obs_type]
        env["numStates"] = self.STATES if self._wants_states() else 0
        env["numActions"] = self.ACTIONS
        super().__init__(
            config=cfg,
            rl_device=rl_device,
            sim_device=sim_device,
            graphics_device_id=graphics_device_id,
            headless=headless,
            virtual_screen_capture=virtual_screen_capture,
            force_render=force_render,
        )
        if env.get("resetTime", -1.0) > 0.0:
            self.max_episode_length = form.episode_length(cfg)
            print("New episode length: ", self.max_episode_length)
        self._allocate()
        if self.randomize:
            self.apply_randomizations(self.randomization_params)

    def _wants_states(self) -> bool:
        return bool(self.cfg["env"]["asymmetric_observations"])

    def _reset_lanes(self, env_ids: torch.Tensor) -> None:
        if self.randomize:
            self.apply_randomizations(self.randomization_params)
        super()._reset_lanes(env_ids)
