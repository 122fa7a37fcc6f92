"""Writer processes that say in every word what it belongs to: ``python writers.py KIND FD NUMBERS...``.

Also the rows themselves, so that a reader can compare what it got with what was written. A run of a writer until its
death is a life; lives are counted by whoever starts them.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.parent import follow_parent
from claw_lightning.rollout.ring import BORDER, FIRST, HAS_FINAL, TERMINATED, TRUNCATED, LaneRing, RowLayout

OBS_SIZE = 32  # even words: step * lanes + lane; odd words: life * 16 + step within the episode
FOREVER = 2**31


def write_ring(fd: int, count: int, obs_size: int, num_steps: int, num_lanes: int) -> None:
    """Every word of a row is step * num_lanes + lane."""
    ring = LaneRing(RowLayout(obs_size, 1), num_steps, num_lanes, fd)
    lanes = np.arange(num_lanes, dtype=np.int32)[:, None]
    for step in range(count):
        ring.slot().view(np.int32)[:] = lanes + step * num_lanes
        ring.publish()


# -- episodes -----------------------------------------------------------------------------------------------------


def episode_ring(fd: int, num_steps: int, num_lanes: int, same_step: bool) -> LaneRing:
    """Ring for :func:`write_episodes`."""
    return LaneRing(RowLayout(OBS_SIZE, 2, has_finals=bool(same_step)), num_steps, num_lanes, fd)


def last_position(lane):
    """Steps before the last of an episode; next-step autoreset adds a border row."""
    return 3 + lane % 3


def period(lane, same_step):
    """Steps from one first step to the next."""
    return last_position(lane) + (1 if same_step else 2)


def episode_rows(layout: RowLayout, num_lanes: int, step, lane, life, position) -> np.ndarray:
    """Rows [M, W] of steps, lanes, lives and positions in the episode, each [M]; final_index is -1."""
    rows, view = np.zeros((len(step), layout.words), np.float32), layout.view
    number, code = step * num_lanes + lane, np.asarray(life) * 16 + position
    view(rows, "obs")[:, 0::2] = number[:, None]
    view(rows, "obs")[:, 1::2] = code[:, None]
    for name, value in {"reward": number, "log_prob_action": code, "log_prob_option": number, "option": lane}.items():
        view(rows, name)[:] = value
    view(rows, "action")[:] = number[:, None]
    for name, value in {"previous_option": life, "option_age": position, "version": step}.items():
        view(rows, name)[:] = value
    ended = np.where(lane % 2 == 0, TERMINATED, TRUNCATED) | (HAS_FINAL if layout.has_finals else 0)
    flags = np.where(position == 0, FIRST, 0) | np.where(position == last_position(lane), ended, 0)
    view(rows, "flags")[:] = flags | np.where(position > last_position(lane), BORDER, 0)
    if layout.has_finals:
        view(rows, "final_index")[:] = -1
    return rows


def write_episodes(ring: LaneRing, count: int, life: int = 0, linger: float = 0.0, begin: int = -1) -> None:
    """Write steps from the head on.

    A life opens episodes in all lanes at step ``begin``, by default the head. ``linger`` seconds pass within each step.
    """
    lanes, same_step = np.arange(ring.num_lanes), ring.layout.has_finals
    begin = ring.head if begin < 0 else begin
    for step in range(ring.head, ring.head + count):
        position = (step - begin) % period(lanes, same_step)
        rows = episode_rows(ring.layout, ring.num_lanes, np.full(len(lanes), step), lanes, life, position)
        slot, half = ring.slot(), ring.layout.words // 2
        slot[:, half:] = rows[:, half:]
        if linger:
            time.sleep(linger / 2)
        ends = np.flatnonzero(position == last_position(lanes))
        if same_step and len(ends):
            finals = -rows[ends, :OBS_SIZE]
            entries = np.arange(ring.finals_written, ring.finals_written + len(ends)) % ring.num_finals
            ring.finals[entries, OBS_SIZE // 2 :] = finals[:, OBS_SIZE // 2 :]
            if linger:
                time.sleep(linger / 2)
            ring.layout.view(rows, "final_index")[ends] = ring.write_finals(finals)
        slot[:] = rows
        if linger:
            time.sleep(linger / 2)
        ring.publish()


def live_episodes(fd: int, count: int, num_steps: int, num_lanes: int, same_step: int) -> None:
    """One life at full speed."""
    write_episodes(episode_ring(fd, num_steps, num_lanes, bool(same_step)), count)


def die_in_episodes(fd: int, lives: int, num_steps: int, num_lanes: int, same_step: int) -> None:
    """Lives that are killed at random moments, nearly always within a step; fails if few of them left half a step."""
    ring, halves = episode_ring(fd, num_steps, num_lanes, bool(same_step)), 0
    for _ in killed_children(lives, lambda life: write_episodes(ring, FOREVER, life, 0.0005), lambda: ring.head):
        # The second half of the words is of the step at the head, the first half of the one that lay there before.
        slot, view = ring.slot(), ring.layout.view
        complete = view(slot, "obs")[:, 0] == ring.head * num_lanes + np.arange(num_lanes)
        halves += int((view(slot, "version") == ring.head).all() and not complete.any())
    assert halves > lives // 8, "%d of %d" % (halves, lives)


# -- images -------------------------------------------------------------------------------------------------------

IMAGE_SHAPE = (1, 8, 16)


def image_of(number) -> np.ndarray:
    """Image of the row ``step * num_lanes + lane``, uint8 [8, 16]; every eighth cannot be compressed."""
    return ((np.arange(128) // (1 + number % 8) * 37 + number) % 256).astype(np.uint8).reshape(8, 16)


def image_ring(fd: int, num_steps: int, num_lanes: int) -> LaneRing:
    """Ring for :func:`write_images`, with an arena for a part of its steps only."""
    layout = RowLayout(1, 1, image_shape=IMAGE_SHAPE, image_codec="zlib", image_bytes=12)
    return LaneRing(layout, num_steps, num_lanes, fd)


def write_images(ring: LaneRing, count: int) -> None:
    """One endless episode from the head on; the observation is the row's number."""
    for step in range(ring.head, ring.head + count):
        numbers = step * ring.num_lanes + np.arange(ring.num_lanes)
        rows = ring.slot()
        rows[:] = 0.0
        ring.layout.view(rows, "obs")[:] = numbers[:, None]
        ring.write_images(np.stack([image_of(number)[None] for number in numbers]))
        ring.publish()


