"""What a sampler hands to the updates and gets back: importance weights, absolute TD errors; bounds of targets."""

import dataclasses

import numpy as np
import pytest
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayBatch
from claw_lightning.replay.samplers import Places
from claw_lightning.rollout.ring import RowLayout
from tests.runs import SPEC, FakeData, fit_fake, make_batch, make_module

FORMS = {
    "single": {},
    "expected": {"arrival": "expected", "all_options": 0.5},
    "sampled": {"arrival": "sampled", "all_options": 0.5},
    "distributional": {"critic_atoms": 11, "value_range": (-5.0, 5.0)},
    "distributional of all": {"critic_atoms": 11, "value_range": (-5.0, 5.0), "all_options": 0.5},
    "executed path": {"n_step": 3},
    "cut at switch": {"n_step": 3, "n_step_form": "switch"},
    "retrace": {"n_step": 3, "n_step_form": "retrace"},
    "K = 1": {"num_options": 1},
}


class Listening(FakeData):
    """Keeps what the sampler would be told."""

    def __init__(self, batches):
        super().__init__(batches)
        self.told = []

    def update_priorities(self, places, errors):
        self.told.append((places, errors))


def batch_of(settings, updates=2, size=8, **fields):
    """A batch of single rows, or of segments that are shorter than they could be, with places."""
    length = settings.get("n_step", 1)
    if length == 1:
        made = make_batch(updates, size, settings.get("num_options", 4), **fields)
    else:
        flat = make_batch(updates, size * length, **fields)
        shape = (updates, size, length, -1)
        valid = torch.ones(updates, size, length, dtype=torch.bool)
        valid[:, ::2, 1:] = False
        rows, next_obs = (x.view(shape) * valid.unsqueeze(-1) for x in (flat.rows, flat.next_obs))
        made = ReplayBatch(rows, next_obs, RowLayout(SPEC.obs_size, SPEC.action_size), flat.moments, 100, valid)
    index = np.arange(updates * size)
    made.places = Places(index * 0, index, index * 0)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_critic_tells_its_errors(form):
    batch = batch_of(FORMS[form])
    data = Listening([batch])
    fit_fake(make_module(**FORMS[form]), [batch], data=data)
    [(places, errors)] = data.told
    assert places is batch.places and errors.shape == (2, 8)
    assert torch.isfinite(errors).all() and (errors > 0).all() and errors.std() > 0


def test_the_errors_are_those_of_the_executed_option():
    settings = {"num_options": 1, "target_noise": 0.0, "normalize_observations": False, "gamma": 0.9}
    batch = batch_of(settings, updates=1)
    data, module = Listening([batch]), make_module(build=True, **settings)
    with torch.no_grad():
        action = module.target_actor.mean_action(module.target_actor(batch.next_obs[0], batch.option[0] * 0))
        value = module.target_critic(batch.next_obs[0], action, batch.option[0] * 0).amin(0)
        target = batch.reward[0] + 0.9 * value * ~batch.terminated[0]
        q = module.critic(batch.obs[0], batch.action[0], batch.option[0] * 0)
        expected = (q - target).abs().mean(0)
    fit_fake(module, [batch], data=data)
    torch.testing.assert_close(data.told[0][1][0], expected)


def test_without_places_nothing_is_told():
    batch = batch_of({})
    batch.places = None
    data = Listening([batch])
    fit_fake(make_module(), [batch], data=data)
    assert data.told == []


def parameters(settings, batch):
    """Critic and actor after an update."""
    module = make_module(build=True, policy_delay=1, target_noise=0.0, **settings)
    torch.manual_seed(1)
    fit_fake(module, [batch])
    return [p.detach().clone() for net in (module.critic, module.policy.actor) for p in net.parameters()]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "sampled"])
def test_rows_of_no_importance_teach_nothing_and_equal_ones_change_nothing(form):
    settings = {**FORMS[form], "normalize_observations": False}
    batch = batch_of(settings, updates=1)
    batch.places = None
    weights = torch.ones(1, 8)
    plain, ones = parameters(settings, batch), parameters(settings, dataclasses.replace(batch, weights=2 * weights))
    for a, b in zip(plain, ones, strict=True):
        torch.testing.assert_close(a, b)
    weights[0, 3:] = 0.0
    other = dataclasses.replace(batch, rows=batch.rows.clone(), weights=weights)
    other.rows[0, 3:, ..., : SPEC.obs_size] += 1.0
    same = [parameters(settings, each) for each in (dataclasses.replace(batch, weights=weights), other)]
    for a, b in zip(*same, strict=True):
        torch.testing.assert_close(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(plain, same[0], strict=True))


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("distributional")])
def test_targets_keep_within_their_range(form, monkeypatch):
    from claw_lightning import losses

    seen, loss = [], losses.critic_loss
    monkeypatch.setattr(losses, "critic_loss", lambda q, y, w=None: (seen.append(y), loss(q, y, w))[1])
    settings = {**FORMS[form], "target_range": (-0.25, 0.5)}
    batch = batch_of(settings, reward=np.linspace(-9, 9, 2 * 8 * settings.get("n_step", 1)).reshape(2, -1))
    batch.places = None
    fit_fake(make_module(**settings), [batch])
    values = torch.cat([y.flatten() for y in seen])
    assert values.min() == -0.25 and values.max() == 0.5


@pytest.mark.parametrize("limits", [(0.0, 0.0), (1.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_ranges_without_meaning_are_refused(limits):
    with pytest.raises(ConfigError, match="model.target_range"):
        make_module(target_range=limits)
