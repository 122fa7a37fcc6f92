"""Recent and Fresh: exact distributions over ages and versions."""

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.recent import Fresh, Recent, _bin_ages
from claw_lightning.rollout.ring import BORDER
from tests.replay.samplers.driver import Driver, check_frequencies, counted, wrapped


def ages(driver, rows):
    """Vector steps since [M]."""
    return np.array([ring.readable()[1] for ring in driver.rings])[rows.ring] - 1 - rows.step


@pytest.mark.parametrize("half_life", [1e-6, 3.0, 60.0, 1e4, 1e15, 1e300])
def test_a_row_halves_its_weight_per_half_life(half_life):
    driver = wrapped(Recent(half_life))
    rows = driver.usable_rows()[0]
    # Six lanes: a vector step of all rings is six environment steps.
    expected = np.exp2(np.maximum(-ages(driver, rows) * 6 / half_life, -1000))
    if half_life < 1:
        driver.write(0, 2, flags=0)  # the newest step must be usable, or nothing would be left
        driver.write(1, 2, flags=0)
        driver.write(2, 2, flags=0)
        rows = driver.usable_rows()[0]
        expected = (ages(driver, rows) == 0).astype(float)
    check_frequencies(counted(driver.draw(50_000), rows), expected)


def test_recent_draws_within_the_spans_only():
    driver = Driver(Recent(50.0), ((16, 2), (20, 1)))
    with pytest.raises(RuntimeError, match="^replay: nothing to sample yet"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)
    driver.write(1, 1)
    with pytest.raises(RuntimeError, match="^replay: nothing to sample yet"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)
    driver.write(0, 2, flags=0)  # the other ring is empty still
    places = driver.draw(50)
    assert set(places.ring.tolist()) == {0}
    assert set(places.step.tolist()) == {0}


def test_the_cost_does_not_depend_on_the_capacity():
    driver = Driver(Recent(1e4), ((16, 2),))
    stored = driver.stored()._replace(spans=[(3 * 10**12, 4 * 10**12)])
    places = driver.sampler.draw(stored, 1000, driver.rng)
    assert 5000 < (4 * 10**12 - places.step).mean() * 2 / np.log2(np.e) < 20_000


