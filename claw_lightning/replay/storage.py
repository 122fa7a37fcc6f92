"""Replays on disk: saved while workers write, cheaply again and again, and never half a row.

A folder holds

* ``replay.json``: format, fields of a row, and of each ring its sizes and the steps [first, head) that are stored,
* ``ring_<i>.rows``: the ring's slots as in memory, step t in slot t % num_steps: [num_steps, num_lanes, words],
* ``ring_<i>.finals``: its side table [num_finals, obs_size + states_size], only where rows point to final observations,
* ``DONE``: without it no save has ever completed, and nothing is loaded.

Rows and finals are raw little-endian float32 words without any header; the fields of
:data:`claw_lightning.rollout.ring.INTEGER_FIELDS` are int32 in the same words. To look at them without this package::

    head = json.loads(pathlib.Path("replay.json").read_text()); ring, words = head["rings"][0], head["layout"]["words"]
    rows = np.memmap(ring["rows"], "<f4", "r", shape=(ring["num_steps"], ring["num_lanes"], words))
    rewards = rows[np.arange(ring["first"], ring["head"]) % ring["num_steps"], :, head["layout"]["fields"]["reward"][0]]

Why a stop at any moment, also by SIGKILL or by a full disk, leaves a replay that can be restored:

* **Slots are vouched for by the header alone.** Before slots are written, a header is put in place that no longer
  counts the steps that lie in them. It is written aside, flushed and renamed; so is the header that counts the new
  steps, once these are flushed themselves.
* **Rounds.** What is to be overwritten is done an eighth of the ring at a time. A stop therefore costs an eighth of the
  replay at most. Where the ring has turned over since the last save, old and new steps do not join, and the longer run
  of either is what is left: a quarter or more.
* **Side table.** An entry counts as lost once ``finals_written`` has run far enough ahead of it. Headers carry the
  number that is true when the entries in the writing are complete.
* **The first save** has nothing to keep: until ``DONE`` is there, the next save begins anew.

What is copied from the rings is judged afterwards as by every reader (:mod:`claw_lightning.rollout.ring`): steps that
the writer may have reached meanwhile are not counted. Rows go from shared memory to the file without a copy between.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from claw_lightning.errors import ConfigError
from claw_lightning.files import sync
from claw_lightning.limits import format_bytes
from claw_lightning.rollout.ring import BORDER, FIRST, HAS_FINAL, QUARANTINED, LaneRing, RowLayout

FORMAT = 1
HEADER, DONE = "replay.json", "DONE"
REPLAY_FOLDER = "replay"  # beside the checkpoints of a run
ROUNDS = 8  # in which a whole ring is overwritten
CHUNK_BYTES = 16 * 2**20

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
Span = tuple[int, int]


@dataclass(frozen=True)
class StoredRing:
    """One ring of a stored replay.

    Attributes:
        num_steps, num_lanes: shape of the ring, T and N.
        first, head: the steps [first, head) are stored.
        finals_written: final observations that count as written; decides which entries are lost.
        finals_copied: those that are stored; the rows point to none beyond.
        num_finals: entries of the side table.
        rows, finals: names of the files; ``finals`` is empty without a side table.
    """

    num_steps: int
    num_lanes: int
    first: int
    head: int
    finals_written: int
    finals_copied: int
    num_finals: int
    rows: str
    finals: str


# -- save -----------------------------------------------------------------------------------------------------------


def save_replay(
    rings: Sequence[LaneRing],
    folder: str | os.PathLike[str],
    *,
    run: str = "",
    moment: int = -1,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> None:
    """Store what the rings hold, while their workers go on writing. Memory needed: next to none beyond the rings.

    A folder that holds an earlier save of the same rings gets only the steps published since. It takes the space of
    what is stored, and of whole rings in the end. Steps that are published during the save are left to the next one.

    Args:
        rings: of all workers, equal layouts.
        folder: made if it is not there; of one run alone. What else lies in it is left alone.
        run: name of the run, by which a checkpoint knows the replay that belongs to it.
        moment: training steps so far, by which replays of several ranks that were saved at once know each other; -1:
            not known.
        chunk_bytes: between two looks at how far the writer is.
        progress: told of the bytes that are copied, after each chunk.

    Raises:
        ConfigError: the folder holds rings of another number, shape or layout, another run's replay, something
            damaged, or is in use, or the rings hold compressed images; one line.
        OSError: disk full or not writable; one line with the folder and the bytes needed. What was stored before stays,
            less what was being overwritten.
    """
    if any(ring.layout.has_arena for ring in rings):
        raise ConfigError(
            f"{folder}: compressed images cannot be stored; set data.image_codec none, or RunCheckpoint's replay false"
        )
    path = Path(folder)
    size = sum(LaneRing.bytes_needed(r.layout, r.num_steps, r.num_lanes) for r in rings)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path, exclusive=True), contextlib.ExitStack() as files:
            _Save(rings, path, run, moment, chunk_bytes, progress, files).run()
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            system = os.statvfs(path)
            free = f", {format_bytes(system.f_bavail * system.f_frsize)} of disk are free"
        reason = os.strerror(error.errno) if error.errno else str(error)
        text = f"the replay could not be saved ({reason}); it needs {size} bytes ({format_bytes(size)}){free}"
        raise OSError(error.errno or errno.EIO, text, str(path)) from error


class _Save:
    """One call of :func:`save_replay`, on a locked folder."""

    def __init__(
        self,
        rings: Sequence[LaneRing],
        folder: Path,
        name: str,
        moment: int,
        chunk_bytes: int,
        progress: Progress | None,
        files: contextlib.ExitStack,
    ) -> None:
        if not rings or any(ring.layout.fields != rings[0].layout.fields for ring in rings):
            raise ValueError("a replay is saved of at least one ring, all of one layout")
        self.rings, self.folder, self.name, self.chunk_bytes = rings, folder, name, chunk_bytes
        self.moment = moment
        self.stored: StoredReplay | None = None
        if (folder / DONE).exists():
            self.stored = load_replay(folder)
            self.stored.check_same(rings)
        #: As it is on the disk; a save that has nothing to add writes nothing.
        self._text = (folder / HEADER).read_text() if self.stored else ""
        self._files: list[_RingFiles] = []
        for i, ring in enumerate(rings):
            stored = self.stored.rings[i] if self.stored else _nothing_of(ring, i)
            self._files.append(_RingFiles(ring, folder, stored, files))
        self._done, self._total = 0, sum(file.bytes_left for file in self._files)
        self._progress = progress

    def run(self) -> None:
        """All rounds, and ``DONE``."""
        if self.stored is None:
            self._make_room()
        else:
            for file in self._files:
                file.refuse_strangers(self.folder)
        rounds = ROUNDS if self.stored else 1
        is_complete = False
        while not is_complete:
            is_complete = True
            for file in self._files:
                file.begin_round(rounds)
            if self.stored:
                self._write_header()
            for file in self._files:
                for count in file.copy(self.chunk_bytes):
                    self._done += count
                    if self._progress:
                        self._progress(self._done, self._total)
                is_complete &= file.next == file.goal
            for file in self._files:
                file.end_round()
            self._write_header()
        if self.stored is None:
            _write_aside(self.folder / DONE, "")

    def _make_room(self) -> None:
        try:
            for file in self._files:  # of what an interrupted first save left
                file.clear()
            system = os.statvfs(self.folder)
            wanted = sum(file.bytes_left for file in self._files)
            if wanted > system.f_bavail * system.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for file in self._files:
                file.lengthen()
        except OSError:
            for file in self._files:  # the space is somebody else's need now
                file.clear()
            raise

    def _write_header(self) -> None:
        layout = self.rings[0].layout
        content = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "run": self.name,
            "moment": self.moment,
            "layout": {**_sizes(layout), "words": layout.words, "fields": layout.fields},
            "rings": [asdict(file.entry) for file in self._files],
        }
        text = json.dumps(content, indent=1)
        if text != self._text:
            _write_aside(self.folder / HEADER, text)
            self._text = text


class _RingFiles:
    """One ring and its files during a save.

    Attributes:
        entry: what the header is to say of it.
        next, goal: steps [next, goal) are still to be copied.
    """

    def __init__(self, ring: LaneRing, folder: Path, stored: StoredRing, files: contextlib.ExitStack) -> None:
        self.ring, self.entry = ring, stored
        # In this order: the entries of all rows before the head are among those that are counted then.
        self.goal = ring.head
        self.finals_goal = ring.finals_written
        self.next = self.round_stop = max(stored.head, self.goal - ring.num_steps + 1)
        #: First step of those copied by this save that no torn one follows.
        self.fresh = self.next
        self.finals_next = max(stored.finals_copied, self.finals_goal - ring.num_finals)
        self._fds = [_open(folder / name, files) for name in (stored.rows, stored.finals) if name]
        self._sizes = [ring.rows.nbytes, ring.finals.nbytes]
        self._path = str(folder / stored.rows)

    @property
    def step_bytes(self) -> int:
        """Of one vector step."""
        return self.ring.num_lanes * self.ring.layout.row_bytes

    @property
    def bytes_left(self) -> int:
        """To be copied."""
        finals = max(0, self.finals_goal - self.finals_next) * 4 * self.ring.layout.final_size
        return max(0, self.goal - self.next) * self.step_bytes + finals

    def clear(self) -> None:
        """Empty the files."""
        for fd in self._fds:
            os.ftruncate(fd, 0)

    def lengthen(self) -> None:
        """Give the files their full length. What is not written takes no space: most runs never fill their replay."""
        for fd, size in zip(self._fds, self._sizes, strict=False):
            os.ftruncate(fd, size)

    def refuse_strangers(self, folder: Path) -> None:
        """Compare the newest stored step with the ring's: rows of two runs must not be mixed.

        Raises:
            ConfigError: it is not the same, or not yet published.
        """
        ring, last = self.ring, self.entry.head - 1
        is_ours = self.goal >= self.entry.head
        if is_ours and self.entry.head > self.entry.first:
            rows = np.empty_like(ring.rows[0])
            _read(self._fds[0], rows, last % ring.num_steps * self.step_bytes, self._path)
            is_same = rows.tobytes() == ring.rows[last % ring.num_steps].tobytes()
            is_ours = is_same or not ring.intact(np.array(last))
        if not is_ours:
            raise ConfigError(f"{folder} holds the replay of another run; give this run a folder of its own")

    def begin_round(self, rounds: int) -> None:
        """Choose what to copy, and take what will be overwritten out of the entry."""
        most = -(-self.ring.num_steps // rounds)
        self.round_stop = max(self.next, min(self.goal, self.next + most))
        span = survivors((self.entry.first, self.entry.head), self.next, self.round_stop, self.ring.num_steps)
        self._set(span, max(self.entry.finals_written, self.finals_goal), self.entry.finals_copied)

    def copy(self, chunk_bytes: int) -> Iterator[int]:
        """Copy and flush a round, the side table in the first one; yields the bytes of each chunk."""
        ring = self.ring
        entry_bytes = 4 * ring.layout.final_size
        most = max(1, chunk_bytes // max(1, entry_bytes))
        for start, stop in chunks(self.finals_next, self.finals_goal, ring.num_finals, most):
            slot = start % ring.num_finals
            _write(self._fds[1], ring.finals[slot : slot + stop - start], slot * entry_bytes)
            yield (stop - start) * entry_bytes
        self.finals_next = max(self.finals_next, self.finals_goal)
        for start, stop in chunks(self.next, self.round_stop, ring.num_steps, max(1, chunk_bytes // self.step_bytes)):
            slot = start % ring.num_steps
            _write(self._fds[0], ring.rows[slot : slot + stop - start], slot * self.step_bytes)
            # After the copy. The writer overtakes steps in their order.
            torn = np.count_nonzero(~ring.intact(np.arange(start, stop)))
            if torn:
                self.fresh = start + int(torn)
            yield (stop - start) * self.step_bytes
        self.next = self.round_stop
        for fd in self._fds:
            os.fsync(fd)

    def end_round(self) -> None:
        """Count what was copied, once it is on the disk."""
        span, new = (self.entry.first, self.entry.head), (self.fresh, self.next)
        if self.fresh <= span[1]:
            span = (min(span[0], self.fresh), self.next)
        elif self.next == self.goal or new[1] - new[0] >= span[1] - span[0]:
            span = new
        self._set(span, max(self.entry.finals_written, self.ring.finals_written), self.finals_goal)

    def _set(self, span: Span, finals_written: int, finals_copied: int) -> None:
        values = {"first": span[0], "head": span[1], "finals_written": finals_written, "finals_copied": finals_copied}
        self.entry = StoredRing(**{**asdict(self.entry), **values})


def survivors(span: Span, start: int, stop: int, size: int) -> Span:
    """The longest run of steps of ``span`` whose slots, ``size`` in number, steps [start, stop) do not take."""
    first, last = span
    if stop <= start:
        return span
    hit = first + (start - first) % size  # the first of them that lies where `start` will
    before = (max(first, hit - size + stop - start), min(hit, last))
    after = (min(hit + stop - start, last), last)
    return before if before[1] - before[0] > after[1] - after[0] else after


def chunks(start: int, stop: int, size: int, most: int) -> Iterator[Span]:
    """Cut [start, stop) into runs of at most ``most`` that lie in consecutive slots of ``size``."""
    while start < stop:
        end = min(stop, start + most, start - start % size + size)
        yield start, end
        start = end


def _nothing_of(ring: LaneRing, index: int) -> StoredRing:
    finals = f"ring_{index}.finals" if ring.num_finals else ""
    return StoredRing(ring.num_steps, ring.num_lanes, 0, 0, 0, 0, ring.num_finals, f"ring_{index}.rows", finals)


# -- load -----------------------------------------------------------------------------------------------------------


def load_replay(folder: str | os.PathLike[str]) -> StoredReplay:
    """Header of a stored replay; its rows stay where they are.

    Raises:
        ConfigError: there is none, it is incomplete, damaged, or of another version of this package; one line with the
            file and the cure.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; a stored replay is the folder that a run wrote")
    if not (path / DONE).exists():
        raise ConfigError(f"{path} holds no complete replay ({DONE} is missing): save into it again, or take another")
    header = path / HEADER
    try:
        content = json.loads(header.read_text())
        version, order = content["format"], content["byteorder"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{header} cannot be read ({_reason(error)}); remove {path}, or take another replay"
        ) from error
    if version != FORMAT:
        raise ConfigError(f"{header} is of format {version}, this version reads {FORMAT}; use the one that wrote it")
    if order != sys.byteorder:
        raise ConfigError(f"{header}: rows are {order}-endian, this machine is not; load them where they were written")
    try:
        sizes = content["layout"]
        names = ("obs_size", "action_size", "states_size", "has_finals")
        layout = RowLayout(**{name: sizes[name] for name in names}, image_shape=sizes.get("image_shape"))
        fields = {name: tuple(span) for name, span in sizes["fields"].items()}
        rings = tuple(StoredRing(**entry) for entry in content["rings"])
        is_sane = fields == layout.fields and bool(rings) and all(_is_sane(ring, layout) for ring in rings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{header} is damaged ({_reason(error)}); remove {path}, or take another replay") from error
    if not is_sane:
        raise ConfigError(f"{header} is damaged (its numbers contradict each other); remove {path}, or take another")
    for ring in rings:
        _check_size(path / ring.rows, ring.num_steps * ring.num_lanes * layout.row_bytes)
        if ring.num_finals:
            _check_size(path / ring.finals, ring.num_finals * 4 * layout.final_size)
    moment = content.get("moment", -1)
    return StoredReplay(path, layout, rings, str(content.get("run", "")), moment if isinstance(moment, int) else -1)


def discard_replay(folder: str | os.PathLike[str]) -> None:
    """Remove a stored replay, and nothing else that lies in the folder. A stop on the way leaves none that loads.

    Raises:
        ConfigError: somebody reads or writes it.
        OSError: a file cannot be removed.
    """
    path = Path(folder)
    if not path.is_dir():
        return
    with _locked(path, exclusive=True):
        for name in (DONE, HEADER):
            (path / name).unlink(missing_ok=True)
        for pattern in ("ring_*.rows", "ring_*.finals"):
            for file in path.glob(pattern):
                file.unlink()


@dataclass(frozen=True)
class StoredReplay:
    """A replay on disk, of :func:`load_replay`.

    Attributes:
        folder: where it lies.
        layout: of its rows.
        rings: in the order in which they were saved.
        run: name of the run that saved it.
        moment: training steps when it was saved; -1: not known.
    """

    folder: Path
    layout: RowLayout
    rings: tuple[StoredRing, ...]
    run: str = ""
    moment: int = -1

    @property
    def stored(self) -> int:
        """Rows that are stored."""
        return sum((ring.head - ring.first) * ring.num_lanes for ring in self.rings)

    @property
    def inserted(self) -> int:
        """Environment steps that had been published when it was saved."""
        return sum(ring.head * ring.num_lanes for ring in self.rings)

    def check_fits(self, layout: RowLayout) -> None:
        """Whether these rows can be learned from beside rows of ``layout``; names of tasks do not matter.

        Raises:
            ConfigError: some size differs; one line with both.
        """
        if _sizes(layout) != _sizes(self.layout):
            raise ConfigError(
                f"the replay in {self.folder} has rows of {_described(self.layout)}, this task has rows of "
                f"{_described(layout)}; take a replay of the same task"
            )

    def check_same(self, rings: Sequence[LaneRing]) -> None:
        """Whether these are rings of the same number, shapes and layout.

        Raises:
            ConfigError: they are not; one line with both.
        """
        self.check_fits(rings[0].layout)
        found = [(ring.num_steps, ring.num_lanes) for ring in self.rings]
        wanted = [(ring.num_steps, ring.num_lanes) for ring in rings]
        if found != wanted:
            raise ConfigError(
                f"the replay in {self.folder} has {_shapes(found)}, this run has {_shapes(wanted)}; use the same "
                "number of workers, environments and capacity, or another folder"
            )

    def restore(
        self, rings: Sequence[LaneRing], *, chunk_bytes: int = CHUNK_BYTES, progress: Progress | None = None
    ) -> None:
        """Fill new rings of the same shapes bit for bit, so that workers go on behind the stored steps.

        The newest stored row of a lane has no successor yet; workers begin with FIRST flags, across which nothing is
        drawn. Steps that the ring would still hold, but that are not stored, are zero and quarantined.

        Raises:
            ConfigError: the rings are of other shapes, or the files are in use, changed or truncated.
            ValueError: something was written into the rings already.
        """
        self.check_same(rings)
        if any(ring.head for ring in rings):
            raise ValueError("a replay is restored into rings that nothing was written into")
        total = sum((r.head - r.first) * r.num_lanes * self.layout.row_bytes for r in self.rings)
        done = 0
        with self._reading() as files:
            for ring, stored in zip(rings, self.rings, strict=True):
                for start, stop in chunks(max(0, stored.head - ring.num_steps), stored.first, ring.num_steps, 2**62):
                    slot = start % ring.num_steps
                    lost = ring.rows[slot : slot + stop - start]
                    lost[:] = 0.0
                    ring.layout.view(lost, "flags")[:] = QUARANTINED | BORDER
                for rows in self._read_steps(stored, stored.first, chunk_bytes, files, ring.rows):
                    done += rows.nbytes
                    if progress:
                        progress(done, total)
                if ring.num_finals:
                    fd, path = _open(self.folder / stored.finals, files, os.O_RDONLY), str(self.folder / stored.finals)
                    _read(fd, ring.finals, 0, path)
                set_progress(ring, stored.head, stored.finals_written)

    def deal(self, rings: Sequence[LaneRing]) -> None:
        """Fill new rings of other shapes: the stored lanes one behind another, as evenly as they go, the newest rows.

        Between two stored lanes lies a border, across which nothing is drawn; lanes that get less than others begin
        with borders. The rows are those of a run that went on, and make room for new ones like them.

        Raises:
            ConfigError: as :meth:`open_rings`, or the rows are of another layout.
            ValueError: something was written into the rings already.
        """
        deal_replays([self], rings)

    def open_rings(self, capacity: int | None = None) -> list[LaneRing]:
        """New rings that hold the stored rows, whatever shapes this run's own have; nothing is written into them.

        Every stored row is drawn from them that could be drawn where it came from, and their steps count from 0. A last
        step of borders follows, which closes episodes that were still open.

        Args:
            capacity: rows to take at most, the newest, an equal number of steps of each ring; None: all.

        Raises:
            ConfigError: nothing is stored, ``capacity`` is below one step, or the files are in use, changed or
                truncated.
        """
        lanes = sum(ring.num_lanes for ring in self.rings)
        most = max(ring.num_steps for ring in self.rings) if capacity is None else capacity // lanes
        if most < 1:
            raise ConfigError(f"a capacity of {capacity} is less than one step of the {lanes} lanes in {self.folder}")
        if self.stored == 0:
            raise ConfigError(f"the replay in {self.folder} is empty; take another one")
        with self._reading() as files:
            return [self._open_ring(ring, most, files) for ring in self.rings if ring.head > ring.first]

    def _open_ring(self, stored: StoredRing, most: int, files: contextlib.ExitStack) -> LaneRing:
        view = self.layout.view
        begin = max(stored.first, stored.head - most)
        steps = stored.head - begin + 1
        # Long enough for no final observation to be lost; what is not touched of a ring takes no memory.
        entries = min(stored.num_finals, stored.finals_copied) + stored.num_lanes
        guard = 2
        num_steps = max(steps + guard, guard + 3, -(-4 * entries // stored.num_lanes))
        ring = LaneRing(self.layout, num_steps, stored.num_lanes, guard=guard)
        # Counted from here on, no entry is lost but -1, which is what rows say whose entry was lost already.
        set_progress(ring, 0, max(0, ring.num_finals - ring.num_lanes))
        finals = np.zeros((stored.num_finals, self.layout.final_size), np.float32)
        if stored.num_finals:
            path = self.folder / stored.finals
            _read(_open(path, files, os.O_RDONLY), finals, 0, str(path))
        for rows in self._read_steps(stored, begin, CHUNK_BYTES, files, ring.rows, begin):
            if stored.num_finals:
                flags, index = view(rows, "flags"), view(rows, "final_index")
                wanted = (flags & HAS_FINAL) != 0
                oldest = stored.finals_written - stored.num_finals + stored.num_lanes
                kept = wanted & (index >= oldest) & (index < stored.finals_copied)
                index[wanted & ~kept] = -1
                index[kept] = ring.write_finals(finals[index[kept] % stored.num_finals])
        view(ring.rows[steps - 1], "flags")[:] = FIRST | BORDER
        set_progress(ring, steps, ring.finals_written)
        return ring

    def _read_steps(
        self,
        stored: StoredRing,
        begin: int,
        chunk_bytes: int,
        files: contextlib.ExitStack,
        target: np.ndarray,
        shift: int = 0,
    ) -> Iterator[np.ndarray]:
        """Read the steps [begin, head) into the slots of step - ``shift`` of ``target``; yields what was read."""
        path, step_bytes = self.folder / stored.rows, stored.num_lanes * self.layout.row_bytes
        fd = _open(path, files, os.O_RDONLY)
        for start, stop in chunks(begin, stored.head, stored.num_steps, max(1, chunk_bytes // step_bytes)):
            slot = (start - shift) % len(target)  # a shifted target does not wrap, an equal one wraps as the file does
            rows = target[slot : slot + stop - start]
            _read(fd, rows, start % stored.num_steps * step_bytes, str(path))
            yield rows

    @contextlib.contextmanager
    def _reading(self) -> Iterator[contextlib.ExitStack]:
        """Hold the folder for as long as it is read; what is opened meanwhile is closed at the end."""
        with _locked(self.folder, exclusive=False), contextlib.ExitStack() as files:
            if load_replay(self.folder).rings != self.rings:
                raise ConfigError(f"the replay in {self.folder} was saved anew since it was looked at; load it again")
            yield files


def deal_replays(replays: Sequence[StoredReplay], rings: Sequence[LaneRing], part: int = 0, parts: int = 1) -> None:
    """Fill new rings as :meth:`StoredReplay.deal`, from several replays, or from every ``parts``-th lane of them.

    Raises:
        ConfigError, ValueError: as there.
    """
    if any(ring.head for ring in rings):
        raise ValueError("a replay is dealt to rings that nothing was written into")
    room = sum(ring.num_steps * ring.num_lanes for ring in rings)
    stored: list[tuple[LaneRing, int]] = []
    for replay in replays:
        replay.check_fits(rings[0].layout)
        sources = replay.open_rings(-(-room * parts // len(replays))) if replay.stored else []
        stored += [(source, lane) for source in sources for lane in range(source.num_lanes)]
    stored = stored[part::parts]
    if not stored:
        return
    targets, begin = sum(ring.num_lanes for ring in rings), 0
    for ring in rings:
        _fill_from(ring, [stored[lane::targets] for lane in range(begin, begin + ring.num_lanes)])
        begin += ring.num_lanes


def _fill_from(ring: LaneRing, parts: Sequence[Sequence[tuple[LaneRing, int]]]) -> None:
    """Fill each lane of a new ring with lanes of other rings, each of which ends with a border."""
    view = ring.layout.view
    lengths = [min(ring.num_steps, sum(source.head for source, _ in lanes)) for lanes in parts]
    steps = max(lengths)
    view(ring.rows[:steps], "flags")[:] = FIRST | BORDER
    finals = np.zeros((steps, ring.num_lanes, ring.layout.final_size), np.float32) if ring.num_finals else None
    for lane, (lanes, length) in enumerate(zip(parts, lengths, strict=True)):
        stop = steps
        for source, index in reversed(lanes):
            start = max(steps - length, stop - source.head)
            rows = source.rows[source.head - (stop - start) : source.head, index]
            ring.rows[start:stop, lane] = rows
            if finals is not None:
                places = view(rows, "final_index").astype(np.int64)
                known = (places >= 0) & source.finals_intact(places)
                finals[start:stop, lane][known] = source.finals[places[known] % source.num_finals]
                view(ring.rows[start:stop, lane], "final_index")[~known] = -1
            stop = start
    set_progress(ring, 0, 0)
    if finals is not None:
        for step in range(steps):  # in the order of the steps, as a worker would have written them
            place = view(ring.rows[step], "final_index")
            wanted = ((view(ring.rows[step], "flags") & HAS_FINAL) != 0) & (place >= 0)
            place[wanted] = ring.write_finals(finals[step, wanted])
    set_progress(ring, steps, ring.finals_written)


def set_progress(ring: LaneRing, head: int, finals_written: int) -> None:
    """Declare that steps and final observations lie in the ring; before a worker has it, and after they do."""
    ring._header[1] = finals_written
    ring._header[0] = head


# -- files ----------------------------------------------------------------------------------------------------------


def _sizes(layout: RowLayout) -> dict[str, Any]:
    return layout.settings()


def _described(layout: RowLayout) -> str:
    finals = "with" if layout.has_finals else "without"
    states = f", {layout.states_size} states" if layout.states_size else ""
    images = ""
    if layout.image_shape is not None:
        compressed = f" ({layout.image_codec})" if layout.has_arena else ""
        images = f", images of {' x '.join(map(str, layout.image_shape))}{compressed}"
    sizes = f"{layout.obs_size} observations{states}{images} and {layout.action_size} actions"
    return f"{sizes} {finals} final observations"


def _shapes(shapes: list[tuple[int, int]]) -> str:
    """Such as "2 rings of 500 steps x 8 lanes"."""
    parts = [f"{shapes.count(shape)} ring(s) of {shape[0]} steps x {shape[1]} lanes" for shape in dict.fromkeys(shapes)]
    return " and ".join(parts)


def _reason(error: Exception) -> str:
    return f"{getattr(error, 'strerror', None) or error or type(error).__name__}"


def _is_sane(ring: StoredRing, layout: RowLayout) -> bool:
    """Whether the numbers of a header can be true."""
    table = max(ring.num_lanes * 4, ring.num_steps * ring.num_lanes // 4) if layout.has_finals else 0
    return (
        0 <= ring.first <= ring.head <= ring.first + ring.num_steps
        and ring.num_lanes > 0
        and 0 <= ring.finals_copied <= ring.finals_written
        and ring.num_finals == table
        and os.path.basename(ring.rows) == ring.rows
        and os.path.basename(ring.finals) == ring.finals
    )


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; copy the folder anew, or take another replay")
    if path.stat().st_size != size:
        raise ConfigError(f"{path} has {path.stat().st_size} of {size} bytes; copy it anew, or take another replay")


def _open(path: Path, files: contextlib.ExitStack, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Descriptor that ``files`` closes."""
    fd = os.open(path, flags, 0o600)
    files.callback(os.close, fd)
    return fd


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data  # of the array itself: all that come here are contiguous


def _write(fd: int, array: np.ndarray, offset: int) -> None:
    view = _bytes_of(array)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _read(fd: int, array: np.ndarray, offset: int, path: str) -> None:
    view = _bytes_of(array)
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise ConfigError(f"{path} ends at byte {offset}; copy it anew, or take another replay")
        view, offset = view[count:], offset + count


def _write_aside(path: Path, text: str) -> None:
    """Put a small file in place, whole and flushed; a fixed name aside leaves at most one behind."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def _locked(folder: Path, exclusive: bool) -> Iterator[None]:
    """Keep savers out, and readers too if exclusive. The kernel gives the lock back when its holder dies.

    Raises:
        ConfigError: another process or thread holds it.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is being read or written by another process; wait until it is done") from error
        except OSError:
            pass  # network file systems without locks
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child would hold it on
        os.close(fd)
