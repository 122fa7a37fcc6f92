"""What simulators have in common that step all lanes at once as torch tensors: mjlab and Isaac Lab."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import (
    GOAL_IN_NEXT_OBS,
    SAME_STEP,
    ContractError,
    EnvError,
    EnvSpec,
    StepResult,
    VectorEnv,
)
from claw_lightning.rollout.envs.packages import one_line

#: A policy's observation and the critic's, by the names that tasks give them.
POLICY_KEYS, CRITIC_KEYS = ("policy", "actor"), ("critic",)


class TensorEnv(VectorEnv):
    """N lanes that answer a step with (groups of observations, reward, terminated, time-outs, extras), all on a device.

    All that a step gives goes to the host in one copy. Groups of observations become one vector each, parts of a group
    in its own order. The group ``policy`` (or ``actor``) is the observation, ``critic`` the states.
    Where a step both terminates and runs out of time, it terminated. In a task of finite horizon the time limit is an
    end like any other.

    Subclasses build the simulator, hand it to :meth:`_take`, and say in :meth:`_begin_episodes` where the true final
    observations are.
    """

    _sim: Any

    def _take(
        self,
        sim: Any,
        task: str,
        device: str,
        action_bound: float,
        versions: Dict[str, str],
        is_finite_horizon: bool = False,
        goal_in_reward: str = GOAL_IN_NEXT_OBS,
    ) -> None:
        """Reset the simulator for the first time and learn the sizes from what it gives.

        Raises:
            EnvError: its actions are not a box, or there is no vector that a policy could observe.
        """
        import torch

        self._torch, self._sim, self._device, self._task = torch, sim, device, task
        self._is_finite_horizon = is_finite_horizon
        low, high = _action_bounds(sim.single_action_space, task, action_bound)
        self._centre, self._half_range = (high + low) / 2, (high - low) / 2
        groups = self._reset_all(None)
        self._policy_key = _key(groups, POLICY_KEYS, task)
        self._critic_key = next((key for key in CRITIC_KEYS if key in groups), None)
        self._fresh: Optional[np.ndarray] = None
        self._fresh = self._to_host(groups)
        step_dt = float(getattr(sim, "step_dt", 0.0))
        self.spec = EnvSpec(
            task=task,
            obs_size=self._obs_size,
            action_size=len(low),
            action_low=list(low),
            action_high=list(high),
            max_episode_steps=int(getattr(sim, "max_episode_length", 0)),
            control_frequency=1.0 / step_dt if step_dt > 0 else 0.0,
            states_size=self._states_size,
            autoreset=SAME_STEP,
            versions=dict(versions, torch=torch.__version__),
            goal_in_reward=goal_in_reward,
        )

    # -- what subclasses may replace ----------------------------------------------------------------------------

    def _reset_all(self, seed: Optional[int]) -> Dict[str, Any]:
        return self._sim.reset(seed=seed)[0]

    def _begin_episodes(
        self, ended: np.ndarray, host: np.ndarray, extras: Dict[str, Any]
    ) -> Tuple[Optional[np.ndarray], np.ndarray]:
        """Called where lanes [N] bool ended; in ``host`` [N, O + S], what the step returned, they are to begin anew.

        Returns:
            Final observations [N, O + S] (rows of other lanes are never read) or None, and which of them are true [N].
        """
        raise NotImplementedError

    def _success(self) -> Any:
        """Tensor [N], or None: the task does not say."""
        return None

    # -- the contract -------------------------------------------------------------------------------------------

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`. The simulator has one generator for all lanes."""
        if seed is None and self._fresh is not None:
            host = self._fresh  # of the reset that told the sizes
        else:
            host = self._to_host(self._reset_all(seed))
        self._fresh = None
        self._states = self._states_of(host)
        return host[:, : self._obs_size].copy()

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`.

        Raises:
            ContractError: the simulator returned arrays of another size.
        """
        torch = self._torch
        scaled = (self._centre + self._half_range * np.clip(action, -1.0, 1.0)).astype(np.float32)
        groups, reward, terminated, truncated, extras = self._sim.step(torch.as_tensor(scaled, device=self._device))
        success = self._success()
        columns = [reward, terminated, truncated] + ([] if success is None else [success])
        host = self._to_host(groups, columns)
        width = self._obs_size + self._states_size
        numbers = host[:, width:]
        ends, cut = numbers[:, 1] != 0, numbers[:, 2] != 0
        if self._is_finite_horizon:
            ends, cut = ends | cut, np.zeros_like(cut)
        ended = ends | cut
        host, finals, has_final = host[:, :width], None, np.zeros(self.num_envs, bool)
        if ended.any():
            finals, has_final = self._begin_episodes(ended, host, extras)
        self._fresh, self._states = None, self._states_of(host)
        return StepResult(
            obs=host[:, : self._obs_size].copy(),
            reward=numbers[:, 0].copy(),
            terminated=ends,
            truncated=cut & ~ends,
            final_obs=None if finals is None else finals[:, : self._obs_size].copy(),
            has_final_obs=has_final,
            is_border=np.zeros(self.num_envs, bool),
            info={} if success is None else {"success": (numbers[:, 3] > 0).astype(np.float32)},
            states=self.states(),
            final_states=None if finals is None else self._states_of(finals),
        )

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return None if self._states is None else self._states.copy()

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self._sim.close()

    # -- tensors ------------------------------------------------------------------------------------------------

    _states: Optional[np.ndarray] = None
    _obs_size = _states_size = 0

    def _to_host(self, groups: Dict[str, Any], columns: Sequence[Any] = ()) -> np.ndarray:
        """Policy's and critic's groups and further columns [N] as one new array [N, O + S + len(columns)] float32."""
        parts = [self._vector(groups[self._policy_key], self._policy_key)]
        self._check("_obs_size", parts[0].shape[1])
        if self._critic_key is not None:
            parts.append(self._vector(groups[self._critic_key], self._critic_key))
            self._check("_states_size", parts[1].shape[1])
        parts += [column.reshape(self.num_envs, 1).to(parts[0].dtype) for column in columns]
        # On the CPU a lone part would come back as the simulator's own buffer.
        return self._torch.cat(parts, dim=1).detach().to("cpu").numpy().copy()

    def _check(self, name: str, size: int) -> None:
        known = getattr(self, name)
        if known and known != size:
            raise ContractError("task %s returned %d observations, expected %d" % (self._task, size, known))
        setattr(self, name, size)

    def _vector(self, group: Any, name: str) -> Any:
        """A group of observations, a tensor or a dictionary of them, as one tensor [N, size] float32."""
        if hasattr(group, "items"):
            return self._torch.cat([self._vector(part, "%s.%s" % (name, key)) for key, part in group.items()], dim=1)
        if group.dim() > 3 or group.dtype == self._torch.uint8:
            raise EnvError(
                "data.env.init_args.task: observation '%s' of %s is an image of shape %s; choose a task that observes "
                "its state" % (name, one_line(self._task), tuple(group.shape[1:]))
            )
        return group.reshape(self.num_envs, -1).float()

    def _states_of(self, host: np.ndarray) -> Optional[np.ndarray]:
        if not self._states_size:
            return None
        return host[:, self._obs_size : self._obs_size + self._states_size].copy()


def check_device(device: str, adapter: str, on_cpu: bool) -> None:
    """Refuse a GPU that this process does not see.

    Raises:
        EnvError: one line with what to set.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        instead = ", or data.env.init_args.device: cpu, which is slow" if on_cpu else ""
        raise EnvError(
            "data.env.init_args.device: %s needs an NVIDIA GPU for '%s' and this worker sees none; set "
            "data.worker_device: cuda:0%s" % (adapter, device, instead)
        )


def _action_bounds(space: Any, task: str, bound: float) -> Tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds [A] in the simulator's units; ``bound`` where it has none."""
    shape = getattr(space, "shape", None)
    if getattr(space, "n", None) is not None or not shape or len(shape) != 1:
        raise EnvError(
            "data.env.init_args.task: actions of %s are %s; only a vector of numbers can be learnt; choose another task"
            % (one_line(task), one_line(space))
        )
    low, high = (np.broadcast_to(np.asarray(side, np.float64), shape) for side in (space.low, space.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    return np.where(bounded, low, -bound), np.where(bounded, high, bound)


def _key(groups: Any, names: Tuple[str, ...], task: str) -> str:
    found: List[str] = [name for name in names if name in groups]
    if not found:
        raise EnvError(
            "data.env.init_args.task: %s has no observation named %s, only %s; choose another task, or rename the group"
            % (one_line(task), " or ".join(names), ", ".join(map(str, groups)))
        )
    return found[0]