def live_images(fd: int, count: int, num_steps: int, num_lanes: int) -> None:
    """At full speed."""
    write_images(image_ring(fd, num_steps, num_lanes), count)


# -- letters ------------------------------------------------------------------------------------------------------


def write_mailbox(fd: int, count: int, size: int) -> None:
    """Every value is the version."""
    mailbox = Mailbox(size, fd)
    for version in range(mailbox.sequence + 1, mailbox.sequence + 1 + count):
        mailbox.publish(np.full(size, version, np.float32), version)


def die_in_mailbox(fd: int, lives: int, size: int) -> None:
    """Writers that are killed at random moments; fails if none of them left half a letter in the idle slot."""
    mailbox, halves = Mailbox(size, fd), 0
    for _ in killed_children(lives, lambda life: write_mailbox(os.dup(fd), FOREVER, size), lambda: mailbox.sequence):
        idle = (mailbox.sequence + 1) & 1
        halves += int((mailbox._values[idle] != mailbox._versions[idle][0]).any())
    assert halves > 0


def killed_children(lives: int, work, progress):
    """Fork children that do ``work(life)``, kill each a moment after some progress, and yield when it has gone."""
    moments = random.Random(0)
    for life in range(lives):
        child = os.fork()
        if child == 0:
            try:
                follow_parent()
                work(life)
            finally:
                os._exit(1)
        target = progress() + moments.randint(1, 6)
        while progress() < target:
            time.sleep(0.0002)
        time.sleep(moments.uniform(0.0, 0.001))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield life


KINDS = {
    "ring": write_ring,
    "mailbox": write_mailbox,
    "episodes": live_episodes,
    "dying_episodes": die_in_episodes,
    "images": live_images,
    "dying_mailbox": die_in_mailbox,
}

if __name__ == "__main__":
    follow_parent()  # whoever ends the tests ends the writers
    KINDS[sys.argv[1]](*map(int, sys.argv[2:]))
