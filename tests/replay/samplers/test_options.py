"""OptionSegments: the beginnings of options, all alike."""

import numpy as np
import pytest

from claw_lightning.replay.samplers.options import OptionSegments
from claw_lightning.rollout.ring import SWITCHED
from tests.replay.samplers.driver import Driver, check_frequencies, counted, wrapped


def wrapped_with_beginnings():
    driver = Driver(OptionSegments(), ((24, 3), (40, 1), (16, 2)))
    for ring in range(3):
        driver.write(ring, 1, flags=SWITCHED)
    for _ in range(31):
        for ring, steps in enumerate((3, 2, 1)):
            driver.write(ring, steps)
        driver.draw(5)
    return driver


def test_beginnings_are_drawn_alike_and_nothing_else_is():
    driver = wrapped_with_beginnings()
    rows, flags, _, _ = driver.usable_rows()
    places = driver.sampler.draw(driver.stored(), 40_000, driver.rng)
    check_frequencies(counted(places, rows), ((flags & SWITCHED) != 0).astype(float))


def test_beginnings_leave_with_their_rows():
    driver = Driver(OptionSegments(), ((12, 2),))
    driver.write(0, 6, flags=SWITCHED)
    assert set(driver.draw(100).step.tolist()) == set(range(5))
    driver.write(0, 8, flags=0)
    assert set(driver.draw(100).step.tolist()) == set(range(4, 6))
    driver.write(0, 2, flags=0)
    driver.follow()
    with pytest.raises(RuntimeError, match=r"^replay: nothing to sample yet: .* option began"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)


def test_steps_that_were_never_seen_hold_nothing():
    driver = wrapped_with_beginnings()
    driver.write(0, 200, flags=0)
    assert set(driver.draw(300).ring.tolist()) == {1, 2}


def test_what_was_followed_beyond_the_span_is_not_drawn():
    driver = wrapped(OptionSegments())
    stored = driver.stored()
    spans = [(first, last - 3) for first, last in stored.spans]
    places = driver.sampler.draw(stored._replace(spans=spans), 2000, driver.rng)
    assert (places.step < np.array(spans)[places.ring, 1]).all()


def test_it_asks_for_segments_within_an_option():
    sampler = OptionSegments()
    assert sampler.follows and sampler.within_option and sampler.needs_segments and not sampler.wants_errors
