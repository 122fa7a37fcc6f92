"""Exploration noise: scales over lanes and workers, statistics against closed forms, resets, decay."""

import numpy as np
import pytest

from claw_lightning.rollout.noise import GaussianNoise, OrnsteinUhlenbeckNoise, lane_scales, linear_decay

SCALES = np.array([0.1, 0.5, 2.0], np.float32)


def make(kind, seed=0, **kwargs):
    return kind(3, 4, SCALES, np.random.default_rng(seed), **kwargs)


def record(noise, num_steps, multiplier=1.0):
    return np.stack([noise.sample(multiplier) for _ in range(num_steps)])


def test_lane_scales_cover_the_range_over_all_workers():
    parts = [lane_scales(0.1, 0.8, 4, worker, 2) for worker in range(2)]
    np.testing.assert_allclose(np.sort(np.concatenate(parts)), np.linspace(0.1, 0.8, 8), rtol=1e-6)
    np.testing.assert_allclose(parts[0], [0.1, 0.3, 0.5, 0.7], rtol=1e-6)  # each worker spans it
    assert parts[0].dtype == np.float32
    np.testing.assert_allclose(lane_scales(0.1, 0.3, 1, 0, 1), [0.2])


@pytest.mark.parametrize("args", [(0.5, 0.1, 2, 0, 1), (-0.1, 0.1, 2, 0, 1), (0, 1, 0, 0, 1), (0, 1, 2, 2, 2)])
def test_lane_scales_refuses(args):
    with pytest.raises(ValueError):
        lane_scales(*args)


def test_linear_decay():
    assert [linear_decay(step, 1.0, 0.2, 4) for step in (-1, 0, 1, 4, 9)] == pytest.approx([1.0, 1.0, 0.8, 0.2, 0.2])
    assert linear_decay(0, 1.0, 0.2, 0) == 0.2


@pytest.mark.parametrize("kind", [GaussianNoise, OrnsteinUhlenbeckNoise])
def test_shape_dtype_seed_and_ownership(kind):
    noise = make(kind)
    first = noise.sample()
    assert (first.shape, first.dtype) == ((3, 4), np.float32)
    kept = first.copy()
    noise.sample()
    noise.reset(np.ones(3, dtype=bool))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(record(make(kind), 5), record(make(kind), 5))
    assert not np.array_equal(record(make(kind), 5), record(make(kind, seed=1), 5))
    np.testing.assert_allclose(record(make(kind), 5, 0.25), 0.25 * record(make(kind), 5), rtol=1e-5)
    assert not record(make(kind), 5, 0.0).any()


def test_gaussian_statistics():
    values = record(make(GaussianNoise), 5000)
    np.testing.assert_allclose(values.std(axis=(0, 2)), SCALES, rtol=0.03)
    lag = (values[1:] * values[:-1]).mean(axis=(0, 2)) / SCALES**2
    np.testing.assert_allclose(lag, 0, atol=0.03)


@pytest.mark.parametrize("theta, dt", [(0.15, 1.0), (4.0, 0.05), (5.0, 1.0)])
def test_ou_stationary_deviation_and_correlation(theta, dt):
    values = record(make(OrnsteinUhlenbeckNoise, theta=theta, dt=dt), 20000)
    np.testing.assert_allclose(values.std(axis=(0, 2)), SCALES, rtol=0.06)
    for lag in (1, 3):
        correlation = (values[lag:] * values[:-lag]).mean(axis=(0, 2)) / values.var(axis=(0, 2))
        np.testing.assert_allclose(correlation, np.exp(-theta * dt * lag), atol=0.04)


def test_ou_explores_from_the_first_step_of_an_episode():
    noise = OrnsteinUhlenbeckNoise(2000, 4, np.ones(2000), np.random.default_rng(0), theta=0.15, dt=0.01)
    assert noise.sample().std() == pytest.approx(1.0, rel=0.03)
    noise.reset(np.arange(2000) < 1000)
    assert noise.sample()[:1000].std() == pytest.approx(1.0, rel=0.04)


def test_ou_reset_touches_the_masked_lanes_only():
    noise = make(OrnsteinUhlenbeckNoise, theta=1e-6)  # as good as constant between steps
    before = noise.sample()
    noise.reset(np.array([True, False, True]))
    after = noise.sample()
    np.testing.assert_allclose(after[1], before[1], atol=0.01)
    assert (np.abs(after[2] - before[2]) > 0.05).all()
    noise.reset(np.zeros(3, dtype=bool))
    np.testing.assert_allclose(noise.sample(), after, atol=0.05)


@pytest.mark.parametrize("scales", [np.ones(2), np.ones((3, 1)), np.array([1, -1, 1]), np.array([1, np.nan, 1])])
@pytest.mark.parametrize("kind", [GaussianNoise, OrnsteinUhlenbeckNoise])
def test_bad_scales(kind, scales):
    with pytest.raises(ValueError):
        kind(3, 4, scales, np.random.default_rng(0))


@pytest.mark.parametrize("kwargs", [{"theta": 0}, {"dt": 0}, {"theta": -1}])
def test_bad_ou_settings(kwargs):
    with pytest.raises(ValueError):
        make(OrnsteinUhlenbeckNoise, **kwargs)
