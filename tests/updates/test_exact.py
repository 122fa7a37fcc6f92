"""The whole update on tabular option MDPs, against exact derivatives of the return.

Every transition (s, a, s') is a row of one batch; the weight of option o in it is N times the discounted probability
of executing o in s, choosing a and going to s' (``solve``). First steps are N rows without such a weight, in numbers
that make the start distribution. The networks are tables, the critics hold the exact Q_U. What the update then hands
to its optimisers is, after the means are turned back into sums, the gradient of J.
"""

import pytest
import torch
from torch import nn

from claw_lightning.minibatch import Minibatch
from claw_lightning.module import OptionCritic
from claw_lightning.rollout.envs.base import EnvSpec
from tests.mdp import acyclic_mdp, random_mdp, solve
from tests.runs import TINY
from tests.test_losses import (
    mdp_b,
    true_action_logit_gradient,
    true_beta_gradient,
    true_option_logit_gradient,
)
from tests.updates.support import capture

COSTS = [0.0, 0.05, 0.2]
MDPS = {
    "mdp_b": lambda cost: mdp_b(cost),
    "mdp_a": lambda cost: acyclic_mdp([0.2, 0.6], 0.8, cost),
    **{f"random_{seed}": lambda cost, seed=seed: with_rational_start(random_mdp(seed), cost) for seed in range(4)},
}
FIRST_STEPS = 8  # N


def with_rational_start(mdp, cost):
    start = torch.zeros_like(mdp.start)
    start[:3] = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64) / FIRST_STEPS
    return mdp.but(start=start, cost=cost)


class Table(nn.Module):
    """Rows [S, ...] looked up by one-hot observations [B, S]."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, obs):
        return torch.einsum("bs,s...->b...", obs, self.values)


@pytest.fixture
def float64(monkeypatch):
    """The networks cast to float32, where figures exact to six digits have no room."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def tabular(mdp, monkeypatch, **settings):
    """OptionCritic whose networks are the tables of an MDP; alpha is 0."""
    states, options = mdp.beta.shape
    actions = mdp.reward.shape[1]
    spec = EnvSpec("table", states, 1, [0.0], [actions - 1.0], num_actions=actions)
    module = OptionCritic(
        **{**TINY, "actor": "categorical", "num_options": options, "gamma": mdp.gamma, "deliberation_cost": mdp.cost,
           "normalize_advantages": False, "option_entropy": 0.0, "termination_entropy": 0.0, "policy_delay": 1,
           "option_delay": 1, "tune_temperature": False, **settings}
    )  # fmt: skip
    module.build(spec)
    module.double()
    module.policy.switch_cost.fill_(mdp.cost)
    module.log_temperature.data.fill_(-torch.inf)
    module.policy.option_policy = Table(mdp.option_probs.log())
    module.policy.termination = Table(mdp.beta.logit())
    actor = Table(mdp.action_probs.log())
    module.policy.actor.table = actor
    monkeypatch.setattr(module.policy.actor, "forward_all", actor.forward)
    monkeypatch.setattr(module.policy.actor, "forward", lambda obs, o: actor(obs)[torch.arange(len(o)), o])
    q = solve(mdp).q_action
    for critic in (module.critic, module.target_critic):
        critic.exact = Table(torch.stack([q, q + 1.0], 1))  # the second critic is too high; [S, C, K, A]
        monkeypatch.setattr(critic, "table", lambda obs, critic=critic: critic.exact(obs).transpose(0, 1))
    return module


def every_transition(mdp):
    """Rows of all (s, a, s') with their weights, then those of first steps."""
    states, options = mdp.beta.shape
    actions = mdp.reward.shape[1]
    s, a, after = torch.cartesian_prod(*(torch.arange(n) for n in (states, actions, states))).T
    weight = solve(mdp).executed[s] * mdp.action_probs[s, :, a] * mdp.transition[s, a, after].unsqueeze(1)
    weight[mdp.terminal[s]] = 0.0
    opening = torch.repeat_interleave(torch.arange(states), (mdp.start * FIRST_STEPS).round().long())
    assert len(opening) == FIRST_STEPS
    s, a, after = (torch.cat(pair) for pair in ((s, opening), (a, 0 * opening), (after, 0 * opening)))
    first = torch.arange(len(s)) >= len(s) - FIRST_STEPS
    eye = torch.eye(states, dtype=torch.float64)
    return Minibatch(
        obs=eye[s], action=a.unsqueeze(1).double(), option=torch.zeros_like(s), reward=mdp.reward[s, a],
        terminated=mdp.terminal[after], next_obs=eye[after], first=first, previous=torch.where(first, -1, 0),
        weight=torch.cat((weight * FIRST_STEPS, torch.zeros(FIRST_STEPS, options, dtype=torch.float64))),
    )  # fmt: skip


def gradients(module, rows, monkeypatch):
    """Gradients that the update would give to its optimisers, by network."""
    found = {}

    def step(name, network):
        if network is not None:
            found[name] = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}

    capture(module, monkeypatch, step)
    module.update(rows, last=False)
    return found


