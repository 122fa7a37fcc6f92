"""RateLimiter: samples per inserted step, never both sides blocked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_lightning.rate import RateLimiter

RATIOS = st.one_of(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 16.0, 64.0, 256.0]), st.floats(0.01, 500.0))
fast = settings(max_examples=150, deadline=None, derandomize=True)


def make(spi=64.0, warmup=10, request=256, insert=4, **kwargs):
    return RateLimiter(spi, warmup, request, insert, **kwargs)


def allowed(limiter):
    return limiter.inserts_allowed - limiter.inserted


@fast
@given(spi=RATIOS, warmup=st.integers(0, 50), request=st.integers(1, 4096), insert=st.integers(1, 64),
       slack=st.sampled_from([1.0, 1.0 + 1e-9, 1.5, 2.0, None]), choices=st.lists(st.booleans(), min_size=50,
                                                                                 max_size=200))  # fmt: skip
def test_never_both_blocked_and_ratio_kept(spi, warmup, request, insert, slack, choices):
    band = None if slack is None else slack * (request + insert * spi)
    limiter = make(spi, warmup, request, insert, band=band)
    for learner_first in choices:
        can_insert = allowed(limiter) >= insert
        assert limiter.can_sample or can_insert
        if limiter.can_sample and (learner_first or not can_insert):
            limiter.sampled += request
        else:
            limiter.inserted += insert
        if limiter.inserted >= limiter.warmup:
            tolerance = 1e-6 * (1 + limiter.band)
            assert -tolerance <= limiter.error <= limiter.band + tolerance
        else:
            assert limiter.sampled == 0
    if limiter.inserted > warmup:  # exact but for what is owed within the band
        paid = limiter.inserted - warmup
        assert limiter.achieved == pytest.approx(spi - limiter.error / paid)


@fast
@given(spi=RATIOS, warmup=st.integers(0, 50), request=st.integers(1, 2048), insert=st.integers(1, 16),
       rounds=st.integers(1, 20), choices=st.integers(0, 2**32 - 1))  # fmt: skip
def test_a_bounded_run_ends_with_all_that_its_steps_pay_for(spi, warmup, request, insert, rounds, choices):
    max_inserts = warmup + insert * rounds
    limiter = make(spi, warmup, request, insert, max_inserts=max_inserts)
    turns = 0
    while not limiter.finished:
        turns += 1
        assert turns < 100_000
        step = min(insert, allowed(limiter))
        assert limiter.can_sample or step > 0
        if limiter.can_sample and (step == 0 or choices >> (turns % 32) & 1):
            limiter.sampled += request
        else:
            limiter.inserted += step
        assert limiter.inserted <= max_inserts
    # As many requests as fit into what was paid.
    pays = (max_inserts - warmup) * spi
    assert limiter.sampled <= pays * (1 + 1e-12)
    assert pays - limiter.sampled < request


def test_ratio_is_exact_in_lock_step():
    # One update of 256 per step after 1,000 steps: 20,000 steps give 19,000 updates.
    limiter = make(256.0, 1000, 256, 1, max_inserts=20_000)
    while not limiter.finished:
        if limiter.can_sample:
            limiter.sampled += 256
        else:
            limiter.inserted += 1
    assert limiter.sampled == 19_000 * 256
    assert limiter.inserted == 20_000
    assert limiter.achieved == 256.0


def test_nothing_is_drawn_during_the_warm_up_and_its_steps_are_not_owed():
    limiter = make(64.0, 100, 256, 4)
    for inserted in range(0, 100, 4):
        limiter.inserted = inserted
        assert not limiter.can_sample
        assert limiter.achieved == 0.0
    limiter.inserted = 100
    assert limiter.error == 0 and not limiter.can_sample
    limiter.inserted = 103
    assert not limiter.can_sample
    limiter.inserted = 104
    assert limiter.can_sample


def test_workers_stop_at_the_band_and_go_on_when_samples_are_drawn():
    limiter = make(64.0, 100, 256, 4, band=512)
    assert limiter.inserts_allowed == 108
    limiter.inserted = 108
    assert allowed(limiter) == 0
    limiter.sampled += 256
    assert allowed(limiter) == 4


def test_the_default_band_is_twice_the_smallest():
    assert make(64.0, 0, 256, 4).band == 2 * (256 + 4 * 64)
    assert make(64.0, 0, 256, 4, band=512).band == 512


def test_a_band_in_which_both_would_wait_is_refused():
    with pytest.raises(ValueError, match="data.rate_band is 511 samples.*at least 512"):
        make(64.0, 0, 256, 4, band=511)


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_a_ratio_that_is_not_positive_is_refused(ratio):
    with pytest.raises(ValueError, match="samples_per_insert"):
        make(ratio)


def test_no_limit_never_finishes():
    limiter = make(max_inserts=0)
    limiter.inserted = limiter.sampled = 10**12
    assert not limiter.finished


def test_inserting_ends_at_the_limit():
    limiter = make(1.0, 0, 8, 4, band=1e6, max_inserts=20)
    assert limiter.inserts_allowed == 20
    limiter.inserted, limiter.sampled = 20, 8
    assert limiter.can_sample and not limiter.finished  # 12 are still paid for
    limiter.sampled = 16
    assert limiter.finished and not limiter.can_sample  # what is left does not make a request


def test_state_round_trip():
    limiter, other = make(warmup=10), make(warmup=3)
    limiter.inserted, limiter.sampled = 500, 2048
    other.load_state_dict(limiter.state_dict())
    for name in ("inserted", "sampled", "warmup", "error", "inserts_allowed", "can_sample", "achieved"):
        assert getattr(other, name) == getattr(limiter, name)
    assert all(type(value) in (int, float) for value in limiter.state_dict().values())


@pytest.mark.parametrize("rate", [2.0, 64.0])
def test_another_rate_owes_nothing_for_the_past(rate):
    before, after = make(warmup=10), make(warmup=10)
    before.inserted = 500
    before.sampled = int(490 * before.samples_per_insert) - 40
    after.samples_per_insert = rate
    after.load_state_dict(before.state_dict())
    assert after.error == before.error == 40
    assert after.achieved == pytest.approx(rate, abs=0.1)
