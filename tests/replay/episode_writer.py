"""Writer process at full speed whose every row is known: ``python episode_writer.py FD COUNT SIZES...``."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from claw_lightning.rollout.ring import BORDER, FIRST, HAS_FINAL, TERMINATED, TRUNCATED, LaneRing, RowLayout

PERIOD = 7  # steps from one first step to the next


def positions(step, lane):
    """Steps since the first step of the episode."""
    return (step + 3 * lane) % PERIOD


def is_cut(lane):
    """Lanes whose episodes stop without an end, as if the worker was restarted."""
    return lane % 3 == 2


def open_ring(fd, obs_size, num_steps, num_lanes, same_step):
    return LaneRing(RowLayout(obs_size, 1, has_finals=bool(same_step)), num_steps, num_lanes, fd)


def play(fd, count, obs_size, num_steps, num_lanes, same_step):
    """Every float of a row is step * num_lanes + lane, its final observation minus that."""
    ring = open_ring(fd, obs_size, num_steps, num_lanes, same_step)
    lanes, view = np.arange(num_lanes), ring.layout.view
    ended = np.where(lanes % 2 == 0, TERMINATED, TRUNCATED) | (HAS_FINAL if same_step else 0)
    for step in range(count):
        position, rows = positions(step, lanes), ring.slot()
        ends = ~is_cut(lanes) & (position == (PERIOD - 1 if same_step else PERIOD - 2))
        flags = np.where(position == 0, FIRST, 0) | np.where(ends, ended, 0)
        if not same_step:
            flags |= np.where(~is_cut(lanes) & (position == PERIOD - 1), BORDER, 0)
        number = (step * num_lanes + lanes).astype(np.float32)[:, None]
        rows[:] = number
        if same_step:
            view(rows, "final_index")[ends] = ring.write_finals(np.tile(-number[ends], obs_size))
        view(rows, "flags")[:] = flags
        ring.publish()


if __name__ == "__main__":
    play(*map(int, sys.argv[1:]))
