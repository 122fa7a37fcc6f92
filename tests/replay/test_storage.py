"""Stored replays: bit for bit, never a torn row, cheap to renew, and whole again after a stop at any moment."""

import errno
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayMemory, storage
from claw_lightning.replay.storage import StoredReplay, discard_replay, load_replay, save_replay, survivors
from claw_lightning.rollout.ring import BORDER, FIRST, HAS_FINAL, QUARANTINED, TERMINATED, LaneRing, RowLayout, usable
from tests.builders import ring_of_lanes, start_writer, write_step
from tests.fakes import writers

STEPS, LANES = 40, 3
REAL_FSYNC = os.fsync


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nothing here cuts the power, and other users of the disk would decide how long the tests take."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def ring_at(head, same_step=False, num_steps=STEPS, num_lanes=LANES):
    """Ring of known rows; see ``writers.write_episodes``."""
    ring = writers.episode_ring(-1, num_steps, num_lanes, same_step)
    writers.write_episodes(ring, head, begin=0)
    return ring


def new_rings(replay):
    return [LaneRing(replay.layout, ring.num_steps, ring.num_lanes) for ring in replay.rings]


def restored(folder):
    replay = load_replay(folder)
    rings = new_rings(replay)
    replay.restore(rings)
    return replay, rings


def rows_of(ring, first, last):
    return ring.rows[np.arange(first, last) % ring.num_steps]


def check_rows(rows, layout, first, num_lanes, finals=None, origin=0):
    """Rows [T, N, W] of the steps from ``first`` on are what ``writers`` wrote; ``finals`` looks up observations."""
    steps = np.repeat(np.arange(first, first + len(rows)), num_lanes)
    lanes = np.tile(np.arange(num_lanes), len(rows))
    position = (steps - origin) % writers.period(lanes, layout.has_finals)
    expected = writers.episode_rows(layout, num_lanes, steps, lanes, 0, position)
    rows = rows.reshape(-1, layout.words).copy()
    if layout.has_finals:
        index = layout.view(rows, "final_index").copy()
        has_final = (layout.view(rows, "flags") & HAS_FINAL) != 0
        assert (index[~has_final] == -1).all()
        layout.view(rows, "final_index")[:] = -1
        if finals is not None:
            found, is_there = finals(index[has_final])
            assert (found[is_there] == -rows[has_final, : writers.OBS_SIZE][is_there]).all()
    np.testing.assert_array_equal(rows.view(np.int32), expected.view(np.int32))


def check_folder(folder):
    """All that the folder vouches for is true; returns the header's entries."""
    replay, rings = restored(folder)
    for stored, ring in zip(replay.rings, rings):
        assert (ring.head, ring.finals_written) == (stored.head, stored.finals_written)
        check_rows(
            rows_of(ring, stored.first, stored.head),
            ring.layout,
            stored.first,
            ring.num_lanes,
            lambda index, ring=ring: (ring.finals[index % ring.num_finals], ring.finals_intact(index)),
        )
        lost = np.arange(max(0, stored.head - ring.num_steps), stored.first)
        left = ring.rows[lost % ring.num_steps]
        assert (ring.layout.view(left, "flags") == (QUARANTINED | BORDER)).all()
        assert not np.delete(left, ring.layout.fields["flags"][0], axis=-1).any()
    return replay.rings


# -- what is restored ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("head", [0, 1, 17, STEPS - 1, STEPS, STEPS + 1, 3 * STEPS + 7])
def test_rings_come_back_bit_for_bit(tmp_path, head, same_step):
    rings = [ring_at(head, same_step), ring_at(2 * head, same_step, 64, 5)]
    view = rings[0].layout.view
    if head:  # nothing is lost on the way that is no number
        view(rings[0].rows, "obs")[(head - 1) % STEPS, 0, 0] = np.array(0x7FC12345, np.int32).view(np.float32)
    save_replay(rings, tmp_path / "replay", chunk_bytes=2000)
    replay, copies = restored(tmp_path / "replay")
    for ring, copy, stored in zip(rings, copies, replay.rings):
        assert (copy.head, copy.finals_written) == (ring.head, ring.finals_written)
        assert (stored.first, stored.head) == (max(0, ring.head - ring.num_steps + 1), ring.head)
        kept = [rows_of(one, stored.first, stored.head).tobytes() for one in (ring, copy)]
        assert kept[0] == kept[1]
        assert ring.finals.tobytes() == copy.finals.tobytes()
    assert replay.inserted == head * LANES + 2 * head * 5
    assert replay.stored == sum((r.head - r.first) * r.num_lanes for r in replay.rings)
    assert sorted(os.listdir(tmp_path / "replay")) == sorted(
        ["DONE", "replay.json", "ring_0.rows", "ring_1.rows"] + ["ring_0.finals", "ring_1.finals"] * same_step
    )


