"""Schedule of exploration."""

import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from tests.runs import make_module


def test_all_actions_are_uniform_before_learning_begins():
    assert Exploration(uniform=0.1).at(5000, learning=False) == (1.0, 1.0)


def test_noise_decays_linearly_to_its_final_factor():
    exploration = Exploration(final=0.2, decay_steps=1000, uniform=0.1)
    assert exploration.at(0, True) == (1.0, 0.1)
    assert exploration.at(500, True) == pytest.approx((0.6, 0.1))
    assert exploration.at(1000, True) == pytest.approx((0.2, 0.1))
    assert exploration.at(9000, True) == pytest.approx((0.2, 0.1))


def test_without_decay_the_noise_stays():
    assert Exploration(final=0.0).at(10**6, True) == (1.0, 0.0)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"scale_min": 0.5, "scale_max": 0.1}, "scale_min"),
        ({"scale_min": -0.1}, "scale_min"),
        ({"uniform": 1.5}, "uniform"),
        ({"uniform_components": 0.0}, "uniform_components"),
        ({"uniform_components": 1.1}, "uniform_components"),
        ({"uniform_scale": 0.9}, "uniform_scale"),
        ({"uniform_scale": float("inf")}, "uniform_scale"),
        ({"decay_steps": -1}, "decay_steps"),
        ({"final": -1.0}, "final"),
    ],
)
def test_values_without_meaning_are_refused(settings, word):
    with pytest.raises(ConfigError, match=word) as error:
        Exploration(**settings)
    assert "model.exploration" in str(error.value) and "\n" not in str(error.value)


def test_the_policy_carries_what_fits_the_counters():
    module = make_module(build=True, exploration=Exploration(final=0.0, decay_steps=200, uniform=0.25))
    module.set_exploration()
    assert module.policy.exploration.tolist() == [1.0, 1.0]
    module.updates, module.env_steps = 1, 100
    module.set_exploration()
    assert module.policy.exploration.tolist() == [0.5, 0.25]
