"""Exploration noise of one worker: batched over its lanes, in numpy.

Every lane has its own scale, spread over the lanes of all workers, so that at any time some explore and some
exploit and no schedule has to be tuned (Li et al. 2023, Parallel Q-Learning, https://arxiv.org/abs/2307.12983).
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional

import numpy as np


def lane_scales(minimum: float, maximum: float, num_lanes: int, worker: int, num_workers: int) -> np.ndarray:
    """Noise scales of one worker's lanes, [N] float32.

    Over all lanes of all workers the scales are evenly spaced from ``minimum`` to ``maximum``, both included. Lanes
    are dealt to the workers in turn, so that each worker covers the whole range and the loss of one leaves no gap.
    A single lane in all gets the middle.

    Raises:
        ValueError: a negative scale, ``minimum`` above ``maximum``, no lanes, or a worker out of range.
    """
    if not 0 <= minimum <= maximum:
        raise ValueError("noise scales need 0 <= minimum <= maximum, not %g and %g" % (minimum, maximum))
    if num_lanes < 1 or not 0 <= worker < num_workers:
        raise ValueError("no such lanes: %d lanes of worker %d of %d" % (num_lanes, worker, num_workers))
    num_total = num_lanes * num_workers
    if num_total == 1:
        return np.full(1, (minimum + maximum) / 2, dtype=np.float32)
    index = np.arange(num_lanes) * num_workers + worker
    return (minimum + (maximum - minimum) * index / (num_total - 1)).astype(np.float32)


def linear_decay(step: float, start: float, end: float, duration: float) -> float:
    """``start`` at step 0, ``end`` from step ``duration`` on, linear between; ``end`` at once where duration <= 0."""
    if duration <= 0:
        return float(end)
    fraction = min(max(step / duration, 0.0), 1.0)
    return float(start + (end - start) * fraction)


class GaussianNoise:
    """Independent normal noise at every step.

    Args:
        num_lanes: N.
        action_size: A.
        scales: [N] standard deviation of each lane.
        rng: generator to draw from.

    Raises:
        ValueError: ``scales`` of another shape, negative or not finite.
    """

    def __init__(self, num_lanes: int, action_size: int, scales: np.ndarray, rng: np.random.Generator) -> None:
        self.scales = _checked_scales(scales, num_lanes)
        self._shape = (num_lanes, action_size)
        self._rng = rng

    def sample(self, multiplier: float = 1.0) -> np.ndarray:
        """New noise [N, A] float32, its standard deviation ``multiplier`` times the scales."""
        unit = self._rng.standard_normal(self._shape, dtype=np.float32)
        return unit * (self.scales[:, None] * np.float32(multiplier))

    def reset(self, mask: Optional[np.ndarray] = None) -> None:
        """Nothing to forget; here so that both kinds of noise are used alike."""

    def state_dict(self) -> Dict[str, Any]:
        """Nothing to keep, beside the generator."""
        return {}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Likewise."""


class OrnsteinUhlenbeckNoise:
    """Noise that drifts smoothly: dx = -theta x dt + sigma dW, sampled exactly every ``dt``.

    With rho = exp(-theta dt), x' = rho x + sqrt(1 - rho^2) scale n, n ~ N(0, 1). The stationary standard deviation
    equals the scale whatever theta and dt are, and values k steps apart correlate by rho^k. A lane starts, and starts
    again at :meth:`reset`, with a draw from that stationary distribution: from zero, a short episode with a long
    correlation time would hardly explore.

    Args:
        num_lanes: N.
        action_size: A.
        scales: [N] stationary standard deviation of each lane.
        rng: generator to draw from.
        theta: rate of return to zero, per unit of time.
        dt: time between two control steps, in the same unit. With the default of 1, theta is per step.

    Raises:
        ValueError: ``scales`` of another shape, negative or not finite; ``theta`` or ``dt`` not positive.
    """

    def __init__(
        self,
        num_lanes: int,
        action_size: int,
        scales: np.ndarray,
        rng: np.random.Generator,
        theta: float = 0.15,
        dt: float = 1.0,
    ) -> None:
        if not (theta > 0 and dt > 0):
            raise ValueError("theta and dt must be positive, not %g and %g" % (theta, dt))
        self.scales = _checked_scales(scales, num_lanes)
        self._rng = rng
        self._rho = np.float32(math.exp(-theta * dt))
        self._innovation = np.float32(math.sqrt(-math.expm1(-2 * theta * dt)))
        # Unit variance; scale and multiplier enter at the end, so that decay acts at once.
        self._value = rng.standard_normal((num_lanes, action_size), dtype=np.float32)

    def sample(self, multiplier: float = 1.0) -> np.ndarray:
        """Next noise [N, A] float32, its stationary standard deviation ``multiplier`` times the scales."""
        noise = self._value * (self.scales[:, None] * np.float32(multiplier))
        shock = self._rng.standard_normal(self._value.shape, dtype=np.float32)
        self._value = self._rho * self._value + self._innovation * shock
        return noise

    def reset(self, mask: Optional[np.ndarray] = None) -> None:
        """Start afresh in the lanes of ``mask`` [N] bool; in all where None."""
        if mask is None:
            mask = np.ones(len(self._value), dtype=bool)
        self._value[mask] = self._rng.standard_normal(self._value[mask].shape, dtype=np.float32)

    def state_dict(self) -> Dict[str, Any]:
        """Present values, for a checkpoint."""
        return {"value": [[float(x) for x in lane] for lane in self._value]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; noise of another kind or size begins anew."""
        value = np.array(state.get("value", ()), np.float32)
        if value.shape == self._value.shape:
            self._value = value


def _checked_scales(scales: np.ndarray, num_lanes: int) -> np.ndarray:
    scales = np.array(scales, dtype=np.float32)
    if scales.shape != (num_lanes,):
        raise ValueError("noise scales have shape %s, expected (%d,)" % (scales.shape, num_lanes))
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise ValueError("noise scales must be finite and not negative")
    return scales
