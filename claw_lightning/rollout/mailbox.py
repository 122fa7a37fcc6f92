"""Mailbox: the newest policy parameters, for readers that neither wait nor block anybody.

Two slots and a sequence number. The learner alone writes: it fills the slot that is not current and then advances the
number; the version (updates at publication) travels inside the slot. A reader copies the current slot and accepts it
only if the number is unchanged afterwards: the slot it copied is touched again only after the number has moved. A
writer that dies within a publication has not advanced the number, so its half-written slot is never read, and the next
publication fills it again. What this rests on is told in :mod:`claw_lightning.rollout.ring`.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import numpy as np

from claw_lightning.rollout.shared import PAGE, SharedBlock


class Mailbox:
    """Versioned double buffer of ``size`` float32 values; one writer, any number of readers."""

    def __init__(self, size: int, fd: int = -1) -> None:
        self.size = size
        stride = PAGE * (1 + (4 * size + PAGE - 1) // PAGE)
        self.block = SharedBlock(PAGE + 2 * stride, fd, "claw-mailbox")
        self._sequence = self.block.array(np.int64, (1,))
        self._versions = [self.block.array(np.int64, (1,), PAGE + slot * stride) for slot in range(2)]
        self._values = [self.block.array(np.float32, (size,), 2 * PAGE + slot * stride) for slot in range(2)]

    @property
    def sequence(self) -> int:
        """Number of publications so far; 0: empty."""
        return int(self._sequence[0])

    def publish(self, values: np.ndarray, version: int) -> None:
        """Make float32 values [size] current. Raises ValueError on another size."""
        if values.shape != (self.size,):
            raise ValueError("mailbox holds %d values, got shape %s" % (self.size, values.shape))

        def write(slot: np.ndarray) -> None:
            slot[:] = values

        self.publish_from(write, version)

    def publish_from(self, write: Callable[[np.ndarray], Any], version: int) -> None:
        """Make current what ``write`` puts into the [size] float32 values that it is given, without a copy between.

        What an error leaves half written is never current.
        """
        sequence = self.sequence + 1
        slot = sequence & 1
        self._versions[slot][0] = version
        write(self._values[slot])
        self._sequence[0] = sequence

    def read(self, seen: int = 0, attempts: int = 100) -> Optional[Tuple[int, int, np.ndarray]]:
        """Newest (sequence, version, values copy), or None if nothing newer than ``seen`` could be had."""
        for _ in range(attempts):
            sequence = self.sequence
            if sequence <= seen:
                return None
            slot = sequence & 1
            version = int(self._versions[slot][0])
            values = self._values[slot].copy()
            if self.sequence == sequence:
                return sequence, version, values
        return None
