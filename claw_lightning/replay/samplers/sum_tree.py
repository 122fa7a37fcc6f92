"""SumTree: leaves in proportion to their values; and RowSlots: which leaf a stored row is.

A sum tree finds the leaf at which the running sum of all leaves exceeds a given mass (Schaul et al. 2016, arXiv
1511.05952, appendix B.2.1). This one is wide and vectorised: a level is a table of blocks of eight children, a batch of
masses descends it with a handful of array operations, and the sums within the blocks on its way are one small matrix
product. Wider blocks need fewer levels but more sums, narrower ones the opposite; eight was the fastest for batches of
256 to 8192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from claw_lightning.replay.samplers.base import Arrivals, Places, Stored
from claw_lightning.rollout.ring import LaneRing

SHIFT = 3
ONES = np.uint64(0x0101010101010101)  # a one in every byte
WIDTH = 1 << SHIFT  # children of a node
MAX_TOP = 2048  # nodes without a parent: one running sum over them costs less than another level
PIECE = 1024  # blocks of one matrix product: few enough that BLAS does not wake other threads for it
ROUNDS = 64  # of choosing anew what lies outside the spans


class SumTree:
    """Leaves that are not negative, and their sums in float64.

    Whatever is set, the sums above it are formed anew from their children, so rounding errors never pile up. Values are
    not checked: they must be finite and at least zero.

    Args:
        size: number of leaves.
        dtype: of the leaves: float32 for priorities, uint8 for indicators and small counts.
    """

    def __init__(self, size: int, dtype: type[np.generic] = np.float32) -> None:
        if size < 1:
            raise ValueError(f"a sum tree has at least one leaf, got {size}")
        self.size = size
        depth = 1
        while size > MAX_TOP << (SHIFT * depth):
            depth += 1
        num_top = -(-size >> (SHIFT * depth))  # rounded up
        # Padded with zeros to whole blocks all the way up: a descent led astray by rounding still ends at some leaf.
        self._blocks = [
            np.zeros((num_top << (SHIFT * (depth - 1 - level)), WIDTH), np.float64 if level else dtype)
            for level in range(depth)
        ]
        self._nodes = [blocks.reshape(-1) for blocks in self._blocks] + [np.zeros(num_top)]
        self._cumulative: np.ndarray | None = None  # [num_top + 1], begins with 0; None: to be formed anew

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._cumulative_top()[-1])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: np.ndarray | slice) -> np.ndarray:
        """Values of leaves, by index [m] or slice."""
        return self._nodes[0][: self.size][index]

    def get(self, index: np.ndarray) -> np.ndarray:
        """Values of the leaves of an index [m]."""
        return self._nodes[0].take(index)

    def set(self, index: np.ndarray, values: np.ndarray | float) -> None:
        """Set the leaves of an index [m] int64 to values [m]; of the values for one leaf the last wins."""
        self._nodes[0][index] = values
        for blocks, parents in zip(self._blocks, self._nodes[1:], strict=True):
            index = index >> SHIFT
            parents[index] = _sums(blocks.take(index, axis=0))
        self._cumulative = None

    def set_range(self, start: int, stop: int, values: np.ndarray | float) -> None:
        """Set the leaves [start, stop); for long runs of neighbours, cheaper than :meth:`set`."""
        if stop <= start:
            return
        self._nodes[0][start:stop] = values
        for blocks, parents in zip(self._blocks, self._nodes[1:], strict=True):
            start, stop = start >> SHIFT, ((stop - 1) >> SHIFT) + 1
            parents[start:stop] = _sums(blocks[start:stop])
        self._cumulative = None

    def find(self, mass: np.ndarray) -> np.ndarray:
        """First leaves at which the running sum exceeds the masses [m] float64 in [0, total); [m] int64.

        Sorted masses are found fastest. A leaf of value 0 is never returned: where rounding at a border leads to one,
        and at masses that rounding has lifted to the total, its neighbour with a value is.

        Raises:
            ValueError: all leaves are zero.
        """
        cumulative = self._cumulative_top()
        node = cumulative.searchsorted(mass, side="right") - 1
        np.minimum(node, len(cumulative) - 2, out=node)
        rest = mass - cumulative.take(node)
        row = np.arange(0, len(mass) << SHIFT, WIDTH)
        for blocks in reversed(self._blocks):
            before = sums_before(blocks.take(node, axis=0).astype(np.float64, copy=False))
            # The last child that does not begin beyond the rest. Eight truth values are the bytes of one word, and the
            # top byte of its product with eight ones is their number: a tenth of the time of a sum along the axis.
            begun = (before <= rest[:, None]).view(np.uint64).reshape(-1)
            child = ((begun * ONES) >> np.uint64(56)).astype(np.int64)
            child -= 1
            child &= WIDTH - 1
            node <<= SHIFT
            node += child
            if blocks is not self._blocks[0]:
                rest -= before.reshape(-1).take(row + child)
        missed = self._nodes[0].take(node) == 0
        if missed.any():
            node[missed] = self._find_carefully(mass[missed])
        return node

    def _find_carefully(self, mass: np.ndarray) -> np.ndarray:
        """As :meth:`find`, with running sums that are monotone and masses kept below them: the leaf has a value."""
        cumulative = self._cumulative_top()[None, 1:]
        if not cumulative[0, -1] > 0:
            raise ValueError("nothing to find: all leaves are zero")
        node, rest = np.zeros(len(mass), np.int64), mass
        for blocks in (None, *reversed(self._blocks)):
            if blocks is not None:
                cumulative = np.cumsum(blocks[node], axis=1, dtype=np.float64)
                node = node << SHIFT
            rest = np.minimum(rest, np.nextafter(cumulative[:, -1], 0.0))
            child = (cumulative > rest[:, None]).argmax(axis=1)
            before = np.take_along_axis(
                np.broadcast_to(cumulative, (len(mass), cumulative.shape[1])), np.maximum(child - 1, 0)[:, None], axis=1
            )[:, 0]
            rest = np.maximum(rest - np.where(child > 0, before, 0.0), 0.0)
            node = node + child
        return node

    def _cumulative_top(self) -> np.ndarray:
        if self._cumulative is None:
            top = self._nodes[-1]
            self._cumulative = np.zeros(len(top) + 1)
            np.cumsum(top, out=self._cumulative[1:])
        return self._cumulative


def _sums(blocks: np.ndarray) -> np.ndarray:
    """Sums [m] float64 of blocks [m, WIDTH]; for short rows several times faster than ``sum``."""
    return np.einsum("ij->i", blocks.astype(np.float64, copy=False))


def sums_before(blocks: np.ndarray) -> np.ndarray:
    """For every entry of blocks [m, F] the sum of those before it in its block [m, F], F a power of two up to 64.

    A product with a triangle of ones, several times faster than ``cumsum`` along such short rows. Sums of numbers that
    are not whole may, by rounding, not be quite monotone.
    """
    triangle = _TRIANGLES[blocks.shape[1], blocks.dtype.char]
    if len(blocks) <= PIECE:
        return blocks @ triangle
    sums = np.empty_like(blocks)
    for start in range(0, len(blocks), PIECE):
        np.matmul(blocks[start : start + PIECE], triangle, out=sums[start : start + PIECE])
    return sums


_TRIANGLES = {
    (width, dtype): np.triu(np.ones((width, width), dtype), 1) for width in (2, 4, 8, 16, 32, 64) for dtype in "fd"
}


class RowSlots:
    """Numbers the slots of all rings, ``offset[ring] + (step % T) * N + lane``, and knows which steps lie in them.

    Samplers that keep something per row keep it by this number. They void what is no longer to be drawn as told by
    :meth:`follow` and :meth:`expire`.

    Args:
        rings: as handed to :meth:`~claw_lightning.replay.samplers.base.Sampler.bind`.

    Attributes:
        size: slots of all rings.
        ends: [R] int64, per ring the first step that was not followed yet.
    """

    def __init__(self, rings: Sequence[LaneRing]) -> None:
        self._num_steps = np.array([ring.num_steps for ring in rings], np.int64)
        self._num_lanes = np.array([ring.num_lanes for ring in rings], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self._num_steps * self._num_lanes)])
        self._first = np.zeros(len(rings), np.int64)  # steps below are void
        self.ends = np.zeros(len(rings), np.int64)  # steps from here on are not followed yet
        self.size = int(self._offsets[-1])

    def runs(self, ring: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Slots (start, stop) of the steps [first, last) of a ring, and the step that each run begins with."""
        size, lanes, offset = int(self._num_steps[ring]), int(self._num_lanes[ring]), int(self._offsets[ring])
        first = max(first, last - size)
        while first < last:
            slot = first % size
            stop = min(slot + last - first, size)
            yield offset + slot * lanes, offset + stop * lanes, first
            first += stop - slot

    def fill(self, arrivals: Arrivals, values: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Slots (start, stop) of new rows, and what of ``values`` [S, N] belongs there, flat."""
        flat, num_lanes = values.reshape(-1), values.shape[1]
        for start, stop, step in self.runs(arrivals.ring, arrivals.first, arrivals.first + len(values)):
            begin = (step - arrivals.first) * num_lanes
            yield start, stop, flat[begin : begin + stop - start]

    def follow(self, arrivals: Arrivals) -> list[tuple[int, int]]:
        """Take note of new steps; returns the slots (start, stop) of steps that were skipped, whose rows are lost."""
        ring, begin = arrivals.ring, int(self.ends[arrivals.ring])
        self.ends[ring] = arrivals.first + len(arrivals.flags)
        return [(start, stop) for start, stop, _ in self.runs(ring, begin, arrivals.first)]

    def expire(self, stored: Stored) -> list[tuple[int, int]]:
        """Slots (start, stop) of steps that fell below the spans since the last call and were not overwritten."""
        found = []
        for ring, (first, _) in enumerate(stored.spans):
            begin, end = int(self._first[ring]), int(self.ends[ring])
            if first > begin:
                self._first[ring] = first
                begin = max(begin, end - int(self._num_steps[ring]))
                found += [(start, stop) for start, stop, _ in self.runs(ring, begin, min(first, end))]
        return found

    def places(self, slot: np.ndarray) -> Places:
        """Places of slots [M]: the newest steps that were followed into them."""
        ring = np.zeros(len(slot), np.int64)
        if len(self.ends) > 1:
            ring = self._offsets.searchsorted(slot, side="right") - 1
        which = self._which(ring)
        place, lane = np.divmod(slot - self._offsets[which], self._num_lanes[which])
        newest = self.ends[which] - 1
        return Places(ring, newest - (newest - place) % self._num_steps[which], lane)

    def slots(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        """Slots of places [M], and which of their rows are still there [M] bool."""
        which = self._which(places.ring)
        num_steps, end = self._num_steps[which], self.ends[which]
        there = (places.step >= np.maximum(self._first[which], end - num_steps)) & (places.step < end)
        slot = self._offsets[which] + (places.step % num_steps) * self._num_lanes[which] + places.lane
        return slot, there

    def _which(self, ring: np.ndarray) -> np.ndarray | int:
        """Index into what is known per ring: of a single ring a number, for numbers are cheaper than arrays."""
        return 0 if len(self.ends) == 1 else ring

    def choose(self, stored: Stored, count: int, choose: Callable[[int], Places]) -> Places:
        """``count`` places that ``choose(number)`` gives, those outside the spans chosen anew.

        What fell below the spans is taken to be void already (:meth:`expire`); rows above them were followed, but are
        not to be drawn at this call.

        Raises:
            RuntimeError: nearly all of the places lie outside.
        """
        places = choose(count)
        last = np.array([last for _, last in stored.spans], np.int64)
        if (self.ends <= last).all():
            return places
        found: list[Places] = []
        for _ in range(ROUNDS):
            inside = places.step < last[places.ring]
            found.append(places.take(inside))
            count -= len(found[-1].ring)
            if count == 0:
                return by_ring(Places.join(found))
            places = choose(count)
        raise RuntimeError(f"replay: {count} samples could not be drawn: the rows to choose from are too new")


def by_ring(places: Places) -> Places:
    """The same places, those of one ring after another."""
    ring = places.ring
    return places if (ring[1:] >= ring[:-1]).all() else places.take(np.argsort(ring, kind="stable"))