@pytest.mark.parametrize("same_step", [False, True])
def test_the_same_seed_draws_the_same_batches(tmp_path, same_step):
    rings = [ring_at(3 * STEPS, same_step), ring_at(30, same_step)]
    save_replay(rings, tmp_path)
    batches = [ReplayMemory(some, 5).sample(2, 64) for some in (rings, restored(tmp_path)[1])]
    assert batches[0].rows.numpy().tobytes() == batches[1].rows.numpy().tobytes()
    assert batches[0].next_obs.numpy().tobytes() == batches[1].next_obs.numpy().tobytes()


@pytest.mark.parametrize("same_step", [False, True])
def test_workers_go_on_behind_it(tmp_path, same_step):
    save_replay([ring_at(61, same_step)], tmp_path)
    [ring] = restored(tmp_path)[1]
    writers.write_episodes(ring, 9, life=1)
    flags = ring.layout.view(rows_of(ring, 60, 62), "flags")
    assert (flags[1] & FIRST).all()
    drawn = usable(flags[0], flags[1])
    assert (drawn == ((flags[0] & (HAS_FINAL | TERMINATED)) != 0)).all()
    assert not drawn.all()
    # A save of what followed joins on.
    save_replay([ring], tmp_path)
    stored = load_replay(tmp_path).rings[0]
    assert (stored.first, stored.head) == (70 - STEPS, 70)


def test_a_million_rows(tmp_path):
    ring = LaneRing(RowLayout(1, 1), 62_500, 16)
    assert ring.layout.words == 10
    ring.rows.reshape(-1)[:] = np.arange(ring.rows.size, dtype=np.float32)
    storage.set_progress(ring, 62_500 + 10_000, 0)
    save_replay([ring], tmp_path)
    [copy] = restored(tmp_path)[1]
    steps = np.arange(10_001, 72_500) % 62_500
    assert (ring.rows[steps] == copy.rows[steps]).all()
    assert load_replay(tmp_path).stored == 16 * 62_499


def test_as_the_text_says_without_this_package(tmp_path, monkeypatch):
    ring = ring_at(57)
    save_replay([ring], tmp_path)
    monkeypatch.chdir(tmp_path)
    code = storage.__doc__.split("::\n\n")[1].split("\n\n")[0]
    names = {"json": json, "np": np, "pathlib": pathlib}
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    rewards = np.arange(57 - STEPS + 1, 57)[:, None] * LANES + np.arange(LANES)
    assert (names["rewards"] == rewards).all()


# -- saved again ---------------------------------------------------------------------------------------------------


def copied(rings, folder, **options):
    """Bytes that a save copied."""
    seen = [(0, 0)]
    save_replay(rings, folder, progress=lambda *numbers: seen.append(numbers), **options)
    assert seen[-1][0] == seen[-1][1]
    assert all(a[0] <= b[0] for a, b in zip(seen, seen[1:]))
    return seen[-1][0]


def test_only_what_is_new_is_written(tmp_path, monkeypatch):
    ring = ring_at(100)
    step_bytes = LANES * ring.layout.row_bytes
    assert copied([ring], tmp_path) == (STEPS - 1) * step_bytes
    writers.write_episodes(ring, 7, begin=0)
    assert copied([ring], tmp_path) == 7 * step_bytes
    monkeypatch.setattr(storage, "_write_aside", lambda *args: pytest.fail("nothing has changed"))
    assert copied([ring], tmp_path) == 0
    assert check_folder(tmp_path)[0].head == 107


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_any_series_of_saves(tmp_path, seed, same_step):
    rng = random.Random(seed)
    rings = [ring_at(0, same_step), ring_at(0, same_step, 23, 2)]
    for _ in range(12):
        for ring in rings:
            writers.write_episodes(ring, rng.choice([0, 1, 4, 20, STEPS - 1, STEPS, 2 * STEPS + 3]), begin=0)
        save_replay(rings, tmp_path, chunk_bytes=rng.choice([1, 3000, 2**20]))
        for stored, ring in zip(check_folder(tmp_path), rings):
            assert stored.head == ring.head
            assert stored.first <= max(0, ring.head - ring.num_steps + 1)


