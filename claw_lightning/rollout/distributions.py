"""Densities that learner and workers share."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def squashed_gaussian_log_prob(pre_tanh: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log density of a = tanh(u), u ~ N(mean, std^2), given u; three times [..., A] -> [...], summed over actions.

    log pi(a) = sum_j log N(u_j; mean_j, std_j^2) - log(1 - tanh(u_j)^2)            [SAC, arXiv 1812.05905]

    with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), exact for every u. A density floor such as
    log(p + 1e-5) would exceed the density itself in the twenty and more dimensions of a hand.
    """
    log_normal = -0.5 * ((pre_tanh - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))
    return (log_normal - log_slope).sum(dim=-1)
