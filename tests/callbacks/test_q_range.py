"""QRange: quantiles, disagreement, targets and gradients by hand; the warning; nothing of the run is touched."""

import logging

import numpy as np
import pytest
import torch

from callbacks import QRange
from callbacks.novelty import NoveltyBonus
from claw_lightning.errors import ConfigError
from tests.runs import fit_fake, make_batch, make_module


class Values(torch.nn.Module):
    """Critics [2, B] whose values are the first component of the observation, and that plus one."""

    def forward(self, obs, action, option, first=None):
        return torch.stack((obs[:, 0], obs[:, 0] + 1.0))

    def forward_all(self, obs, actions, first=None):
        return (obs[:, :1] * torch.ones(2, 1, actions.shape[1])) * 0.0 + 2.0


def look(batch, module=None, **settings):
    module = module or make_module(gamma=0.5, normalize_observations=False, build=True)
    made = QRange(**settings)
    made.setup(None, module, "fit")
    made.on_batch_sampled(None, module, batch)
    made._gradients = lambda module: {}
    module.callbacks = list
    return made, made.metrics()


def batch_of(values, **fields):
    obs = np.zeros((1, len(values), 3))
    obs[0, :, 0] = values
    return make_batch(1, len(values), obs=obs, **fields)


def fixed():
    module = make_module(gamma=0.5, normalize_observations=False, deliberation_form="regularizer", build=True)
    module.critic = module.target_critic = module.next_values.critic = Values()
    return module


def test_quantiles_disagreement_and_targets_by_hand():
    values = np.arange(101) / 10.0
    _, found = look(batch_of(values, reward=np.full((1, 101), -3.0)), fixed())
    # Means over the critics lie half above the observation.
    wanted = {"q/min": 0.5, "q/p05": 1.0, "q/p50": 5.5, "q/p95": 10.0, "q/max": 10.5, "q/disagreement": 1.0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)
    # -3 + 0.5 * 2, whatever the options.
    assert (found["q/target_min"], found["q/target_max"]) == pytest.approx((-2.0, -2.0))
    assert found["q/bound"] == pytest.approx(6.0)


def test_the_bound_remembers_the_greatest_reward():
    made, _ = look(batch_of([0.0], reward=np.array([[-8.0]])), fixed())
    made.on_batch_sampled(None, made._module, batch_of([0.0], reward=np.array([[1.0]])))
    assert made.metrics()["q/bound"] == pytest.approx(16.0)


def test_impossible_values_are_told_once(caplog):
    caplog.set_level(logging.WARNING)
    batch = batch_of([100.0], reward=np.array([[1.0]]))
    made, _ = look(batch, fixed())
    made.on_batch_sampled(None, made._module, batch)
    made.metrics()
    assert caplog.text.count("rewards allow 2 at most") == 1 and "model.critic_lr" in caplog.text


@pytest.mark.parametrize("value, bonus", [(5.0, False), (100.0, True)])
def test_no_warning_within_the_limit_or_where_callbacks_pay(value, bonus, caplog):
    caplog.set_level(logging.WARNING)
    module, made = fixed(), QRange()
    made.setup(None, module, "fit")
    module.callbacks = lambda: [NoveltyBonus()] if bonus else []
    made._gradients = lambda module: {}
    made.on_batch_sampled(None, module, batch_of([value], reward=np.array([[1.0]])))
    made.metrics()
    assert "QRange" not in caplog.text


@pytest.mark.parametrize(
    "settings", [{}, {"actor": "gaussian"}, {"num_options": 1}, {"n_step": 3}, {"critic_atoms": 11}]
)
def test_a_run_is_the_same_with_and_without_and_has_gradient_norms(settings):
    runs = []
    for callbacks in ([QRange()], []):
        module = make_module(**settings)
        shape = (2, 8, 3) if "n_step" in settings else (2, 8)
        batches = [make_batch(2, 8, num_options=settings.get("num_options", 4), seed=i) for i in range(3)]
        if len(shape) == 3:
            for batch in batches:
                batch.rows = batch.rows.unsqueeze(2).repeat(1, 1, 3, 1)
                batch.next_obs = batch.next_obs.unsqueeze(2).repeat(1, 1, 3, 1)
                batch.valid = torch.ones(shape, dtype=torch.bool)
        fit_fake(module, batches, callbacks)
        runs.append(module)
    for (name, mine), theirs in zip(runs[0].state_dict().items(), runs[1].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    found = runs[0].latest_metrics
    assert found["grad_norm/critic"] > 0 and found["grad_norm/actor"] > 0 and "q/p50" in found
    assert "grad_norm/critic" not in runs[1].latest_metrics


def test_wrong_settings_are_named():
    for settings in ({"rows": 0}, {"limit": 0.5}):
        with pytest.raises(ConfigError, match=f"QRange.{next(iter(settings))}"):
            QRange(**settings)
