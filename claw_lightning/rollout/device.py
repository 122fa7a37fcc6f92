"""HostSide: a simulator whose tensors live on a device, behind the contract of numpy arrays.

The policy acts on the observation where it is; all that goes into shared memory crosses to the host in one copy per
vector step. Random draws stay on the host whatever the device: they are few, and the same everywhere.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from claw_lightning.rollout.envs.base import NEXT_STEP, ContractError, EnvError, StepResult, VectorEnv

FLAGS = ("terminated", "truncated", "is_border")


class HostSide(VectorEnv):
    """Numpy arrays of a :class:`VectorEnv` that deals in tensors on :attr:`VectorEnv.device`.

    Everything of a step is laid side by side on the device, [N, O + S + 1 + 3 + metrics] float32, and copied at once,
    into page-locked memory where the device is a GPU. The arrays handed out are views of that memory, which is written
    again two steps later.

    Attributes:
        obs_on_device: [N, O] float32, the observation of the last reset or step where the simulator left it.

    Raises:
        EnvError: the simulator resets within the same step or has images, which this side does not carry.
    """

    reuses_buffers = False  # not before a row is complete

    def __init__(self, env: VectorEnv) -> None:
        if env.spec.autoreset != NEXT_STEP or env.spec.image_shape is not None:
            raise EnvError(
                "task %s: an adapter that returns tensors must reset on the next step and have no images; return numpy "
                "arrays (device None)" % env.spec.task
            )
        self.env, self.spec, self.num_envs, self.device = env, env.spec, env.num_envs, env.device
        self.obs_on_device: Optional[Tensor] = None
        self._states: Optional[np.ndarray] = None
        self._buffers: Dict[Tuple[int, int], Tensor] = {}
        self._turn = 0

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`."""
        obs = self._checked(self.env.reset(seed), (self.num_envs, self.spec.obs_size), "observation")
        parts = [obs]
        if self.spec.states_size:
            parts.append(self._checked(self.env.states(), (self.num_envs, self.spec.states_size), "states"))
        self.obs_on_device = obs
        host = self._copy(parts)
        self._states = host[:, self.spec.obs_size :].copy() if self.spec.states_size else None
        return np.ascontiguousarray(host[:, : self.spec.obs_size])

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`."""
        result = self.env.step(torch.from_numpy(action).to(self.device))  # type: ignore[arg-type]
        if not isinstance(result, StepResult):
            raise ContractError("the simulator returned the step as %s, expected StepResult" % type(result).__name__)
        n, size = self.num_envs, self.spec.obs_size
        obs = self._checked(result.obs, (n, size), "observation")
        parts = [obs, self._checked(result.reward, (n,), "reward")[:, None]]
        parts += [self._checked(getattr(result, name), (n,), name, torch.bool)[:, None].float() for name in FLAGS]
        metrics = sorted(result.info)
        parts += [self._metric(result.info[name], name)[:, None] for name in metrics]
        if self.spec.states_size:
            parts.append(self._checked(result.states, (n, self.spec.states_size), "states"))
        self.obs_on_device = obs
        host = self._copy(parts)
        flags = [host[:, size + 1 + i] != 0.0 for i in range(len(FLAGS))]
        start = size + 1 + len(FLAGS)
        info = {name: host[:, start + i].copy() for i, name in enumerate(metrics)}
        self._states = host[:, start + len(metrics) :] if self.spec.states_size else None
        return StepResult(
            host[:, :size], host[:, size], flags[0], flags[1], None, None, flags[2], info, states=self._states
        )

    def _copy(self, parts: List[Tensor]) -> np.ndarray:
        """Parts [N, any] float32 side by side, on the host. Two buffers take turns."""
        packed = torch.cat(parts, 1)
        self._turn = 1 - self._turn
        key = (packed.shape[1], self._turn)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(packed.shape, pin_memory=packed.is_cuda)
        return self._buffers[key].copy_(packed).numpy()

    def _checked(self, tensor: Any, shape: Tuple[int, ...], what: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Raises ContractError for what is of another kind, shape or dtype, before it is laid beside others."""
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            is_tensor = isinstance(tensor, Tensor)
            got = "of shape %s %s" % (tuple(tensor.shape), tensor.dtype) if is_tensor else "as " + type(tensor).__name__
            raise ContractError("the simulator returned %s %s, expected %s %s" % (what, got, shape, dtype))
        return tensor

    def _metric(self, value: Any, name: str) -> Tensor:
        if not isinstance(value, Tensor) or tuple(value.shape) != (self.num_envs,):
            raise ContractError("the simulator returned metric %s not as a tensor of (%d,)" % (name, self.num_envs))
        return value.to(torch.float32)

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return None if self._states is None else self._states.copy()

    def render(self, lane: int) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.render`."""
        return self.env.render(lane)

    def configure(self, **settings: Any) -> None:
        """See :meth:`VectorEnv.configure`."""
        self.env.configure(**settings)

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self.env.close()
