"""Several ranks: real processes over gloo, in lock-step where simulators are needed."""

import json
import threading

import numpy as np
import pytest
import torch

from claw_lightning import ranks
from claw_lightning.errors import ConfigError
from claw_lightning.ranks import Ranks, deal_state, env_steps_of, merge_metrics, merge_moments
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import FIRST, TERMINATED
from tests import rank_runs
from tests.rank_runs import run_ranks

OPTIONS = {"num_options": 4, "all_options": 0.5, "target_decision_rate": 0.2}
TASK = {"updates": 1, "size": 32}


def largest_error(one, other):
    """Over all parameters, relative to the largest gradient of each."""
    return max(float((one[n] - x).abs().max() / x.abs().max().clamp_min(1e-12)) for n, x in other.items())


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"num_options": 1, "target_noise": 0.1},
        {"num_options": 1, "actor": "gaussian"},
        {"num_options": 4, "target_noise": 0.1, "max_grad_norm": 0.5},
    ],
    ids=["TD3", "SAC", "K4"],
)
def test_two_ranks_with_half_a_batch_each_have_the_gradient_of_the_whole(settings):
    rng = np.random.default_rng(5)
    first, ended = (rng.random((1, 32)) < np.repeat([p, q], 16) for p, q in ((0.1, 0.6), (0.5, 0.2)))  # uneven
    previous = np.where(first, -1, min(1, settings["num_options"] - 1))
    rows = {"size": 32, "num_options": settings["num_options"], "flags": FIRST * first + TERMINATED * ended,
            "previous_option": previous}  # fmt: skip
    (whole,) = run_ranks(rank_runs.gradients, rows, settings, size=1)
    one, two = run_ranks(rank_runs.gradients, rows, settings)
    assert isinstance(whole, dict) and isinstance(one, dict), (whole, one, two)
    assert len(whole) > 8
    assert all(torch.equal(one[name], two[name]) for name in whole)
    assert largest_error(one, whole) < 1e-5
