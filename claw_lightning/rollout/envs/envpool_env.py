"""EnvPool: many tasks, the Shadow and LEAP hands among them, stepped by C++ threads."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Any, Dict, Optional

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.envs.gymnasium_env import (
    SUCCESS_KEYS,
    ActionScaler,
    ObservationLayout,
    robotics_reward,
    unknown_task,
)
from claw_lightning.rollout.envs.packages import check_lanes, one_line

_INT32_RANGE = 2**31
#: Arguments of EnvPool that this adapter sets, or that would end the synchronous mode it is written for.
_RESERVED = ("batch_size", "env_seed", "from_pixels", "gym_reset_return_info", "max_num_players", "render_mode")
#: Libraries of which EnvPool's drawing needs one. It takes what is in the process when it is imported itself.
_OPENGL = ("libEGL.so.1", "libEGL.so", "libGL.so.1", "libGL.so")
#: Seconds per physics step of the Shadow and Fetch models; their EnvPool configuration has only the frame skip.
_ROBOTICS_TIME_STEP = 0.002


class EnvPoolEnv(VectorEnv):
    """N copies of an EnvPool task, stepped together in synchronous mode.

    Episodes restart on the step after their end: EnvPool ignores the action of that step and returns the first
    observation with reward 0 and elapsed step 0. It is reported as a border row, and the observation returned with
    the end is the true last one. Lane i is seeded with ``seed + i``.

    Where a task ends at the very step of its time limit, EnvPool reports the time limit alone. Playground tasks say
    by another entry that they ended and are corrected here; for the others that one step is taken as truncated.

    Fetch, HandReach and HandManipulate describe their rewards (``spec.goal_reward``); mazes and kitchens do not.

    EnvPool fixes seeds when it is built: ``reset(seed)`` with a seed builds the pool anew.

    Args:
        task: EnvPool's id, such as ``HandReachDense-v3`` or ``LeapCubeReorient-v1``.
        num_envs: N.
        seed: any integer, taken modulo 2**31.
        num_threads: size of EnvPool's own thread pool.
        kwargs: further settings of the task, such as ``max_episode_steps`` or ``reward_type``.

    Raises:
        EnvError: EnvPool is missing, does not know the task or a setting, or the spaces cannot be learnt from.
    """

    may_be_built_twice = True

    def __init__(self, task: str, num_envs: int = 1, seed: int = 0, num_threads: int = 1, **kwargs: Any) -> None:
        try:
            _load_opengl()
            import envpool
        except ImportError as error:
            raise EnvError(
                "data.env.class_path: EnvPoolEnv needs EnvPool and Python 3.11 or later; pip install envpool (%s)"
                % one_line(error)
            ) from error
        check_lanes(num_envs)
        if num_threads < 1:
            # EnvPool would take 0 for all cores, and every worker would do so.
            raise EnvError("data.env.init_args.num_threads: must be at least 1, not %d" % num_threads)
        for name in _RESERVED:
            if name in kwargs and (name, kwargs[name]) != ("render_mode", "rgb_array"):
                raise EnvError("data.env.init_args.%s: EnvPoolEnv sets this itself; remove it" % name)
        known = envpool.list_all_envs()
        if task not in known:
            raise unknown_task(task, known, "EnvPool")

        self.num_envs = num_envs
        self._task = task
        self._make_kwargs = dict(kwargs, num_threads=num_threads)
        self._pool = self._build(seed)
        self._is_unused = True
        try:
            self._layout = ObservationLayout(self._pool.observation_space, task)
            self._scale = ActionScaler(self._pool.action_space, task, self._action_dtype())
        except EnvError:
            self._pool.close()
            raise
        config = self._pool.spec.config
        horizon = int(config.max_episode_steps)
        self.spec = EnvSpec(
            task=task,
            obs_size=self._layout.obs_size,
            action_size=self._scale.size,
            action_low=self._scale.low,
            action_high=self._scale.high,
            max_episode_steps=horizon if 0 < horizon < _INT32_RANGE - 1 else 0,
            control_frequency=_control_frequency(config),
            states_size=self._layout.states_size,
            num_actions=self._scale.num_actions,
            autoreset=NEXT_STEP,
            achieved_goal=self._layout.achieved_goal,
            desired_goal=self._layout.desired_goal,
            versions={"envpool": str(envpool.__version__)},
            goal_reward=_goal_reward(task, config),
        )
        self._states: Optional[np.ndarray] = None

    def _build(self, seed: int) -> Any:
        import envpool

        seeds = [(int(seed) + lane) % _INT32_RANGE for lane in range(self.num_envs)]
        try:
            return envpool.make_gymnasium(self._task, num_envs=self.num_envs, seed=seeds, **self._make_kwargs)
        except (TypeError, ValueError, AssertionError) as error:
            # The compiled part lists the types of every setting below a first line that says little; one line is kept.
            raise EnvError(
                "data.env.init_args: EnvPool rejects them for %s: %s" % (self._task, one_line(error))
            ) from error

    def _action_dtype(self) -> Any:
        # What the compiled part reads (int32 for discrete tasks, float64 for Playground); the space may say otherwise.
        action = self._pool.spec.action_array_spec.get("action")
        return None if action is None else action.dtype

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`."""
        if seed is not None:
            self._pool.close()
            self._pool = self._build(seed)
        self._is_unused = False
        raw, _ = self._pool.reset()
        self._states = self._layout.states(raw, self.num_envs)
        return self._layout.obs(raw, self.num_envs)

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`.

        Raises:
            RuntimeError: not reset yet; EnvPool itself would wait for ever.
        """
        if self._is_unused:
            raise RuntimeError("step before the first reset")
        raw, reward, terminated, truncated, info = self._pool.step(self._scale(action))
        is_border = np.asarray(info["elapsed_step"]) == 0
        terminated = np.array(terminated, dtype=bool)
        truncated = np.array(truncated, dtype=bool)
        if "terminated" in info:
            terminated |= truncated & np.asarray(info["terminated"], dtype=bool)
        self._states = self._layout.states(raw, self.num_envs)
        return StepResult(
            obs=self._layout.obs(raw, self.num_envs),
            reward=np.where(is_border, 0.0, reward).astype(np.float32),
            terminated=terminated & ~is_border,
            truncated=truncated & ~is_border,
            final_obs=None,
            has_final_obs=None,
            is_border=is_border,
            info=_success(info, is_border),
            states=None if self._states is None else self._states.copy(),
        )

    @classmethod
    def rendering(cls, init_args: Dict[str, Any]) -> Dict[str, Any]:
        """See :meth:`VectorEnv.rendering`."""
        return dict(init_args, render_mode="rgb_array")

    def render(self, lane: int) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.render`. MuJoCo tasks are drawn by EGL, in the simulation itself."""
        if self._make_kwargs.get("render_mode") is None:
            return None
        try:
            if not _opengl_is_loaded:  # MuJoCo would end the process
                raise RuntimeError("no OpenGL library was loaded before EnvPool")
            image = self._pool.render(env_ids=lane)
        except Exception as error:  # whatever a graphics library raises, and tasks that EnvPool cannot draw
            raise EnvError(
                "task %s cannot be drawn here (%s: %s); EnvPool's MuJoCo tasks need EGL (a graphics driver, or Mesa's "
                "libegl1); the environment variable MUJOCO_EGL_DEVICE_ID chooses among several devices"
                % (one_line(self._task), type(error).__name__, one_line(error))
            ) from error
        return None if image is None else np.asarray(image, dtype=np.uint8)[0]

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return None if self._states is None else self._states.copy()

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self._pool.close()


_opengl_is_loaded = False


def _load_opengl() -> None:
    """Load an OpenGL library, if there is one and EnvPool has not been imported yet: it costs nothing else."""
    global _opengl_is_loaded
    if _opengl_is_loaded or "envpool" in sys.modules:
        return
    for name in _OPENGL:
        with suppress(OSError):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            _opengl_is_loaded = True
            return


def _success(info: Dict[str, Any], is_border: np.ndarray) -> Dict[str, np.ndarray]:
    for key in SUCCESS_KEYS:
        if key in info:
            return {"success": np.where(is_border, 0.0, info[key]).astype(np.float32)}
    return {}


def _goal_reward(task: str, config: Any) -> Optional[Dict[str, Any]]:
    """Description of the reward, None for tasks other than those of Fetch and the Shadow hand with a goal."""
    hand_task = getattr(config, "hand_task", "")
    if task.startswith("Fetch") or hand_task == "reach":
        return robotics_reward(config, is_pose=False)
    return robotics_reward(config, is_pose=True) if hand_task == "manipulate" else None


def _control_frequency(config: Any) -> float:
    """Control steps per second; 0 where the configuration does not tell."""
    time_step = float(getattr(config, "ctrl_dt", 0.0))
    if not time_step and hasattr(config, "distance_threshold"):  # the Shadow hand and Fetch
        time_step = config.frame_skip * _ROBOTICS_TIME_STEP
    return 1.0 / time_step if time_step > 0 else 0.0
