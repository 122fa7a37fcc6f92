"""ByOption: rows stratified by the option that was executed, so that rare options are learned from as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored
from claw_lightning.replay.samplers.sum_tree import RowSlots, SumTree, by_ring, sums_before
from claw_lightning.rollout.ring import LaneRing

SHIFT = 4
BLOCK = 1 << SHIFT  # neighbouring slots whose rows are counted per option
PIECE = 1 << 17  # slots that are counted at once, to bound the memory that it takes


class ByOption(Sampler):
    """A share of every batch for each option, within the option every usable row alike.

    Of n_k usable rows that executed option k, N altogether, the share is q_k, in proportion to n_k^(1 - balance), but
    at most ``max_ratio * n_k / N``: a few rows are not repeated without end. What is cut off goes to the other options
    in proportion to their shares. A batch of M holds M q_k rows of option k, rounded down or up by systematic sampling
    (one random number for all options), which makes the expected number exact and its variance the least possible.

    Rows whose option is not among those of the networks are not drawn.

    Args:
        balance: 0: shares as stored (uniform over rows), 1: equal shares; between: in between.
        max_ratio: no row is drawn more than this many times as often as if all were drawn alike.
        correct: whether importance weights (n_k / N) / q_k undo the stratification in expectation. The estimate of a
            mean over all rows is then unbiased, and gradients of rare options are less noisy.
    """

    follows = True
    knows_usable = True
    bytes_per_row = 3.2  # with 16 options; 0.13 for each and 1

    def __init__(self, balance: float = 1.0, max_ratio: float = 10.0, correct: bool = False) -> None:
        group = "data.sampler.init_args"
        if not 0.0 <= balance <= 1.0:
            raise ConfigError(f"{group}.balance is {balance}; it must lie in [0, 1]")
        check_numbers(group, {"max_ratio": max_ratio}, least=1.0)
        self.balance, self.max_ratio, self.correct = balance, max_ratio, correct
        self._quotas: np.ndarray | None = None

    def bind(self, rings: Sequence[LaneRing], num_options: int = 1) -> None:
        """See :meth:`Sampler.bind`."""
        self._slots = RowSlots(rings)
        self._num_options = num_options
        self._num_blocks = -(-self._slots.size >> SHIFT)
        # Per slot the option of its row, num_options where there is nothing to draw. Per option and block the number of
        # such rows, option after option: one tree finds the blocks for all options at once.
        dtype = np.uint8 if num_options < 256 else np.int32
        self._option = np.full((self._num_blocks, BLOCK), num_options, dtype)
        self._tree = SumTree(num_options * self._num_blocks, np.uint8)
        self._counts = np.zeros(num_options, np.int64)  # n_k

    def follow(self, arrivals: Arrivals) -> None:
        """See :meth:`Sampler.follow`."""
        for start, stop in self._slots.follow(arrivals):
            self._enter(start, stop, self._num_options)
        known = arrivals.usable & (arrivals.option >= 0) & (arrivals.option < self._num_options)
        for start, stop, rows in self._slots.fill(arrivals, np.where(known, arrivals.option, self._num_options)):
            self._enter(start, stop, rows)

    def draw(self, stored: Stored, count: int, rng: np.random.Generator) -> Places:
        """See :meth:`Sampler.draw`."""
        for start, stop in self._slots.expire(stored):
            self._enter(start, stop, self._num_options)
        rows = int(self._counts.sum())
        if rows == 0:
            raise RuntimeError("replay: nothing to sample yet: no usable row is stored")
        quotas = self._quotas = option_quotas(self._counts, self.balance, self.max_ratio)
        with np.errstate(divide="ignore", invalid="ignore"):  # options without rows, which are never drawn
            weights = (self._counts / rows / quotas).astype(np.float32)
        begins = np.cumsum(self._counts) - self._counts

        def choose(number: int) -> Places:
            option = np.repeat(np.arange(self._num_options), systematic_counts(quotas, number, rng))
            # Whole numbers, which the tree's sums hold exactly: no mass is taken for one of another option.
            leaf = self._tree.find(begins[option] + np.floor(rng.random(number) * self._counts[option]))
            block = leaf - option * self._num_blocks
            rank = np.floor(rng.random(number) * self._tree.get(leaf)).astype(np.float32)
            # The row before the first one that has more than ``rank`` rows of the option before it.
            mine = self._option.take(block, axis=0) == option.astype(self._option.dtype)[:, None]
            after = sums_before(mine.astype(np.float32)) > rank[:, None]
            row = (after.argmax(axis=1) - 1) & (BLOCK - 1)
            places = self._slots.places((block << SHIFT) + row)
            return by_ring(places._replace(weight=weights[option]) if self.correct else places)

        return self._slots.choose(stored, count, choose)

    def metrics(self) -> dict[str, float]:
        """See :meth:`Sampler.metrics`."""
        if self._quotas is None:
            return {}
        return {f"replay/quota_{option}": float(quota) for option, quota in enumerate(self._quotas)}

    def _enter(self, start: int, stop: int, option: np.ndarray | int) -> None:
        """Set what slots hold, and count the blocks that they lie in anew."""
        self._option.reshape(-1)[start:stop] = option
        last = ((stop - 1) >> SHIFT) + 1
        for first in range(start >> SHIFT, last, PIECE >> SHIFT):
            blocks = np.arange(first, min(first + (PIECE >> SHIFT), last))
            kinds = self._num_options + 1
            key = self._option[blocks] + (np.arange(len(blocks)) * kinds)[:, None]
            counts = np.bincount(key.reshape(-1), minlength=len(blocks) * kinds).reshape(-1, kinds)[:, :-1]
            leaf = blocks[:, None] + np.arange(self._num_options) * self._num_blocks
            self._counts += counts.sum(axis=0) - self._tree.get(leaf).sum(axis=0, dtype=np.int64)
            self._tree.set(leaf.reshape(-1), counts.reshape(-1))


def option_quotas(counts: np.ndarray, balance: float, max_ratio: float) -> np.ndarray:
    """Shares [K] float64 of options with ``counts`` rows [K]; see :class:`ByOption`."""
    stored = counts / counts.sum()
    bound = max_ratio * stored
    wanted = np.where(counts > 0, stored ** (1.0 - balance), 0.0)
    quotas = wanted / wanted.sum()
    capped = np.zeros(len(counts), bool)
    for _ in range(len(counts)):  # each round caps at least one option
        over = (quotas > bound) & ~capped
        if not over.any():
            break
        capped |= over
        free = np.where(capped, 0.0, wanted)
        quotas = np.where(capped, bound, 0.0)
        if free.any():
            quotas += free * (max(0.0, 1.0 - quotas.sum()) / free.sum())
    return quotas / quotas.sum()


def systematic_counts(shares: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers [K] int64 that sum to ``count``: each ``shares * count`` rounded down or up, its expectation exact.

    Args:
        shares: [K] float64, of sum 1. A share of 0 gives 0.
        count: to be dealt out.
        rng: one number is drawn.
    """
    edges = np.floor(np.cumsum(shares) * count + rng.random()).astype(np.int64)
    edges[np.flatnonzero(shares)[-1] :] = count  # whatever rounding made of the last sum
    return np.diff(edges, prepend=0)
