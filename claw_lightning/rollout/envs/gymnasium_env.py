"""Gymnasium tasks, and the translation of Gymnasium spaces that every adapter with such spaces shares."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from dataclasses import replace
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, SAME_STEP, EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.envs.packages import check_lanes, load_extension, one_line

GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")
PRIVILEGED_KEY = "privileged_state"
#: Where tasks say that they are solved: those of gymnasium-robotics, those of Adroit and Playground, those of MyoSuite.
SUCCESS_KEYS = ("is_success", "success", "solved")

_ROBOTICS_TASK = re.compile(r"^(Hand(Reach|Manipulate)|AdroitHand|Fetch|PointMaze|AntMaze|FrankaKitchen)")
_ROBOTICS_CURE = "pip install gymnasium-robotics 'mujoco>=3.5,<3.12'"
#: Where gymnasium-robotics defines the rewards that :func:`robotics_reward` describes, and whether they compare poses.
_REWARD_MODULES = {
    "gymnasium_robotics.envs.fetch.fetch_env": False,
    "gymnasium_robotics.envs.shadow_dexterous_hand.reach": False,
    "gymnasium_robotics.envs.shadow_dexterous_hand.manipulate": True,
}


def unknown_task(task: str, known: Iterable[str], source: str) -> EnvError:
    """Error for a task that a simulator does not list, naming the three nearest that it does."""
    nearest = difflib.get_close_matches(task, list(known), n=3, cutoff=0.0)
    return EnvError(
        "data.env.init_args.task: %s has no task '%s'; nearest: %s" % (source, one_line(task), ", ".join(nearest))
    )


def robotics_reward(source: Any, is_pose: bool) -> Dict[str, Any]:
    """Settings for :func:`claw_lightning.rollout.goals.goal_reward` of a Fetch or Shadow hand task.

    Args:
        source: holds ``reward_type``, ``distance_threshold`` and so on: a task of gymnasium-robotics or a configuration
            of EnvPool, which kept the names.
        is_pose: whether positions and rotations of one object are compared (HandManipulate) rather than points.
    """
    is_sparse = source.reward_type == "sparse"  # any other word is dense to both simulators
    if not is_pose:
        return {"kind": "distance", "threshold": float(source.distance_threshold), "sparse": is_sparse}
    return {
        "kind": "pose",
        "position": source.target_position != "ignore",
        "rotation": source.target_rotation != "ignore",
        "ignore_z": bool(source.ignore_z_target_rotation),
        "position_threshold": float(source.distance_threshold),
        "rotation_threshold": float(source.rotation_threshold),
        "sparse": is_sparse,
    }


class ObservationLayout:
    """How the observation of a Gymnasium space becomes one float32 vector per lane.

    A box is flattened, a discrete value becomes one-hot. The parts of a dictionary follow one another in the space's
    own order, except that a goal-conditioned one starts with observation, achieved_goal, desired_goal.
    ``privileged_state`` beside other parts is kept out of the observation and becomes the states. So is, for adapters
    that hand it on, one image: a uint8 box [H, W, C], [C, H, W] (channels are the smaller of the outer axes) or [H, W].

    Args:
        images: whether the adapter hands an image on.

    Attributes:
        obs_size: O; 0 where there is an image alone.
        states_size: S, 0 without privileged observations.
        image_shape: (C, H, W), or None.
        achieved_goal, desired_goal: (start, stop) slices of the observation, or None.

    Raises:
        EnvError: the space holds text, several images or anything else that is not a vector.
    """

    def __init__(self, space: Any, task: str, images: bool = False) -> None:
        self.achieved_goal: Optional[Tuple[int, int]] = None
        self.desired_goal: Optional[Tuple[int, int]] = None
        self._states_part: List[Tuple[Optional[str], Any, slice]] = []
        # A bare space is a dictionary of one part without a name.
        parts: Dict[Optional[str], Any] = dict(space.items()) if hasattr(space, "items") else {None: space}
        privileged = parts.pop(PRIVILEGED_KEY, None) if len(parts) > 1 else None
        self.image_shape: Optional[Tuple[int, int, int]] = None
        self._image_name: Optional[str] = None
        self._image_axes: Tuple[int, ...] = ()
        for name in [name for name in parts if images and _is_image(parts[name])][:1]:
            self._image_name = name
            self.image_shape, self._image_axes = _image_axes(parts.pop(name).shape)
        names: List[Optional[str]] = list(parts)
        is_goal = all(name in parts for name in GOAL_KEYS)
        if is_goal:
            names = [*GOAL_KEYS, *(name for name in names if name not in GOAL_KEYS)]

        self._obs_part: List[Tuple[Optional[str], Any, slice]] = []
        self.obs_size = 0
        for name in names:
            size = _vector_size(parts[name], name, task)
            self._obs_part.append((name, parts[name], slice(self.obs_size, self.obs_size + size)))
            self.obs_size += size
        self.states_size = 0
        if privileged is not None:
            self.states_size = _vector_size(privileged, PRIVILEGED_KEY, task)
            self._states_part.append((PRIVILEGED_KEY, privileged, slice(0, self.states_size)))
        if is_goal:
            slices = {name: (part.start, part.stop) for name, _, part in self._obs_part}
            self.achieved_goal, self.desired_goal = slices["achieved_goal"], slices["desired_goal"]

    def obs(self, raw: Any, num_envs: int) -> np.ndarray:
        """Simulator's batched observation -> new array [N, O] float32."""
        return _gather(raw, self._obs_part, num_envs, self.obs_size)

    def states(self, raw: Any, num_envs: int) -> Optional[np.ndarray]:
        """Simulator's batched observation -> new array [N, S] float32, or None."""
        return _gather(raw, self._states_part, num_envs, self.states_size) if self.states_size else None

    def image(self, raw: Any, num_envs: int) -> Optional[np.ndarray]:
        """Simulator's batched observation -> new array [N, C, H, W] uint8, or None."""
        if self.image_shape is None:
            return None
        value = np.asarray(raw if self._image_name is None else raw[self._image_name])
        return np.array(value.transpose(self._image_axes), order="C").reshape((num_envs,) + self.image_shape)


