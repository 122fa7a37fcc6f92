"""Block: published steps of one ring as plain bytes, and the way into another ring of the same layout.

Steps, final observations and images are numbered from the beginning of the run on both sides: a row can go as it is,
though the ring on the node is a short one. The sender never has more unsent steps than :func:`unsent_limit`, so that
nothing is overwritten before it was sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from claw_lightning.rollout.ring import LaneRing, RowLayout, image_offsets

#: Bytes of rows that a node keeps until they are fetched; the ring there is four times as large.
UNSENT_BYTES = 8 << 20
#: Bounds of the steps of such a ring.
LEAST_STEPS, MOST_STEPS = 64, 8192


@dataclass
class Block:
    """Published steps, and what their rows point at.

    Attributes:
        head: number of the first step.
        rows: [S, N, row_bytes] uint8.
        first_final: number of the first final observation.
        finals: [M, 4 * final_size] uint8.
        first_image: number of the first byte of compressed images.
        images: [B] uint8.
    """

    head: int
    rows: np.ndarray
    first_final: int
    finals: np.ndarray
    first_image: int
    images: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.rows.nbytes + self.finals.nbytes + self.images.nbytes


@dataclass
class Progress:
    """How far a ring has been read or written: steps, final observations, bytes of compressed images."""

    head: int = 0
    finals: int = 0
    images: int = 0


def host_layout(layout: RowLayout) -> RowLayout:
    """The same rows, with room for images that cannot be compressed: none may be displaced before it was sent."""
    settings = layout.settings()
    if layout.has_arena:
        settings["image_bytes"] = layout.image_size
    return RowLayout(**settings)


def host_steps(layout: RowLayout, num_lanes: int) -> int:
    """Vector steps of the ring on a node."""
    return min(MOST_STEPS, max(LEAST_STEPS, 4 * UNSENT_BYTES // (num_lanes * layout.step_bytes)))


def unsent_limit(ring: LaneRing) -> int:
    """Steps that may wait in a ring on a node.

    A quarter of the ring: the table of final observations holds one for every fourth row, and lanes may end in every
    step.
    """
    return ring.num_steps // 4 - ring.guard


def cut_block(ring: LaneRing, sent: Progress, most_bytes: int) -> Block:
    """Copy what was published and not sent, ``most_bytes`` at most but one step at least; ``sent`` is moved on.

    To be called by one thread; the writer goes on meanwhile.
    """
    layout, head = ring.layout, ring.head
    most_steps = max(1, most_bytes // (ring.num_lanes * layout.step_bytes))
    head = min(head, sent.head + most_steps)
    # All that the rows point at was published before they were.
    finals_written = ring.finals_written
    rows = ring.rows[np.arange(sent.head, head) % ring.num_steps].view(np.uint8)
    finals = np.empty((0, 4 * layout.final_size), np.uint8)
    if ring.num_finals:
        finals = ring.finals[np.arange(sent.finals, finals_written) % ring.num_finals].view(np.uint8)
    images = np.empty(0, np.uint8)
    if layout.has_arena and head > sent.head:
        place = layout.view(ring.rows[(head - 1) % ring.num_steps], "image_place")[-1]
        stop = int(image_offsets(place)) + int(place[2])
        images = np.frombuffer(ring.read_bytes(sent.images, stop - sent.images), np.uint8)
    block = Block(sent.head, rows, sent.finals, finals, sent.images, images)
    sent.head, sent.finals, sent.images = head, sent.finals + len(finals), sent.images + len(images)
    return block


def append_block(ring: LaneRing, block: Block) -> None:
    """Publish a block's steps, one after another as their worker did; the ring's only writer may call this.

    Raises:
        ValueError: the block is not of this ring, or does not follow what lies in it.
    """
    shape = (ring.num_lanes, ring.layout.row_bytes)
    if block.rows.shape[1:] != shape or block.head != ring.head:
        raise ValueError(
            f"a block of rows {block.rows.shape[1:]} from step {block.head} does not follow step {ring.head} of rows "
            f"{shape}"
        )
    # Before the rows that point at them, and never more at once than readers allow for.
    finals = block.finals.view(np.float32)
    if len(finals) and block.first_final != ring.finals_written:
        raise ValueError(f"final observations from {block.first_final} do not follow {ring.finals_written}")
    for first in range(0, len(finals), ring.num_lanes):
        ring.write_finals(finals[first : first + ring.num_lanes])
    if len(block.images):
        ring.write_bytes(block.first_image, block.images)
    for step in block.rows.view(np.float32):
        ring.slot()[:] = step
        ring.publish()
