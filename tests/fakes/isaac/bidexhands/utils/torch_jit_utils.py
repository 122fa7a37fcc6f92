"""Tensor helpers under the name that the tasks import them by."""

from isaacgym.torch_utils import tensor_clamp, to_torch, torch_rand_float

__all__ = ["tensor_clamp", "to_torch", "torch_rand_float"]