def _is_image(space: Any) -> bool:
    return len(getattr(space, "shape", None) or ()) in (2, 3) and space.dtype == np.uint8


def _image_axes(shape: Tuple[int, ...]) -> Tuple[Tuple[int, int, int], Tuple[int, ...]]:
    """(C, H, W) of an image of the given shape, and the axes of a batch of them in the order N, C, H, W."""
    if len(shape) == 2:
        return (1, shape[0], shape[1]), (0, 1, 2)
    if shape[0] < shape[2]:
        return (shape[0], shape[1], shape[2]), (0, 1, 2, 3)
    return (shape[2], shape[0], shape[1]), (0, 3, 1, 2)


def _vector_size(space: Any, name: Optional[str], task: str) -> int:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        return int(space.n)
    if isinstance(space, Box):
        is_image = len(space.shape) >= 3 or (len(space.shape) == 2 and space.dtype == np.uint8)
        if not is_image:
            return int(np.prod(space.shape, dtype=np.int64))
    where = "observation" if name is None else "observation part '%s'" % name
    raise EnvError(
        "data.env.init_args.task: %s of %s is %s, not a vector; choose a task that observes its state, or register one "
        "with a wrapper such as gymnasium.wrappers.FlattenObservation" % (where, one_line(task), one_line(space))
    )


def _gather(raw: Any, parts: List[Tuple[Optional[str], Any, slice]], num_envs: int, size: int) -> np.ndarray:
    vector = np.zeros((num_envs, size), dtype=np.float32)
    for name, space, columns in parts:
        value = np.asarray(raw if name is None else raw[name])
        if hasattr(space, "n"):
            index = value.reshape(num_envs).astype(np.int64) - int(getattr(space, "start", 0))
            vector[np.arange(num_envs), columns.start + index] = 1.0
        else:
            vector[:, columns] = value.reshape(num_envs, -1)
    return vector


