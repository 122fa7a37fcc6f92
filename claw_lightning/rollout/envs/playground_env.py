"""MuJoCo Playground: the LEAP and Aero hands in JAX, thousands of lanes on a GPU by MuJoCo Warp."""

from __future__ import annotations

import difflib
import os
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.envs.gymnasium_env import PRIVILEGED_KEY, unknown_task
from claw_lightning.rollout.envs.packages import check_lanes, load, numbers, one_line, package_version, refuse_cpu

#: Playground 0.2.0 calls ``clip(a_max=...)``, which JAX 0.10 no longer has.
_CURE = "pip install 'playground==0.2.0' 'jax<0.10' into a Python 3.11 or later"
#: Metrics by which a task says that it is solved at this step.
_SUCCESS_METRICS = ("success", "reward/success")
IMPLEMENTATIONS = ("warp", "jax")


class PlaygroundEnv(VectorEnv):
    """N lanes of a Playground task, stepped together as one JAX program.

    Playground's tasks neither end by time nor restart; its wrapper for Brax does both, but begins every episode with
    the very same state and loses the last observation. It is not used. Here lanes restart on the step after their end,
    from a state of their own: that row is a border, its action is ignored, and the observation returned with the end is
    the true last one, the privileged one included. (Restarting in the same step would need room for both at each end.)
    A restart computes the reset of all lanes and keeps those that ended, so it costs the more the shorter episodes are.

    An episode that the task does not end is cut by the time limit after ``episode_length`` steps. Where both happen at
    once, the task ended it. ``privileged_state`` becomes the states; other parts of the observation follow one another
    in the order of their names. A step is one program on the device and one copy to the host. ``success`` is the task's
    own metric, where it has one. EnvPool has the hands of Playground for the CPU, with the same sizes and rewards.

    Lane i begins its episodes with keys derived from ``seed + i`` and the episode's number, whatever other lanes do.

    Args:
        task: Playground's name, such as ``LeapCubeReorient``.
        num_envs: N.
        seed: of lane 0, taken modulo 2**31.
        impl: ``warp`` needs an NVIDIA GPU, ``jax`` runs everywhere (slowly on CPUs); None: ``warp`` where JAX sees a
            GPU. Tasks without this setting ignore None.
        config_overrides: settings of the task by dotted name, such as ``{"episode_length": 500}``.

    Raises:
        EnvError: Playground is missing or too old, the task or a setting is unknown, there is no GPU for ``warp``, or
            the observation is no vector.
    """

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        impl: Optional[str] = None,
        config_overrides: Optional[Dict[str, Any]] = None,
    ) -> None:
        check_lanes(num_envs)
        if impl not in (None, *IMPLEMENTATIONS):
            raise EnvError("data.env.init_args.impl: warp or jax, not '%s'" % one_line(impl))
        # JAX would take three quarters of the GPU's memory, which learner and other workers need too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._jax = jax = load("jax", "PlaygroundEnv", "JAX", _CURE)
        package = load("mujoco_playground", "PlaygroundEnv", "MuJoCo Playground", _CURE)
        version = package_version("playground", package)
        if numbers(version) and numbers(version) < (0, 0, 5):
            raise EnvError("data.env.class_path: PlaygroundEnv needs Playground 0.0.5 or later, not %s; %s"
                           % (version, _CURE))  # fmt: skip
        registry = package.registry
        if task not in registry.ALL_ENVS:
            raise unknown_task(task, registry.ALL_ENVS, "Playground")

        self.num_envs, self._task = num_envs, task
        config = registry.get_default_config(task)
        overrides = dict(config_overrides or {})
        chosen = _implementation(impl, config, jax, task)
        if chosen is not None:
            overrides["impl"] = chosen
        self._task_env, config = _build(registry, task, config, overrides)
        self._limit = int(config.episode_length)
        parts = _parts(jax.eval_shape(self._task_env.reset, jax.random.PRNGKey(0)).obs, task)
        self._obs_names, obs_size, self._states_name, states_size = parts
        self._widths = (obs_size, states_size)
        self._seed = int(seed)
        self._reset_lanes, self._step_lanes = jax.jit(self._reset_program), jax.jit(self._step_program)
        self._state: Any = None
        self._host = np.zeros((num_envs, 0), np.float32)
        self.spec = EnvSpec(
            task=task,
            obs_size=obs_size,
            action_size=int(self._task_env.action_size),
            action_low=[-1.0] * int(self._task_env.action_size),
            action_high=[1.0] * int(self._task_env.action_size),
            max_episode_steps=self._limit,
            control_frequency=1.0 / float(config.ctrl_dt) if "ctrl_dt" in config else 0.0,
            states_size=states_size,
            autoreset=NEXT_STEP,
            versions={
                "playground": version,
                "impl": str(chosen or ""),
                **{name: package_version(name) for name in ("jax", "mujoco", "warp-lang")},
            },
        )

    def _lane_seeds(self, seed: int) -> np.ndarray:
        return ((int(seed) + np.arange(self.num_envs)) % 2**31).astype(np.uint32)

    # -- programs on the device ---------------------------------------------------------------------------------

    def _pack(self, state: Any) -> Any:
        """All that the host wants to know of a state, [N, O + S + 3]: observations, reward, whether ended, success."""
        np_ = self._jax.numpy
        obs = state.obs if hasattr(state.obs, "items") else {"": state.obs}
        names = [*self._obs_names, *([] if self._states_name is None else [self._states_name])]
        columns = [obs[name].reshape(self.num_envs, -1) for name in names]
        success = next((state.metrics[name] for name in _SUCCESS_METRICS if name in state.metrics), state.done * 0)
        columns += [column.reshape(self.num_envs, 1) for column in (state.reward, state.done, success)]
        return np_.concatenate([column.astype(np_.float32) for column in columns], axis=1)

    def _reset_program(self, keys: Any, episodes: Any) -> Tuple[Any, Any]:
        jax = self._jax
        state = jax.vmap(self._task_env.reset)(jax.vmap(jax.random.fold_in)(keys, episodes))
        return state, self._pack(state)

    def _step_program(self, state: Any, action: Any) -> Tuple[Any, Any]:
        state = self._jax.vmap(self._task_env.step)(state, action)
        return state, self._pack(state)

    def _run(self, program: Any, *arguments: Any) -> Any:
        """Run a program; the first time it is traced, and parts that do not fit together are told by Python's errors.

        Raises:
            EnvError: Playground, JAX and MuJoCo do not fit together.
        """
        try:
            return program(*arguments)
        except (AttributeError, ImportError, NotImplementedError, TypeError) as error:
            versions = ", ".join("%s %s" % item for item in self.spec.versions.items() if item[1])
            raise EnvError(
                "data.env.class_path: %s does not run with the versions that are installed (%s): %s; %s"
                % (self._task, versions, one_line(error), _CURE)
            ) from error

    def _chosen(self, lanes: np.ndarray, taken: Any, others: Any) -> Any:
        """Tree of states: ``taken`` in the lanes [N] bool, elsewhere ``others``."""
        np_ = self._jax.numpy
        mask = np_.asarray(lanes)

        def choose(new: Any, old: Any) -> Any:
            # Buffers of MuJoCo Warp that all lanes share (contacts) have no lanes to choose; steps write them anew.
            if np_.ndim(old) == 0 or np_.shape(old)[0] != self.num_envs:
                return old
            return np_.where(mask.reshape((-1,) + (1,) * (np_.ndim(old) - 1)), new, old).astype(old.dtype)

        return self._jax.tree_util.tree_map(choose, taken, others)

    # -- the contract -------------------------------------------------------------------------------------------

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`."""
        if seed is not None or self._state is None:
            self._keys = self._jax.vmap(self._jax.random.PRNGKey)(
                self._lane_seeds(self._seed if seed is None else seed)
            )
            self._episodes = np.zeros(self.num_envs, np.uint32)
        self._state, packed = self._run(self._reset_lanes, self._keys, self._episodes)
        self._episodes = self._episodes + np.uint32(1)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._over = np.zeros(self.num_envs, bool)
        self._host = np.array(packed)
        return self._host[:, : self._widths[0]].copy()

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`.

        Raises:
            RuntimeError: not reset yet.
        """
        if self._state is None:
            raise RuntimeError("step before the first reset")
        border = self._over
        state, packed = self._run(self._step_lanes, self._state, np.clip(action, -1.0, 1.0).astype(np.float32))
        host = np.array(packed)  # the one copy from the device; JAX's own arrays cannot be written
        if border.any():
            fresh, fresh_packed = self._run(self._reset_lanes, self._keys, self._episodes)
            state, host[border] = self._chosen(border, fresh, state), np.array(fresh_packed)[border]
            self._episodes = self._episodes + border.astype(np.uint32)
        self._state, self._host = state, host
        self._steps = np.where(border, 0, self._steps + 1)
        obs_size, states_size = self._widths
        reward, done, success = host[:, obs_size + states_size :].T
        terminated = (done != 0) & ~border
        truncated = (self._steps >= self._limit) & ~terminated & ~border
        self._over = terminated | truncated
        return StepResult(
            obs=host[:, :obs_size].copy(),
            reward=np.where(border, 0.0, reward).astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            final_obs=None,
            has_final_obs=None,
            is_border=border,
            info={"success": ((success > 0) & ~border).astype(np.float32)} if self._tells_success else {},
            states=self.states(),
        )

    @property
    def _tells_success(self) -> bool:
        return any(name in self._state.metrics for name in _SUCCESS_METRICS)

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        obs_size, states_size = self._widths
        return (
            self._host[:, obs_size : obs_size + states_size].copy() if states_size and self._state is not None else None
        )


def _implementation(wanted: Optional[str], config: Any, jax: Any, task: str) -> Optional[str]:
    """The physics to ask for; None for a task that has no choice.

    Raises:
        EnvError: it cannot run here.
    """
    has_gpu = any(device.platform in ("gpu", "cuda") for device in jax.devices())
    if wanted == "warp" and not has_gpu:
        raise EnvError(
            "data.env.init_args.impl: warp needs an NVIDIA GPU and JAX sees none in this worker; set "
            "data.worker_device: cuda:0 with a JAX for CUDA (pip install 'jax[cuda12]'), or impl: jax, or use "
            "EnvPoolEnv, which has the hands too"
        )
    if not has_gpu:  # whatever the physics: all of it is JAX's
        refuse_cpu("PlaygroundEnv", "its JAX sees no GPU; install one for CUDA (pip install 'jax[cuda12]')")
    if "impl" not in config:
        if wanted is not None:
            raise EnvError("data.env.init_args.impl: %s of this Playground has no such setting; remove it" % task)
        return None
    return wanted or ("warp" if has_gpu else "jax")


def _build(registry: Any, task: str, config: Any, overrides: Dict[str, Any]) -> Tuple[Any, Any]:
    """Task and its configuration with the overrides.

    Raises:
        EnvError: a setting is unknown or of the wrong type, or the task asks for repeated actions.
    """
    unknown = [name for name in overrides if not _holds(config, name)]  # an open configuration would take it
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], list(config), n=3, cutoff=0.0)
        raise EnvError(
            "data.env.init_args.config_overrides: %s has no setting '%s'; nearest: %s"
            % (task, one_line(unknown[0]), ", ".join(nearest))
        )
    try:
        config.update_from_flattened_dict(overrides)
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(
            "data.env.init_args.config_overrides: Playground rejects them for %s: %s" % (task, one_line(error))
        ) from error
    if int(config.get("action_repeat", 1)) != 1:
        raise EnvError(
            "data.env.init_args.config_overrides: %s repeats actions (action_repeat %s), which PlaygroundEnv does not; "
            "set action_repeat: 1" % (task, config.action_repeat)
        )
    return registry.load(task, config=config), config


def _holds(config: Any, name: str) -> bool:
    """Whether a configuration has a setting of the dotted name."""
    for part in name.split("."):
        if not hasattr(config, "keys") or part not in config:
            return False
        config = config[part]
    return True


def _parts(obs: Any, task: str) -> Tuple[List[str], int, Optional[str], int]:
    """Names and size of the observation, name and size of the states, of one lane's observation (shapes alone).

    Raises:
        EnvError: a part is an image.
    """
    groups = dict(obs) if hasattr(obs, "items") else {"": obs}
    for name, part in groups.items():
        if len(part.shape) > 2 or name.startswith("pixels"):
            raise EnvError(
                "data.env.init_args.task: observation '%s' of %s is an image of shape %s; choose a task that observes "
                "its state" % (name, task, tuple(part.shape))
            )
    states = PRIVILEGED_KEY if PRIVILEGED_KEY in groups and len(groups) > 1 else None
    names = sorted(name for name in groups if name != states)
    sizes = {name: int(np.prod(part.shape, dtype=np.int64)) for name, part in groups.items()}
    return names, sum(sizes[name] for name in names), states, sizes[states] if states else 0
