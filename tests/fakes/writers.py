"""Writer processes at full speed: ``python writers.py ring|mailbox FD COUNT SIZES...``."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing, RowLayout


def write_ring(fd: int, count: int, obs_size: int, num_steps: int, num_lanes: int) -> None:
    """Every word of a row is step * num_lanes + lane."""
    ring = LaneRing(RowLayout(obs_size, 1), num_steps, num_lanes, fd)
    lanes = np.arange(num_lanes, dtype=np.int32)[:, None]
    for step in range(count):
        ring.slot().view(np.int32)[:] = lanes + step * num_lanes
        ring.publish()


def write_mailbox(fd: int, count: int, size: int) -> None:
    """Every value is the version."""
    mailbox = Mailbox(size, fd)
    for version in range(1, count + 1):
        mailbox.publish(np.full(size, version, np.float32), version)


if __name__ == "__main__":
    {"ring": write_ring, "mailbox": write_mailbox}[sys.argv[1]](*map(int, sys.argv[2:]))
