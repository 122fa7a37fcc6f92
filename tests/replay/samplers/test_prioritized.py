"""Prioritized: frequencies, weights without bias, priorities that leave with their rows."""

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.base import Places
from claw_lightning.replay.samplers.prioritized import Prioritized
from tests.replay.samplers.driver import Driver, check_frequencies, counted, key, wrapped


def priorities(driver, rows):
    """Priority [M] of each row [M], 0 for rows that have left."""
    slot, there = driver.sampler._slots.slots(rows)
    return np.where(there, driver.sampler._tree.get(slot), 0.0)


def judged(sampler):
    """Driver in which every usable row has been given another error; also the rows and the priorities."""
    driver = wrapped(sampler)
    rows = driver.usable_rows()[0]
    errors = np.exp(driver.rng.normal(0, 1.5, len(rows.ring))).astype(np.float32)
    sampler.update(rows, errors)
    return driver, rows, (errors.astype(np.float64) + sampler.epsilon) ** sampler.alpha


def test_rows_are_drawn_in_proportion_to_their_priorities():
    driver, rows, expected = judged(Prioritized())
    np.testing.assert_allclose(priorities(driver, rows), expected, rtol=1e-6)
    check_frequencies(counted(driver.draw(60_000), rows), expected)


def test_new_rows_are_drawn_alike_and_only_usable_ones():
    driver = wrapped(Prioritized())
    rows = driver.usable_rows()[0]
    assert (priorities(driver, rows) == 1.0).all()
    places = driver.sampler.draw(driver.stored(), 60_000, driver.rng)  # not drawn anew: all of them are usable
    check_frequencies(counted(places, rows), np.ones(len(rows.ring)))
    assert driver.sampler._num_rows == len(rows.ring)
    assert driver.sampler._tree.total == len(rows.ring)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_the_weighted_mean_is_that_over_usable_rows(beta):
    driver, rows, expected = judged(Prioritized(alpha=0.8, beta=beta, final_beta=beta))
    chances = expected / expected.sum()
    values = driver.rng.normal(2.0, 3.0, len(rows.ring)) * expected**0.3  # some function of the row
    places = driver.draw(40_000)
    counts = counted(places, rows)
    drawn = np.repeat(np.arange(len(counts)), counts)
    exact = (len(chances) * chances) ** -beta
    # The places in the order of `drawn`, to compare each weight with that of its row.
    order = np.lexsort((places.lane, places.step, places.ring))
    np.testing.assert_allclose(places.weight[order], exact[drawn], rtol=1e-5)
    assert places.weight.dtype == np.float32
    expectation = float((chances * exact * values).sum())
    if beta == 1.0:
        assert (chances * exact).sum() == pytest.approx(1.0)
        assert expectation == pytest.approx(values.mean())
    else:
        assert (chances * exact).sum() <= 1.0 + 1e-12
    estimates = exact[drawn] * values[drawn]
    assert abs(estimates.mean() - expectation) < 4 * estimates.std() / np.sqrt(len(drawn))


def test_beta_follows_the_environment_steps():
    driver = Driver(Prioritized(beta=0.4, final_beta=0.9, anneal_steps=1000))
    driver.write(0, 10, flags=0)
    for env_steps, beta in ((0, 0.4), (500, 0.65), (1000, 0.9), (5000, 0.9)):
        driver.follow()
        driver.sampler.draw(driver.stored()._replace(env_steps=env_steps), 4, driver.rng)
        assert driver.sampler.metrics() == {"replay/priority_max": 1.0, "replay/beta": pytest.approx(beta)}


def test_new_rows_enter_at_the_largest_priority_ever_seen():
    driver = Driver(Prioritized(alpha=0.5))
    driver.write(0, 10, flags=0)
    driver.follow()
    rows = driver.usable_rows()[0]
    driver.sampler.update(rows.take(np.arange(3)), np.array([0.1, 16.0, 2.0], np.float32))
    driver.sampler.update(rows.take(np.arange(3)), np.array([0.1, 0.2, 0.3], np.float32))
    largest = np.sqrt(16.0 + 0.01)
    driver.write(0, 1, flags=0)
    driver.follow()
    new = driver.usable_rows()[0].take(np.arange(27, 30))
    assert new.step.tolist() == [9, 9, 9]
    np.testing.assert_allclose(priorities(driver, new), largest, rtol=1e-6)
    assert driver.sampler.state_dict()["max_priority"] == pytest.approx(largest)
    other = Driver(Prioritized(alpha=0.5))
    other.sampler.load_state_dict(driver.sampler.state_dict())
    other.write(0, 10, flags=0)
    other.follow()
    np.testing.assert_allclose(priorities(other, other.usable_rows()[0]), largest, rtol=1e-6)


def test_rows_lose_their_priorities_when_they_are_overwritten():
    driver, rows, _ = judged(Prioritized())
    before = driver.sampler._tree[:].copy()
    driver.write(0, 10)
    driver.follow()
    driver.sampler.draw(driver.stored(), 1, driver.rng)
    left = driver.rings[0].readable()[0]
    gone = (rows.ring == 0) & (rows.step < left)
    assert gone.any()
    assert (priorities(driver, rows.take(gone)) == 0).all()
    assert (priorities(driver, rows.take(~gone)) > 0).all()
    after = driver.sampler._tree[:].copy()
    size = driver.rings[0].num_steps * driver.rings[0].num_lanes
    np.testing.assert_array_equal(before[size:], after[size:])  # of the other rings
    # Errors that arrive after their rows have left, into slots that other rows lie in now: nothing happens.
    driver.sampler.update(rows.take(gone), np.full(gone.sum(), 1000.0, np.float32))
    np.testing.assert_array_equal(driver.sampler._tree[:], after)
    assert driver.sampler._max_priority < 100
    new = driver.usable_rows()[0]
    assert driver.sampler._num_rows == len(new.ring) == np.count_nonzero(after)
    check_frequencies(counted(driver.draw(40_000), new), priorities(driver, new))


