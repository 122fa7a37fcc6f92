"""The one contract behind which every simulator ends.

Nothing outside this folder knows which simulator ran. An adapter translates reset mode, dtypes, devices and
buffer reuse into the values below, and says in its own docstring where it could not.
"""

from __future__ import annotations

import importlib
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

#: Simulators return the reset observation one step after the end of an episode (EnvPool, Gymnasium >= 1.0,
#: Isaac Gym) or in the same step (Isaac Lab, mjlab). The first kind needs no memory for final observations.
NEXT_STEP = "next_step"
SAME_STEP = "same_step"

#: Which of a step's two observations shows the goal that its reward refers to (:attr:`EnvSpec.goal_in_reward`).
GOAL_IN_OBS = "obs"
GOAL_IN_NEXT_OBS = "next_obs"


class EnvError(Exception):
    """A simulator or its task cannot be used as configured; the message names the setting and the cure."""


class ContractError(Exception):
    """A running simulator broke the contract below; a fresh process may do better."""


@dataclass(frozen=True)
class EnvSpec:
    """What a learner must know of a task before it allocates anything.

    ``action_low`` and ``action_high`` are in the simulator's own units; policies act in [-1, 1] and
    :meth:`VectorEnv.step` receives values in [-1, 1]: the adapter scales. For discrete tasks ``num_actions`` > 0,
    ``action_size`` is 1 and actions are integral floats in [0, num_actions).
    ``achieved_goal`` and ``desired_goal`` are (start, stop) slices of the observation, or None.
    ``image_shape`` is (channels, height, width) of an image beside the observation, or None. With one, ``obs_size`` may
    be 0.
    ``desired_goal_in_states`` is the (start, stop) slice of the states that shows the desired goal once more, or None
    where they do not; goals that are replaced in hindsight are replaced there too.
    ``goal_reward`` describes the reward of a goal-conditioned task by plain data, from which the learner computes the
    rewards of other goals (:func:`claw_lightning.rollout.goals.goal_reward`); None where the task has no such reward.
    ``goal_in_reward`` matters where a task draws a new goal within an episode. "next_obs": reward and next observation
    of a step know the new goal, its observation still shows the old one (hands of Isaac Gym). "obs": the goal is drawn
    after the reward, so that the next observation is ahead of it (Isaac Lab). Elsewhere both are the same.

    Raises:
        EnvError: ``goal_reward`` or ``goal_in_reward`` is not one of the values above, ``desired_goal_in_states`` is no
            slice of the states or of another size than the goal, or ``image_shape`` is no shape of an image, or goes
            with same-step autoreset.
    """

    task: str
    obs_size: int
    action_size: int
    action_low: List[float]
    action_high: List[float]
    max_episode_steps: int = 0  # 0: no time limit known
    control_frequency: float = 0.0  # Hz; 0: unknown
    states_size: int = 0  # privileged observations of an asymmetric critic, beside the observation
    num_actions: int = 0  # > 0: discrete
    autoreset: str = NEXT_STEP
    achieved_goal: Optional[Tuple[int, int]] = None
    desired_goal: Optional[Tuple[int, int]] = None
    versions: Dict[str, str] = field(default_factory=dict)
    goal_reward: Optional[Dict[str, Any]] = None
    goal_in_reward: str = GOAL_IN_NEXT_OBS
    image_shape: Optional[Tuple[int, int, int]] = None
    desired_goal_in_states: Optional[Tuple[int, int]] = None

    def __post_init__(self) -> None:
        """Plain numbers: an adapter may have taken them from numpy, which JSON does not know."""
        for name in ("obs_size", "action_size", "max_episode_steps", "states_size", "num_actions"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("action_low", "action_high"):
            object.__setattr__(self, name, [float(x) for x in getattr(self, name)])
        object.__setattr__(self, "control_frequency", float(self.control_frequency))
        for name in ("achieved_goal", "desired_goal", "desired_goal_in_states"):
            span = getattr(self, name)
            if span is not None:
                object.__setattr__(self, name, (int(span[0]), int(span[1])))
        self._check_goal_in_states()
        if self.image_shape is not None:
            self._check_image()
        if self.goal_in_reward not in (GOAL_IN_OBS, GOAL_IN_NEXT_OBS):
            raise EnvError(
                "goal_in_reward: must be '%s' or '%s', not %r" % (GOAL_IN_OBS, GOAL_IN_NEXT_OBS, self.goal_in_reward)
            )
        if self.goal_reward is not None:
            # Not at the top: goals.py raises the errors that are defined here.
            from claw_lightning.rollout.goals import plain_settings

            object.__setattr__(self, "goal_reward", plain_settings(self.goal_reward))

    def _check_goal_in_states(self) -> None:
        if self.desired_goal_in_states is None:
            return
        start, stop = self.desired_goal_in_states
        size = 0 if self.desired_goal is None else self.desired_goal[1] - self.desired_goal[0]
        if not (0 <= start < stop <= self.states_size and stop - start == size):
            raise EnvError(
                "desired_goal_in_states: (%d, %d) is no slice of %d states as long as desired_goal (%d)"
                % (start, stop, self.states_size, size)
            )

    def _check_image(self) -> None:
        assert self.image_shape is not None
        shape = tuple(int(size) for size in self.image_shape)
        if len(shape) != 3 or min(shape) < 1:
            raise EnvError("image_shape: must be (channels, height, width), not %s" % (shape,))
        if self.autoreset == SAME_STEP:
            raise EnvError(
                "task %s: images with same-step autoreset are not supported, as the last image of an episode would be "
                "lost; let the adapter reset on the next step" % self.task
            )
        object.__setattr__(self, "image_shape", shape)

    def to_json(self) -> Dict[str, Any]:
        """Plain containers only, fit for a pipe, a checkpoint or a log line."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Dict[str, Any]) -> EnvSpec:
        """Inverse of :meth:`to_json` (JSON turns tuples into lists). Fields that came later may be missing.

        Raises:
            EnvError: it is no such description, or was changed: one line with what is wrong.
        """
        if not isinstance(data, dict):
            raise EnvError("a description of a task is a mapping, not %s" % type(data).__name__)
        missing = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        missing = [name for name in missing if name not in data]
        unknown = sorted(str(name) for name in set(data) - {each.name for each in fields(cls)})
        if missing or unknown:
            what = "lacks %s" % missing[0] if missing else "has the unknown field %s" % unknown[0]
            raise EnvError("the description of a task %s" % what)
        try:
            spec = cls(**data)
        except EnvError:
            raise
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
            raise EnvError("the description of a task holds a wrong value (%s)" % error) from error
        for name in ("obs_size", "action_size", "max_episode_steps", "states_size", "num_actions"):
            if getattr(spec, name) < 0:
                raise EnvError("the description of a task has %s %d" % (name, getattr(spec, name)))
        return spec


class StepResult(NamedTuple):
    """One vector step of N environments. Arrays are float32 (flags bool), owned by the caller.

    Attributes:
        obs: [N, O], what the policy acts on next.
        reward: [N].
        terminated: [N] bool, the task ended: no bootstrap.
        truncated: [N] bool, a time limit cut the episode: bootstrap from the true final observation.
        final_obs: [N, O] true last observation where ``has_final_obs``, or None. Only same-step autoreset
            needs it; under next-step autoreset ``obs`` itself is the true last observation.
        has_final_obs: [N] bool or None.
        is_border: [N] bool, this step belonged to no episode (the reset step of next-step autoreset): ``obs`` is
            the first observation of a new episode; the action was ignored or crossed the border. Never learned from.
        info: per-lane metrics, each [N]: ``success`` (float, 1 where the task is solved at this step) and others.
        states: [N, S] privileged observation that goes with ``obs``, or None where the task has none.
        image: [N, C, H, W] uint8, what the policy sees beside ``obs``, or None where the task has no images.
        final_states: [N, S] states that go with ``final_obs``; needed with it where the task has states, else None.
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Optional[np.ndarray]
    has_final_obs: Optional[np.ndarray]
    is_border: np.ndarray
    info: Dict[str, np.ndarray]
    states: Optional[np.ndarray] = None
    image: Optional[np.ndarray] = None
    final_states: Optional[np.ndarray] = None


class VectorEnv:
    """N copies of one task, stepped together.

    Subclasses take ``task`` as the simulator's own name of the task, plus ``num_envs`` and ``seed`` as keywords with
    the defaults 1 and 0 (both supplied by the worker), set :attr:`num_envs` and :attr:`spec`, and implement the methods
    below.
    The constructor raises :class:`EnvError` for anything the user can mend.

    An adapter may deal in torch tensors on its simulator's device in place of numpy arrays (:attr:`device`).
    """

    num_envs: int
    spec: EnvSpec
    #: Whether a second one may be built in the same process, as is done to measure the memory of a lane.
    may_be_built_twice = False
    #: Whether it runs in the learner's process as well: in lock-step mode, and where a recorded run is played again.
    may_run_in_lockstep = True
    #: Whether arrays that were returned may change at the next step or reset, against the contract of
    #: :class:`StepResult`; they are then copied. Adapters that hand out arrays for good may say so and save the copy.
    reuses_buffers = True
    #: Device of the torch tensors that :meth:`reset`, :meth:`states` and :meth:`step` deal in (``cpu`` or ``cuda:0``,
    #: the one that the process sees), or None: they deal in numpy arrays. See ``claw_lightning/rollout/device.py``.
    device: Optional[str] = None
    #: The last observation [N, O] as a torch tensor on :attr:`device`, which the policy then acts on, or None.
    obs_on_device: Any = None

    @classmethod
    def import_first(cls, init_args: Dict[str, Any]) -> None:
        """Import what must come before torch. Called once in a worker's process, when numpy alone is there.

        The adapter's own module is imported before torch as well: it must not import torch at its top then.

        Raises:
            EnvError: it cannot be imported; the message says why.
        """

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """Start new episodes in all lanes. Returns obs [N, O] float32."""
        raise NotImplementedError

    def step(self, action: np.ndarray) -> StepResult:
        """Apply actions [N, A] in [-1, 1], float32 (discrete: integral values). See :class:`StepResult`."""
        raise NotImplementedError

    def states(self) -> Optional[np.ndarray]:
        """Privileged observation [N, S] that goes with the last ``reset``; None where the task has none."""
        return None

    def image(self) -> Optional[np.ndarray]:
        """Image [N, C, H, W] uint8 that goes with the last ``reset``; None where the task has none."""
        return None

    def render(self, lane: int) -> Optional[np.ndarray]:
        """What a camera sees of one lane now, [H, W, 3] uint8; None where the adapter has no camera.

        Raises:
            EnvError: there is one, and it cannot be used here.
        """
        return None

    @classmethod
    def rendering(cls, init_args: Dict[str, Any]) -> Dict[str, Any]:
        """Arguments with which the adapter is built where :meth:`render` is going to be called."""
        return init_args

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
        """Vectorised reward of goal-conditioned tasks: [B, G], [B, G] -> [B] float32, as ``spec.goal_reward`` says.

        Raises:
            EnvError: the task describes no such reward.
            ValueError: goals of wrong size.
        """
        if self.spec.goal_reward is None:
            raise EnvError("task %s has no goal-conditioned reward" % self.spec.task)
        from claw_lightning.rollout.goals import goal_reward

        return goal_reward(self.spec.goal_reward)(achieved_goal, desired_goal)

    def configure(self, **settings: Any) -> None:
        """Change settings of the running simulator, from the next step on: episodes go on where they are.

        Values are numbers, texts or switches. They outlast resets. Either all of them are changed or none.

        Raises:
            EnvError: the simulator has no such setting, or not of this value; the message names it.
        """
        raise EnvError(
            "settings (%s) of task %s cannot be changed while it runs; give them in data.env.init_args, or write an "
            "adapter that implements configure" % (", ".join(sorted(settings)), self.spec.task)
        )

    def close(self) -> None:
        """Release the simulator. Called once; may be a no-op."""


def resolve_class(class_path: str) -> type:
    """Class for a dotted path, or for the bare name of a shipped adapter.

    Raises:
        EnvError: no such module or class, or not a VectorEnv.
    """
    if "." not in class_path:
        class_path = "claw_lightning.rollout.envs." + class_path
    module_name, _, class_name = class_path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvError("data.env.class_path: cannot import %s (%s)" % (class_path, error)) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise EnvError("data.env.class_path: module %s has no class %s" % (module_name, class_name))
    if not (isinstance(cls, type) and issubclass(cls, VectorEnv)):
        raise EnvError("data.env.class_path: %s is not a VectorEnv" % class_path)
    return cls


def plain_init_args(init_args: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments without those that the worker supplies; their defaults are let pass.

    Raises:
        EnvError: one of them was set by hand.
    """
    for name, default, instead in (("num_envs", 1, "data.envs_per_worker"), ("seed", 0, "data.seed")):
        if init_args.get(name, default) != default:
            raise EnvError("data.env.init_args.%s: set %s instead" % (name, instead))
    return {name: value for name, value in init_args.items() if name not in ("num_envs", "seed")}


def make_env(
    class_path: str, init_args: Dict[str, Any], num_envs: int, seed: int, rendering: bool = False
) -> VectorEnv:
    """Build the adapter that a configuration names; with ``rendering`` one whose images can be taken.

    Raises:
        EnvError: the class, its arguments or the task cannot be used; the message says which and why.
    """
    cls = resolve_class(class_path)
    init_args = plain_init_args(init_args)
    if rendering:
        init_args = cls.rendering(init_args)  # type: ignore[attr-defined]
    try:
        env = cls(num_envs=num_envs, seed=seed, **init_args)
    except TypeError as error:
        # A misspelt or missing init_args key is the user's; a TypeError from inside the simulator is re-raised whole.
        if "__init__()" in str(error) or "argument" in str(error):
            raise EnvError("data.env.init_args: %s" % error) from error
        raise
    if env.device is None:
        return env
    from claw_lightning.rollout.device import HostSide  # not at the top: it needs torch

    return HostSide(env)
