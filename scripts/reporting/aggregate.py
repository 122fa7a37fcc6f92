"""Figures over seeds: interquartile means, bootstrap intervals, and how likely one group does better than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from reporting.runs import Curve, Run

#: Runs below which a bootstrap over them says nothing; their least and largest value are shown instead.
LEAST_RUNS = 3
RESAMPLES = 2000
#: A curve is drawn with at most so many points.
MAX_POINTS = 1000


@dataclass(frozen=True)
class Estimate:
    """Of one figure over the runs of a group.

    Attributes:
        values: [R], one per run.
        center: interquartile mean.
        low: end of the 95 % interval; the least value where there are fewer than :data:`LEAST_RUNS` runs.
        high: the other one.
    """

    values: tuple[float, ...]
    center: float
    low: float
    high: float

    @property
    def is_interval(self) -> bool:
        """Whether ``low`` and ``high`` are of a bootstrap."""
        return len(self.values) >= LEAST_RUNS


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: without the quarter of the smallest and the quarter of the largest."""
    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def estimate(values: Sequence[float]) -> Estimate | None:
    """IQM with a percentile bootstrap over runs (Agarwal et al. 2021, with one task); None without finite values."""
    kept = np.array([each for each in values if np.isfinite(each)])
    if not len(kept):
        return None
    center, low, high = float(iqm(kept)), float(kept.min()), float(kept.max())
    if len(kept) >= LEAST_RUNS and low < high:
        found = stats.bootstrap(
            (kept,), iqm, vectorized=True, method="percentile", n_resamples=RESAMPLES, rng=np.random.default_rng(0)
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Estimate(tuple(kept.tolist()), center, low, high)


def probability_of_improvement(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """That a run of the first group has a larger value than one of the second (ties count half); None without runs."""
    x, y = (np.array([each for each in values if np.isfinite(each)]) for values in (first, second))
    if not len(x) or not len(y):
        return None

    def share(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        left, right = np.moveaxis(x, axis, -1)[..., :, None], np.moveaxis(y, axis, -1)[..., None, :]
        return ((left > right) + 0.5 * (left == right)).mean((-1, -2))

    center = float(share(x, y))
    low = high = center
    if min(len(x), len(y)) >= LEAST_RUNS:
        found = stats.bootstrap(
            (x, y), share, vectorized=True, method="percentile", n_resamples=RESAMPLES, rng=np.random.default_rng(0)
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Estimate(tuple(range(min(len(x), len(y)))), center, low, high)


def value_at(run: Run, name: str, steps: float) -> float:
    """The last value of a logged name at or before so many environment steps, or else its first; NaN without any."""
    curve = run.curves.get(name)
    if curve is None:
        return float("nan")
    index = int(np.searchsorted(curve.steps, steps, side="right")) - 1
    return float(curve.values[max(0, index)])


@dataclass(frozen=True)
class Band:
    """Curves of several runs on one grid.

    Attributes:
        x: [P].
        center: [P], interquartile mean of the runs that reach so far.
        low: [P], their least value.
        high: [P], their largest.
        count: [P], how many they are.
    """

    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray


def band(curves: Sequence[Curve], axis: str, points: int = 200) -> Band:
    """Interpolate curves on a common grid of ``steps`` or ``minutes``; beyond its ends a run does not count.

    Args:
        curves: at least one with finite values.
        axis: ``steps`` or ``minutes``.
        points: most points of the grid.
    """
    pairs = []
    for curve in curves:
        finite = np.isfinite(curve.values)
        if finite.any():
            pairs.append((getattr(curve, axis)[finite], curve.values[finite]))
    largest = max(len(x) for x, _ in pairs)
    grid = np.linspace(min(x[0] for x, _ in pairs), max(x[-1] for x, _ in pairs), min(points, max(2, largest)))
    table = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in pairs])
    count = np.isfinite(table).sum(0)
    grid, table, count = grid[count > 0], table[:, count > 0], count[count > 0]
    center = np.array([float(iqm(column[np.isfinite(column)])) for column in table.T])
    return Band(grid, center, np.nanmin(table, 0), np.nanmax(table, 0), count)


def thin(x: np.ndarray, y: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points: of each stretch the least and the largest value, so that no peak is lost."""
    if len(x) <= most:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), max(1, most // 2 - 1)):
        values = y[part]
        if np.isfinite(values).any():
            kept |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
        else:
            kept.add(int(part[0]))
    index = np.array(sorted(kept))
    return x[index], y[index]
