"""Targets of the critics: executed option, all options, distributions, and returns over segments."""

import pytest
import torch

from claw_lightning import losses, returns
from claw_lightning.settings import Diversity
from claw_lightning.updates import critic as update
from claw_lightning.updates.critic import capped_after, ended_after, update_critic, update_critic_over_segments
from claw_lightning.updates.rows import executed_probs
from tests.runs import make_module
from tests.updates.support import capture, constant, make_discrete, make_rows, sgd


@pytest.fixture
def stubbed(monkeypatch):
    """K = 2 with U(s', o) = [x0, 10 + x0] whatever the rest."""
    module = make_module(num_options=2, gamma=0.9, build=True)

    def arrivals(x):
        return torch.stack([x[:, 0], 10 + x[:, 0]], 1)

    monkeypatch.setattr(module.next_values, "arrivals", arrivals)
    monkeypatch.setattr(module.next_values, "arrival", lambda x, o: arrivals(x).gather(1, o[:, None])[:, 0])
    return module


def test_executed_options_learn_towards_their_own_arrival(stubbed, monkeypatch):
    rows = make_rows(4, option=torch.tensor([0, 1, 0, 1]), terminated=torch.tensor([False, False, True, False]))
    arrival = rows.next_obs[:, 0] + torch.tensor([0.0, 10.0, 0.0, 10.0])
    want = rows.reward + torch.tensor([0.9, 0.9, 0.0, 0.9]) * arrival
    seen = {}

    def forward(obs, action, option, first=None):
        seen.update(obs=obs, action=action, option=option)
        return torch.stack([want + 1.0, want - 2.0]).requires_grad_()

    monkeypatch.setattr(stubbed.critic, "forward", forward)
    found = capture(stubbed, monkeypatch)
    update_critic(stubbed, rows, counted=True)
    assert float(found["critic"]) == pytest.approx(1.0**2 + 2.0**2, rel=1e-5)
    assert seen["obs"] is rows.obs and seen["action"] is rows.action and seen["option"] is rows.option


def test_all_options_learn_towards_their_own_arrival_by_weight(stubbed, monkeypatch):
    weight = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    rows = make_rows(3, terminated=torch.tensor([False, False, True]), weight=weight)
    x = rows.next_obs[:, :1]
    want = rows.reward[:, None] + torch.tensor([[0.9], [0.9], [0.0]]) * torch.cat((x, 10 + x), 1)
    error = torch.tensor([[1.0, 2.0], [3.0, 100.0], [0.0, 4.0]])  # 100: an option of weight 0
    seen = {}

    def forward_all(obs, actions, first=None):
        seen.update(obs=obs, actions=actions)
        return torch.stack([want + error, want]).requires_grad_()

    monkeypatch.setattr(stubbed.critic, "forward_all", forward_all)
    found = capture(stubbed, monkeypatch)
    update_critic(stubbed, rows, counted=True)
    assert float(found["critic"]) == pytest.approx(float((weight * error.square()).sum() / 3), rel=1e-5)
    assert seen["obs"] is rows.obs
    assert torch.equal(seen["actions"], torch.stack([rows.action, rows.action], 1))


def test_one_hot_weights_equal_the_executed_option(monkeypatch):
    for settings in ({}, {"critic_atoms": 21, "value_range": (-3.0, 3.0)}):
        module = make_module(num_options=2, target_noise=0.0, build=True, **settings)
        rows, grads = make_rows(), []
        for weight in (None, torch.nn.functional.one_hot(rows.option, 2).float()):
            rows.weight = weight
            capture(module, monkeypatch, lambda name, net: grads.append([p.grad.clone() for p in net.parameters()]))  # noqa: B023
            update_critic(module, rows, counted=True)
        for one, other in zip(*grads):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_adaptive_weights_reach_the_loss(stubbed, monkeypatch):
    stubbed.diversity = Diversity(adaptive_weights=True)
    stubbed.option_shares.copy_(torch.tensor([0.8, 0.2]))
    rows = make_rows(2, option=torch.tensor([0, 1]))
    want = rows.reward + 0.9 * (rows.next_obs[:, 0] + torch.tensor([0.0, 10.0]))
    error = torch.tensor([1.0, 2.0])
    monkeypatch.setattr(stubbed.critic, "forward", lambda *_: torch.stack([want, want + error]).requires_grad_())
    found = capture(stubbed, monkeypatch)
    update_critic(stubbed, rows, counted=True)
    assert float(found["critic"]) == pytest.approx((0.625 * 1 + 2.5 * 4) / (0.625 + 2.5), rel=1e-5)


# -- distributions ----------------------------------------------------------------------------------------------------


def distributional(**settings):
    return make_module(
        num_options=2, critic_atoms=41, value_range=(-5.0, 5.0), target_noise=0.0, build=True, **settings
    )


