"""The averaged policy: follows the policy, is what is evaluated and exported, and is part of checkpoints."""

import pytest
import torch

from callbacks import RunCheckpoint
from claw_lightning.errors import ConfigError
from claw_lightning.module import OptionCritic
from tests.runs import fit_fake, fit_lockstep, make_batch, make_module


def parameters(policy):
    return [p.detach().clone() for p in policy.parameters()]


def test_it_follows_the_policy_by_its_rate():
    module = make_module(build=True, policy_average=0.25, policy_delay=1)
    before = parameters(module.policy)
    assert all(torch.equal(a, b) for a, b in zip(parameters(module.average), before, strict=True))
    batches = [make_batch(1, seed=seed) for seed in range(2)]
    expected, steps = before, []
    update = module.move_average
    module.move_average = lambda: (steps.append(parameters(module.policy)), update())
    fit_fake(module, batches)
    for step in steps:
        expected = [torch.lerp(a, b, 0.25) for a, b in zip(expected, step, strict=True)]
    assert len(steps) == 2
    for a, b in zip(parameters(module.average), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_evaluated_and_exported_with_the_present_statistics():
    module = make_module(build=True, policy_average=0.01)
    assert make_module(build=True).evaluated_policy.__class__ is module.policy.__class__
    fit_fake(module, [make_batch(4)])
    shown = module.evaluated_policy
    assert shown is module.average
    assert torch.equal(shown.normalizer.mean, module.policy.normalizer.mean)
    agent = module.agent()
    assert all(torch.equal(a, b) for a, b in zip(agent.policy.parameters(), shown.parameters(), strict=True))
    assert any(
        not torch.equal(a, b) for a, b in zip(agent.policy.parameters(), module.policy.parameters(), strict=True)
    )


def test_nothing_else_changes_by_it():
    one, other = (make_module(build=True, policy_average=rate) for rate in (0.0, 0.5))
    for module in (one, other):
        torch.manual_seed(3)
        fit_fake(module, [make_batch(4)])
    assert all(torch.equal(a, b) for a, b in zip(parameters(one.policy), parameters(other.policy), strict=True))


def test_it_comes_back_from_checkpoints(tmp_path):
    keep = RunCheckpoint(dirpath=str(tmp_path))
    settings = {"limit_val_batches": 0, "enable_checkpointing": True}
    _, module, _ = fit_lockstep(tmp_path, callbacks=[keep], model={"policy_average": 0.1}, **settings)
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert all(torch.equal(a, b) for a, b in zip(parameters(loaded.average), parameters(module.average), strict=True))
    with pytest.raises(ConfigError, match=r"model.policy_average 0.1; this run has model.policy_average 0"):
        fit_lockstep(tmp_path, ckpt=tmp_path / "last.ckpt", limit_val_batches=0)
