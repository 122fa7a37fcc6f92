"""Isaac Gym: hand tasks of IsaacGymEnvs and Bi-DexHands, thousands of environments in one process on one GPU."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional

import numpy as np

from claw_lightning.rollout.envs import isaacgym_config as configs
from claw_lightning.rollout.envs import isaacgym_setup as setup
from claw_lightning.rollout.envs.base import GOAL_IN_NEXT_OBS, NEXT_STEP, EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.envs.packages import refuse_cpu

if TYPE_CHECKING:
    from torch import Tensor

    from claw_lightning.rollout.envs.isaacgym_task import IsaacGymTask

log = logging.getLogger(__name__)

#: Control steps per second where a task does not say: physics at 60 Hz.
PHYSICS_STEP = 1.0 / 60.0


class IsaacGymEnv(VectorEnv):
    """N copies of an Isaac Gym task, stepped together on one GPU (or on the CPU), in a process of its own.

    **Resets.** An episode that ended at one step is reset at the beginning of the next one, and the action of that
    next step is applied to the new episode. So the observation returned with the end is the true last one, and the
    step after it leads from one episode into another: it is reported as a border row, with reward 0 and no end. Of each
    new episode the first observation seen is one control step old. The first :meth:`reset` sets all reset flags and
    takes one step with zero actions, as ``reset`` of the simulator itself returns zeros.

    **Ends.** A time limit is what the simulator calls one (``time_outs``), in Bi-DexHands, which never fills them, an
    end at ``max_episode_length``. A fall at the very last step counts as a time limit, as there. An end by the highest
    number of successes in a row is an end of the task.

    **Goals** are drawn anew one step after a success; reward and next observation of that step know the new one.

    **Success** of an episode is the number of goals reached in it (``successes``): above 1 where a hand does well.

    **Rewards** are multiplied by ``reward_scale``: raw ones are in the hundreds, and rl_games and PQL train on a
    hundredth. Logged returns are of that scale.

    **Domain randomisation** (``overrides: {task.randomize: true}``) happens inside the simulator. The noise that it
    adds to actions is part of the dynamics: what is stored is the action that the policy chose.

    Observations stay on the simulator's device (:attr:`device`), where the policy acts on them.

    Args:
        task: name of a file of IsaacGymEnvs' ``cfg/task`` (``ShadowHand``, ``ShadowHandOpenAI_FF``, ``AllegroHand``,
            ``AllegroKukaLSTM``, ...) or of Bi-DexHands' ``cfg`` (``ShadowHandOver``, ...).
        num_envs: N.
        seed: any integer; of random, numpy and torch. GPU PhysX does not repeat itself to the bit all the same.
        overrides: settings of the task by dotted keys, such as ``{env.observationType: full_state}``; ``+env.key`` adds
            one that the file does not have.
        subtask: of AllegroKuka: ``reorientation``, ``regrasping`` or ``throw``, with that file's settings.
        reward_scale: factor of rewards.
        pipeline: ``gpu`` or ``cpu``: where the tensors are. None: where the simulation is.
        scalars_every: steps between looks at the task's scalar metrics; each look waits for the GPU.
        gpu_memory: GiB that must be free on the GPU; None: estimated; 0: not looked at.
        num_threads: of PhysX on the CPU.
        isaacgymenvs_path: folder of IsaacGymEnvs where it is not installed.
        bidexhands_path: folder of Bi-DexHands where it is not installed.

    Raises:
        EnvError: whatever keeps the task from being built, with its cure.
    """

    may_run_in_lockstep = False  # it is to be imported before torch, and a process can build one only
    #: Whether this process has built one: the simulator keeps its first scene for ever, and a second one fails in it.
    _is_taken = False

    @classmethod
    def import_first(cls, init_args: Dict[str, Any]) -> None:
        """See :meth:`VectorEnv.import_first`."""
        setup.import_isaacgym()

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        overrides: Optional[Dict[str, Any]] = None,
        subtask: str = "",
        reward_scale: float = 0.01,
        pipeline: Optional[str] = None,
        scalars_every: int = 100,
        gpu_memory: Optional[float] = None,
        num_threads: int = 1,
        isaacgymenvs_path: Optional[str] = None,
        bidexhands_path: Optional[str] = None,
    ) -> None:
        _check_arguments(
            num_envs,
            seed,
            {"reward_scale": reward_scale, "gpu_memory": gpu_memory},
            {"scalars_every": scalars_every, "num_threads": num_threads},
            {"task": task, "subtask": subtask},
            {"isaacgymenvs_path": isaacgymenvs_path, "bidexhands_path": bidexhands_path},
        )
        if pipeline not in (None, "gpu", "cpu"):
            raise EnvError("data.env.init_args.pipeline: must be gpu or cpu, not %r" % (pipeline,))
        if IsaacGymEnv._is_taken:
            raise EnvError("IsaacGymEnv: one process can hold one Isaac Gym environment, and this one has its own")
        setup.import_isaacgym()
        place = find_task(task, isaacgymenvs_path, bidexhands_path)
        gpu = setup.find_gpu()
        if gpu is None:
            refuse_cpu("IsaacGymEnv", setup.why_no_gpu())
        else:
            setup.check_gpu(gpu, num_envs, gpu_memory)
        if pipeline == "gpu" and gpu is None:
            raise EnvError("data.env.init_args.pipeline: gpu needs a GPU; set data.worker_device to cuda:<number>")
        setup.import_gymtorch()
        machine = machine_settings(num_envs, gpu is not None, pipeline, num_threads)
        config = place.config({} if overrides is None else overrides, machine, subtask)
        setup.set_seed(seed)
        IsaacGymEnv._is_taken = True
        self._task: IsaacGymTask = _build(place, config, machine, task)
        self.num_envs, self._name = num_envs, task
        self.device = machine["rl_device"]
        self._reward_scale, self._scalars_every = float(reward_scale), scalars_every
        self._check_sizes()
        self.spec = self._make_spec(config, gpu)
        self._is_time_limit_given = place.package == "isaacgymenvs"
        self._num_steps = 0
        self._scalars: Dict[str, float] = {}
        self._states: Optional[Tensor] = None
        self._border: Optional[Tensor] = None

    def _check_sizes(self) -> None:
        """Raises EnvError where the task is not of the kind that this adapter knows."""
        task = self._task
        if getattr(task, "use_dict_obs", False):
            raise EnvError(
                "data.env.init_args.task: %s returns a dict of observations (use_dict_obs), which is not supported"
                % self._name
            )
        if task.num_envs != self.num_envs:
            raise EnvError("task %s has %d environments in place of %d" % (self._name, task.num_envs, self.num_envs))
        if task.max_episode_length < configs.SHORTEST:
            raise EnvError(
                "data.env.init_args.overrides: episodes of %s are %d steps long, from which nothing can be learned; "
                "raise env.episodeLength or env.resetTime to give at least %d"
                % (self._name, task.max_episode_length, configs.SHORTEST)
            )
        if task.num_obs < 1 or task.num_acts < 1:
            raise EnvError("task %s has %d observations and %d actions" % (self._name, task.num_obs, task.num_acts))

    def _make_spec(self, config: Dict[str, Any], gpu: Optional[setup.Gpu]) -> EnvSpec:
        task = self._task
        low, high = task.action_space.low, task.action_space.high
        limit = int(task.max_episode_length)
        rounds = int(config["env"].get("maxConsecutiveSuccesses") or 0)  # the clock restarts at each success
        step = float(config["sim"].get("dt") or PHYSICS_STEP) * int(config["env"].get("controlFrequencyInv") or 1)
        return EnvSpec(
            task=self._name,
            obs_size=task.num_obs,
            action_size=task.num_acts,
            action_low=np.broadcast_to(low, (task.num_acts,)).tolist(),
            action_high=np.broadcast_to(high, (task.num_acts,)).tolist(),
            max_episode_steps=limit * max(1, rounds),
            control_frequency=1.0 / step,
            states_size=task.num_states,
            autoreset=NEXT_STEP,
            goal_in_reward=GOAL_IN_NEXT_OBS,
            versions={"isaacgym": _version("isaacgym"), "device": gpu.name if gpu is not None else "cpu"},
        )

    def reset(self, seed: Optional[int] = None) -> Tensor:  # type: ignore[override]
        """See :meth:`VectorEnv.reset`; [N, O] on :attr:`device`."""
        if seed is not None:
            setup.set_seed(seed)
        self._task.reset_buf[:] = 1
        obs, _, done, _ = self._task.step(self._task.zero_actions())
        self._border = done != 0  # an episode may end at its first step
        self._states = self._read_states(obs)
        return self._read_obs(obs)

    def step(self, action: Any) -> StepResult:
        """See :meth:`VectorEnv.step`; tensors on :attr:`device`.

        Args:
            action: [N, A] tensor (or array) in [-1, 1].

        Raises:
            RuntimeError: not reset yet.
        """
        import torch

        if self._border is None:
            raise RuntimeError("step before the first reset")
        given = torch.as_tensor(action, dtype=torch.float32).to(self.device)
        obs, reward, done, extras = self._task.step(given)
        self._num_steps += 1
        self._tell_progress()
        # The simulator writes over its rewards and flags at the next step; each line below makes a tensor of its own.
        ended, border = done != 0, self._border
        time_out = ended & self._time_outs(ended, extras)
        successes = getattr(self._task, "successes", None)
        info = {} if successes is None else {"success": successes.to(self.device, torch.float32, copy=True)}
        info.update(self._read_scalars(extras, reward))
        self._border = ended
        self._states = self._read_states(obs)
        parts: Dict[str, Any] = {
            "obs": self._read_obs(obs),
            "reward": (reward * self._reward_scale).masked_fill(border, 0.0),
            "terminated": ended & ~time_out & ~border,
            "truncated": time_out & ~border,
            "is_border": border,
            "states": self._states,
        }
        return StepResult(final_obs=None, has_final_obs=None, info=info, **parts)

    def _read_obs(self, obs: Any) -> Tensor:
        if not isinstance(obs, dict) or "obs" not in obs:
            raise EnvError("data.env.init_args.task: %s returns no 'obs'; dicts of observations are not supported"
                           % self._name)  # fmt: skip
        return obs["obs"]  # type: ignore[no-any-return]

    def _read_states(self, obs: Any) -> Optional[Tensor]:
        return obs["states"] if self.spec.states_size else None

    def _time_outs(self, ended: Tensor, extras: Dict[str, Any]) -> Tensor:
        """Lanes whose time is over, [N] bool."""
        limit = self._task.max_episode_length - (1 if self._is_time_limit_given else 0)
        over = (self._task.progress_buf >= limit).to(ended.device)
        given = extras.get("time_outs") if isinstance(extras, dict) else None
        return over if given is None else (given != 0).to(ended.device) | over

    def _read_scalars(self, extras: Dict[str, Any], reward: Tensor) -> Dict[str, Any]:
        """Metrics of the whole task, spread over lanes; read seldom, as each reading waits for the GPU."""
        if (self._num_steps - 1) % self._scalars_every == 0:
            self._scalars = {}
            found = {**extras.get("scalars", {}), **extras} if isinstance(extras, dict) else {}
            for name, value in found.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if is_number or (
                    getattr(value, "ndim", None) is not None and value.numel() == 1 and name != "time_outs"
                ):
                    self._scalars[name] = float(value)
        return {name: reward.new_full((self.num_envs,), value) for name, value in self._scalars.items()}

    def _tell_progress(self) -> None:
        """Curricula of the tasks go by the frames so far; this process knows its own."""
        tell = getattr(self._task, "set_train_info", None)
        if tell is not None:
            tell(self._num_steps * self.num_envs)

    def states(self) -> Optional[Tensor]:  # type: ignore[override]
        """See :meth:`VectorEnv.states`; [N, S] on :attr:`device`."""
        return self._states

    def env_state(self) -> Dict[str, Any]:
        """State of the task's curriculum (AllegroKuka: ``success_tolerance``); empty where it has none."""
        get = getattr(self._task, "get_env_state", None)
        return dict((get() if get is not None else None) or {})

    def configure(self, **settings: Any) -> None:
        """Set the curriculum where it was: any name of :meth:`env_state`.

        Raises:
            EnvError: the task's curriculum has no such name.
        """
        state = self.env_state()
        for name, value in settings.items():
            if name not in state:
                raise EnvError(
                    "setting %s of task %s cannot be changed while it runs%s; give it in data.env.init_args.overrides"
                    % (name, self._name, " (known: %s)" % ", ".join(sorted(state)) if state else "")
                )
            if isinstance(value, (bool, str)) or not np.isfinite(value):
                raise EnvError("setting %s of task %s: must be a number, not %r" % (name, self._name, value))
        self._task.set_env_state({**state, **settings})

    def close(self) -> None:
        """Does nothing: the simulator is freed by the end of its process alone."""


