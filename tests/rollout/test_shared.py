"""Blocks are shared by descriptor and give their memory back."""

import gc
import os

import numpy as np

from claw_lightning.rollout.shared import SharedBlock


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