def test_survivors_by_counting():
    rng = random.Random(0)
    for _ in range(3000):
        size = rng.randint(1, 12)
        first = rng.randint(0, 30)
        span = (first, first + rng.randint(0, size))
        start = span[1] + rng.choice([0, 0, rng.randint(0, 30)])
        stop = start + rng.randint(0, size)
        taken = {step % size for step in range(start, stop)}
        left = [step for step in range(*span) if step % size not in taken]
        runs = np.split(left, np.flatnonzero(np.diff(left) != 1) + 1)
        low, high = survivors(span, start, stop, size)
        assert span[0] <= low <= high <= span[1]
        assert not taken & {step % size for step in range(low, high)}
        assert high - low == max(map(len, runs))


@pytest.mark.parametrize("same_step", [0, 1])
def test_nothing_is_torn_by_a_writer_at_full_speed(tmp_path, same_step):
    shape = (1024, 8)
    ring, saves = writers.episode_ring(-1, *shape, same_step), 0
    with start_writer("episodes", ring.block.fd, 12_000, *shape, same_step) as writer:
        while writer.poll() is None:
            save_replay([ring], tmp_path, chunk_bytes=64 * 1024)
            [stored] = check_folder(tmp_path)
            saves += stored.head > 0
    assert writer.returncode == 0
    assert saves > 0
    save_replay([ring], tmp_path)
    assert check_folder(tmp_path)[0].head == 12_000


@pytest.mark.parametrize("ahead", [1, 5, STEPS - 1, STEPS, 3 * STEPS])
@pytest.mark.parametrize("is_second", [False, True])
def test_steps_that_are_overtaken_during_the_copy_do_not_count(tmp_path, monkeypatch, ahead, is_second):
    ring, write, chunks = ring_at(90, True), storage._write, []
    if is_second:
        save_replay([ring], tmp_path)
        writers.write_episodes(ring, 60, begin=0)
    head = ring.head

    def overtaken(fd, array, offset):
        if np.shares_memory(array, ring.rows):
            chunks.append(len(array))
            if len(chunks) == 2:  # the writer runs ahead between the choice and the copy
                writers.write_episodes(ring, ahead, begin=0)
        write(fd, array, offset)

    monkeypatch.setattr(storage, "_write", overtaken)
    save_replay([ring], tmp_path, chunk_bytes=6 * LANES * ring.layout.row_bytes)
    [stored] = check_folder(tmp_path)
    assert stored.head == head
    if not is_second:  # the first chunk was safe before the writer ran; it counts unless something behind it is lost
        assert stored.head - stored.first == (STEPS - 1 if ahead <= 6 else max(0, STEPS - 1 - ahead))


# -- stopped -------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """As if the process ended here."""


