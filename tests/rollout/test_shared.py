"""Blocks are shared by descriptor, in memory or in a file, and give their space back."""

import errno
import gc
import logging
import os
import stat

import numpy as np
import pytest

from claw_lightning.rollout.ring import LaneRing, RowLayout
from claw_lightning.rollout.shared import SharedBlock, reserve
from tests.builders import start_writer


def test_two_mappings_see_the_same_bytes():
    block = SharedBlock(4096)
    other = SharedBlock(4096, os.dup(block.fd))
    block.array(np.float32, (4,), 16)[:] = 7.0
    assert other.array(np.float32, (4,), 16).tolist() == [7.0] * 4


def test_a_forgotten_block_gives_its_descriptor_back():
    block = SharedBlock(4096)
    fd = block.fd
    del block
    gc.collect()
    duplicate = os.dup(0)  # takes the lowest free number
    assert duplicate <= fd
    os.close(duplicate)


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """A folder of the temporary files' disk, and one of a tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    path = f"/dev/shm/claw-test-{os.getpid()}"
    try:
        os.mkdir(path)
    except OSError:
        pytest.skip("no /dev/shm here")
    yield type(tmp_path)(path)
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


def free_bytes(folder):
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize


def test_a_file_is_unlinked_at_once_and_its_space_is_reserved(folder):
    block = SharedBlock(10_000_000, path=str(folder / "replay"))
    assert os.listdir(folder) == []
    assert os.fstat(block.fd).st_size == 10_000_000
    assert 512 * os.fstat(block.fd).st_blocks >= 10_000_000
    assert not os.get_inheritable(block.fd)
    other = SharedBlock(10_000_000, os.dup(block.fd))
    block.array(np.int64, (2,), 8_000_000)[:] = 5
    assert other.array(np.int64, (2,), 8_000_000).tolist() == [5, 5]
    assert not other.array(np.uint8, (8_000_000,)).any()


def test_a_file_may_be_kept(folder):
    path = folder / "replay"
    block = SharedBlock(8192, path=str(path), keep=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    block.array(np.float32, (4,))[:] = 7.0
    assert np.fromfile(path, np.float32, 4).tolist() == [7.0] * 4


def test_a_file_that_exists_is_not_touched(folder):
    path = folder / "replay"
    path.write_text("of another run")
    with pytest.raises(FileExistsError, match="is there already; it may be another run's") as caught:
        SharedBlock(4096, path=str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "of another run"


@pytest.mark.parametrize("keep", [False, True])
def test_a_disk_without_room_is_told_and_nothing_is_left(tmp_path, keep):
    size = free_bytes(tmp_path) + 2**40
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        OSError, match=rf"needs {size} bytes, {size} of them new, and \d+ are free \(No space"
    ) as caught:
        SharedBlock(size, path=str(tmp_path / "replay"), keep=keep)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SharedBlock(4096, path=str(tmp_path / "nowhere" / "replay"))


def test_a_file_system_that_cannot_reserve(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with caplog.at_level(logging.WARNING):
        block = SharedBlock(4096, path=str(tmp_path / "replay"))
    assert block.array(np.uint8, (4096,)).sum() == 0
    assert "cannot reserve space; if it fills up, the run dies by SIGBUS" in caplog.text


def test_reserving_keeps_what_is_there(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"claw")
        file.flush()
        assert reserve(file.fileno(), 100_000, file.name)
        assert reserve(file.fileno(), 100_000, file.name)
    assert (tmp_path / "file").read_bytes() == b"claw" + bytes(99_996)


def test_a_worker_writes_into_a_ring_in_a_file(folder):
    ring = LaneRing(RowLayout(3, 1), 64, 4, path=str(folder / "ring"))
    with start_writer("ring", ring.block.fd, 100, 3, 64, 4) as writer:
        assert writer.wait(60) == 0
    assert ring.head == 100
    steps = np.arange(36, 100)
    expected = (steps[:, None] * 4 + np.arange(4))[:, :, None]
    assert (ring.rows[steps % 64].view(np.int32) == expected).all()
    assert os.listdir(folder) == []
