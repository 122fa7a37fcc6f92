"""The dynamics and the reward of the stand-in's tasks, told in ``isaac_closed_form``; for any base class of tasks.

Only to be imported after isaacgym, as it imports torch.
"""

from __future__ import annotations

from typing import Any, Dict

import isaac_closed_form as form
import torch


class Joints:
    """Joints that shall reach goal angles, reset and given new goals one step late.

    The base class beside it has the buffers ``obs_buf``, ``states_buf``, ``rew_buf``, ``reset_buf``, ``progress_buf``
    and ``extras``, their sizes and the ``device``.
    """

    cfg: Dict[str, Any]
    extras: Dict[str, Any]
    device: str
    num_envs: Any
    num_states: int
    num_actions: int
    max_episode_length: int
    obs_buf: torch.Tensor
    states_buf: torch.Tensor
    rew_buf: torch.Tensor
    reset_buf: torch.Tensor
    progress_buf: torch.Tensor
    #: Share of an episode's successes in the moving average, where a configuration does not say.
    AVERAGING = 0.1

    def _read_settings(self) -> None:
        env = self.cfg["env"]
        self.randomize = self.cfg["task"]["randomize"]
        self.randomization_params = self.cfg["task"]["randomization_params"]
        self.max_episode_length = env["episodeLength"]
        self.max_consecutive_successes = env["maxConsecutiveSuccesses"]
        self.success_tolerance = env["successTolerance"]
        self.success_steps = int(env.get("successSteps", form.SUCCESS_STEPS))
        self.active = int(env.get("activeJoints", form.ACTIVE_JOINTS))

    def _allocate(self) -> None:
        joints = (self.num_envs, self.active)
        self.dof_pos = torch.zeros(joints, device=self.device)
        self.dof_vel = torch.zeros(joints, device=self.device)
        self.goal = torch.zeros(joints, device=self.device)
        self.applied = torch.zeros((self.num_envs, self.num_actions), device=self.device)
        self.actions = torch.zeros((self.num_envs, self.num_actions), device=self.device)
        self.reset_goal_buf = self.reset_buf.clone()
        self.near_goal_steps = torch.zeros(self.num_envs, device=self.device)
        self.successes = torch.zeros(self.num_envs, device=self.device)
        self.consecutive_successes = torch.zeros(1, device=self.device)

    def reset_target_pose(self, env_ids: torch.Tensor, apply_reset: bool = False) -> None:
        """New goals."""
        drawn = 2.0 * torch.rand((len(env_ids), self.active), device=self.device) - 1.0
        size = form.GOAL_MIN + (form.GOAL_MAX - form.GOAL_MIN) * drawn.abs()
        self.goal[env_ids] = torch.where(drawn < 0.0, -size, size)
        self.near_goal_steps[env_ids] = 0
        self.reset_goal_buf[env_ids] = 0

    def _reset_lanes(self, env_ids: torch.Tensor) -> None:
        self.reset_target_pose(env_ids)
        spread = float(self.cfg["env"].get("resetDofPosRandomInterval", 0.2))
        self.dof_pos[env_ids] = (2.0 * torch.rand((len(env_ids), self.active), device=self.device) - 1.0) * spread
        self.dof_vel[env_ids] = 0.0
        self.applied[env_ids] = 0.0
        self.progress_buf[env_ids] = 0
        self.reset_buf[env_ids] = 0
        self.successes[env_ids] = 0.0

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        """Late resets and goals, then the action: it was chosen before them and acts after them."""
        env_ids = self.reset_buf.nonzero(as_tuple=False).squeeze(-1)
        goal_env_ids = self.reset_goal_buf.nonzero(as_tuple=False).squeeze(-1)
        if len(goal_env_ids) > 0:
            self.reset_target_pose(goal_env_ids, apply_reset=len(env_ids) == 0)
        if len(env_ids) > 0:
            self._reset(env_ids, goal_env_ids)
        self.actions = actions.clone().to(self.device).float()
        share = float(self.cfg["env"]["actionsMovingAverage"])
        self.applied = share * self.actions + (1.0 - share) * self.applied
        self._integrate(self.applied[:, : self.active])

    def _reset(self, env_ids: torch.Tensor, goal_env_ids: torch.Tensor) -> None:
        self.reset_idx(env_ids, goal_env_ids)

    def reset_idx(self, env_ids: torch.Tensor, goal_env_ids: torch.Tensor) -> None:
        """New episodes; called at the start of the step after the one that flagged them."""
        self._reset_lanes(env_ids)

    def _integrate(self, action: torch.Tensor) -> None:
        self.dof_vel = form.DRAG * self.dof_vel - form.SPRING * self.dof_pos + form.REACH * action
        position = self.dof_pos + self.dof_vel
        stopped = position.abs() >= form.LIMIT
        self.dof_vel = torch.where(stopped, torch.zeros_like(position), self.dof_vel)
        self.dof_pos = torch.clamp(position, -form.LIMIT, form.LIMIT)

    def post_physics_step(self) -> None:
        """Observations come before the reward and its flags: nothing is reset in them."""
        self.progress_buf += 1
        self.compute_observations()
        self.compute_reward()

    def compute_observations(self) -> None:
        """Fills ``obs_buf`` and, if asked for, ``states_buf``."""
        self._write(self.obs_buf)
        if self.num_states > 0:
            self._write(self.states_buf)

    def _write(self, buffer: torch.Tensor) -> None:
        positions, velocities, errors = form.LAYOUTS[buffer.shape[1]]
        error = self.goal - self.dof_pos
        buffer.zero_()  # noise of the last step may lie in the columns that mean nothing here
        if positions is not None:
            buffer[:, positions : positions + self.active] = self.dof_pos
        if velocities is not None:
            buffer[:, velocities : velocities + self.active] = self.dof_vel
        else:
            error = error - form.DRAG * self.dof_vel + form.SPRING * self.dof_pos
        buffer[:, errors : errors + self.active] = error
        buffer[:, -self.num_actions :] = self.actions

    def compute_reward(self) -> None:
        """Reward, flags and metrics, all written into the buffers in place."""
        error = (self.dof_pos - self.goal).abs()
        reward = (1.0 / (1.0 + (error / form.WIDTH) ** 2)).mean(dim=-1)
        reached = self._reached(error)
        fell = error.mean(dim=-1) >= float(self.cfg["env"]["fallDistance"]) * form.FALL_SCALE
        reward = reward + reached * float(self.cfg["env"]["reachGoalBonus"]) * form.BONUS_SCALE
        reward = reward + fell * float(self.cfg["env"]["fallPenalty"]) * form.BONUS_SCALE
        self._finish(reward, reached, fell)

    def _reached(self, error: torch.Tensor) -> torch.Tensor:
        near = error.max(dim=-1).values <= self.success_tolerance
        self.near_goal_steps = (self.near_goal_steps + 1.0) * near
        return self.near_goal_steps >= self.success_steps

    def _finish(self, reward: torch.Tensor, reached: torch.Tensor, fell: torch.Tensor) -> None:
        """Flags as the real hands set them: falls, enough successes, or the step counter."""
        self.reset_goal_buf[:] = torch.where(reached, torch.ones_like(self.reset_goal_buf), self.reset_goal_buf)
        self.successes += self.reset_goal_buf
        resets = torch.where(fell, torch.ones_like(self.reset_buf), self.reset_buf)
        if self.max_consecutive_successes > 0:
            self.progress_buf[reached] = 0
            enough = self.successes >= self.max_consecutive_successes
            resets = torch.where(enough, torch.ones_like(resets), resets)
        late = self.progress_buf >= self._last_step()
        self.reset_buf[:] = torch.where(late, torch.ones_like(resets), resets)
        self.rew_buf[:] = reward
        self._metrics()

    def _last_step(self) -> int:
        return self.max_episode_length - 1

    def _metrics(self) -> None:
        self.consecutive_successes[:] = self._average(self.consecutive_successes, self.successes)
        self.extras["consecutive_successes"] = self.consecutive_successes.mean()

    def _average(self, before: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Moves towards the mean over the episodes that end in this step; stands still where none does."""
        ended = self.reset_buf.sum()
        if ended == 0:
            return before
        factor = float(self.cfg["env"].get("averFactor", self.AVERAGING))
        return factor * (values * self.reset_buf).sum() / ended + (1.0 - factor) * before
