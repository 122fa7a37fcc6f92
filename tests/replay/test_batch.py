"""ReplayBatch: fields out of packed rows."""

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.ring import BY_CAP, FIRST, INTEGER_FIELDS, SWITCHED, TERMINATED, TRUNCATED, RowLayout

LAYOUT = RowLayout(4, 2, 3, True)
VECTORS = {"obs": 4, "states": 3, "action": 2}
SHAPES = [(2, 5), (2, 5, 3)]  # single rows, segments


def make_batch(*shape):
    """Batch of [U, B] single rows or [U, B, L] segments, and what every field of it should be."""
    lead = shape or (2, 5)
    rows, rng, expected = np.zeros((*lead, LAYOUT.words), np.float32), np.random.default_rng(0), {}
    for name in LAYOUT.fields:
        shape = (*lead, VECTORS[name]) if name in VECTORS else lead
        if name in INTEGER_FIELDS:
            expected[name] = rng.integers(-1, 512, shape).astype(np.int32)
        else:
            expected[name] = rng.standard_normal(shape).astype(np.float32)
        LAYOUT.view(rows, name)[...] = expected[name]
    valid = torch.from_numpy(rng.random(lead) < 0.5) if len(lead) == 3 else None
    moments = (1.0, np.zeros(4), np.zeros(4))
    return ReplayBatch(torch.from_numpy(rows), torch.randn(*lead, 4), LAYOUT, moments, 99, valid), expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_field(shape):
    batch, expected = make_batch(*shape)
    for name, values in expected.items():
        field = batch.field(name)
        assert field.dtype == (torch.int32 if name in INTEGER_FIELDS else torch.float32)
        np.testing.assert_array_equal(field, values)


@pytest.mark.parametrize("shape", SHAPES)
def test_named_fields(shape):
    batch, expected = make_batch(*shape)
    for name in ("obs", "action", "reward", "version", "option_age", "log_prob_action", "log_prob_option"):
        np.testing.assert_array_equal(getattr(batch, name), expected[name])
    for name in ("option", "previous_option"):
        np.testing.assert_array_equal(getattr(batch, name), expected[name])
        assert getattr(batch, name).dtype == torch.int64  # an index
    assert len(batch) == 2


@pytest.mark.parametrize("shape", [(3, 50), (3, 50, 4)])
def test_flags_become_booleans(shape):
    batch, expected = make_batch(*shape)
    named = {"terminated": TERMINATED, "truncated": TRUNCATED, "first": FIRST, "switched": SWITCHED}
    for name, bit in {**named, "ended_by_cap": BY_CAP}.items():
        values = getattr(batch, name)
        assert values.dtype == torch.bool
        np.testing.assert_array_equal(values, (expected["flags"] & bit) != 0)
    batch.rows[:] = torch.from_numpy(np.full(batch.rows.shape, TRUNCATED, np.int32).view(np.float32))
    assert batch.truncated.all() and not batch.terminated.any()  # a time limit is no end of the task


@pytest.mark.parametrize("shape", SHAPES)
def test_moving_keeps_everything(shape):
    batch, _ = make_batch(*shape)
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert torch.equal(moved.rows, batch.rows) and torch.equal(moved.next_obs, batch.next_obs)
    assert (moved.layout, moved.moments, moved.env_steps) == (batch.layout, batch.moments, 99)


def test_moving_takes_the_valid_steps_along():
    batch, _ = make_batch(2, 5, 3)
    assert batch.to("meta").valid.device.type == batch.to("meta").rows.device.type == "meta"
    assert make_batch()[0].to("meta").valid is None


def test_no_previous_option_is_minus_one():
    batch, _ = make_batch(2, 5, 3)
    LAYOUT.view(batch.rows.numpy(), "previous_option")[:] = -1  # all bits set, which is NaN as a float
    assert (batch.to("cpu").previous_option == -1).all()