class ActionScaler:
    """From actions in [-1, 1] to those of a Gymnasium box space, or from integral floats to a discrete one.

    Attributes:
        size: A; 1 for a discrete space.
        low, high: bounds in the simulator's units, A numbers each.
        num_actions: > 0 for a discrete space.

    Raises:
        EnvError: neither a box of finite bounds nor discrete.
    """

    def __init__(self, space: Any, task: str, dtype: Any = None) -> None:
        from gymnasium.spaces import Box, Discrete

        self._shape: Tuple[int, ...] = ()
        self._offset = 0
        if isinstance(space, Discrete):
            self.num_actions = int(space.n)
            self.low, self.high = [0.0], [self.num_actions - 1.0]
            self._offset = int(space.start)
        elif isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
            if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
                raise EnvError(
                    "data.env.init_args.task: actions of %s are %s and a policy in [-1, 1] needs finite bounds; "
                    "register the task with a bounded action space" % (one_line(task), one_line(space))
                )
            self.num_actions = 0
            self._shape = tuple(space.shape)
            self.low = [float(value) for value in space.low.reshape(-1)]
            self.high = [float(value) for value in space.high.reshape(-1)]
        else:
            raise EnvError(
                "data.env.init_args.task: actions of %s are %s; only a float box or a discrete space can be learnt; "
                "choose another task or wrap this one" % (one_line(task), one_line(space))
            )
        self.size = len(self.low)
        self._dtype = np.dtype(space.dtype if dtype is None else dtype)
        low, high = np.array(self.low), np.array(self.high)
        # Centre and half range rather than (action + 1) / 2: exact where the bounds are -1 and 1.
        self._centre, self._half_range = (high + low) / 2, (high - low) / 2

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """[N, A] -> the simulator's batch, in its dtype. Values outside [-1, 1] are clipped.

        Raises:
            ValueError: wrong shape, or a discrete action that is no number of an action.
        """
        action = np.asarray(action)
        if action.ndim != 2 or action.shape[1] != self.size:
            raise ValueError("actions have shape %s, expected [N, %d]" % (action.shape, self.size))
        if self.num_actions:
            index = np.rint(action[:, 0])
            if not ((index >= 0) & (index < self.num_actions)).all():
                raise ValueError("discrete actions must lie in [0, %d): %s" % (self.num_actions, one_line(index)))
            return (index.astype(np.int64) + self._offset).astype(self._dtype)
        scaled = self._centre + self._half_range * np.clip(action, -1.0, 1.0)
        return scaled.astype(self._dtype).reshape((len(action),) + self._shape)