def _check_arguments(
    num_envs: Any,
    seed: Any,
    sizes: Dict[str, Any],
    counts: Dict[str, Any],
    texts: Dict[str, Any],
    paths: Dict[str, Any],
) -> None:
    """Refuse arguments of a wrong kind, which from Python nobody else has looked at."""
    if not configs.is_whole(num_envs) or num_envs < 1:
        raise EnvError("data.envs_per_worker: must be at least 1 and whole, not %.60r" % (num_envs,))
    if not configs.is_whole(seed):
        raise EnvError("data.seed: must be a whole number, not %.60r" % (seed,))
    for name, value in sizes.items():
        may_be_zero = name == "gpu_memory"
        if may_be_zero and value is None:
            continue
        if not (configs.is_number(value) and np.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
            least = "from 0" if may_be_zero else "above 0"
            raise EnvError("data.env.init_args.%s: must be a number %s, not %.60r" % (name, least, value))
    for name, value in counts.items():
        if not configs.is_whole(value) or value < 1:
            raise EnvError("data.env.init_args.%s: must be at least 1 and whole, not %.60r" % (name, value))
    for name, value in texts.items():
        if not isinstance(value, str):
            raise EnvError("data.env.init_args.%s: must be a name, not %.60r" % (name, value))
    for name, value in paths.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise EnvError("data.env.init_args.%s: must be a folder, not %.60r" % (name, value))


def machine_settings(num_envs: int, has_gpu: bool, pipeline: Optional[str], num_threads: int) -> Dict[str, Any]:
    """What holds for all tasks: numbers and devices. Devices always with a number: some tasks split at the colon."""
    sim_device = "cuda:0" if has_gpu else "cpu:0"  # the only GPU that the process sees
    pipeline = pipeline or ("gpu" if has_gpu else "cpu")
    return {
        "num_envs": num_envs,
        "physics_engine": "physx",
        "pipeline": pipeline,
        "sim_device": sim_device,
        "rl_device": sim_device if pipeline == "gpu" else "cpu:0",
        "graphics_device_id": -1,
        "num_threads": num_threads,
        "num_subscenes": 4 if has_gpu else num_threads,
        "solver_type": 1,
        "headless": True,
        "test": False,
        "multi_gpu": False,
        "force_render": False,
        "virtual_screen_capture": False,
    }


class Place(NamedTuple):
    """Where a task was found: package, its folder, the folder of its configurations."""

    package: str
    folder: str
    configs: str
    task: str

    def config(self, overrides: Dict[str, Any], machine: Dict[str, Any], subtask: str) -> Dict[str, Any]:
        """Plain settings of the task.

        Raises:
            EnvError: see :func:`isaacgym_config.task_config` and :func:`isaacgym_config.check_clock`.
        """
        if self.package == "isaacgymenvs":
            found = configs.task_config(self.folder, self.task, overrides, machine, subtask)
        elif subtask:
            raise configs.no_subtasks(self.task)
        else:
            file = configs.read_yaml(os.path.join(self.configs, self.task + ".yaml"))
            found = dict(configs.plain(configs.override(file, overrides, machine), machine), name=self.task)
        configs.check_clock(found)
        return found


def find_task(task: str, isaacgymenvs_path: Optional[str], bidexhands_path: Optional[str]) -> Place:
    """Look a task up in IsaacGymEnvs, then in Bi-DexHands.

    Raises:
        EnvError: neither is installed, or neither has it.
    """
    places = {}
    for package, given, inside in (
        ("isaacgymenvs", isaacgymenvs_path, os.path.join("cfg", "task")), ("bidexhands", bidexhands_path, "cfg"),
    ):  # fmt: skip
        folder = setup.find_package(package, given)
        if folder is not None:
            places[os.path.join(folder, inside)] = (package, folder)
    if not places:
        raise EnvError(
            "data.worker_python: IsaacGymEnvs is not installed there; clone it, and give its folder as "
            "data.env.init_args.isaacgymenvs_path (or run pip install -e, without dependencies)"
        )
    found = setup.check_task(task, list(places))
    package, folder = places[found]
    return Place(package, folder, found, task)


def _build(place: Place, config: Dict[str, Any], machine: Dict[str, Any], task: str) -> IsaacGymTask:
    """Build the simulator.

    Raises:
        RuntimeError: it ended by ``quit()``, as it does where no scene can be made.
    """
    cls = setup.load_task_class(
        place.package, place.folder, str(config.get("name", task)), str(config.get("env", {}).get("subtask", ""))
    )
    try:
        if place.package == "bidexhands":
            from claw_lightning.rollout.envs.isaacgym_task import BiDexTask

            return BiDexTask(cls, config, machine)
        names = ("rl_device", "sim_device", "graphics_device_id", "headless", "virtual_screen_capture", "force_render")
        return cls(config, *(machine[name] for name in names))  # type: ignore[no-any-return]
    except SystemExit as error:
        raise RuntimeError(
            "Isaac Gym ended the process while it set up %s; it printed last: %s" % (task, setup.last_printed())
        ) from error


def _version(name: str) -> str:
    """Version of an installed distribution; ``unknown`` for what merely lies on the path."""
    from importlib import metadata

    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return "unknown"