def close(actual, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9 * scale)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", MDPS)
def test_every_parameter_group_descends_along_the_exact_gradient(float64, monkeypatch, name, cost):
    mdp = MDPS[name](cost)
    module, rows, solution = tabular(mdp, monkeypatch), every_transition(mdp), solve(mdp)
    found = gradients(module, rows, monkeypatch)

    arriving = (rows.weight * (~rows.terminated).unsqueeze(1)).sum() / FIRST_STEPS
    # Discounted arrivals carry one more gamma than the executions that lead to them.
    to_beta = -found["termination"]["values"] * arriving * mdp.gamma / (mdp.beta * (1 - mdp.beta))
    truth = true_beta_gradient(mdp)
    close(to_beta, truth)
    close(truth, -solution.arrived * (solution.q - solution.value.unsqueeze(1) + cost))

    executed = rows.weight.sum() / FIRST_STEPS
    close(-found["actor"]["table.values"] * executed, true_action_logit_gradient(mdp))

    # At exact values the critics have nothing to learn; the second one is 1 too high everywhere.
    wrong = found["critic"]["exact.values"]
    assert float(wrong[:, 0].abs().max()) < 1e-9 * float(wrong[:, 1].abs().max())


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", MDPS)
def test_option_policy_descends_along_the_exact_gradient_start_states_included(float64, monkeypatch, name, cost):
    mdp = MDPS[name](cost)
    module, rows, solution = tabular(mdp, monkeypatch), every_transition(mdp), solve(mdp)
    rows.weight[:-FIRST_STEPS] *= mdp.gamma  # arrivals, next to first steps of weight 1
    found = gradients(module, rows, monkeypatch)
    chosen = solution.selected.sum()  # what the loss divides by
    truth = true_option_logit_gradient(mdp)
    close(-found["option_policy"]["values"] * chosen, truth)
    advantage = solution.q - solution.value.unsqueeze(1)
    close(truth, solution.selected.unsqueeze(1) * mdp.option_probs * advantage)
    assert float((mdp.option_probs * advantage).sum(1).abs().max()) < 1e-12

    # Without first steps it is another gradient.
    rows.first[:] = False
    found = gradients(module, rows, monkeypatch)
    without = -found["option_policy"]["values"] * (chosen - 1.0)
    start = mdp.start > 0
    assert not torch.allclose(without[start], truth[start], rtol=1e-3)


@pytest.mark.parametrize("cost", [0.05, 0.2])
def test_the_regulariser_form_has_no_cost_inside_the_values(float64, monkeypatch, cost):
    free, mdp = MDPS["random_0"](0.0), MDPS["random_0"](cost)
    # Critics that never paid; the cost stands in the termination loss alone.
    module = tabular(free, monkeypatch, deliberation_form="regularizer")
    module.policy.switch_cost.fill_(cost)
    rows, solution = every_transition(free), solve(free)
    found = gradients(module, rows, monkeypatch)
    wrong = found["critic"]["exact.values"]
    assert float(wrong[:, 0].abs().max()) < 1e-9 * float(wrong[:, 1].abs().max())
    arriving = (rows.weight * (~rows.terminated).unsqueeze(1)).sum() / FIRST_STEPS
    to_beta = -found["termination"]["values"] * arriving * free.gamma / (free.beta * (1 - free.beta))
    close(to_beta, -solution.arrived * (solution.q - solution.value.unsqueeze(1) + cost))
    assert not torch.allclose(to_beta, true_beta_gradient(mdp), rtol=1e-3)


@pytest.mark.parametrize("name", ["mdp_b", "random_1"])
def test_normalised_advantages_change_the_size_alone(float64, monkeypatch, name):
    mdp = MDPS[name](0.05)
    plain = gradients(tabular(mdp, monkeypatch), every_transition(mdp), monkeypatch)
    module = tabular(mdp, monkeypatch, normalize_advantages=True)
    scaled = gradients(module, every_transition(mdp), monkeypatch)
    for group in ("termination", "option_policy"):
        close(scaled[group]["values"] * module.advantage_scale, plain[group]["values"])
    close(scaled["actor"]["table.values"], plain["actor"]["table.values"])


@pytest.mark.parametrize("name", ["mdp_b", "random_2"])
def test_executed_options_by_number_give_what_weights_give(float64, monkeypatch, name):
    """One row per executed option, repeated by rounded weights, against the same weights in one row per transition."""
    mdp = MDPS[name](0.05)
    rows = every_transition(mdp)
    weight = (rows.weight * 20.0 / rows.weight.max()).round()
    rows.weight = weight
    by_weight = gradients(tabular(mdp, monkeypatch), rows, monkeypatch)
    row, option = weight.nonzero().T
    index = torch.repeat_interleave(torch.arange(len(row)), weight[row, option].long())
    single = rows.map(lambda x: x[row[index]])
    single.weight, single.option = None, option[index]
    module = tabular(mdp, monkeypatch)
    by_row = gradients(module, single, monkeypatch)
    for group, key in (("critic", "exact.values"), ("actor", "table.values"), ("termination", "values")):
        close(by_row[group][key], by_weight[group][key])
