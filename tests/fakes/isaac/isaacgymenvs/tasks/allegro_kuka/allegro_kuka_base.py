"""An arm with a hand: states always, own metrics, a tolerance that shrinks, and a device that must be numbered."""

from __future__ import annotations

from typing import Any, Dict

from isaacgym import gymapi, gymtorch, gymutil  # noqa: F401  isort: skip
import jinja2  # noqa: F401  (the real one writes its objects with it)
import torch
from isaacgymenvs.tasks.base.joint_reach import JointReach

KUKA_SETTINGS = [
    "numEnvs", "envSpacing", "episodeLength", "enableDebugVis", "clampAbsObservations", "useRelativeControl",
    "dofSpeedScale", "actionsMovingAverage", "liftingRewScale", "keypointRewScale", "distanceDeltaRewScale",
    "reachGoalBonus", "fallDistance", "fallPenalty", "privilegedActions", "objectType", "observationType",
    "successTolerance", "targetSuccessTolerance", "toleranceCurriculumIncrement", "toleranceCurriculumInterval",
    "maxConsecutiveSuccesses", "successSteps", "saveStates", "loadInitialStates", "asset",
]  # fmt: skip
REWARD_OBS_SCALE = 0.01


class AllegroKukaBase(JointReach):
    """Raises IndexError for a device without a number, such as ``cpu``."""

    SETTINGS = KUKA_SETTINGS

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
        cfg["device_type"] = sim_device.split(":")[0]
        cfg["device_id"] = int(sim_device.split(":")[1])
        self.clamp_abs_observations: float = cfg["env"]["clampAbsObservations"]
        super().__init__(cfg, rl_device, sim_device, graphics_device_id, headless, virtual_screen_capture, force_render)

    def _wants_states(self) -> bool:
        return True

    def _allocate(self) -> None:
        super()._allocate()
        self.frame_since_restart = 0
        self.last_curriculum_update = 0
        self.true_objective = torch.zeros(self.num_envs, device=self.device)
        self.prev_episode_successes = torch.zeros(self.num_envs, device=self.device)
        self.episode_reward = torch.zeros(self.num_envs, device=self.device)

    def reset_idx(self, env_ids: torch.Tensor, *args: Any) -> None:
        """New episodes; unlike the hands, lanes only."""
        self.prev_episode_successes[env_ids] = self.successes[env_ids]
        self.episode_reward[env_ids] = 0.0
        self._reset_lanes(env_ids)

    def _reset(self, env_ids: torch.Tensor, goal_env_ids: torch.Tensor) -> None:
        self.reset_idx(env_ids)

    def post_physics_step(self) -> None:
        """The reward is part of the observation, so that comes last."""
        self.frame_since_restart += 1
        self._shrink_tolerance()
        super().post_physics_step()
        for buffer in (self.obs_buf, self.states_buf):
            buffer[:, -1] = REWARD_OBS_SCALE * self.rew_buf
            buffer.clamp_(-self.clamp_abs_observations, self.clamp_abs_observations)

    def _write(self, buffer: torch.Tensor) -> None:
        super()._write(buffer)
        buffer[:, -self.num_actions :] = 0.0  # no actions among these observations
        buffer[:, -2] = torch.log(self.progress_buf.float() / 10.0 + 1.0)

    def _shrink_tolerance(self) -> None:
        env = self.cfg["env"]
        if self.frame_since_restart - self.last_curriculum_update < env["toleranceCurriculumInterval"]:
            return
        if self.prev_episode_successes.mean() < 3.0:
            return
        self.last_curriculum_update = self.frame_since_restart
        smaller = self.success_tolerance * env["toleranceCurriculumIncrement"]
        self.success_tolerance = max(smaller, env["targetSuccessTolerance"])

    def _metrics(self) -> None:
        self.true_objective = self.successes.clone()
        self.episode_reward += self.rew_buf
        self.extras["successes"] = self.prev_episode_successes
        self.extras["true_objective"] = self.true_objective
        self.extras["rewards_episode"] = {"keypoint_rew": self.episode_reward}
        self.extras["episode_cumulative"] = {"keypoint_rew": self.rew_buf}
        self.extras["scalars"] = {"success_tolerance": self.success_tolerance}

    def get_env_state(self) -> Dict[str, Any]:
        """How far the curriculum is."""
        return {"success_tolerance": self.success_tolerance}

    def set_env_state(self, env_state: Any) -> None:
        """Goes on from there; None is ignored."""
        if env_state is not None:
            self.success_tolerance = env_state["success_tolerance"]
