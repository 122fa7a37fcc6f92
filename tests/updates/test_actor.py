"""Action policies: whose gradient, of which size, and what never moves."""

import pytest
import torch

from claw_lightning.settings import Diversity
from claw_lightning.updates import actor as update
from claw_lightning.updates.actor import update_actor
from tests.runs import fit_fake, make_batch, make_module
from tests.updates.support import capture, make_discrete, make_rows, sgd

KINDS = ["deterministic", "gaussian", "categorical"]


def make(kind, **settings):
    if kind == "categorical":
        return make_discrete(**settings)
    return make_module(**{"num_options": 2, "actor": kind, "build": True, **settings})


def rows_of(kind, **fields):
    return make_rows(**({"num_actions": 3} if kind == "categorical" else {}), **fields)


def raw_gradient(module, rows, monkeypatch):
    """Gradient of the actor's loss in the raw outputs of the options that learn."""
    seen = {}
    name = "forward" if rows.weight is None else "forward_all"
    method = getattr(module.policy.actor, name)

    def watched(*args):
        seen["raw"] = method(*args)
        seen["raw"].retain_grad()
        return seen["raw"]

    with monkeypatch.context() as patch:
        patch.setattr(module.policy.actor, name, watched)
        found = {}

        def step(name, network):
            if name == "actor":
                found["grad"] = seen["raw"].grad.clone()
                found["critics"] = [p.grad for net in (module.critic, module.target_critic) for p in net.parameters()]

        capture(module, patch, step)
        torch.manual_seed(5)
        update_actor(module, rows)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_critics_keep_no_gradients_and_go_on_learning_afterwards(monkeypatch, kind, weighted):
    module = make(kind)
    rows = rows_of(kind, weight=torch.rand(8, 2) if weighted else None)
    found = raw_gradient(module, rows, monkeypatch)
    assert found["grad"].abs().sum() > 0
    assert all(grad is None or not grad.any() for grad in found["critics"])
    assert all(p.requires_grad for p in module.critic.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_each_option_learns_in_proportion_to_its_weight(monkeypatch, kind):
    module, weight = make(kind), torch.rand(8, 2) + 0.1
    one = raw_gradient(module, rows_of(kind, weight=torch.ones(8, 2)), monkeypatch)["grad"]
    got = raw_gradient(module, rows_of(kind, weight=weight), monkeypatch)["grad"]
    torch.testing.assert_close(got, one * 16 * (weight / weight.sum()).unsqueeze(-1), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_weights_equal_executed_options(monkeypatch, kind):
    module, rows = make(kind), rows_of(kind)
    if kind == "gaussian":  # the same noise for both, which draw different numbers of samples
        monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    executed = raw_gradient(module, rows, monkeypatch)["grad"]
    one_hot = torch.nn.functional.one_hot(rows.option, 2).float()
    got = raw_gradient(module, rows_of(kind, weight=one_hot), monkeypatch)["grad"]
    torch.testing.assert_close(got, one_hot.unsqueeze(-1) * executed.unsqueeze(1), rtol=1e-3, atol=1e-7)


def test_deterministic_actor_climbs_the_first_critic(monkeypatch):
    module = make("deterministic")
    rows = rows_of("deterministic")
    before = module.critic(rows.obs, module.policy.actor.mean_action(module.policy.actor(rows.obs, rows.option)),
                           rows.option).detach()  # fmt: skip
    capture(module, monkeypatch, sgd(1.0))
    update_actor(module, rows)
    after = module.critic(rows.obs, module.policy.actor.mean_action(module.policy.actor(rows.obs, rows.option)),
                          rows.option)  # fmt: skip
    assert float(after[0].mean()) > float(before[0].mean())


def test_categorical_actor_prefers_the_action_of_the_higher_lower_twin(monkeypatch):
    module = make_discrete(initial_temperature=1e-3, tune_temperature=False)
    table = torch.zeros(2, 8, 2, 3)
    table[0, :, 0], table[1, :, 0] = torch.tensor([1.0, 9.0, 0.0]), torch.tensor([1.0, -9.0, 0.0])
    table[:, :, 1] = torch.tensor([0.0, 0.0, 1.0])
    monkeypatch.setattr(module.critic, "table", lambda obs: table)
    rows = make_rows(num_actions=3, weight=torch.ones(8, 2))
    capture(module, monkeypatch, sgd(2.0))
    for _ in range(200):
        update_actor(module, rows)
    likeliest = module.policy.actor.forward_all(rows.obs).argmax(-1)
    assert likeliest.tolist() == [[0, 2]] * 8


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("target, direction", [(50.0, 1), (-50.0, -1)])
def test_temperature_follows_the_entropy(monkeypatch, kind, target, direction):
    module = make(kind)
    module.target_entropy = target
    before = module.log_temperature.item()

    def step(name, network):
        if name == "temperature":
            module.log_temperature.data -= 0.1 * module.log_temperature.grad

    capture(module, monkeypatch, step)
    update_actor(module, rows_of(kind, weight=torch.rand(8, 2)))
    assert (module.log_temperature.item() - before) * direction > 0


def test_ddpg_is_a_configuration():
    module = make_module(num_options=1, num_critics=1, policy_delay=1, target_noise=0.0)
    fit_fake(module, [make_batch(3, num_options=1)])
    assert module.critic.count == 1 and module.updates == 3
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_separate_heads_leave_the_last_layers_of_other_options_as_they_were(monkeypatch, kind):
    module = make(kind, num_options=3, option_heads="separate")
    rows = rows_of(kind, option=torch.ones(8, dtype=torch.int64))
    last, size = module.policy.actor.body[-1], module.policy.actor.out_size
    before = last.weight.detach().clone().view(3, size, -1), last.bias.detach().clone().view(3, size)
    capture(module, monkeypatch, sgd(1.0))
    update_actor(module, rows)
    for then, now in zip(before, (last.weight.view(3, size, -1), last.bias.view(3, size))):
        assert torch.equal(then[0], now[0]) and torch.equal(then[2], now[2])
        assert not torch.equal(then[1], now[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_bonus_drives_near_options_apart(monkeypatch, kind, weighted):
    spreads = {}
    for bonus in (0.0, 50.0):
        diversity = Diversity(bonus=bonus, length_scale=0.3)
        module = make(kind, option_heads="separate", diversity=diversity, num_options=2)
        rows = rows_of(kind, weight=torch.full((8, 2), 0.5) if weighted else None)
        actor = module.policy.actor
        with torch.no_grad():  # all but identical
            half = len(actor.body[-1].weight) // 2
            noise = 0.01 * torch.randn_like(actor.body[-1].weight[:half])
            actor.body[-1].weight[half:] = actor.body[-1].weight[:half] + noise
        before = float(update.option_spread(module, rows, None))
        capture(module, monkeypatch, sgd(0.01))
        for _ in range(5):
            update_actor(module, rows)
        spreads[bonus] = float(update.option_spread(module, rows, None)) / before
    assert spreads[50.0] > 1.05
    assert spreads[50.0] > spreads[0.0]
