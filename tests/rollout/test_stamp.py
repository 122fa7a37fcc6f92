"""Stamp: rows written in one pass hold what field by field would, and a sum tells what is not finite."""

import numpy as np
import pytest

from claw_lightning.rollout.ring import RowLayout
from claw_lightning.rollout.stamp import Stamp, all_finite

LAYOUTS = {
    "plain": RowLayout(5, 2),
    "states": RowLayout(5, 2, 3),
    "finals": RowLayout(5, 2, has_finals=True),
    "pixels": RowLayout(5, 2, image_shape=(1, 3, 3)),
    "pixels alone": RowLayout(0, 1, image_shape=(1, 2, 2)),
    "compressed": RowLayout(5, 2, 3, image_shape=(1, 3, 3), image_codec="zlib"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_hold_every_field_and_keep_their_image(name):
    layout, rng = LAYOUTS[name], np.random.default_rng(0)
    lanes, stamp = 4, Stamp(LAYOUTS[name], 4)
    written = rng.integers(-(2**31), 2**31, (lanes, layout.words)).astype(np.int32).view(np.float32)  # NaN of all sorts
    before = written.copy()
    obs = rng.standard_normal((lanes, layout.obs_size)).astype(np.float32)
    states = rng.standard_normal((lanes, layout.states_size)).astype(np.float32) if layout.states_size else None
    given = {}
    for field in layout.fields:
        if field in ("obs", "states", "image", "image_place"):
            continue
        values = rng.integers(-3, 99, stamp[field].shape)
        stamp[field][:] = given[field] = values.astype(stamp[field].dtype)
    stamp.write(written, obs, states)
    for field in layout.fields:
        found = layout.view(written, field)
        if field in ("image", "image_place"):
            np.testing.assert_array_equal(found, layout.view(before, field))
        else:
            np.testing.assert_array_equal(found, {"obs": obs, "states": states, **given}[field])
    floats = sorted(f for f in layout.fields if f in ("action", "reward", "log_prob_action", "log_prob_option"))
    assert stamp.floats.shape[1] == sum(layout.span(f)[1] - layout.span(f)[0] for f in floats)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(bad):
    for part in range(2):
        for column in range(3):
            parts = [np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)]
            parts[part][2, column] = bad
            np.testing.assert_array_equal(all_finite(parts[0], None, parts[1]), [True, True, False, True])


def test_opposite_infinities_do_not_cancel():
    assert not all_finite(np.array([[np.inf, -np.inf]], np.float32)).any()
    assert not all_finite(np.array([[np.inf]], np.float32), np.array([[-np.inf]], np.float32)).any()


def test_the_largest_numbers_are_finite():
    largest = np.finfo(np.float32).max
    assert all_finite(np.full((1, 4096), largest), np.full((1, 4096), -largest)).all()


def test_of_rows_without_numbers_all_are_finite():
    assert all_finite(np.zeros((2, 0), np.float32)).all()
