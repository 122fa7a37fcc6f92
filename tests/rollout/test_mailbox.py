"""Mailbox: newest parameters, never torn, version belongs to values."""

import os

import numpy as np
import pytest

from claw_lightning.rollout.mailbox import Mailbox
from tests.builders import PATIENCE, start_writer

SIZE = 5


def test_read_gives_the_newest_once():
    mailbox = Mailbox(SIZE)
    assert mailbox.sequence == 0 and mailbox.read() is None
    seen = 0
    for version in (10, 20, 30):
        mailbox.publish(np.full(SIZE, version, np.float32), version)
        seen, got, values = mailbox.read(seen)
        assert got == version and (values == version).all()
        assert mailbox.read(seen) is None
    assert seen == mailbox.sequence == 3


def test_a_slow_reader_skips_versions_and_owns_its_copy():
    mailbox = Mailbox(SIZE)
    mailbox.publish(np.full(SIZE, 1, np.float32), 1)
    _, _, kept = mailbox.read()
    for version in (2, 3):
        mailbox.publish(np.full(SIZE, version, np.float32), version)
    assert (kept == 1).all()
    assert mailbox.read(1)[:2] == (3, 3)


@pytest.mark.parametrize("shape", [(SIZE + 1,), (SIZE - 1,), (1, SIZE), ()])
def test_another_size_is_refused_and_changes_nothing(shape):
    mailbox = Mailbox(SIZE)
    with pytest.raises(ValueError, match="5 values"):
        mailbox.publish(np.zeros(shape, np.float32), 1)
    assert mailbox.sequence == 0


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])  # around the page that the slots are padded to
def test_slots_do_not_overlap(size):
    mailbox = Mailbox(size)
    other = Mailbox(size, os.dup(mailbox.block.fd))
    for version in (1, 2, 3):
        mailbox.publish(np.arange(size, dtype=np.float32) + version, version)
        np.testing.assert_array_equal(other.read(version - 1)[2], np.arange(size) + version)
    assert {float(values[0]) for values in mailbox._values} == {2.0, 3.0}  # the older one is whole too


def test_a_reader_that_is_overtaken_each_time_gives_up():
    mailbox = Mailbox(SIZE)
    mailbox.publish(np.zeros(SIZE, np.float32), 1)

    class Overtaking(np.ndarray):
        def copy(self, order="C"):
            mailbox.publish(np.zeros(SIZE, np.float32), 2)
            return np.asarray(self).copy()

    mailbox._values = [values.view(Overtaking) for values in mailbox._values]
    assert mailbox.read(attempts=3) is None
    assert mailbox.sequence == 4


@pytest.mark.timeout(PATIENCE)
def test_no_torn_letter_from_a_writer_at_full_speed():
    size, count = 5000, 40_000
    mailbox = Mailbox(size)
    letters, torn, seen = 0, 0, 0
    with start_writer("mailbox", mailbox.block.fd, count, size) as writer:
        while seen < count:
            letter = mailbox.read(seen)
            if letter is None:
                assert writer.poll() is None or mailbox.sequence == count
                continue
            sequence, version, values = letter
            assert sequence > seen
            seen, letters = sequence, letters + 1
            torn += int(version != sequence or (values != version).any())
    assert writer.returncode == 0
    assert letters > 0 and torn == 0
