"""LaneRing: experience of one worker in shared memory, one writer, any number of readers, no locks.

Layout: a header page (word 0: steps published, word 1: final observations published), ``rows[T, N, W]`` (T vector
steps, N lanes or environments, one packed row of W 32-bit words each) and a side table of final observations. The
observation of a step is stored once: the next observation of ``rows[t, n]`` is the observation of ``rows[t + 1, n]``.

Who writes: the worker that owns the ring, nobody else. Its successor is started when it has gone, so there is never a
second writer. The learner only reads.

Why a reader never gets half of an old and half of a new step (other files refer to this text):

* **Publication.** The writer fills slot ``head % T`` and only then publishes ``head + 1``, one aligned 64-bit store.
* **Guard band.** While step ``head`` is being written, the slot in danger is that of step ``head - T``. A reader takes
  steps of ``[head - T + guard, head - 1)`` (:meth:`LaneRing.readable`), all with a published successor. The guard is no
  proof, it only makes it rare that something must be read anew.
* **Check after the copy.** After copying, the reader reads ``head`` again: step ``t`` was intact during the whole copy
  if ``t > head_after - T`` (:meth:`LaneRing.intact`). Whatever was not is dropped, whatever its flags say: samples are
  drawn anew, moments do without it.
* **Side table.** An entry is reachable only through a published row and is judged after its copy in the same way
  (:meth:`LaneRing.finals_intact`); of the entries that are not counted yet, one per lane may be in the writing.
* **Death within a step.** What was not published does not exist: the successor finds ``head`` where it was and writes
  that slot again, with FIRST flags, which nothing is drawn across. Entries of the side table that were begun are
  written again; entries that were counted, but whose row was never published, are skipped.
* **Memory order.** On x86-64 (TSO) the stores of a core become visible in their order, loads happen in theirs, aligned
  64-bit words are whole, and the C library fences the streaming stores of large copies. So a reader that saw any word
  of step ``s`` also sees, in the check after it, ``head >= s``. On ARM neither order is given without barriers, which
  Python does not offer: there, that a step is whole when its number appears and that the check comes after the copy
  are unproven. The interpreter's work in between makes a failure unlikely, not impossible.

Which rows may be learned from is decided by flags alone (:func:`usable`): a row that belongs to no episode, a row whose
successor opens a new episode without its true final observation being known, and quarantined rows never are.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

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

    def readable(self, head: Optional[int] = None) -> Tuple[int, int]:
        """Steps [first, last) that have a published successor and lie outside the guard band, seen from ``head``."""
        if head is None:
            head = self.head
        return max(0, head - self.num_steps + self.guard), max(0, head - 1)

    def intact(self, steps: np.ndarray, head: Optional[int] = None) -> np.ndarray:
        """Which steps were certainly not being overwritten up to now; call after copying. Same shape, bool.

        ``head``: the one that was read after copying, if it was read already.
        """
        return steps > (self.head if head is None else head) - self.num_steps

    def finals_intact(self, indices: np.ndarray, written: Optional[int] = None) -> np.ndarray:
        """Which entries of the side table were certainly not being overwritten up to now; as :meth:`intact`.

        ``written``: :attr:`finals_written` that was read after copying, if it was read already.
        """
        written = self.finals_written if written is None else written
        # Up to one entry per lane may be in the writing without being counted yet.
        return indices >= written - self.num_finals + self.num_lanes


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
