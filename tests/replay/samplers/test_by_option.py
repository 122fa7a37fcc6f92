"""ByOption: shares, caps, rounding, and rows of an option alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.by_option import ByOption, option_quotas, systematic_counts
from tests.replay.samplers.driver import Driver, check_frequencies, counted, wrapped


def quotas_by_bisection(counts, balance, max_ratio):
    """The same shares in another way: min(level * n^(1 - balance), cap), with the level that makes their sum 1."""
    stored = np.array(counts) / np.sum(counts)
    wanted, low, high = np.where(stored > 0, stored ** (1 - balance), 0.0), 0.0, 1e12
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(level * wanted, max_ratio * stored).sum() < 1 else (low, level)
    return np.minimum(high * wanted, max_ratio * stored)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=9).filter(any),
    st.floats(0, 1),
    st.sampled_from((1.0, 1.2, 3.0, 10.0, 1e9)),
)
def test_quotas(counts, balance, max_ratio):
    quotas = option_quotas(np.array(counts), balance, max_ratio)
    assert quotas.sum() == pytest.approx(1.0)
    assert (quotas <= max_ratio * np.array(counts) / sum(counts) + 1e-12).all()
    np.testing.assert_allclose(quotas, quotas_by_bisection(counts, balance, max_ratio), atol=1e-9)


def test_quotas_by_hand():
    counts = np.array([900, 90, 9, 0, 1])
    np.testing.assert_allclose(option_quotas(counts, 0.0, 10.0), counts / 1000)
    np.testing.assert_allclose(option_quotas(counts, 1.0, 1e9), [0.25, 0.25, 0.25, 0, 0.25])
    # Ten times as often at most: 0.09 and 0.01; the other two share what is left.
    np.testing.assert_allclose(option_quotas(counts, 1.0, 10.0), [0.45, 0.45, 0.09, 0, 0.01])
    np.testing.assert_allclose(option_quotas(counts, 1.0, 1.0), counts / 1000)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(any), st.integers(0, 300), st.integers(0, 99))
def test_systematic_counts_are_rounded_down_or_up(shares, count, seed):
    shares = np.array(shares) / np.sum(shares)
    counts = systematic_counts(shares, count, np.random.default_rng(seed))
    assert counts.sum() == count
    assert (np.abs(counts - shares * count) < 1 + 1e-9).all()
    assert (counts[shares == 0] == 0).all()


def test_systematic_counts_are_exact_in_expectation():
    shares, rng = np.array([0.37, 0.0, 0.011, 0.25, 0.369]), np.random.default_rng(0)
    counts = np.array([systematic_counts(shares, 10, rng) for _ in range(4000)])
    error = counts.mean(axis=0) - 10 * shares
    assert (np.abs(error) <= 4 * counts.std(axis=0) / np.sqrt(len(counts)) + 1e-12).all()


@pytest.mark.parametrize("balance, max_ratio", [(0.0, 10.0), (1.0, 1e6), (1.0, 3.0), (0.5, 10.0)])
def test_frequencies(balance, max_ratio):
    driver = wrapped(ByOption(balance, max_ratio), num_options=5)
    rows, _, option, _ = driver.usable_rows()
    counts = np.bincount(option, minlength=5)
    assert 0 < counts[counts > 0].min() < 12
    np.testing.assert_array_equal(driver.sampler._counts, counts)
    places = driver.sampler.draw(driver.stored(), 60_000, driver.rng)
    quotas = quotas_by_bisection(counts, balance, max_ratio)
    expected = (quotas / np.maximum(counts, 1))[option]
    check_frequencies(counted(places, rows), expected)
    drawn = np.bincount(np.repeat(option, counted(places, rows)), minlength=5)
    assert (np.abs(drawn - 60_000 * quotas) < 1).all()
    assert places.weight is None
    assert driver.sampler.metrics() == {f"replay/quota_{k}": pytest.approx(quotas[k]) for k in range(5)}


def test_frequencies_over_many_small_draws():
    driver = wrapped(ByOption(), num_options=3)
    rows, _, option, _ = driver.usable_rows()
    counts = np.bincount(option, minlength=3)
    drawn = sum(counted(driver.sampler.draw(driver.stored(), 2, driver.rng), rows) for _ in range(2000))
    check_frequencies(drawn, (quotas_by_bisection(counts, 1.0, 10.0) / counts)[option])


def test_corrected_weights_are_unbiased():
    driver = wrapped(ByOption(correct=True), num_options=4)
    rows, _, option, _ = driver.usable_rows()
    values = driver.rng.normal(1.0, 2.0, len(option)) + option
    counts = np.bincount(option, minlength=4)
    quotas = quotas_by_bisection(counts, 1.0, 10.0)
    weights, chances = (counts / counts.sum() / quotas)[option], (quotas / counts)[option]
    assert (chances * weights * values).sum() == pytest.approx(values.mean())
    places = driver.draw(40_000)
    drawn = np.repeat(np.arange(len(option)), counted(places, rows))
    order = np.lexsort((places.lane, places.step, places.ring))
    np.testing.assert_allclose(places.weight[order], weights[drawn], rtol=1e-5)
    estimates = weights[drawn] * values[drawn]
    assert abs(estimates.mean() - values.mean()) < 4 * estimates.std() / np.sqrt(len(drawn))


def test_options_come_and_go_with_their_rows():
    driver = Driver(ByOption(), ((12, 2),), num_options=3)
    driver.write(0, 4, flags=0, option=0)
    driver.draw(10)
    assert driver.sampler.metrics() == {"replay/quota_0": 1.0, "replay/quota_1": 0.0, "replay/quota_2": 0.0}
    driver.write(0, 6, flags=0, option=2)
    driver.draw(10)
    assert driver.sampler.metrics()["replay/quota_2"] == pytest.approx(0.5)
    driver.write(0, 30, flags=0, option=1)
    places = driver.draw(100)
    assert driver.sampler._counts.tolist() == [0, 2 * 9, 0]
    assert set(places.step.tolist()) == set(range(*driver.rings[0].readable()))


def test_options_that_the_networks_do_not_have_are_left_out():
    driver = Driver(ByOption(), ((12, 2),), num_options=2)
    driver.write(0, 3, flags=0, option=7)
    driver.write(0, 3, flags=0, option=-1)
    driver.write(0, 3, flags=0, option=1)
    assert set(driver.draw(100).step.tolist()) == {6, 7}


def test_many_rows_at_once_are_counted_in_pieces(monkeypatch):
    monkeypatch.setattr("claw_lightning.replay.samplers.by_option.PIECE", 32)
    driver = Driver(ByOption(), ((60, 5), (33, 3)), num_options=4)
    for ring in (0, 1):
        driver.write(ring, 130)
    rows, _, option, _ = driver.usable_rows()
    places = driver.draw(30_000)
    counts = np.bincount(option, minlength=4)
    np.testing.assert_array_equal(driver.sampler._counts, counts)
    check_frequencies(counted(places, rows), (quotas_by_bisection(counts, 1.0, 10.0) / counts)[option])


def test_what_was_followed_beyond_the_span_is_not_drawn():
    driver = wrapped(ByOption(balance=0.0), num_options=3)
    stored = driver.stored()
    spans = [(first, last - 3) for first, last in stored.spans]
    places = driver.sampler.draw(stored._replace(spans=spans), 2000, driver.rng)
    assert (places.step < np.array(spans)[places.ring, 1]).all()


def test_without_usable_rows_it_says_so():
    driver = Driver(ByOption())
    with pytest.raises(RuntimeError, match="^replay: nothing to sample yet"):
        driver.sampler.draw(driver.stored(), 3, driver.rng)


@pytest.mark.parametrize(
    "name, value", [("balance", -0.1), ("balance", 1.1), ("max_ratio", 0.5), ("max_ratio", np.inf)]
)
def test_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^data\.sampler\.init_args\.{name} is {value}; it must "):
        ByOption(**{name: value})
