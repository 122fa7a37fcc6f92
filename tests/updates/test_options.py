"""Option policy and termination: where a choice is made, who arrives, and what a decision costs."""

import pytest
import torch

from claw_lightning import losses
from claw_lightning.updates.options import update_options, update_state_value, update_values, watch_options
from tests.runs import make_module
from tests.updates.support import capture, constant, make_rows, sgd

PLAIN = {"num_options": 2, "option_entropy": 0.0, "termination_entropy": 0.0, "build": True}
NO, YES = torch.zeros(8, dtype=torch.bool), torch.ones(8, dtype=torch.bool)


def stepped(monkeypatch, rows, q=(1.0, 0.0), beta=None, **settings):
    """beta(s') and pi(s') and pi(s) before and after one plain gradient step."""
    module = make_module(**{**PLAIN, **settings})
    monkeypatch.setattr(module.next_values, "options", constant(list(q)))
    if beta is not None:
        monkeypatch.setattr(module.policy, "beta", constant(beta))
    found = capture(module, monkeypatch, sgd(0.1) if beta is None else policy_alone)

    def look():
        policy = module.policy
        tables = policy.beta(rows.next_obs), policy.option_probs(rows.next_obs), policy.option_probs(rows.obs)
        return [x.detach().clone() for x in tables]

    before = look()
    update_options(module, rows)
    return before, look(), found, module


def policy_alone(name, network):
    if name == "option_policy":
        sgd(0.1)(name, network)


@pytest.fixture(autouse=True)
def losses_need_gradients(monkeypatch):
    """Where beta is a constant its loss has nothing to differentiate."""
    plain = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda x, *args: plain(x, *args) if x.requires_grad else None)


def test_termination_falls_where_the_advantage_is_positive_and_rises_where_negative(monkeypatch):
    for option, direction in ((0, -1), (1, 1)):
        rows = make_rows(option=torch.full((8,), option))
        (before, _, _), (after, _, _), _, _ = stepped(monkeypatch, rows)
        assert ((after[:, option] - before[:, option]) * direction > 0).all()


def test_option_policy_climbs_to_the_better_option(monkeypatch):
    rows = make_rows(option=torch.zeros(8, dtype=torch.int64), first=NO)
    (_, before, _), (_, after, _), _, _ = stepped(monkeypatch, rows)
    assert (after[:, 0] > before[:, 0]).all()


@pytest.mark.parametrize("better", [0, 1])
def test_at_first_steps_it_climbs_even_where_no_option_ever_ends(monkeypatch, better):
    q = (1.0, 0.0) if better == 0 else (0.0, 1.0)
    (_, _, before), (_, _, after), _, _ = stepped(monkeypatch, make_rows(first=YES), q, beta=[0.0, 0.0])
    assert (after[:, better] > before[:, better]).all()
    # Elsewhere nothing is chosen, and nothing learned.
    (_, _, before), (_, _, after), _, _ = stepped(monkeypatch, make_rows(first=NO), q, beta=[0.0, 0.0])
    assert torch.equal(before, after)


def test_nothing_is_learned_at_next_states_where_the_episode_ended(monkeypatch):
    before, after, _, _ = stepped(monkeypatch, make_rows(terminated=YES, first=NO))
    for left, right in zip(before, after):
        assert torch.equal(left, right)
    # But at the first states of such rows.
    (beta, _, probs), (beta_after, _, after), _, _ = stepped(monkeypatch, make_rows(terminated=YES, first=YES))
    assert (after[:, 0] > probs[:, 0]).all() and torch.equal(beta, beta_after)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["full", "regularizer"])
def test_losses_are_the_weighted_means_by_hand(monkeypatch, form, weighted):
    first = torch.tensor([True, False, False, True, False, False, False, False])
    terminated = torch.tensor([False, False, True, True, False, False, False, False])
    weight = torch.rand(8, 2) if weighted else None
    rows = make_rows(first=first, terminated=terminated, weight=weight)
    module = make_module(
        **{**PLAIN, "option_entropy": 0.3, "termination_entropy": 0.7}, deliberation_cost=0.2, deliberation_form=form,
        normalize_advantages=False, target_noise=0.0,
    )  # fmt: skip
    found = capture(module, monkeypatch)
    policy = module.policy
    arriving = torch.nn.functional.one_hot(rows.option, 2).float() if weight is None else weight
    policy_sum = policy_total = termination_sum = termination_total = 0.0
    with torch.no_grad():
        for i in range(8):
            x = rows.next_obs[i : i + 1]
            q, probs, beta = module.next_values.options(x)[0], policy.option_probs(x)[0], policy.beta(x)[0]
            value, alive = float(probs @ q), float(not terminated[i])
            for o in range(2):
                w = float(arriving[i, o]) * alive
                b = float(beta[o])
                entropy = float(losses.bernoulli_entropy(beta[o]))
                termination_sum += w * (b * (float(q[o]) - value + 0.2) - 0.7 * entropy)
                termination_total += w
                policy_sum += w * b * (-value - 0.3 * float(losses.categorical_entropy(probs)))
                policy_total += w * b
            if first[i]:
                q, probs = module.next_values.options(rows.obs[i : i + 1])[0], policy.option_probs(rows.obs[i])
                policy_sum += -float(probs @ q) - 0.3 * float(losses.categorical_entropy(probs))
                policy_total += 1.0
    update_options(module, rows)
    assert float(found["termination"]) == pytest.approx(termination_sum / termination_total, rel=1e-3, abs=1e-4)
    assert float(found["option_policy"]) == pytest.approx(policy_sum / policy_total, rel=1e-3, abs=1e-4)