@pytest.mark.parametrize("num_steps, num_single", [(1, 4), (3, 4), (500, 4), (10_000, 64), (5_000_000, 64)])
def test_bins_are_short_compared_with_their_age(num_steps, num_single):
    begins = _bin_ages(num_steps, num_single)
    lengths = np.diff(begins, append=num_steps)
    assert begins[0] == 0
    assert (lengths > 0).all()
    assert (lengths <= np.maximum(begins // num_single, 1)).all()
    assert len(begins) < 1000


@pytest.mark.parametrize("scale", [1e-3, 10.0, 150.0, 1e9])
def test_weights_fall_with_the_staleness(scale):
    driver = wrapped(Fresh(scale))
    driver.updates += 3
    rows, _, _, version = driver.usable_rows()
    expected = 1 / (1 + (driver.updates - version) / scale)
    check_frequencies(counted(driver.draw(50_000), rows), expected)


def test_weights_within_long_bins_are_exact():
    # Bins of many steps each, and versions that jump within them.
    driver = Driver(Fresh(20.0), ((600, 1), (300, 1)))
    driver.sampler._bin_ring = np.array([0, 0, 1])
    driver.sampler._bin_age = np.array([0, 100, 0])
    driver.sampler._bin_stop = np.array([100, 10_000, 10_000])
    for _ in range(90):
        driver.write(0, 9, flags=0)
        driver.write(1, 5, flags=0)
        driver.updates += 1
    rows, _, _, version = driver.usable_rows()
    expected = 20.0 / (20.0 + driver.updates - version)
    check_frequencies(counted(driver.draw(60_000), rows), expected)


def test_few_steps_are_passed_over():
    driver = Driver(Fresh(5.0), ((4000, 1),))
    driver.write(0, 2000, flags=0, version=0)
    driver.write(0, 50, flags=0, version=100_000)
    driver.updates = 100_000
    driver.follow()
    accepted = []
    plain = driver.rng

    class Counting:
        def random(self, number):
            accepted.append(number)
            return plain.random(number)

    driver.sampler.draw(driver.stored(), 20_000, Counting())
    assert accepted[0] == 20_000
    assert sum(accepted[4::4]) < 0.05 * 20_000


def test_rows_that_are_too_stale_are_not_drawn():
    driver = wrapped(Fresh(50.0, max_staleness=60))
    rows, _, _, version = driver.usable_rows()
    staleness = driver.updates - version
    assert (staleness > 60).any()
    check_frequencies(counted(driver.draw(30_000), rows), np.where(staleness <= 60, 1 / (1 + staleness / 50.0), 0.0))


def test_if_all_are_too_stale_the_freshest_version_is_drawn():
    driver = wrapped(Fresh(50.0, max_staleness=60))
    driver.updates += 1000
    rows, _, _, version = driver.usable_rows()
    check_frequencies(counted(driver.draw(20_000), rows), (version == version.max()).astype(float))


def test_steps_without_a_usable_row_are_not_fresh_ones():
    driver = Driver(Fresh(50.0, max_staleness=10), ((16, 2),))
    driver.write(0, 5, flags=0, version=3)
    driver.write(0, 2, flags=0, version=4)
    driver.write(0, 3, flags=BORDER, version=20)
    driver.updates = 25
    assert set(driver.draw(200).step.tolist()) == {5, 6}
    driver.write(0, 2, flags=0, version=21)
    assert set(driver.draw(200).step.tolist()) == {10}


def test_the_newest_usable_step_may_be_far_back():
    driver = Driver(Fresh(50.0, max_staleness=10), ((900, 1), (16, 1)))
    driver.write(0, 1000, flags=0, version=3)
    driver.write(0, 700, flags=BORDER, version=20)
    driver.updates = 25
    assert driver.draw(200).step.max() <= 999
    assert driver.sampler._newest_usable(0, *driver.rings[0].readable()) == 999
    assert driver.sampler._newest_usable(0, 1100, 1600) == -1


def test_steps_that_were_never_seen_are_in_order():
    driver = wrapped(Fresh(50.0))
    driver.updates += 100
    driver.write(0, 100)
    rows, _, _, version = driver.usable_rows()
    check_frequencies(counted(driver.draw(30_000), rows), 1 / (1 + (driver.updates - version) / 50.0))
    assert set(driver.sampler._version[: driver.rings[0].num_steps]) == {driver.updates - 100 - 7, driver.updates}


def test_versions_ahead_of_the_updates_count_as_fresh():
    driver = Driver(Fresh(5.0), ((32, 2),))
    driver.write(0, 20, flags=0, version=50)
    driver.updates = 10
    rows = driver.usable_rows()[0]
    check_frequencies(counted(driver.draw(5000), rows), np.ones(len(rows.ring)))


def test_versions_that_fall_are_found_out():
    driver = Driver(Fresh(1e-12), ((64, 1),))
    driver.sampler._bin_ring, driver.sampler._bin_age = np.array([0]), np.array([0])
    driver.sampler._bin_stop = np.array([1000])
    driver.write(0, 60, flags=0, version=0)
    driver.write(0, 2, flags=0, version=10**9)
    driver.updates = 10**9
    driver.follow()
    driver.sampler._version[60] = 10**9 - 1
    stored = driver.stored()
    few = stored._replace(spans=[(2, 61)])
    places = driver.sampler.draw(few, 2, driver.rng)  # the newest step alone, in spite of the long bin
    assert set(places.step.tolist()) == {60}


@pytest.mark.parametrize("max_staleness", [None, 5])
def test_without_rows_it_says_so(max_staleness):
    driver = Driver(Fresh(max_staleness=max_staleness))
    with pytest.raises(RuntimeError, match="^replay: nothing to sample yet"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)


def test_fresh_without_a_usable_row_leaves_it_to_the_memory():
    driver = Driver(Fresh(max_staleness=0), ((16, 2),))
    driver.write(0, 5, flags=BORDER, version=0)
    driver.updates = 9
    driver.follow()
    assert len(driver.sampler.draw(driver.stored(), 10, driver.rng).ring) == 10


@pytest.mark.parametrize(
    "kind, name, value",
    [
        (Recent, "half_life", 0.0),
        (Recent, "half_life", float("inf")),
        (Fresh, "scale", 0.0),
        (Fresh, "scale", float("nan")),
        (Fresh, "max_staleness", -1),
    ],
)
def test_refused(kind, name, value):
    with pytest.raises(ConfigError, match=rf"^data\.sampler\.init_args\.{name} is {value}; it must be finite and "):
        kind(**{name: value})


@pytest.mark.parametrize("max_staleness", [None, 20])
def test_steps_that_were_not_followed_yet_are_left_for_the_next_call(max_staleness):
    driver = wrapped(Fresh(50.0, max_staleness=max_staleness))
    ends = driver.sampler._slots.ends.copy()
    for ring in range(3):
        driver.write(ring, 3)
    places = driver.draw(2000, follow=False)
    assert (places.step < ends[places.ring]).all()