class GymnasiumEnv(VectorEnv):
    """N copies of a Gymnasium task (>= 1.0), stepped in turn within this process.

    Episodes restart on the step after their end, which is reported as a border row: its action is ignored. The
    observation returned with the end is therefore the true last one. With ``autoreset`` ``same_step`` they restart in
    the step that ends them, and the true last observation is ``final_obs``: no step is spent on restarts, but images
    are refused. Lane i is seeded with ``seed + i``.
    One uint8 box of an observation becomes the image (:class:`ObservationLayout`).

    Args:
        task: id of a registered task; ``module:EnvId`` imports the module first.
        num_envs: N.
        seed: of the first reset.
        make_kwargs: further arguments of ``gymnasium.make``.
        import_module: dotted module that registers the user's own tasks, imported first.
        autoreset: ``next_step``, or ``same_step``, which needs Gymnasium 1.1.

    Raises:
        EnvError: unknown task, missing package, wrong ``make_kwargs``, or spaces that cannot be learnt from.
    """

    may_be_built_twice = True

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        make_kwargs: Optional[Dict[str, Any]] = None,
        import_module: Optional[str] = None,
        autoreset: str = NEXT_STEP,
    ) -> None:
        check_lanes(num_envs)
        if autoreset not in (NEXT_STEP, SAME_STEP):
            raise EnvError("data.env.init_args.autoreset: next_step or same_step, not '%s'" % one_line(autoreset))
        gym = _import_gymnasium()
        load_extension(import_module)
        if _ROBOTICS_TASK.match(task) and task not in gym.registry:
            _register_robotics(gym, task)

        self.num_envs = num_envs
        self._task = task
        self._gym = gym
        self._autoreset = autoreset
        # Bounds and shapes are checked here, and the checker of gymnasium.make costs time at every step.
        self._make_kwargs = {"disable_env_checker": True, **(make_kwargs or {})}
        self._vector = self._build(self._make_kwargs)
        try:
            self._layout = ObservationLayout(self._vector.single_observation_space, task, images=True)
            self._scale = ActionScaler(self._vector.single_action_space, task)
        except EnvError:
            self._vector.close()
            raise
        first = self._vector.envs[0]
        time_step = getattr(first.unwrapped, "dt", 0.0)
        has_time_step = isinstance(time_step, (int, float)) and time_step > 0
        self.spec = EnvSpec(
            task=task,
            obs_size=self._layout.obs_size,
            action_size=self._scale.size,
            action_low=self._scale.low,
            action_high=self._scale.high,
            max_episode_steps=int(getattr(first.spec, "max_episode_steps", None) or 0),
            control_frequency=1.0 / float(time_step) if has_time_step else 0.0,
            states_size=self._layout.states_size,
            num_actions=self._scale.num_actions,
            autoreset=autoreset,
            achieved_goal=self._layout.achieved_goal,
            desired_goal=self._layout.desired_goal,
            versions=_loaded_versions(),
            goal_reward=_goal_reward(first.unwrapped),
            image_shape=self._layout.image_shape,
        )
        self._next_seed: Optional[int] = seed  # None once used: later episodes draw from the lanes' own generators
        self._ended = np.zeros(num_envs, dtype=bool)
        self._states: Optional[np.ndarray] = None
        self._image: Optional[np.ndarray] = None
        self._reports_success = False

    def _build(self, make_kwargs: Dict[str, Any]) -> Any:
        gym = self._gym
        vector_kwargs: Dict[str, Any] = {"copy": False}  # the layout copies
        mode = getattr(gym.vector, "AutoresetMode", None)
        if mode is not None:  # Gymnasium 1.0 knew next-step only and had no such argument
            # Gymnasium's own reset in the same step hands on the array that a task returned with the end, which tasks
            # that use one array again overwrite when they are reset. So lanes are reset here.
            vector_kwargs["autoreset_mode"] = mode.NEXT_STEP if self._autoreset == NEXT_STEP else mode.DISABLED
        elif self._autoreset != NEXT_STEP:
            raise EnvError(
                "data.env.init_args.autoreset: '%s' needs Gymnasium 1.1 or later, not %s; pip install 'gymnasium>=1.1'"
                % (self._autoreset, gym.__version__)
            )
        try:
            return gym.vector.SyncVectorEnv(
                [lambda: gym.make(self._task, **make_kwargs) for _ in range(self.num_envs)], **vector_kwargs
            )
        except gym.error.UnregisteredEnv as error:
            raise unknown_task(self._task, gym.registry, "Gymnasium") from error
        except ModuleNotFoundError as error:
            raise EnvError(
                "data.env.init_args.task: %s: %s Install the module, or correct its name before ':'"
                % (one_line(self._task), one_line(error))
            ) from error
        except gym.error.Error as error:  # deprecated version, missing dependency: the text names the cure
            raise EnvError("data.env.init_args.task: %s: %s" % (one_line(self._task), one_line(error))) from error
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise EnvError("data.env.init_args.make_kwargs: %s" % one_line(error)) from error
        except AssertionError as error:
            raise self._explained(error) from error

    def _explained(self, error: AssertionError) -> Exception:
        """Say what a bare assertion of gymnasium-robotics does not.

        Up to 1.4.2 it compares joint types the wrong way round for mujoco >= 3.12
        (https://github.com/Farama-Foundation/Gymnasium-Robotics/pull/330).
        """
        registered = self._gym.registry.get(self._task.rpartition(":")[2])
        is_robotics = str(getattr(registered, "entry_point", "")).startswith("gymnasium_robotics")
        version = str(getattr(sys.modules.get("mujoco"), "__version__", "0"))
        if is_robotics and tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= (3, 12):
            return EnvError(
                "data.env.init_args.task: %s cannot reset with mujoco %s; %s" % (self._task, version, _ROBOTICS_CURE)
            )
        return error

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`. Without a seed only the first reset uses the constructor's."""
        seed = self._next_seed if seed is None else seed
        self._next_seed = None
        try:
            raw, _ = self._vector.reset(seed=None if seed is None else int(seed))
        except AssertionError as error:
            raise self._explained(error) from error
        self._ended[:] = False
        self._states = self._layout.states(raw, self.num_envs)
        self._image = self._layout.image(raw, self.num_envs)
        return self._layout.obs(raw, self.num_envs)

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`."""
        raw, reward, terminated, truncated, infos = self._vector.step(self._scale(action))
        # New arrays: those of the vector environment are written anew by its next call.
        reward = np.array(reward, dtype=np.float32)
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        ended, is_border = terminated | truncated, self._ended.copy()
        finals: Optional[np.ndarray] = None
        final_states: Optional[np.ndarray] = None
        if self._autoreset == NEXT_STEP:
            self._ended = ended
        elif ended.any():
            finals, final_states = self._layout.obs(raw, self.num_envs), self._layout.states(raw, self.num_envs)
            raw = self._vector.reset(options={"reset_mask": ended})[0]
        self._states = self._layout.states(raw, self.num_envs)
        return StepResult(
            obs=self._layout.obs(raw, self.num_envs),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=finals,
            has_final_obs=None if self._autoreset == NEXT_STEP else ended,
            is_border=is_border,
            info=self._success(infos, is_border),
            states=None if self._states is None else self._states.copy(),
            image=self._layout.image(raw, self.num_envs),
            final_states=final_states,
        )

    def _success(self, infos: Dict[str, Any], is_border: np.ndarray) -> Dict[str, np.ndarray]:
        for key in SUCCESS_KEYS:
            if key in infos:
                self._reports_success = True
                # The mask beside each value says which lanes gave it; the others hold filling.
                given = np.asarray(infos.get("_" + key, True)) & ~is_border
                success = np.zeros(self.num_envs, dtype=np.float32)
                success[given] = np.asarray(infos[key]).reshape(self.num_envs, -1)[given, 0].astype(np.float32)
                return {"success": success}
        # No lane gave it at this step (all at a border, or a task that tells at the end only): the metric stays.
        return {"success": np.zeros(self.num_envs, dtype=np.float32)} if self._reports_success else {}

    @classmethod
    def rendering(cls, init_args: Dict[str, Any]) -> Dict[str, Any]:
        """See :meth:`VectorEnv.rendering`. Without a display MuJoCo draws by EGL, unless MUJOCO_GL says otherwise."""
        if not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")
        make_kwargs = {"render_mode": "rgb_array", **(init_args.get("make_kwargs") or {})}
        return dict(init_args, make_kwargs=make_kwargs)

    def render(self, lane: int) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.render`."""
        try:
            image = self._vector.envs[lane].render()
        except Exception as error:  # whatever a graphics library raises
            cure = ""
            if not isinstance(error, self._gym.error.DependencyNotInstalled):  # whose text names the cure
                cure = (
                    "; without a display MuJoCo needs EGL (a graphics driver) or OSMesa: try the environment variable "
                    "MUJOCO_GL=egl or MUJOCO_GL=osmesa"
                )
            raise EnvError(
                "task %s cannot be drawn here (%s: %s)%s"
                % (one_line(self._task), type(error).__name__, one_line(error), cure)
            ) from error
        return None if image is None else np.asarray(image, dtype=np.uint8)

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return None if self._states is None else self._states.copy()

    def image(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.image`."""
        return None if self._image is None else self._image.copy()

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
        """[B, G], [B, G] -> [B] float32, by ``spec.goal_reward``, else by the task's own ``compute_reward``.

        That one must accept batches. Those of the hands do not: with ``ignore_z_target_rotation`` (pens) they replace
        one row of a batch instead of one angle of each row.

        Raises:
            EnvError: the task has neither, or one that answers with another shape.
        """
        if self.spec.goal_reward is not None:
            return super().compute_reward(achieved_goal, desired_goal)
        function = getattr(self._vector.envs[0].unwrapped, "compute_reward", None)
        if function is None or self.spec.achieved_goal is None:
            return super().compute_reward(achieved_goal, desired_goal)
        reward = np.array(function(achieved_goal, desired_goal, {}), dtype=np.float32)
        if reward.shape != (len(achieved_goal),):
            raise EnvError(
                "compute_reward of task %s gave shape %s for a batch of %d; it must be vectorised"
                % (self._task, reward.shape, len(achieved_goal))
            )
        return reward

    def configure(self, **settings: Any) -> None:
        """See :meth:`VectorEnv.configure`: attributes of the unwrapped tasks that hold a number, text or switch.

        An attribute that a task reads only while it is built has no effect any more. ``spec.goal_reward`` follows
        where the reward itself was changed.
        """
        tasks = [env.unwrapped for env in self._vector.envs]
        # All are looked at before one is changed.
        changes = [(task, name, self._fitting(task, name, settings[name])) for task in tasks for name in settings]
        for task, name, value in changes:
            setattr(task, name, value)
        self.spec = replace(self.spec, goal_reward=_goal_reward(tasks[0]))

    def _fitting(self, task: Any, name: str, value: Any) -> Any:
        """The value in the kind of the attribute that it is to replace."""
        where = "attribute '%s' of task %s" % (name, one_line(self._task))
        if name.startswith("_") or not hasattr(task, name):
            raise EnvError("%s cannot be changed: there is none" % where)
        defined = getattr(type(task), name, None)
        if isinstance(defined, property) and defined.fset is None:
            raise EnvError("%s cannot be changed: the task computes it" % where)
        present = getattr(task, name)
        if _kind(present) is None or _kind(present) != _kind(value):
            raise EnvError("%s cannot be changed from %s to %s" % (where, one_line(present), one_line(value)))
        # Whoever sends numbers may know no whole ones.
        is_whole = isinstance(present, (int, np.integer)) and isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else value

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self._vector.close()


def _kind(value: Any) -> Optional[str]:
    """What may take the place of a value; None for arrays, functions and other objects, which nothing here replaces."""
    if isinstance(value, (bool, np.bool_)):
        return "switch"
    if isinstance(value, (int, float, np.integer, np.floating)):
        return "number"
    return "text" if isinstance(value, str) else None


def _goal_reward(task: Any) -> Optional[Dict[str, Any]]:
    """Description of the reward of an unwrapped task; None unless it is computed by gymnasium-robotics' own code."""
    module = getattr(getattr(task, "compute_reward", None), "__module__", None)
    is_pose = _REWARD_MODULES.get(str(module))
    if is_pose is None:
        return None
    # A subclass may keep compute_reward and replace what it is made of.
    parts = ("_goal_distance", "_is_success") if is_pose else ()
    if any(getattr(getattr(task, name, None), "__module__", None) != module for name in parts):
        return None
    return robotics_reward(task, is_pose)


def _import_gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise EnvError("data.env.class_path: GymnasiumEnv needs Gymnasium; pip install 'gymnasium>=1.0'") from error
    if int(gymnasium.__version__.split(".")[0]) < 1:
        raise EnvError(
            "data.env.class_path: GymnasiumEnv needs Gymnasium 1.0 or later, not %s; pip install 'gymnasium>=1.0'"
            % gymnasium.__version__
        )
    return gymnasium


def _register_robotics(gym: Any, task: str) -> None:
    # Gymnasium 1.0 no longer loads packages that register tasks, so the id alone would be unknown.
    try:
        module = importlib.import_module("gymnasium_robotics")
    except ImportError as error:
        raise EnvError(
            "data.env.init_args.task: %s comes with gymnasium-robotics; %s" % (one_line(task), _ROBOTICS_CURE)
        ) from error
    gym.register_envs(module)


def _loaded_versions() -> Dict[str, str]:
    names = ("gymnasium", "gymnasium_robotics", "mujoco")
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}