@pytest.mark.parametrize("goal", [-3.0, 3.0])
def test_means_of_distributions_move_towards_the_target(monkeypatch, goal):
    module = distributional()
    rows = make_rows(4, reward=torch.full((4,), goal), terminated=torch.ones(4, dtype=torch.bool))
    before = module.critic(rows.obs, rows.action, rows.option).detach()
    capture(module, monkeypatch, sgd(0.1))
    update_critic(module, rows, counted=True)
    after = module.critic(rows.obs, rows.action, rows.option)
    assert ((after - goal).abs() < (before - goal).abs()).all()
    for _ in range(300):
        update_critic(module, rows, counted=True)
    torch.testing.assert_close(module.critic(rows.obs, rows.action, rows.option), torch.full((2, 4), goal), atol=0.1,
                               rtol=0)  # fmt: skip


def test_distributional_target_has_the_mean_of_the_scalar_one(monkeypatch):
    module = distributional(gamma=0.5, deliberation_cost=0.1)
    rows = make_rows(16, terminated=torch.arange(16) % 4 == 0, reward=torch.linspace(-1, 1, 16))
    seen = {}

    def cross_entropy(logits, target, weight=None):
        seen.update(target=target, weight=weight)
        return logits.sum() * 0.0

    monkeypatch.setattr(update.distributional, "cross_entropy", cross_entropy)
    capture(module, monkeypatch)
    update_critic(module, rows, counted=True)
    arrivals = module.next_values.arrivals(rows.next_obs)
    want = losses.td_target(rows.reward, rows.terminated, arrivals.gather(1, rows.option[:, None])[:, 0], 0.5)
    torch.testing.assert_close(seen["target"] @ module.critic.support, want, atol=2e-3, rtol=1e-4)

    rows.weight = torch.rand(16, 2)
    update_critic(module, rows, counted=True)
    want = [losses.td_target(rows.reward, rows.terminated, arrivals[:, o], 0.5) for o in (0, 1)]
    got = (seen["target"] @ module.critic.support).view(16, 2)
    torch.testing.assert_close(got, torch.stack(want, 1), atol=2e-3, rtol=1e-4)
    assert torch.equal(seen["weight"].view(16, 2), rows.weight)


def test_options_of_no_weight_leave_distributions_alone(monkeypatch):
    module = distributional()
    rows = make_rows(4, reward=torch.full((4,), 3.0), weight=torch.tensor([[1.0, 0.0]]).repeat(4, 1))
    seen = {}
    logits_all = module.critic.logits_all

    def watched(*args):
        seen["logits"] = logits_all(*args)
        seen["logits"].retain_grad()
        return seen["logits"]

    monkeypatch.setattr(module.critic, "logits_all", watched)
    capture(module, monkeypatch, lambda *_: None)
    update_critic(module, rows, counted=True)
    grad = seen["logits"].grad
    assert (grad[:, :, 0].abs().sum(-1) > 0).all() and not grad[:, :, 1].any()


# -- segments ---------------------------------------------------------------------------------------------------------


def test_the_next_rows_flag_tells_that_an_option_ended():
    switched = torch.tensor([[True, False, True, True], [True, True, True, True]])
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    rows = make_rows(2, length=4, switched=switched, valid=valid)
    assert ended_after(rows).tolist() == [[False, True, True, False], [True, False, False, False]]


def test_the_age_tells_that_an_option_was_capped():
    age = torch.tensor([[0, 1, 2, 0], [2, 0, 1, 2]], dtype=torch.int32)
    rows = make_rows(2, length=4, age=age)
    module = make_module(num_options=2, max_option_duration=3, build=True)
    assert capped_after(module, rows).tolist() == [[False, False, True, False], [True, False, False, True]]
    assert not capped_after(make_module(num_options=2, build=True), rows).any()


def segment_rows(**fields):
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[2, 3:] = valid[3, 1:] = valid[4, 2:] = valid[5, 2:] = False
    terminated = torch.zeros(6, 4, dtype=torch.bool)
    terminated[4, 1] = terminated[0, 3] = True  # row 5 is cut by a time limit where row 4 terminates
    age = torch.arange(4, dtype=torch.int32).repeat(6, 1)
    return make_rows(6, length=4, valid=valid, terminated=terminated, age=age, **fields)


def values_of(module, rows, cost):
    """U(s_{k+1}, o_k) and V(s_{k+1}) step by step."""
    arrival, value = torch.zeros(6, 4), torch.zeros(6, 4)
    for k in range(4):
        q = module.next_values.options(rows.next_obs[:, k])
        probs, beta = module.policy.option_probs(rows.next_obs[:, k]), module.policy.beta(rows.next_obs[:, k])
        u = losses.arrival_value(q, probs, beta, cost)
        arrival[:, k] = u.gather(1, rows.option[:, k, None])[:, 0].detach()
        value[:, k] = losses.state_value(q, probs).detach()
    return arrival, value


