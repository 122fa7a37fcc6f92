"""Observation normalisation with running statistics, learned by the learner and sent to workers with the weights."""

from __future__ import annotations

from typing import Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

Moments = Tuple[float, np.ndarray, np.ndarray]  # count, mean [O], sum of squared deviations [O] (float64)


class Normalizer(nn.Module):
    """``clip((x - mean) / std, -limit, limit)``; the identity (with clipping) until statistics arrive.

    ``mean`` and ``std`` [O] float32 are what workers receive. The exact statistics (float64) stay in the learner's
    :class:`RunningMoments`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, limit: float = 5.0) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., O]."""
        return ((x - self.mean) / self.std).clamp(-self.limit, self.limit)


class RunningMoments(nn.Module):
    """Count, mean and squared deviations of all observations so far (Chan et al. 1979, pairwise update), float64."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int, epsilon: float = 1e-4) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    def update(self, moments: Moments) -> None:
        """Merge the moments of a batch of observations."""
        count = float(moments[0])
        if count <= 0:
            return
        mean = torch.as_tensor(moments[1], dtype=torch.float64, device=self.mean.device)
        squares = torch.as_tensor(moments[2], dtype=torch.float64, device=self.mean.device)
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count.copy_(total)

    def write_to(self, normalizer: Normalizer) -> None:
        """Set the float32 statistics. Components that (nearly) never vary are divided by ``epsilon``, not by zero."""
        if float(self.count) < 2:
            return
        std = (self.squares / self.count).sqrt().clamp_min(self.epsilon)
        normalizer.mean.copy_(self.mean)
        normalizer.std.copy_(std)


def merged_moments(parts: Sequence[Moments], size: int) -> Moments:
    """Moments of all observations [O = size] of several batches together; the arithmetic of :class:`RunningMoments`."""
    count, mean, squares = 0.0, np.zeros(size), np.zeros(size)
    for n, part_mean, part_squares in parts:
        if n > 0:
            total = count + n
            delta = part_mean - mean
            squares = squares + part_squares + np.square(delta) * (count * n / total)
            mean = mean + delta * (n / total)
            count = total
    return count, mean, squares


def batch_moments(observations: np.ndarray) -> Moments:
    """Moments of observations [M, O]; rows that are not finite do not count."""
    finite = np.isfinite(observations).all(axis=1)
    x = observations[finite].astype(np.float64)
    if len(x) == 0:
        size = observations.shape[1]
        return 0.0, np.zeros(size), np.zeros(size)
    mean = x.mean(axis=0)
    return float(len(x)), mean, np.square(x - mean).sum(axis=0)
