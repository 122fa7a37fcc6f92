"""ReplayBatch: fields out of packed rows."""

import numpy as np
import torch

from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.ring import FIRST, INTEGER_FIELDS, SWITCHED, TERMINATED, TRUNCATED, RowLayout

LAYOUT = RowLayout(4, 2, 3, True)
VECTORS = {"obs": 4, "states": 3, "action": 2}


def make_batch(num_updates=2, batch_size=5):
    """Batch and what every field of it should be."""
    rows, rng, expected = np.zeros((num_updates, batch_size, LAYOUT.words), np.float32), np.random.default_rng(0), {}
    for name in LAYOUT.fields:
        shape = (num_updates, batch_size, VECTORS[name]) if name in VECTORS else (num_updates, batch_size)
        if name in INTEGER_FIELDS:
            expected[name] = rng.integers(-1, 512, shape).astype(np.int32)
        else:
            expected[name] = rng.standard_normal(shape).astype(np.float32)
        LAYOUT.view(rows, name)[...] = expected[name]
    next_obs = torch.randn(num_updates, batch_size, 4)
    return ReplayBatch(torch.from_numpy(rows), next_obs, LAYOUT, (1.0, np.zeros(4), np.zeros(4)), 99), expected


def test_every_field():
    batch, expected = make_batch()
    for name, values in expected.items():
        field = batch.field(name)
        assert field.dtype == (torch.int32 if name in INTEGER_FIELDS else torch.float32)
        np.testing.assert_array_equal(field, values)


def test_named_fields():
    batch, expected = make_batch()
    for name in ("obs", "action", "reward", "version"):
        np.testing.assert_array_equal(getattr(batch, name), expected[name])
    np.testing.assert_array_equal(batch.option, expected["option"])
    assert batch.option.dtype == torch.int64  # an index
    assert len(batch) == 2


def test_flags_become_booleans():
    batch, expected = make_batch(3, 50)
    for name, bit in (("terminated", TERMINATED), ("first", FIRST), ("switched", SWITCHED)):
        values = getattr(batch, name)
        assert values.dtype == torch.bool
        np.testing.assert_array_equal(values, (expected["flags"] & bit) != 0)
    batch.rows[:] = torch.from_numpy(np.full(batch.rows.shape, TRUNCATED, np.int32).view(np.float32))
    assert not batch.terminated.any()  # a time limit is no end of the task


def test_moving_keeps_everything():
    batch, _ = make_batch()
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert torch.equal(moved.rows, batch.rows) and torch.equal(moved.next_obs, batch.next_obs)
    assert (moved.layout, moved.moments, moved.env_steps) == (batch.layout, batch.moments, 99)
