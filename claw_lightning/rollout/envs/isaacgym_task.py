"""The part of an Isaac Gym task that the adapter uses, as a type; and Bi-DexHands' tasks brought into that form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Protocol, Tuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isaacgym.gymapi import SimParams

CLIP_OBS, CLIP_ACTIONS = 5.0, 1.0  # with which Bi-DexHands wraps its tasks
CONTACT_PAIRS = 8 * 1024 * 1024


class Box(Protocol):
    """An old gym's space."""

    low: Any
    high: Any


class IsaacGymTask(Protocol):
    """N environments of a task (``VecTask`` of IsaacGymEnvs 1.5.1), O observations, S states, A actions.

    ``step`` returns dicts that it uses again, and rewards and flags that alias its buffers. Tasks may also have
    ``successes`` [N] float, ``get_env_state``, ``set_env_state`` and ``set_train_info``.
    """

    num_envs: int
    num_obs: int
    num_states: int
    num_acts: int
    max_episode_length: int
    #: [N] int64: 1 where the next step resets.
    reset_buf: Tensor
    #: [N] int64: control steps of the episode.
    progress_buf: Tensor

    @property
    def action_space(self) -> Box:
        """Bounds of an action."""

    def step(self, actions: Tensor) -> Tuple[Dict[str, Tensor], Tensor, Tensor, Dict[str, Any]]:
        """[N, A] -> observations (``obs`` [N, O], ``states`` [N, S]), reward [N], reset flags [N] int64, extras."""

    def zero_actions(self) -> Tensor:
        """[N, A]."""

    def set_env_state(self, env_state: Any) -> None:
        """Take up the state of a curriculum."""


class BiDexTask:
    """A task of Bi-DexHands (:class:`IsaacGymTask`), which come without the outer half of a ``VecTask``.

    Both hands are one agent. Observations are cut to +-5 and actions to +-1, as the package's own wrapper does.

    Args:
        cls: class of the task.
        config: its plain settings.
        machine: devices and numbers, see :func:`claw_lightning.rollout.envs.isaacgym.machine_settings`.
    """

    def __init__(self, cls: Callable[..., Any], config: Dict[str, Any], machine: Dict[str, Any]) -> None:
        from isaacgym import gymapi

        self.device = machine["rl_device"]
        kind, _, number = machine["sim_device"].partition(":")
        if machine["pipeline"] != "gpu":
            kind = "cpu"  # these tasks have one device for scene and tensors
        self.task = cls(
            cfg=config,
            sim_params=sim_params(config["sim"], kind),
            physics_engine=gymapi.SIM_PHYSX,
            device_type=kind,
            device_id=int(number or 0),
            headless=True,
            is_multi_agent=False,
        )
        self.num_envs, self.num_obs = int(self.task.num_envs), int(self.task.num_obs)
        self.num_states, self.num_acts = int(self.task.num_states), int(self.task.num_actions)
        self.max_episode_length = int(self.task.max_episode_length)
        self.reset_buf, self.progress_buf = self.task.reset_buf, self.task.progress_buf

    @property
    def action_space(self) -> Box:
        """Bounds of all actions."""
        return _Bounds(-CLIP_ACTIONS, CLIP_ACTIONS)

    @property
    def successes(self) -> Any:
        """[N], where the task has them."""
        return getattr(self.task, "successes", None)

    def step(self, actions: Tensor) -> Tuple[Dict[str, Tensor], Tensor, Tensor, Dict[str, Any]]:
        """See :meth:`IsaacGymTask.step`."""
        task = self.task
        task.step(actions.clamp(-CLIP_ACTIONS, CLIP_ACTIONS))
        # Some tasks put new tensors in the place of their buffers.
        self.reset_buf, self.progress_buf = task.reset_buf, task.progress_buf
        found = {"obs": task.obs_buf.clamp(-CLIP_OBS, CLIP_OBS).to(self.device)}
        if self.num_states > 0:
            found["states"] = task.states_buf.clamp(-CLIP_OBS, CLIP_OBS).to(self.device)
        return found, task.rew_buf.to(self.device), task.reset_buf.to(self.device), task.extras

    def zero_actions(self) -> Tensor:
        """[N, A]."""
        return torch.zeros(self.num_envs, self.num_acts, device=self.device)

    def set_env_state(self, env_state: Any) -> None:
        """Does nothing: there are no curricula."""


class _Bounds:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high


def sim_params(sim: Dict[str, Any], kind: str) -> SimParams:
    """``gymapi.SimParams`` of a Bi-DexHands task: the package's defaults (60 Hz), then what its file says."""
    from isaacgym import gymapi, gymutil

    params = gymapi.SimParams()
    params.dt = 1.0 / 60.0
    physx = params.physx
    physx.solver_type, physx.num_position_iterations, physx.num_velocity_iterations = 1, 4, 0
    physx.max_gpu_contact_pairs = CONTACT_PAIRS
    gymutil.parse_sim_config(sim, params)
    params.use_gpu_pipeline = physx.use_gpu = kind != "cpu"
    return params
