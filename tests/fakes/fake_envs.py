"""Simulators whose observations tell lane, episode and step. Read by workers under Python 3.8 too."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, SAME_STEP, EnvError, EnvSpec, StepResult, VectorEnv


class CountingEnv(VectorEnv):
    """Observes [lane, episode, step], pays the step's number, and is solved where an episode ends by termination.

    Lane i has episodes of ``lengths[i % len(lengths)]`` steps, which end as ``ends[i % len(ends)]`` says.

    Args:
        autoreset: ``next_step`` or ``same_step``.
        nan_reward, nan_obs: vector steps (from 1) at which lane 0 gets such a reward or observation.
        fault: what goes wrong, and where; see the code.
    """

    def __init__(
        self,
        num_envs: int = 1,
        seed: int = 0,
        lengths: Any = (3, 5),
        ends: Any = ("terminated", "truncated"),
        autoreset: str = NEXT_STEP,
        nan_reward: Any = (),
        nan_obs: Any = (),
        fault: str = "",
    ) -> None:
        if fault == "quit":
            quit_like_a_simulator()
        elif fault == "exit":
            os._exit(0)
        elif fault == "refuse":
            raise EnvError("data.env.init_args.task: no such hand")
        self.num_envs, self.fault = num_envs, fault
        self.spec = EnvSpec("Counting", 3, 2, [-1.0] * 2, [1.0] * 2, autoreset=autoreset, versions={"counting": "1"})
        self.lengths = np.array([lengths[i % len(lengths)] for i in range(num_envs)])
        self.ends_terminated = np.array([ends[i % len(ends)] == "terminated" for i in range(num_envs)])
        self.nan_reward, self.nan_obs = nan_reward, nan_obs
        self.episode = np.full(num_envs, -1)
        self.count = np.zeros(num_envs, int)
        self.over = np.zeros(num_envs, bool)
        self.steps = 0
        self.bonus = 0.0
        self.actions = []  # type: list
        self.seeds = []  # type: list

    def _obs(self) -> np.ndarray:
        obs = np.stack([np.arange(self.num_envs), self.episode, self.count], axis=1).astype(np.float32)
        if self.steps in self.nan_obs:
            obs[0, 1] = np.nan
        return obs

    def reset(self, seed: Any = None) -> np.ndarray:
        self.seeds.append(seed)
        self.episode += 1
        self.count[:] = 0
        self.over[:] = False
        return self._obs()

    def step(self, action: np.ndarray) -> StepResult:
        self.steps += 1
        if self.fault == "raise" and self.steps == 5:
            raise RuntimeError("the hand fell off")
        if self.fault == "print":
            print('{"kind": "ready"}\nnot json', flush=True)
            print("noise", file=sys.stderr, flush=True)
        self.actions.append(action.copy())
        border = self.over.copy()
        self.episode += border
        self.count = np.where(border, 0, self.count + 1)
        done = self.count >= self.lengths
        reward = self.count.astype(np.float32) + np.float32(self.bonus)
        if self.steps in self.nan_reward:
            reward[0] = np.nan
        obs, final, has_final = self._obs(), None, None
        if self.fault == "shape" and self.steps == 5:
            obs = obs[:, :-1]
        if self.spec.autoreset == SAME_STEP:
            final, has_final = obs, done
            self.episode += done
            self.count = np.where(done, 0, self.count)
            obs = self._obs()
        else:
            self.over = done
        return StepResult(
            obs=obs,
            reward=reward,
            terminated=done & self.ends_terminated,
            truncated=done & ~self.ends_terminated,
            final_obs=final,
            has_final_obs=has_final,
            is_border=border,
            info={"success": (done & self.ends_terminated).astype(np.float32)},
        )


def quit_like_a_simulator() -> None:
    """End the interpreter with status 0, as isaacgymenvs does when it cannot start."""
    print("the simulator needs a license")
    sys.exit(0)


class ConfigurableEnv(CountingEnv):
    """Its ``bonus`` is added to every reward and can be changed while it runs."""

    def configure(self, **settings: Any) -> None:
        if sorted(settings) != ["bonus"] or not settings["bonus"] >= 0:
            raise EnvError("this hand has no %s" % sorted(settings.items()))
        self.bonus = settings["bonus"]


class PicturesEnv(CountingEnv):
    """Shows lane, episode and step as images [N, 3, 4, 5], channel by channel, beside ``obs_size`` numbers of them.

    Args:
        wrong: the images of steps are given in the wrong ``shape`` or ``dtype``, or are ``absent``.
    """

    def __init__(self, obs_size: int = 3, wrong: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.obs_size, self.wrong = obs_size, wrong
        self.spec = EnvSpec("Pictures", obs_size, 2, [-1.0] * 2, [1.0] * 2, image_shape=(3, 4, 5))

    def _obs(self) -> np.ndarray:
        return super()._obs()[:, : self.obs_size]

    def image(self) -> np.ndarray:
        numbers = np.stack([np.arange(self.num_envs), self.episode, self.count], axis=1).astype(np.uint8)
        return np.broadcast_to(numbers[:, :, None, None], (self.num_envs, 3, 4, 5)).copy()

    def step(self, action: np.ndarray) -> StepResult:
        result = super().step(action)._replace(image=self.image())
        if self.wrong == "shape":
            return result._replace(image=result.image[:, :, :3])
        if self.wrong == "dtype":
            return result._replace(image=result.image.astype(np.float32))
        return result._replace(image=None) if self.wrong == "absent" else result


class WrongOutput(CountingEnv):
    """Returns one array of the wrong shape or dtype: ``wrong`` is ``shape``, ``dtype`` or ``reward``."""

    def __init__(self, wrong: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wrong = wrong

    def step(self, action: np.ndarray) -> StepResult:
        result = super().step(action)
        if self.wrong == "shape":
            return result._replace(obs=result.obs[:, :2])
        if self.wrong == "dtype":
            return result._replace(obs=result.obs.astype(np.float64))
        return result._replace(reward=result.reward[:, None])
