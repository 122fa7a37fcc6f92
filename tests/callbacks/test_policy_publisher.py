"""When the policy is published, and under which version."""

import pytest

from callbacks import PolicyPublisher
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from tests.runs import fit_fake, make_batch, make_module


def test_publishes_every_n_updates_under_the_number_of_updates():
    module = make_module(exploration=Exploration(uniform=0.25))
    _, data = fit_fake(module, [make_batch(4, seed=s) for s in range(3)], [PolicyPublisher(every=5)])
    # With the exploration that fits: learning has begun.
    assert data.published == [(5, [1.0, 0.25]), (10, [1.0, 0.25])]


def test_a_resumed_run_counts_from_where_it_stands():
    module = make_module()
    module.updates = 103
    _, data = fit_fake(module, [make_batch(6)], [PolicyPublisher(every=5)])
    assert [version for version, _ in data.published] == [108]


def test_wrong_period_is_named():
    with pytest.raises(ConfigError, match=r"PolicyPublisher\.every"):
        PolicyPublisher(every=0)
