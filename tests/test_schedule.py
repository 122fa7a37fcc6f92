"""Learning rates over environment steps."""

import dataclasses

import pytest

from claw_lightning.errors import ConfigError
from tests.runs import fit_fake, make_batch, make_module


def rates(module):
    return {
        name: group["lr"]
        for name, wrapped in zip(module._optimizer_names, module.optimizers(), strict=True)
        for group in wrapped.optimizer.param_groups
    }


@pytest.mark.parametrize("env_steps, factor", [(0, 1.0), (100, 0.6), (200, 0.2), (10**6, 0.2)])
def test_all_rates_fall_linearly(env_steps, factor):
    module = make_module(lr_decay_steps=200, final_lr=0.2)
    fit_fake(module, [dataclasses.replace(make_batch(1), env_steps=env_steps)])
    h = module.settings
    expected = {
        "critic": h.critic_lr, "actor": h.actor_lr, "option_policy": h.option_policy_lr,
        "termination": h.termination_lr, "option_value": h.value_lr, "state_value": h.value_lr,
    }  # fmt: skip
    assert rates(module) == pytest.approx({name: rate * factor for name, rate in expected.items()})


def test_without_a_schedule_they_stay():
    module = make_module()
    fit_fake(module, [dataclasses.replace(make_batch(1), env_steps=10**6)])
    assert rates(module)["critic"] == module.settings.critic_lr


@pytest.mark.parametrize("settings", [{"lr_decay_steps": -1}, {"final_lr": -0.1}, {"final_lr": 1.5}])
def test_schedules_without_meaning_are_refused(settings):
    with pytest.raises(ConfigError, match=f"model.{next(iter(settings))}"):
        make_module(**settings)