@pytest.mark.parametrize("form, cost", [("full", 0.3), ("regularizer", 0.0)])
@pytest.mark.parametrize("n_step_form", ["executed", "switch"])
def test_returns_of_a_segment_are_those_of_the_same_values_by_hand(monkeypatch, n_step_form, form, cost):
    module = make_module(
        num_options=2, n_step=4, n_step_form=n_step_form, gamma=0.9, deliberation_cost=0.3, deliberation_form=form,
        target_noise=0.0, max_option_duration=3, build=True,
    )  # fmt: skip
    monkeypatch.setattr(module.policy, "beta", constant([0.3, 0.6]))
    rows = segment_rows()
    arrival, value = values_of(module, rows, cost)
    ended = torch.cat((rows.switched[:, 1:] & rows.valid[:, 1:], torch.zeros(6, 1, dtype=torch.bool)), 1)
    capped = rows.age >= 2
    if n_step_form == "executed":
        want = returns.executed_path_return(
            rows.reward, rows.terminated, rows.valid, arrival, 0.9, ended=ended, by_cap=capped, deliberation_cost=cost
        )
    else:
        want = returns.cut_at_switch_return(
            rows.reward, rows.terminated, rows.valid, ended, capped, arrival, value, cost, 0.9
        )
    seen = target_of(module, rows, monkeypatch)
    torch.testing.assert_close(seen["target"], want)
    assert torch.equal(seen["obs"], rows.obs[:, 0]) and torch.equal(seen["option"], rows.option[:, 0])
    # A time limit bootstraps, an end of the task does not.
    path = rows.reward[:, 0] + 0.9 * rows.reward[:, 1]
    if n_step_form == "executed":
        toll = 0.9 * cost * ended[:, 0]
        torch.testing.assert_close(want[4], (path - toll)[4])
        torch.testing.assert_close(want[5], (path - toll + 0.81 * arrival[:, 1])[5])
        torch.testing.assert_close(want[3], rows.reward[3, 0] + 0.9 * arrival[3, 0])


def target_of(module, rows, monkeypatch):
    seen = {}
    forward = module.critic.forward

    def critic(obs, action, option, first=None):
        seen.update(obs=obs, action=action, option=option)
        return forward(obs, action, option)

    def critic_loss(q, target, weight=None):
        seen.update(q=q, target=target, weight=weight)
        return q.sum() * 0.0

    monkeypatch.setattr(module.critic, "forward", critic)
    monkeypatch.setattr(update.losses, "critic_loss", critic_loss)
    capture(module, monkeypatch)
    update_critic_over_segments(module, rows, counted=True)
    return seen


@pytest.mark.parametrize("actor", ["deterministic", "categorical"])
def test_retrace_targets_are_those_of_the_same_values_by_hand(monkeypatch, actor):
    settings = {"num_options": 2, "n_step": 4, "n_step_form": "retrace", "trace": 0.7, "gamma": 0.9,
                "deliberation_cost": 0.3, "target_noise": 0.0}  # fmt: skip
    discrete = actor == "categorical"
    module = make_discrete(**settings) if discrete else make_module(**settings, build=True)
    rows = segment_rows(**({"num_actions": 3} if discrete else {}))
    arrival, _ = values_of(module, rows, 0.3)
    q = module.target_critic(rows.obs.flatten(0, 1), rows.action.flatten(0, 1), rows.option.flatten())
    q = q.amin(0).view(6, 4).detach()
    if discrete:
        ratio = executed_probs(module, rows).gather(2, rows.option[..., None])[..., 0].log() - rows.log_prob_option
        for k in range(4):
            logits = module.policy.actor(rows.obs[:, k], rows.option[:, k]).log_softmax(-1)
            ratio[:, k] += logits.gather(1, rows.action[:, k].long())[:, 0].detach() - rows.log_prob_action[:, k]
        trace = 0.7 * ratio.exp().clamp_max(1.0)
        assert (trace < 0.7).any()
    else:
        trace = torch.where(rows.switched, 0.0, 0.7)
    want = returns.retrace_targets(q, rows.reward, rows.terminated, rows.valid, arrival, trace, 0.9)
    seen = target_of(module, rows, monkeypatch)
    torch.testing.assert_close(seen["target"].view(6, 4), want)
    assert torch.equal(seen["weight"].view(6, 4), rows.valid.float())
    assert torch.equal(seen["option"], rows.option.flatten())


@pytest.mark.parametrize("n_step_form", ["executed", "retrace"])
def test_adaptive_weights_reach_segments(monkeypatch, n_step_form):
    module = make_module(
        num_options=2, n_step=4, n_step_form=n_step_form, diversity=Diversity(adaptive_weights=True), build=True
    )
    module.option_shares.copy_(torch.tensor([0.8, 0.2]))
    rows = segment_rows()
    seen, factor = target_of(module, rows, monkeypatch), torch.tensor([0.625, 2.5])[rows.option]
    want = factor[:, 0] if n_step_form == "executed" else (factor * rows.valid).flatten()
    torch.testing.assert_close(seen["weight"], want)
