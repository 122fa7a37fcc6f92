"""ResidentReplay: the rows of all rings once more on the learner's device, so that only new ones have to travel.

A batch of U x B rows crosses the bus at every draw otherwise, and each row does so as often as it is drawn: at 64
samples per inserted step, 64 times. Here it crosses once. What is small stays on the host: which rows there are, which
of them are drawn (samplers, flags) and the reward of another goal, a function of NumPy arrays.

A mirror belongs to the learner alone, so nothing overtakes a gather. The copying into it is read as every reader reads
(:mod:`claw_lightning.rollout.ring`): the heads are read again behind it, and what lies too near to them is not trusted,
neither now nor later. Writers that run on after that do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from claw_lightning.replay.hindsight import Relabeller
from claw_lightning.replay.segments import Segments, connected
from claw_lightning.rollout.ring import FIRST, HAS_FINAL, LaneRing, usable

#: What is staged at once; bounds the page-locked memory when a whole ring is copied, as after a resume.
STAGED_BYTES = 32 << 20


class Mirror:
    """One ring's rows and final observations on a device, and their flags on the host.

    Args:
        ring: of a worker, or of the past.
        device: where the rows go.

    Attributes:
        rows: [T x N, W] float32 on the device.
        finals: [F, O + S] float32 on the device; F is 0 without a side table.
        flags: [T x N] int32 on the host.
        final_index: [T x N] int32 on the host; empty without a side table.
    """

    def __init__(self, ring: LaneRing, device: torch.device) -> None:
        self.ring, self.device = ring, device
        size, layout = ring.num_steps * ring.num_lanes, ring.layout
        self.rows = torch.empty(size, layout.words, device=device)
        self.finals = torch.empty(ring.num_finals, layout.final_size, device=device)
        self.flags = np.zeros(size, np.int32)
        self.final_index = np.zeros(size if layout.has_finals else 0, np.int32)
        self._head = self._written = 0

    def synchronise(self, head: int) -> tuple[int, int]:
        """Copy what was published since the last call, up to step ``head``, as far as it is still there.

        Returns:
            The head and the number of final observations as they were read after copying: what
            :meth:`LaneRing.intact` and :meth:`LaneRing.finals_intact` say of those holds for what lies here.
        """
        ring, lanes, view = self.ring, self.ring.num_lanes, self.ring.layout.view
        written = ring.finals_written  # after the head: with all entries that rows before it refer to
        rows = ring.rows.reshape(-1, ring.layout.words)
        first = max(self._head, ring.readable(head)[0])
        most = max(1, STAGED_BYTES // (lanes * ring.layout.row_bytes))
        for start, stop in _slices(first, head, ring.num_steps, most):
            own = slice(start * lanes, stop * lanes)
            staged = self._upload(rows[own], self.rows[own])
            self.flags[own] = view(staged, "flags")
            if len(self.final_index):
                self.final_index[own] = view(staged, "final_index")
        most = max(1, STAGED_BYTES // max(1, 4 * ring.layout.final_size))
        for start, stop in _slices(max(self._written, written - ring.num_finals), written, ring.num_finals, most):
            self._upload(ring.finals[start:stop], self.finals[start:stop])
        self._head, self._written = head, written
        return ring.head, ring.finals_written

    def _upload(self, values: np.ndarray, target: Tensor) -> np.ndarray:
        """Copy rows [R, W] into the mirror; returns them as they were copied."""
        # Staged rather than sent from the ring, which is not page-locked. The allocator of page-locked memory hands a
        # block out again only when the copies out of it are done.
        staged = torch.empty(values.shape, pin_memory=self.device.type == "cuda")
        staged.copy_(torch.from_numpy(values))
        target.copy_(staged, non_blocking=True)
        return staged.numpy()


class ResidentReplay:
    """Mirrors of all rings, and the gathers of samples out of them.

    Args:
        rings: those of the workers, then those of the past; without compressed images.
        device: of the learner.

    Attributes:
        mirrors: one per ring.
        device: where they lie.
    """

    def __init__(self, rings: Sequence[LaneRing], device: torch.device) -> None:
        self.device, self.layout = device, rings[0].layout
        assert not self.layout.has_arena, "compressed images are decoded on the host"
        self.mirrors = [Mirror(ring, device) for ring in rings]

    @staticmethod
    def bytes_needed(rings: Sequence[LaneRing]) -> int:
        """Bytes of the device's memory."""
        return sum(4 * (ring.rows.size + ring.finals.size) for ring in rings)

    def synchronise(self, heads: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bring all mirrors up to these heads; returns heads and final observations read after that, per ring."""
        found = [mirror.synchronise(head) for mirror, head in zip(self.mirrors, heads, strict=True)]
        return tuple(head for head, _ in found), tuple(written for _, written in found)

    def send(self, values: np.ndarray) -> Tensor:
        """A small array on the device, in the order of its stream."""
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def copy(
        self,
        ring_index: int,
        begin: np.ndarray,
        lanes: np.ndarray,
        last: int,
        got: Segments,
        written: int,
        within_option: bool,
    ) -> None:
        """Gather the segments that begin at steps [M] and lanes [M] into ``got``, whose tensors are on the device.

        Args:
            ring_index: which ring.
            begin: [M].
            lanes: [M].
            last: steps from here on have no successor yet.
            got: receives rows, next observations, images and, on the host, which steps are valid.
            written: final observations, of :meth:`synchronise`.
            within_option: see :func:`connected`.
        """
        mirror, seen, length = self.mirrors[ring_index], got.next_obs.shape[-1], got.rows.shape[1]
        ring = mirror.ring
        steps = begin[:, None] + np.arange(length + 1)
        index = steps % ring.num_steps * ring.num_lanes + lanes[:, None]
        places = self.send(index)
        after = places[:, -1].contiguous()
        if got.whole is not None:
            torch.index_select(mirror.rows, 0, places.view(-1), out=got.whole.view(-1, self.layout.words))
        else:
            torch.index_select(mirror.rows, 0, places[:, 0].contiguous(), out=got.rows.squeeze(1))
            torch.index_select(mirror.rows[:, :seen], 0, after, out=got.next_obs.squeeze(1))
        if got.next_images is not None:
            got.next_images[:, :-1] = self._pixels(got.rows[:, 1:])
            got.next_images[:, -1] = self._pixels(mirror.rows).index_select(0, after)

        flags = mirror.flags[index]
        # Slots from ``last`` on hold steps of the round before, or nothing, or repeat the segment (L > T).
        fine = usable(flags[:, :-1], flags[:, 1:]) & (steps[:, :-1] < last)
        if self.layout.has_finals:
            wanted = fine & ((flags[:, :-1] & HAS_FINAL) != 0)
            entry = mirror.final_index[index[:, :-1]].astype(np.int64)
            sample, step = (self.send(where) for where in np.nonzero(wanted))
            finals = mirror.finals.index_select(0, self.send(entry[wanted] % ring.num_finals))
            got.next_obs[sample, step] = finals[:, :seen]
            fine &= ~wanted | ring.finals_intact(entry, written)
        got.valid.copy_(torch.from_numpy(connected(fine, flags[:, :-1], within_option)))

    def relabel(
        self,
        relabeller: Relabeller,
        ring_index: int,
        chosen: np.ndarray,
        source: np.ndarray,
        lanes: np.ndarray,
        check: tuple[int, int],
        got: Segments,
    ) -> None:
        """Write the goals that steps achieved, and the rewards that belong to them, into gathered samples.

        What :meth:`Relabeller.goals` and :meth:`Relabeller.apply` do on the host. The goals come to the host once,
        for the reward, and the rewards go back: (L + 1) x G and L numbers per sample.

        Args:
            relabeller: of the memory.
            ring_index: which ring.
            chosen: [m], indices of samples in ``got``.
            source: [m], steps whose achieved goals they get.
            lanes: [m], lanes of those.
            check: head and final observations, of :meth:`synchronise`.
            got: gathered samples on the device.
        """
        if len(chosen) == 0:
            return
        mirror, achieved, desired = self.mirrors[ring_index], relabeller.achieved, relabeller.desired
        ring = mirror.ring
        after = (source + 1) % ring.num_steps * ring.num_lanes + lanes
        offset = self.layout.span("obs")[0]
        goals = mirror.rows[:, offset + achieved.start : offset + achieved.stop].index_select(0, self.send(after))
        intact = ring.intact(source, check[0])
        # What follows the end of an episode that a restart cut off is the next one's beginning.
        known = (mirror.flags[after] & FIRST) == 0
        if self.layout.has_finals:
            slots = source % ring.num_steps * ring.num_lanes + lanes
            final = (mirror.flags[slots] & HAS_FINAL) != 0
            entry = mirror.final_index[slots].astype(np.int64)
            values = mirror.finals[:, achieved].index_select(0, self.send(entry[final] % ring.num_finals))
            goals.index_copy_(0, self.send(np.flatnonzero(final)), values)
            # An entry that was overwritten is of a later episode: a goal all the same, but not one of this episode.
            intact &= ~final | ring.finals_intact(entry, check[1])
            known |= final
        arrived = got.next_obs[..., achieved].index_select(0, self.send(chosen))
        found = torch.cat((goals[:, None], arrived), dim=1).cpu().numpy()  # the only wait for the device

        fine = np.flatnonzero(np.isfinite(found[:, 0]).all(axis=1) & intact & known)
        length, size = arrived.shape[1:]
        wanted = np.broadcast_to(found[fine, :1], (len(fine), length, size))
        rewards = np.asarray(relabeller.reward(found[fine, 1:], wanted), np.float32)
        at = self.send(chosen[fine])
        shown = goals.index_select(0, self.send(fine))[:, None].expand(-1, length, -1)
        got.rows[at, :, offset + desired.start : offset + desired.stop] = shown
        got.next_obs[at, :, desired] = shown
        if (again := relabeller.desired_in_states) is not None:  # of rows and of what follows them, behind all of obs
            got.rows[at, :, again] = shown
            if got.next_obs.shape[-1] >= again.stop:
                got.next_obs[at, :, again] = shown
        got.rows[at, :, self.layout.span("reward")[0]] = self.send(rewards)

    def _pixels(self, rows: Tensor) -> Tensor:
        """Images [..., bytes] uint8 in rows [..., W]."""
        start, stop = self.layout.span("image")
        return rows[..., start:stop].view(torch.uint8)[..., : self.layout.image_size]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a CUDA device; None where it is the host's, which is looked after elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _slices(first: int, last: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of slots that hold the numbers [first, last) in a ring of ``size``, each at most ``most`` long."""
    while first < last:
        start = first % size
        stop = min(start + last - first, size, start + most)
        yield start, stop
        first += stop - start
