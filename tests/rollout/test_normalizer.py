"""Running normalisation: equal to numpy over everything seen, whatever the batches."""

import numpy as np
import pytest
import torch

from claw_lightning.rollout.normalizer import Normalizer, RunningMoments, batch_moments

DATA = np.random.default_rng(0).normal([0.0, 100.0, -1e4], [1.0, 0.1, 50.0], (500, 3)).astype(np.float32)


def merged(*parts):
    moments = RunningMoments(DATA.shape[1])
    for part in parts:
        moments.update(batch_moments(part))
    return moments


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (0, 0, 499), (100, 250, 400)])
def test_moments_equal_numpys_whatever_the_pieces(cuts):
    moments = merged(*np.split(DATA, cuts))
    exact = DATA.astype(np.float64)
    assert float(moments.count) == len(DATA)
    np.testing.assert_allclose(moments.mean, exact.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.squares / moments.count, exact.var(0), rtol=1e-9)


def test_rows_that_are_not_finite_do_not_count():
    dirty = np.insert(DATA, [0, 7, 500], 1.0, axis=0)
    dirty[0, 0], dirty[8, 1], dirty[-1, 2] = np.nan, np.inf, -np.inf
    for exact, found in zip(batch_moments(DATA), batch_moments(dirty)):
        np.testing.assert_array_equal(found, exact)
    count, mean, squares = batch_moments(dirty[:1])
    assert count == 0.0 and not mean.any() and not squares.any()
    before = merged(DATA)
    before.update((count, mean, squares))
    assert float(before.count) == len(DATA)


def test_written_statistics_normalise():
    normalizer = Normalizer(3)
    merged(DATA).write_to(normalizer)
    out = normalizer(torch.from_numpy(DATA)).double().numpy()
    np.testing.assert_allclose(out.mean(0), 0.0, atol=2e-3)  # float32 at 100 +- 0.1 has no more
    np.testing.assert_allclose(out.std(0), 1.0, atol=2e-3)


def test_identity_with_clipping_until_statistics_arrive():
    normalizer = Normalizer(3, limit=2.0)
    merged(DATA[:1]).write_to(normalizer)  # one observation says nothing of a spread
    assert normalizer(torch.tensor([-9.0, 0.5, 9.0])).tolist() == [-2.0, 0.5, 2.0]
    assert Normalizer(3, float("inf"))(torch.tensor([-1e9, 0.5, 9.0])).tolist() == [-1e9, 0.5, 9.0]


def test_a_component_that_never_varies_is_not_divided_by_zero():
    normalizer, moments = Normalizer(1), RunningMoments(1, epsilon=1e-2)
    moments.update(batch_moments(np.full((10, 1), 3.0, np.float32)))
    moments.write_to(normalizer)
    assert normalizer(torch.tensor([[3.0], [3.01]])).flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-4)


def test_state_round_trip():
    moments, other = merged(DATA), RunningMoments(3)
    other.load_state_dict(moments.state_dict())
    more = batch_moments(DATA[:50] + 1)
    moments.update(more)
    other.update(more)
    assert all(torch.equal(a, b) for a, b in zip(moments.buffers(), other.buffers()))