def stop_after(monkeypatch, count):
    """Let the ``count``-th call that changes the disk be the last; a write is then half done."""
    calls = iter(range(10**9))

    def stopping(name):
        real = getattr(os, name)

        def call(*args, **options):
            if next(calls) < count:
                return real(*args, **options)
            if name == "pwrite":
                real(args[0], args[1][: len(args[1]) // 2], args[2])
            raise Stop

        return call

    for name in ("pwrite", "fsync", "replace"):
        monkeypatch.setattr(os, name, stopping(name))


@pytest.mark.parametrize("more, same_step", [(3, True), (STEPS // 2, True), (STEPS, False), (2 * STEPS + 5, True)])
def test_a_stop_at_every_moment_of_a_second_save(tmp_path, monkeypatch, more, same_step):
    ring = ring_at(100, same_step)
    save_replay([ring], tmp_path / "before")
    writers.write_episodes(ring, more, begin=0)
    for count in range(1000):
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "before", folder)
        with monkeypatch.context() as patch:
            stop_after(patch, count)
            try:
                save_replay([ring], folder, chunk_bytes=5000)
                break
            except Stop:
                pass
        [stored] = check_folder(folder)
        assert stored.head <= ring.head
        assert stored.head - stored.first >= (STEPS - 1 - STEPS // 8 if more < STEPS else STEPS // 4)
        save_replay([ring], folder)  # by the same run, as if the disk had been full
        assert check_folder(folder)[0].head == ring.head
    assert count > 5
    assert check_folder(folder)[0].head == ring.head


@pytest.mark.parametrize("is_second", [False, True])
def test_what_the_order_rests_on_is_flushed_first(tmp_path, monkeypatch, is_second):
    ring, calls = ring_at(100, True), []
    if is_second:
        save_replay([ring], tmp_path)
        writers.write_episodes(ring, 5, begin=0)

    def name_of(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    write, replace = os.pwrite, os.replace
    monkeypatch.setattr(os, "pwrite", lambda fd, *args: (calls.append(("write", name_of(fd))), write(fd, *args))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("flush", name_of(fd))), REAL_FSYNC(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append(("put", args[1].name)), replace(*args))[1])
    save_replay([ring], tmp_path)
    header = [("flush", ".replay.json.new"), ("put", "replay.json"), ("flush", tmp_path.name)]
    slots = [("write", "ring_0.finals"), ("write", "ring_0.rows"), ("flush", "ring_0.rows"), ("flush", "ring_0.finals")]
    done = [("flush", ".DONE.new"), ("put", "DONE"), ("flush", tmp_path.name)]
    assert list(dict.fromkeys(calls)) == list(
        dict.fromkeys(header * is_second + slots + header + done * (not is_second))
    )
    assert calls[-len(header) - len(done) * (not is_second) :] == header + done * (not is_second)


def test_a_stop_at_every_moment_of_the_first_save(tmp_path, monkeypatch):
    ring, other = ring_at(100, True), ring_at(20, True, 30, 2)
    for count in range(1000):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            stop_after(patch, count)
            try:
                save_replay([ring], folder, chunk_bytes=5000)
                break
            except Stop:
                pass
        if not (folder / "DONE").exists():
            with pytest.raises(ConfigError, match="no complete replay"):
                load_replay(folder)
            save_replay([other if count % 2 else ring], folder)  # nothing is lost: other shapes are welcome
        check_folder(folder)
    assert count > 5


@pytest.mark.parametrize("same_step", [False, True])
def test_killed_at_random_moments(tmp_path, same_step):
    rng, seen = random.Random(same_step), set()
    rings = [ring_at(0, same_step, 512, 4), ring_at(0, same_step, 300, 3)]
    save_replay(rings, tmp_path)
    for _ in range(16):
        for ring in rings:
            writers.write_episodes(ring, rng.choice([5, 60, 400, 700]), begin=0)
        child = os.fork()
        if child == 0:
            try:
                save_replay(rings, tmp_path, chunk_bytes=4096)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stored = check_folder(tmp_path)
        seen.add(all(a.head == b.head for a, b in zip(stored, rings)))
    save_replay(rings, tmp_path)
    assert [one.head for one in check_folder(tmp_path)] == [ring.head for ring in rings]
    assert False in seen


# -- disks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_is_told_with_the_bytes_needed(small_disk):
    ring = ring_at(2900, num_steps=3000)
    with pytest.raises(OSError, match=r"could not be saved \(No space left on device\); it needs \d+ bytes") as caught:
        save_replay([ring], small_disk / "replay")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(small_disk / "replay")
    assert "\n" not in str(caught.value)
    assert not any(path.stat().st_size for path in (small_disk / "replay").iterdir())


def test_a_replay_takes_the_space_of_what_is_stored(small_disk):
    ring = ring_at(10, num_steps=3000)  # whole, it would not fit
    free = os.statvfs(small_disk).f_bavail
    save_replay([ring], small_disk / "replay")
    assert (free - os.statvfs(small_disk).f_bavail) * 4096 < 40_000
    assert check_folder(small_disk / "replay")[0].head == 10


def test_a_disk_that_others_fill_up_keeps_what_was_stored(small_disk):
    ring = ring_at(10, True, num_steps=500)
    save_replay([ring], small_disk / "replay")
    other = small_disk / "other"
    other.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 8192))
    writers.write_episodes(ring, 900, begin=0)
    with pytest.raises(OSError, match="No space left"):
        save_replay([ring], small_disk / "replay")
    assert load_replay(small_disk / "replay").rings
    other.unlink()
    save_replay([ring], small_disk / "replay")
    assert check_folder(small_disk / "replay")[0].head == 910


def test_a_limit_of_file_sizes(tmp_path):
    ring, before = ring_at(10, num_steps=3000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be saved \(File too large\); it needs \d+ bytes"):
            save_replay([ring], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("calls", range(8))
def test_a_disk_that_gets_full_in_the_middle(tmp_path, monkeypatch, calls):
    ring = ring_at(100)
    save_replay([ring], tmp_path)
    writers.write_episodes(ring, 30, begin=0)
    left, write = iter(range(calls)), storage._write

    def full(fd, array, offset):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, array, offset)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write", full)
        with pytest.raises(OSError, match="No space left on device"):
            save_replay([ring], tmp_path, chunk_bytes=2 * LANES * ring.layout.row_bytes)
    [stored] = check_folder(tmp_path)
    assert stored.head - stored.first >= STEPS - 1 - STEPS // 8
    save_replay([ring], tmp_path)
    assert check_folder(tmp_path)[0].head == 130


# -- other shapes --------------------------------------------------------------------------------------------------


def draws(rings, count=4000):
    batch = ReplayMemory(rings, 0).sample(1, count)
    return {(tuple(row[:2].tolist()), tuple(after.tolist())) for row, after in zip(batch.obs[0], batch.next_obs[0])}


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("head", [30, 3 * STEPS + 7])
def test_rings_of_other_shapes_hold_the_same_rows(tmp_path, head, same_step):
    rings = [ring_at(head, same_step), ring_at(head + 1, same_step, 30, 2)]
    save_replay(rings, tmp_path)
    opened = load_replay(tmp_path).open_rings()
    for stored, ring in zip(load_replay(tmp_path).rings, opened):
        rows = ring.rows[: ring.head - 1]
        assert ring.head - 1 == stored.head - stored.first
        assert ring.readable() == (0, ring.head - 1)
        check_rows(
            rows,
            ring.layout,
            stored.first,
            ring.num_lanes,
            lambda index, ring=ring: (ring.finals[index % ring.num_finals], ring.finals_intact(index)),
        )
    # All that could be drawn still can, and no more than the oldest and the last steps are added.
    known, found = draws(rings), draws(opened)
    assert known <= found
    assert {place for place, _ in found - known} <= {
        tuple(ring.rows[step % ring.num_steps, lane, :2].tolist())
        for ring in rings
        for step in (ring.head - 1, ring.head - ring.num_steps + 1)
        for lane in range(ring.num_lanes)
    }


def test_an_end_in_the_last_step_is_drawn_and_an_open_episode_is_not(tmp_path):
    ring = ring_of_lanes(
        [[([0, 0], FIRST, None), ([0, 1], TERMINATED, None)], [([1, 0], FIRST, None), ([1, 1], 0, None)]],
        num_steps=8,
    )
    save_replay([ring], tmp_path)
    [opened] = load_replay(tmp_path).open_rings()
    assert {place for place, _ in draws([opened], 100)} == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)}


def test_lost_final_observations_stay_lost(tmp_path):
    ring = LaneRing(RowLayout(2, 1, has_finals=True), 32, 1)
    for step in range(60):  # an end at every step asks for more entries than there are
        write_step(ring, [[step, 0]], [TERMINATED | FIRST], {0: [-step, 1]})
    save_replay([ring], tmp_path)
    opened = load_replay(tmp_path).open_rings()
    for found in (draws([ring], 500), draws(opened, 500)):
        assert all(after == (-place[0], 1.0) for place, after in found)
        assert len(found) in (7, 6)
    assert draws([ring], 500) <= draws(opened, 500)


def test_the_newest_rows_only(tmp_path):
    save_replay([ring_at(100), ring_at(50), ring_at(4)], tmp_path)
    replay = load_replay(tmp_path)
    opened = replay.open_rings(capacity=9 * 10 + 5)
    assert [ring.head - 1 for ring in opened] == [10, 10, 4]
    check_rows(opened[0].rows[:10], replay.layout, 90, LANES)
    with pytest.raises(ConfigError, match="capacity of 8 is less than one step of the 9 lanes"):
        replay.open_rings(capacity=8)


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(match, function, *args):
    with pytest.raises(ConfigError, match=match) as caught:
        function(*args)
    assert "\n" not in str(caught.value)


def edited(folder, **changes):
    """Folder of a small replay whose header is changed; a change is a function of the old value, or the new value."""
    save_replay([ring_at(50, True)], folder)
    header = json.loads((folder / "replay.json").read_text())
    for name, value in changes.items():
        header[name] = value(header[name]) if callable(value) else value
    (folder / "replay.json").write_text(json.dumps(header))
    return folder


def test_folders_that_hold_no_whole_replay(tmp_path):
    refused("nowhere is no folder", load_replay, tmp_path / "nowhere")
    refused("no complete replay .DONE is missing.", load_replay, tmp_path)
    refused(r"replay.json is of format 9, this version reads 1", load_replay, edited(tmp_path / "a", format=9))
    refused("rows are big-endian", load_replay, edited(tmp_path / "b", byteorder="big"))
    refused("replay.json is damaged", load_replay, edited(tmp_path / "c", rings=[{}]))
    refused("replay.json is damaged", load_replay, edited(tmp_path / "d", rings=[]))
    folder = edited(tmp_path / "e", layout=lambda old: {**old, "fields": {"obs": [0, 1]}})
    refused("numbers contradict each other", load_replay, folder)
    folder = edited(tmp_path / "f", rings=lambda old: [{**old[0], "first": 3}])
    refused("numbers contradict each other", load_replay, folder)
    folder = edited(tmp_path / "g", rings=lambda old: [{**old[0], "rows": "../ring"}])
    refused("numbers contradict each other", load_replay, folder)
    for i, name in enumerate(("ring_0.rows", "ring_0.finals")):
        folder = edited(tmp_path / f"h{i}")
        size = (folder / name).stat().st_size
        os.truncate(folder / name, size - 4)
        refused(f"{name} has {size - 4} of {size} bytes", load_replay, folder)
        (folder / name).unlink()
        refused(f"{name} is missing", load_replay, folder)
    folder = edited(tmp_path / "i")
    (folder / "replay.json").write_text("{")
    refused("replay.json cannot be read", load_replay, folder)
    (folder / "replay.json").unlink()
    refused("replay.json cannot be read .No such file", load_replay, folder)


def test_rows_of_another_task(tmp_path):
    save_replay([LaneRing(RowLayout(4, 2, 3), 8, 1)], tmp_path)
    replay = load_replay(tmp_path)
    replay.check_fits(RowLayout(4, 2, 3))
    text = "4 observations, 3 states and 2 actions without final observations, this task has rows of "
    refused(text + "5 observations, 3 states and 2 actions without", replay.check_fits, RowLayout(5, 2, 3))
    refused(text + "4 observations and 2 actions with final", replay.check_fits, RowLayout(4, 2, 0, True))
    refused(text, replay.restore, [LaneRing(RowLayout(4, 1, 3), 8, 1)])


@pytest.mark.parametrize("shapes", [[(8, 1)], [(8, 1), (9, 1)], [(8, 2), (8, 1)]])
def test_rings_of_another_shape(tmp_path, shapes):
    layout = RowLayout(2, 1)
    save_replay([LaneRing(layout, 8, 1)] * 2, tmp_path)
    others = [LaneRing(layout, *shape) for shape in shapes]
    text = r"has 2 ring\(s\) of 8 steps x 1 lanes, this run has "
    refused(text, save_replay, others, tmp_path)
    refused(text, load_replay(tmp_path).restore, others)


def test_rings_that_are_in_use_are_not_filled(tmp_path):
    save_replay([ring_at(5)], tmp_path)
    with pytest.raises(ValueError, match="nothing was written"):
        load_replay(tmp_path).restore([ring_at(1)])


@pytest.mark.parametrize("head", [99, 101])
def test_the_folder_of_another_run(tmp_path, head):
    save_replay([ring_at(100)], tmp_path)
    other = writers.episode_ring(-1, STEPS, LANES, False)
    writers.write_episodes(other, head, life=1)
    refused("holds the replay of another run", save_replay, [other], tmp_path)
    assert check_folder(tmp_path)[0].head == 100


def test_two_at_once(tmp_path):
    ring = ring_at(20)
    save_replay([ring], tmp_path)
    replay = load_replay(tmp_path)
    with storage._locked(tmp_path, exclusive=True):
        refused("is being read or written by another process", save_replay, [ring], tmp_path)
        refused("is being read or written by another process", replay.open_rings)
    with storage._locked(tmp_path, exclusive=False):
        refused("is being read or written by another process", save_replay, [ring], tmp_path)
        replay.open_rings()
    writers.write_episodes(ring, 1, begin=0)
    save_replay([ring], tmp_path)
    refused("saved anew since it was looked at", replay.open_rings)


def test_an_empty_replay_is_no_experience(tmp_path):
    save_replay([ring_at(0)], tmp_path)
    refused("is empty", load_replay(tmp_path).open_rings)
    assert isinstance(load_replay(tmp_path), StoredReplay)
    with pytest.raises(ValueError, match="at least one ring"):
        save_replay([], tmp_path)


# -- other shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("shapes", [[(40, 3)], [(100, 1)], [(30, 2), (30, 2)], [(9, 5)]])
def test_rows_are_dealt_to_rings_of_other_shapes(tmp_path, shapes, same_step):
    """Every sample from there was one where it came from, and the newest rows are among them."""
    rings = [made_ring(50, lanes, 70, same_step, seed) for seed, lanes in enumerate((2, 2))]
    save_replay(rings, tmp_path)
    dealt = [LaneRing(rings[0].layout, *shape) for shape in shapes]
    load_replay(tmp_path).deal(dealt)
    before, after = (samples_of(each) for each in (rings, dealt))
    # A terminated row that was the newest had no successor yet, and needs none.
    assert after and all(next_obs == (0.0, 0.0, 0.0) for _, next_obs in after - before)
    room = sum(steps * lanes for steps, lanes in shapes)
    if room > 300:
        assert len(after) > 0.9 * len(before)
    with pytest.raises(ValueError):
        load_replay(tmp_path).deal(dealt)


def made_ring(num_steps, num_lanes, head, same_step, seed):
    """A ring with ends, whose every number is its own."""
    rng = np.random.default_rng(seed)
    ring = LaneRing(RowLayout(3, 1, has_finals=same_step), num_steps, num_lanes)
    for _ in range(head):
        flags = rng.choice([0, 0, 0, TERMINATED, FIRST], num_lanes)
        if same_step:
            flags = np.where(flags == TERMINATED, TERMINATED | HAS_FINAL, flags)
        finals = {lane: rng.random(3) for lane in range(num_lanes) if flags[lane] & HAS_FINAL}
        write_step(ring, rng.random((num_lanes, 3)), flags, finals)
    return ring


def samples_of(rings):
    """{(observation, next observation)} that can be drawn; a terminated row has none where no final one is kept."""
    batch = ReplayMemory(rings, 0).sample(1, 20_000)
    ended = batch.terminated[0] & (not rings[0].layout.has_finals)
    next_obs = batch.next_obs[0] * ~ended[:, None]
    return {(tuple(a), tuple(b)) for a, b in zip(batch.obs[0].tolist(), next_obs.tolist(), strict=True)}


def test_a_discarded_replay_is_gone_and_nothing_else(tmp_path):
    rings = [made_ring(50, 2, 70, True, 0)]
    save_replay(rings, tmp_path, run="a")
    assert load_replay(tmp_path).run == "a"
    (tmp_path / "mine").write_text("kept")
    discard_replay(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} <= {"mine", "LOCK", "lock"}
    save_replay([made_ring(20, 1, 9, False, 1)], tmp_path, run="b")  # of any other shape
    assert load_replay(tmp_path).run == "b"
    discard_replay(tmp_path / "nowhere")
