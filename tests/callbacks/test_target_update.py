"""Numbers of soft and hard target updates."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks import TargetUpdate
from claw_lightning.errors import ConfigError
from tests.runs import fit_fake, make_batch, make_module


def pair(online, target):
    networks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    for network, value in zip(networks, (online, target)):
        torch.nn.init.constant_(network.weight, value)
        torch.nn.init.constant_(network.bias, value)
    return tuple(networks)


def updates(callback, count):
    online, target = pair(1.0, 0.0)
    module = SimpleNamespace(target_pairs=[(online, target)], updates=0)
    values = []
    for _ in range(count):
        module.updates += 1
        callback.on_update_end(None, module)
        values.append(target.weight.item())
        assert target.bias.item() == target.weight.item()
    assert online.weight.item() == 1.0
    return values


def test_soft_update_moves_by_tau():
    assert updates(TargetUpdate(tau=0.5), 3) == [0.5, 0.75, 0.875]


def test_hard_update_copies_every_third_time():
    assert updates(TargetUpdate(mode="hard", every=3), 4) == [0.0, 0.0, 1.0, 1.0]


def test_soft_update_every_second_time():
    assert updates(TargetUpdate(tau=0.5, every=2), 4) == [0.0, 0.5, 0.5, 0.75]


def test_targets_of_critic_and_actor_follow_after_every_update():
    module = make_module()
    fit_fake(module, [make_batch(4)], [TargetUpdate(mode="hard")])
    for online, target in module.target_pairs:
        for left, right in zip(online.parameters(), target.parameters()):
            assert torch.equal(left, right)
            assert not right.requires_grad


def test_default_comes_with_the_module_unless_given():
    given = TargetUpdate(tau=0.3)
    trainer, _ = fit_fake(make_module(), [make_batch()], [given])
    assert [c for c in trainer.callbacks if isinstance(c, TargetUpdate)] == [given]
    trainer, _ = fit_fake(make_module(), [make_batch()])
    assert [c.weight for c in trainer.callbacks if isinstance(c, TargetUpdate)] == [0.005]


def test_settings_of_the_module_are_taken_and_may_not_contradict():
    module = make_module(tau=0.3, target_delay=3)
    trainer, _ = fit_fake(module, [make_batch()])
    (made,) = [c for c in trainer.callbacks if isinstance(c, TargetUpdate)]
    assert (made.weight, made.every) == (0.3, 3)
    same = TargetUpdate(tau=0.3)
    fit_fake(make_module(tau=0.3, target_delay=3), [make_batch()], [same])
    assert (same.weight, same.every) == (0.3, 3)
    for wrong in (TargetUpdate(tau=0.2), TargetUpdate(every=2), TargetUpdate(mode="hard")):
        with pytest.raises(ConfigError, match="model.ta"):
            fit_fake(make_module(tau=0.3, target_delay=3), [make_batch()], [wrong])
    with pytest.raises(ConfigError, match="more than once"):
        fit_fake(make_module(), [make_batch()], [TargetUpdate(), TargetUpdate(tau=0.1)])
    for settings in ({"tau": 0.0}, {"target_delay": 0}):
        with pytest.raises(ConfigError, match=f"model.{next(iter(settings))} is 0"):
            make_module(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"mode": "sudden"}, {"tau": 0.0}, {"tau": 1.5}, {"tau": math.nan}, {"tau": True}, {"tau": "0.1"},
     {"every": 0}, {"every": math.nan}, {"every": 1.5}, {"every": "2"}, {"tau": 0.1, "mode": "hard"}],
)  # fmt: skip
def test_wrong_settings_are_named(settings):
    with pytest.raises(ConfigError, match=f"TargetUpdate.{next(iter(settings))}"):
        TargetUpdate(**settings)