def test_errors_that_are_not_finite_and_rows_that_are_not_usable_are_passed_over():
    driver, rows, expected = judged(Prioritized())
    errors = np.full(len(rows.ring), np.nan, np.float32)
    errors[::3], errors[1::3] = np.inf, -np.inf
    driver.sampler.update(rows, errors)
    np.testing.assert_allclose(priorities(driver, rows), expected, rtol=1e-6)
    everything = driver.sampler._slots.places(np.arange(driver.sampler._slots.size))
    driver.sampler.update(everything, np.ones(len(everything.ring), np.float32))
    assert np.count_nonzero(driver.sampler._tree[:]) == len(rows.ring)


@pytest.mark.parametrize("error", [0.0, 1e-30, 3e38, -3e38])
def test_any_finite_error_leaves_a_row_in_the_draw(error):
    driver, rows, _ = judged(Prioritized(alpha=1.0, epsilon=1e-60))
    driver.sampler.update(rows, np.full(len(rows.ring), error, np.float32))
    found = priorities(driver, rows)
    assert (found > 0).all()
    assert np.isfinite(found).all()
    places = driver.draw(100)
    np.testing.assert_allclose(places.weight, 1.0, rtol=1e-4)


def test_the_last_of_several_errors_of_a_row_counts():
    driver, rows, _ = judged(Prioritized())
    driver.sampler.update(rows.take(np.array([4, 4, 4])), np.array([9.0, 1.0, 2.0], np.float32))
    assert priorities(driver, rows)[4] == pytest.approx(2.01**0.6)


def test_steps_that_were_never_seen_hold_nothing():
    driver, _, _ = judged(Prioritized())
    driver.write(0, 100)  # several rounds at once, of which only the readable part is followed
    places = driver.draw(5000)
    rows = driver.usable_rows()[0]
    assert driver.sampler._num_rows == len(rows.ring)
    assert counted(places, rows).sum() == 5000


def test_what_was_followed_beyond_the_span_is_not_drawn():
    driver = wrapped(Prioritized())
    stored = driver.stored()
    earlier = stored._replace(spans=[(first, last - 4) for first, last in stored.spans])
    places = driver.sampler.draw(earlier, 4000, driver.rng)
    rows = driver.usable_rows()[0]
    inside = rows.step < np.array([last for _, last in earlier.spans])[rows.ring]
    check_frequencies(counted(places, rows), inside.astype(float))
    assert len(places.weight) == 4000
    assert (np.diff(places.ring) >= 0).all()


def test_the_same_seed_gives_the_same_places():
    first, second = (wrapped(Prioritized()).draw(500) for _ in range(2))
    for mine, other in zip(first[:4], second[:4], strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_without_usable_rows_it_says_so(steps):
    driver = Driver(Prioritized())
    driver.write(0, steps, flags=8)
    driver.follow()
    with pytest.raises(RuntimeError, match="^replay: nothing to sample yet"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)


@pytest.mark.parametrize(
    "name, value, cure",
    [
        ("alpha", -0.1, r"\[0, 1\]"),
        ("alpha", 1.5, r"\[0, 1\]"),
        ("alpha", float("nan"), r"\[0, 1\]"),
        ("beta", 2.0, r"\[0, 1\]"),
        ("final_beta", -1.0, r"\[0, 1\]"),
        ("anneal_steps", 0, "at least 1"),
        ("epsilon", 0.0, "above 0"),
        ("epsilon", float("inf"), "above 0"),
    ],
)
def test_refused(name, value, cure):
    with pytest.raises(ConfigError, match=rf"^data\.sampler\.init_args\.{name} is {value}; it must .*{cure}$"):
        Prioritized(**{name: value})


def test_an_update_for_nothing():
    driver, rows, _ = judged(Prioritized())
    nothing = Places(*(values[:0] for values in rows[:3]))
    driver.sampler.update(nothing, np.zeros(0, np.float32))


def test_priorities_come_back_with_the_rows_and_newer_rows_enter_as_ever():
    driver, rows, expected = judged(Prioritized())
    state = driver.sampler.state_dict()
    again = Driver(Prioritized(), ((24, 3), (40, 1), (16, 2)))
    again.rings = driver.rings  # restored to the bit
    again.sampler.bind(driver.rings)
    again.sampler.load_state_dict(state)
    again.write(1, 2, flags=0)  # stored after the checkpoint
    again.follow()
    there = np.isin(key(rows), key(again.usable_rows()[0]))
    np.testing.assert_array_equal(priorities(again, rows)[there], np.float32(expected[there]))
    new = again.usable_rows()[0].take(~np.isin(key(again.usable_rows()[0]), key(rows)))
    assert len(new.ring) and (priorities(again, new) == np.float32(state["max_priority"])).all()
    other = Driver(Prioritized(), ((24, 3), (40, 1), (16, 3)))  # a ring of another shape
    other.sampler.load_state_dict(state)
    assert other.sampler._restored is None and other.sampler._max_priority == state["max_priority"]