def test_all_options_arrive_by_weight(monkeypatch):
    """At s' of one row both options learn: the better one persists, the other ends."""
    rows = make_rows(weight=torch.full((8, 2), 0.5), option=torch.zeros(8, dtype=torch.int64))
    (before, _, _), (after, _, _), _, _ = stepped(monkeypatch, rows)
    assert (after[:, 0] < before[:, 0]).all() and (after[:, 1] > before[:, 1]).all()
    grads = []
    for weight in ([1.0, 0.0], [0.0, 1.0], [0.25, 0.75]):
        rows.weight = torch.tensor([weight]).repeat(8, 1)
        module = make_module(**PLAIN)
        monkeypatch.setattr(module.next_values, "options", constant([1.0, 0.0]))
        capture(module, monkeypatch, lambda name, net: grads.append(net[-1].bias.grad.clone()))
        update_options(module, rows)
    (_, one), (_, other), (_, mixed) = (grads[i : i + 2] for i in (0, 2, 4))
    torch.testing.assert_close(mixed, 0.25 * one + 0.75 * other)


def test_option_batch_size_leaves_the_other_rows_out(monkeypatch):
    rows, part = make_rows(first=YES), make_rows(first=YES).map(lambda x: x[:3])
    found = []
    for batch, size in ((rows, 3), (part, 0)):
        module = make_module(**PLAIN, option_batch_size=size)
        found.append(capture(module, monkeypatch))
        monkeypatch.setattr(module.next_values, "options", constant([1.0, 0.0]))
        update_options(module, batch)
    assert found[0]["termination"] == found[1]["termination"] and found[0]["option_policy"] == found[1]["option_policy"]


def test_normalised_advantages_make_the_step_invariant_to_the_rewards_scale(monkeypatch):
    results = []
    for factor in (1.0, 100.0):
        before, after, _, _ = stepped(monkeypatch, make_rows(), (factor, 0.0), option_entropy=0.5)
        results.append([b - a for b, a in zip(before, after)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)
    plain = [stepped(monkeypatch, make_rows(), (f, 0.0), normalize_advantages=False)[:2] for f in (1.0, 100.0)]
    steps = [float((before[0] - after[0]).abs().max()) for before, after in plain]
    assert steps[1] > 20 * steps[0]


@pytest.mark.parametrize("beta, cost, direction", [(0.5, 0.2, 1), (0.1, 0.2, -1), (0.1, 0.0, 0)])
def test_the_cost_follows_the_decision_rate_and_never_falls_below_zero(monkeypatch, beta, cost, direction):
    rows = make_rows()
    _, _, _, module = stepped(
        monkeypatch, rows, beta=[beta, beta], deliberation_cost=cost, target_decision_rate=0.3,
        deliberation_cost_lr=0.1, normalize_advantages=False,
    )  # fmt: skip
    assert float(module.policy.switch_cost) == pytest.approx(max(0.0, cost + 0.1 * (beta - 0.3)))
    assert (float(module.policy.switch_cost) > cost) == (direction > 0)


def test_the_rate_counts_arriving_options_alone():
    module = make_module(**PLAIN, target_decision_rate=0.3, deliberation_cost_lr=0.1, deliberation_cost=1.0)
    beta, arriving = torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    watch_options(module, beta, arriving, torch.tensor([1, 1]), torch.tensor(2.0))
    assert float(module.policy.switch_cost) == pytest.approx(1.0 + 0.1 * 2.0 * (0.15 - 0.3))
    torch.testing.assert_close(module.option_shares, torch.tensor([0.495, 0.505]))


@pytest.mark.parametrize("selection, probs", [("random", [0.5, 0.5]), (1, [0.0, 1.0])])
def test_options_chosen_by_a_rule_are_not_learned(monkeypatch, selection, probs):
    rows = make_rows(first=YES)
    before, after, found, module = stepped(monkeypatch, rows, option_selection=selection)
    assert torch.equal(after[2], torch.tensor([probs]).repeat(8, 1))
    assert "option_policy" not in found
    assert not torch.equal(before[0], after[0])  # termination learns all the same


def test_value_networks_learn_what_the_critics_say(monkeypatch):
    module, rows = make_module(**PLAIN), make_rows()
    monkeypatch.setattr(module.next_values, "options", constant([3.0, -1.0]))
    monkeypatch.setattr(module.policy, "option_probs", constant([0.25, 0.75]))
    capture(module, monkeypatch, sgd(0.1))
    for _ in range(200):
        update_values(module, rows)
    torch.testing.assert_close(
        module.policy.option_values(rows.next_obs), torch.tensor([[3.0, -1.0]]).repeat(8, 1), atol=0.4, rtol=0
    )
    torch.testing.assert_close(module.state_value(rows.next_obs), torch.zeros(8, 1), atol=0.4, rtol=0)
    found = capture(module, monkeypatch)
    update_state_value(module, rows.next_obs, torch.tensor([[7.0, 3.0]]).repeat(8, 1))
    assert float(found["state_value"]) == pytest.approx(16.0, rel=0.2)
