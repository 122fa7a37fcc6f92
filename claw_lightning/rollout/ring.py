"""LaneRing: experience of one worker in shared memory, one writer, any number of readers, no locks.

Layout: a header page (word 0: steps published, word 1: final observations published), ``rows[T, N, W]`` (T vector
steps, N lanes or environments, one packed row of W 32-bit words each) and a side table of final observations. The
observation of a step is stored once: the next observation of ``rows[t, n]`` is the observation of ``rows[t + 1, n]``.
So are images: within the rows or, compressed, in an arena of bytes behind them (header word 2: its bytes taken).

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
* **Arena.** Compressed images have no fixed size: those of a step follow one another in a ring of bytes, and each row
  holds where its own lies. The writer takes the bytes (header word 2), writes them, then publishes the row. So a reader
  that copied one and then reads how many bytes are taken knows exactly: what begins at ``offset`` was whole during the
  copy if ``offset >= taken_after - size``. As images lie in the order of their steps, all images from some step on are
  there (:meth:`LaneRing.oldest_image`); older rows are not drawn.
* **Death within a step.** What was not published does not exist: the successor finds ``head`` where it was and writes
  that slot again, with FIRST flags, which nothing is drawn across. Entries of the side table that were begun are
  written again; entries that were counted, but whose row was never published, are skipped, as are bytes of the arena.
* **Memory order.** On x86-64 (TSO) the stores of a core become visible in their order, loads happen in theirs, aligned
  64-bit words are whole, and the C library fences the streaming stores of large copies. So a reader that saw any word
  of step ``s`` also sees, in the check after it, ``head >= s``, and one that saw a byte of an image that those bytes
  are taken. On ARM neither order is given without barriers, which Python does not offer: there, that a step is whole
  when its number appears and that the check comes after the copy are unproven. The interpreter's work in between makes
  a failure unlikely, not impossible.

Which rows may be learned from is decided by flags alone (:func:`usable`): a row that belongs to no episode, a row whose
successor opens a new episode without its true final observation being known, and quarantined rows never are.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from claw_lightning.rollout.images import make_codec
from claw_lightning.rollout.shared import PAGE, SharedBlock

TERMINATED = 1  # the task ended: no bootstrap
TRUNCATED = 2  # a time limit cut the episode: bootstrap from the true final observation
FIRST = 4  # first step of an episode: no arriving option
BORDER = 8  # belongs to no episode
SWITCHED = 16  # the option was selected anew at this step (also at first steps)
BY_CAP = 32  # the previous option ended by the duration cap, not by its termination
HAS_FINAL = 64  # the true final observation lies in the side table
QUARANTINED = 128  # holds a number that is not finite

#: Words of a row that are integers; all others but those of images are float32.
INTEGER_FIELDS = ("flags", "option", "previous_option", "option_age", "version", "final_index")
#: Fields with an axis of their own, also where that has one word or none.
VECTOR_FIELDS = ("obs", "states", "action", "image", "image_place")

ATTEMPTS = 64  # at finding the oldest image, while the writer overtakes each


class RowLayout:
    """Which word of a packed row holds what.

    Fields (words): obs [O], states [S] (only if S > 0), action [A], reward, log_prob_action, log_prob_option, image
    (uint8 pixels, filled up to whole words) or image_place [3] (of a compressed image: low and high word of its offset
    in the arena, length in bytes), flags, option, previous_option (-1 at first steps), option_age (steps since the
    option began), version (updates at publication of the policy that acted), final_index (only with a side table; -1:
    none). All before the image are float32, all behind it integers.

    Args:
        image_shape: (channels, height, width), or None.
        image_codec: see :data:`claw_lightning.rollout.images.CODECS`.
        image_bytes: of the arena, for each row; 0: a quarter of an image.
    """

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        states_size: int = 0,
        has_finals: bool = False,
        image_shape: Optional[Sequence[int]] = None,
        image_codec: str = "none",
        image_bytes: int = 0,
    ) -> None:
        self.obs_size, self.action_size, self.states_size = obs_size, action_size, states_size
        self.has_finals = has_finals
        self.image_shape = None if image_shape is None else tuple(int(size) for size in image_shape)
        #: Bytes of an image; 0: there are none.
        self.image_size = 0 if image_shape is None else int(np.prod(image_shape, dtype=np.int64))
        self.image_codec = image_codec if self.image_size else "none"
        #: Whether images lie compressed in an arena.
        self.has_arena = self.image_codec != "none"
        self.image_bytes = (image_bytes or max(1, self.image_size // 4)) if self.has_arena else 0
        sizes = [("obs", obs_size), ("states", states_size), ("action", action_size)]
        sizes += [(name, 1) for name in ("reward", "log_prob_action", "log_prob_option")]
        sizes += [("image_place", 3)] if self.has_arena else [("image", (self.image_size + 3) // 4)]
        sizes += [(name, 1) for name in INTEGER_FIELDS if name != "final_index" or has_finals]
        self.fields: Dict[str, Tuple[int, int]] = {}
        offset = 0
        for name, size in sizes:
            if size > 0:
                self.fields[name] = (offset, offset + size)
                offset += size
        self.words = offset

    @property
    def final_size(self) -> int:
        """Numbers of a final observation: O, and the S of its states behind them, as at the beginning of a row."""
        return self.obs_size + self.states_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return 4 * self.words

    @property
    def step_bytes(self) -> int:
        """Bytes of one packed row and its share of the arena."""
        return self.row_bytes + self.image_bytes

    def settings(self) -> Dict[str, Any]:
        """Arguments that make an equal layout, as plain data."""
        found: Dict[str, Any] = {
            "obs_size": self.obs_size,
            "action_size": self.action_size,
            "states_size": self.states_size,
            "has_finals": self.has_finals,
        }
        if self.image_shape is not None:
            found.update(image_shape=list(self.image_shape), image_codec=self.image_codec, image_bytes=self.image_bytes)
        return found

    def span(self, name: str) -> Tuple[int, int]:
        """Words [first, last) of a field. An observation may have none (purely visual tasks)."""
        return (0, 0) if name == "obs" and self.obs_size == 0 else self.fields[name]

    def view(self, rows: np.ndarray, name: str) -> np.ndarray:
        """View of a field in float32 rows [..., W]: [..., size], or [...] for one-word fields; pixels are uint8.

        Raises:
            KeyError: the rows have no such field.
        """
        return self.cut(rows, name, *self.span(name))

    def cut(self, words: np.ndarray, name: str, start: int, stop: int) -> np.ndarray:
        """As :meth:`view`, where the field is elsewhere: in words [start, stop)."""
        part = words[..., start:stop]
        if name == "image":
            return part.view(np.uint8)[..., : self.image_size]
        if name in INTEGER_FIELDS or name == "image_place":
            part = part.view(np.int32)
        return part if name in VECTOR_FIELDS else part[..., 0]


class LaneRing:
    """See the module's text.

    Args:
        layout: packed row.
        num_steps: T, vector steps kept. Must exceed the guard band by at least 2.
        num_lanes: N.
        fd: descriptor of the learner's block (in a worker), or -1 to create one.
        guard: vector steps before the write head that readers leave alone.
        path: of a new file that holds the block instead of anonymous memory; see :class:`SharedBlock`.

    Raises:
        ValueError: too few steps.
        EnvError: the package of the images' codec is missing.
        OSError: the file cannot be made, or there is no room for it; one line with the path.
    """

    def __init__(
        self,
        layout: RowLayout,
        num_steps: int,
        num_lanes: int,
        fd: int = -1,
        guard: int = 2,
        path: Optional[str] = None,
    ) -> None:
        if num_steps < guard + 3:
            raise ValueError("a ring of %d vector steps is too short (needs %d)" % (num_steps, guard + 3))
        self.layout, self.num_steps, self.num_lanes, self.guard = layout, num_steps, num_lanes, guard
        # A final observation must outlive its row: at most every lane ends at every step, which no task does; the
        # table is a quarter of that and rows whose entry was overwritten are not drawn.
        self.num_finals = max(num_lanes * 4, num_steps * num_lanes // 4) if layout.has_finals else 0
        row_bytes = num_steps * num_lanes * layout.row_bytes
        self.block = SharedBlock(self.bytes_needed(layout, num_steps, num_lanes), fd, "claw-ring", path)
        self._header = self.block.array(np.int64, (PAGE // 8,))
        self.rows = self.block.array(np.float32, (num_steps, num_lanes, layout.words), PAGE)
        self.finals = self.block.array(np.float32, (self.num_finals, layout.final_size), PAGE + row_bytes)
        self.arena_size = self._arena_bytes(layout, num_steps, num_lanes, guard)
        arena_start = PAGE + row_bytes + self.num_finals * 4 * layout.final_size
        self._arena = self.block.array(np.uint8, (self.arena_size,), arena_start)
        self._codec = make_codec(layout.image_codec, layout.image_size) if layout.has_arena else None

    @staticmethod
    def bytes_needed(layout: RowLayout, num_steps: int, num_lanes: int, guard: int = 2) -> int:
        """Bytes of shared memory of a ring."""
        finals = max(num_lanes * 4, num_steps * num_lanes // 4) if layout.has_finals else 0
        final_bytes = finals * 4 * layout.final_size
        arena = LaneRing._arena_bytes(layout, num_steps, num_lanes, guard)
        return PAGE + num_steps * num_lanes * layout.row_bytes + final_bytes + arena

    @staticmethod
    def _arena_bytes(layout: RowLayout, num_steps: int, num_lanes: int, guard: int) -> int:
        # Whatever the budget, the newest steps must fit in also where nothing can be compressed: there is always
        # something to draw, and no image is longer than the arena.
        if not layout.has_arena:
            return 0
        return max(num_steps * num_lanes * layout.image_bytes, (guard + 3) * num_lanes * layout.image_size)

    @property
    def head(self) -> int:
        """Vector steps published since the beginning of the run."""
        return int(self._header[0])

    @property
    def finals_written(self) -> int:
        """Final observations published since the beginning of the run."""
        return int(self._header[1])

    @property
    def arena_taken(self) -> int:
        """Bytes of the arena that were taken for images since the beginning of the run."""
        return int(self._header[2])

    # -- writer -------------------------------------------------------------------------------------------------

    def slot(self) -> np.ndarray:
        """Rows [N, W] of the step that is being written; not visible before :meth:`publish`."""
        return self.rows[self.head % self.num_steps]

    def publish(self) -> None:
        """Make the step written into :meth:`slot` visible."""
        self._header[0] = self.head + 1

    def write_finals(self, observations: np.ndarray) -> np.ndarray:
        """Store final observations [M, O], with states [M, O + S]; returns their indices [M] int32."""
        first = self.finals_written
        indices = np.arange(first, first + len(observations), dtype=np.int64)
        self.finals[indices % self.num_finals] = observations
        self._header[1] = first + len(observations)
        return indices.astype(np.int32)

    def write_images(self, images: np.ndarray) -> None:
        """Store images [N, C, H, W] uint8 of the step that is being written."""
        rows, view = self.slot(), self.layout.view
        if self._codec is None:
            view(rows, "image")[:] = images.reshape(self.num_lanes, -1)
            return
        stored = [self._codec.encode(image) for image in images]
        lengths = np.array([len(each) for each in stored], np.int64)
        offsets = self.arena_taken + np.cumsum(lengths) - lengths
        self.write_bytes(self.arena_taken, np.frombuffer(b"".join(stored), np.uint8))
        view(rows, "image_place")[:, :2] = offsets.view(np.int32).reshape(-1, 2)  # little-endian: low word first
        view(rows, "image_place")[:, 2] = lengths

    def write_bytes(self, offset: int, data: np.ndarray) -> None:
        """Store bytes uint8 [B] of compressed images in the arena, from ``offset`` on; all before it is taken too."""
        # Taken before anything is overwritten, so that no reader trusts what lay there.
        self._header[2] = offset + len(data)
        first = offset % self.arena_size
        fits = min(len(data), self.arena_size - first)
        self._arena[first : first + fits] = data[:fits]
        self._arena[: len(data) - fits] = data[fits:]

    def begin_at(self, head: int, finals_written: int, arena_taken: int = 0) -> None:
        """Count from here on, before there is a writer: where another ring has come to, which this one goes on for."""
        self._header[2], self._header[1], self._header[0] = arena_taken, finals_written, head

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

    def read_image(self, offset: int, length: int) -> bytes:
        """Copy of a compressed image; of any bytes where the place is wrong or lost, which the check after it tells."""
        return self.read_bytes(offset, min(max(length, 0), self.layout.image_size))

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Copy of bytes of the arena, from ``offset`` on."""
        first = offset % self.arena_size
        fits = min(length, self.arena_size - first)
        found = self._arena[first : first + fits].tobytes()
        return found if fits == length else found + self._arena[: length - fits].tobytes()

    def decode_image(self, stored: bytes) -> np.ndarray:
        """Pixels uint8 [bytes of an image] of an intact copy."""
        assert self._codec is not None
        return self._codec.decode(stored)

    def oldest_image(self) -> int:
        """The first readable step from which on all images are certainly not being overwritten up to now.

        To be called before choosing steps, and after copying: what is older than the second answer is not trusted.
        """
        place = self.layout.view(self.rows, "image_place")
        for _ in range(ATTEMPTS):
            lost = self.arena_taken - self.arena_size
            head = self.head
            first, last = self.readable(head)[0], head
            low, high = first, last
            while low < high:  # offsets grow with the steps
                middle = (low + high) // 2
                if image_offsets(place[middle % self.num_steps, 0]) < lost:
                    low = middle + 1
                else:
                    high = middle
            if first == last or first > self.head - self.num_steps:  # else the writer has come into what was searched
                return low
        return self.head


def image_offsets(place: np.ndarray) -> Any:
    """Offsets int64 [...] out of fields image_place [..., 3]."""
    return np.array(place[..., :2], order="C").view(np.int64)[..., 0]


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
