"""A task whose numbers say where they come from, as told in ``isaac_encoding``: a test sees what came from where."""

from __future__ import annotations

from isaacgymenvs.tasks.shadow_hand import ShadowHand  # isort: skip  (isaacgym before torch)
import isaac_encoding as encoding
import torch


class Encoded(ShadowHand):
    """Lane i falls in step 2 + (3 i + episode) % ``env.period`` of its episode, unless its time is up before;
    with ``env.period`` 0 never.

    A new goal is due every ``env.goalPeriod`` steps. Episodes of a lane count from 0.
    """

    def _allocate(self) -> None:
        super()._allocate()
        self.lane = torch.arange(self.num_envs, device=self.device)
        self.episode = torch.full((self.num_envs,), -1, dtype=torch.long, device=self.device)
        self.goals = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.period = int(self.cfg["env"]["period"])
        self.goal_period = int(self.cfg["env"]["goalPeriod"])

    def reset_target_pose(self, env_ids: torch.Tensor, apply_reset: bool = False) -> None:
        """Counts the goal."""
        super().reset_target_pose(env_ids, apply_reset)
        self.goals[env_ids] += 1

    def _reset_lanes(self, env_ids: torch.Tensor) -> None:
        super()._reset_lanes(env_ids)
        self.goals[env_ids] = 0
        self.episode[env_ids] += 1

    def _falls(self) -> torch.Tensor:
        return self.progress_buf == encoding.fall_step(self.lane, self.episode, self.period)

    def _write(self, buffer: torch.Tensor) -> None:
        late = self.progress_buf >= self.max_episode_length - 1
        step = torch.full_like(self.lane, self.control_steps + 1)
        codes = [self.lane, self.episode, self.progress_buf, step, self.goals, self._falls() | late]
        mark = encoding.STATES_MARK if buffer is self.states_buf else 0.0
        buffer.zero_()
        buffer[:, : encoding.CODES] = torch.stack([code.float() for code in codes], dim=-1) + mark
        buffer[:, -self.num_actions :] = self.actions

    def compute_reward(self) -> None:
        """The code of the row; reward and next observation of a step belong together."""
        reward = encoding.reward_of(self.lane, self.episode, self.progress_buf)
        self._finish(reward.float(), self.progress_buf % self.goal_period == 0, self._falls())
