"""LaneRing: experience of one worker in shared memory, one writer, any number of readers, no locks.

Layout: ``rows[T, N, W]`` — T vector steps, N lanes (environments), one packed row of W 32-bit words each. The
observation of a step is stored once: the next observation of ``rows[t, n]`` is the observation of ``rows[t + 1, n]``.

Why a reader never sees half a step:

* The writer fills slot ``head % T`` and only then publishes ``head + 1`` (single-writer publication; the aligned
  64-bit store becomes visible after the data on x86-64, and on weaker machines at the latest with the guard band).
* While step ``head`` is being written, the slot in danger is that of step ``head - T``. A reader takes steps in
  ``[head - T + guard, head - 1)`` (:meth:`LaneRing.readable`) and, after copying, reads ``head`` again: a step ``t``
  was certainly intact during the copy if ``t > head_after - T`` (:meth:`LaneRing.intact`). Others are drawn anew.
* A writer that dies in the middle of a step has not published it; its successor writes that slot again.

Which rows may be learned from is decided by flags alone (:func:`usable`): a row that belongs to no episode, a row whose
successor opens a new episode without its true final observation being known, and quarantined rows never are.
"""

from __future__ import annotations

from typing import Dict, Tuple

import numpy as np

from claw_lightning.rollout.shared import PAGE, SharedBlock

TERMINATED = 1  # the task ended: no bootstrap
TRUNCATED = 2  # a time limit cut the episode: bootstrap from the true final observation
FIRST = 4  # first step of an episode: no arriving option
BORDER = 8  # belongs to no episode
SWITCHED = 16  # the option was selected anew at this step (also at first steps)
BY_CAP = 32  # the previous option ended by the duration cap, not by its termination
HAS_FINAL = 64  # the true final observation lies in the side table
QUARANTINED = 128  # holds a number that is not finite

#: Words of a row that are integers; all others are float32.
INTEGER_FIELDS = ("flags", "option", "previous_option", "option_age", "version", "final_index")


class RowLayout:
    """Which word of a packed row holds what.

    Fields (words): obs [O], states [S] (only if S > 0), action [A], reward, log_prob_action, log_prob_option, flags,
    option, previous_option (-1 at first steps), option_age (steps since the option began), version (updates at
    publication of the policy that acted), final_index (only with a side table; -1: none).
    """

    def __init__(self, obs_size: int, action_size: int, states_size: int = 0, has_finals: bool = False) -> None:
        sizes = [("obs", obs_size), ("states", states_size), ("action", action_size)]
        sizes += [(name, 1) for name in ("reward", "log_prob_action", "log_prob_option")]
        sizes += [(name, 1) for name in INTEGER_FIELDS if name != "final_index" or has_finals]
        self.obs_size, self.action_size, self.states_size = obs_size, action_size, states_size
        self.has_finals = has_finals
        self.fields: Dict[str, Tuple[int, int]] = {}
        offset = 0
        for name, size in sizes:
            if size > 0:
                self.fields[name] = (offset, offset + size)
                offset += size
        self.words = offset

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return 4 * self.words

    def view(self, rows: np.ndarray, name: str) -> np.ndarray:
        """View of a field in float32 rows [..., W]: [..., size], or [...] for one-word fields."""
        start, stop = self.fields[name]
        part = rows[..., start:stop]
        if name in INTEGER_FIELDS:
            part = part.view(np.int32)
        return part[..., 0] if name not in ("obs", "states", "action") else part


class LaneRing:
    """See the module's text.

    Args:
        layout: packed row.
        num_steps: T, vector steps kept. Must exceed the guard band by at least 2.
        num_lanes: N.
        fd: descriptor of the learner's block (in a worker), or -1 to create one.
        guard: vector steps before the write head that readers leave alone.
    """

    def __init__(self, layout: RowLayout, num_steps: int, num_lanes: int, fd: int = -1, guard: int = 2) -> None:
        if num_steps < guard + 3:
            raise ValueError("a ring of %d vector steps is too short (needs %d)" % (num_steps, guard + 3))
        self.layout, self.num_steps, self.num_lanes, self.guard = layout, num_steps, num_lanes, guard
        # A final observation must outlive its row: at most every lane ends at every step, which no task does; the
        # table is a quarter of that and rows whose entry was overwritten are not drawn.
        self.num_finals = max(num_lanes * 4, num_steps * num_lanes // 4) if layout.has_finals else 0
        row_bytes = num_steps * num_lanes * layout.row_bytes
        self.block = SharedBlock(self.bytes_needed(layout, num_steps, num_lanes), fd, "claw-ring")
        self._header = self.block.array(np.int64, (PAGE // 8,))
        self.rows = self.block.array(np.float32, (num_steps, num_lanes, layout.words), PAGE)
        self.finals = self.block.array(np.float32, (self.num_finals, layout.obs_size), PAGE + row_bytes)

    @staticmethod
    def bytes_needed(layout: RowLayout, num_steps: int, num_lanes: int) -> int:
        """Bytes of shared memory of a ring."""
        finals = max(num_lanes * 4, num_steps * num_lanes // 4) if layout.has_finals else 0
        final_bytes = finals * 4 * layout.obs_size
        return PAGE + num_steps * num_lanes * layout.row_bytes + final_bytes

    @property
    def head(self) -> int:
        """Vector steps published since the beginning of the run."""
        return int(self._header[0])

    @property
    def finals_written(self) -> int:
        """Final observations published since the beginning of the run."""
        return int(self._header[1])

    # -- writer -------------------------------------------------------------------------------------------------

    def slot(self) -> np.ndarray:
        """Rows [N, W] of the step that is being written; not visible before :meth:`publish`."""
        return self.rows[self.head % self.num_steps]

    def publish(self) -> None:
        """Make the step written into :meth:`slot` visible."""
        self._header[0] = self.head + 1

    def write_finals(self, observations: np.ndarray) -> np.ndarray:
        """Store final observations [M, O]; returns their indices [M] int32."""
        first = self.finals_written
        indices = np.arange(first, first + len(observations), dtype=np.int64)
        self.finals[indices % self.num_finals] = observations
        self._header[1] = first + len(observations)
        return indices.astype(np.int32)

    # -- readers ------------------------------------------------------------------------------------------------

    def readable(self) -> Tuple[int, int]:
        """Steps [first, last) that have a published successor and lie outside the guard band."""
        head = self.head
        return max(0, head - self.num_steps + self.guard), max(0, head - 1)

    def intact(self, steps: np.ndarray) -> np.ndarray:
        """Which steps were certainly not being overwritten up to now; call after copying. Same shape, bool."""
        return steps > self.head - self.num_steps


def usable(flags: np.ndarray, next_flags: np.ndarray) -> np.ndarray:
    """Which rows may be learned from: flags of rows and of their successors, int32 [...] -> bool [...].

    A terminated row needs no successor, since nothing is bootstrapped from it; but where it has one, that one must be
    finite: values and terminations are evaluated there, and a weight of zero does not remove a NaN.
    """
    bad = (flags & (BORDER | QUARANTINED)) != 0
    # A successor that opens an episode is the wrong next observation (worker restart, same-step autoreset).
    bad |= ((next_flags & FIRST) != 0) & ((flags & (HAS_FINAL | TERMINATED)) == 0)
    bad |= ((next_flags & QUARANTINED) != 0) & ((flags & HAS_FINAL) == 0)
    return ~bad
