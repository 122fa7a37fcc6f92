"""Mailbox: newest parameters, never torn, version belongs to values."""

import os

import numpy as np
import pytest

from claw_lightning.rollout.mailbox import Mailbox
from tests.builders import PATIENCE, start_writer
from tests.fakes.writers import FOREVER

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


def test_a_writer_that_dies_within_a_publication():
    mailbox = Mailbox(SIZE)
    mailbox.publish(np.full(SIZE, 1, np.float32), 1)
    idle = (mailbox.sequence + 1) & 1
    mailbox._versions[idle][0] = 2  # a version and half of the values, then the process is gone
    mailbox._values[idle][: SIZE // 2] = 2.0
    sequence, version, values = mailbox.read()
    assert (sequence, version) == (1, 1) and (values == 1).all()
    assert mailbox.read(1) is None

    successor = Mailbox(SIZE, os.dup(mailbox.block.fd))
    successor.publish(np.full(SIZE, 3, np.float32), 3)
    sequence, version, values = mailbox.read(1)
    assert (sequence, version) == (2, 3) and (values == 3).all()


def test_the_number_moves_after_the_letter():
    mailbox, read_within = Mailbox(SIZE), []
    mailbox.publish(np.full(SIZE, 1, np.float32), 1)

    class Peeking(np.ndarray):
        def __setitem__(self, key, value):
            read_within.append(mailbox.read())  # before, within and after the slot is filled
            np.asarray(self)[key] = value
            read_within.append(mailbox.read())

    for slots in (mailbox._versions, mailbox._values):
        slots[:] = [slot.view(Peeking) for slot in slots]
    mailbox.publish(np.full(SIZE, 2, np.float32), 2)
    assert len(read_within) == 4
    assert all(version == 1 and (np.asarray(values) == 1).all() for _, version, values in read_within)


def read_letters(mailbox, writer, done):
    """Read until ``done(letters)``; returns letters and the torn ones among them. The sequence must never go back."""
    letters, torn, last = 0, 0, 0
    while not done(letters):
        letter = mailbox.read()  # also the same again: each read is a chance to be overtaken
        if letter is None:
            # Nothing there yet, or overtaken at each attempt.
            assert writer.poll() is None or mailbox.sequence > 0
            continue
        sequence, version, values = letter
        assert sequence >= last
        last, letters = sequence, letters + 1
        torn += int(version != sequence or (values != version).any())
    return letters, torn


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("size, reads", [(8, 100_000), (5000, 10_000), (200_000, 200)])
def test_no_torn_letter_from_a_writer_at_full_speed(size, reads):
    mailbox = Mailbox(size)
    with start_writer("mailbox", mailbox.block.fd, FOREVER, size) as writer:
        try:
            _, torn = read_letters(mailbox, writer, lambda letters: letters >= reads)
        finally:
            writer.kill()
    assert torn == 0


@pytest.mark.timeout(2 * PATIENCE)
def test_no_torn_letter_from_writers_that_are_killed_within_publications():
    mailbox = Mailbox(100_000)
    with start_writer("dying_mailbox", mailbox.block.fd, 40, mailbox.size) as writer:
        letters, torn = read_letters(mailbox, writer, lambda letters: writer.poll() is not None)
    assert writer.returncode == 0  # some left half a letter
    assert letters > 0 and torn == 0


def test_a_writer_that_fails_halfway_leaves_the_last_letter_current():
    mailbox = Mailbox(SIZE)
    mailbox.publish(np.full(SIZE, 1, np.float32), 1)

    def write(slot):
        slot[: SIZE // 2] = 2
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        mailbox.publish_from(write, 2)
    _, version, values = mailbox.read()
    assert version == 1 and (values == 1).all()
