"""ShadowHandOver: the sizes of the real one, for two hands that are one agent."""

from __future__ import annotations

from typing import Any, Dict

from bidexhands.tasks.hand_base.base_task import BaseTask
from bidexhands.utils.torch_jit_utils import *  # noqa: F403  (as the real file does)

import isaac_joints  # isort: skip  (isaacgym before torch)

SETTINGS = [
    "numEnvs", "envSpacing", "aggregateMode", "distRewardScale", "rotRewardScale", "actionPenaltyScale",
    "successTolerance", "reachGoalBonus", "fallDistance", "fallPenalty", "rotEps", "resetPositionNoise",
    "resetRotationNoise", "resetDofPosRandomInterval", "resetDofVelRandomInterval", "dofSpeedScale",
    "useRelativeControl", "actionsMovingAverage", "enableDebugVis", "episodeLength", "printNumSuccesses",
    "maxConsecutiveSuccesses", "objectType", "observationType", "asymmetric_observations",
]  # fmt: skip


class ShadowHandOver(isaac_joints.Joints, BaseTask):
    """398 observations, 211 states where asked for, 40 actions; an episode ends one step later than in IsaacGymEnvs."""

    AVERAGING = 0.01

    def __init__(
        self,
        cfg: Dict[str, Any],
        sim_params: Any,
        physics_engine: int,
        device_type: str,
        device_id: int,
        headless: bool,
        agent_index: Any = None,
        is_multi_agent: bool = False,
    ) -> None:
        self.cfg, self.sim_params, self.physics_engine = cfg, sim_params, physics_engine
        for name in SETTINGS:
            cfg["env"][name]
        if is_multi_agent:
            raise NotImplementedError("one agent only in this stand-in")
        if cfg["env"]["observationType"] != "full_state":
            raise Exception("observationType must be full_state in this stand-in")
        self._read_settings()
        cfg["env"].update(
            numObservations=398, numStates=211 if cfg["env"]["asymmetric_observations"] else 0, numActions=40
        )
        cfg.update(device_type=device_type, device_id=device_id, headless=headless)
        super().__init__(cfg)
        self._allocate()

    def _last_step(self) -> int:
        return self.max_episode_length

    def _metrics(self) -> None:
        super()._metrics()
        self.extras["successes"] = self.successes
        self.extras["consecutive_successes"] = self.consecutive_successes
