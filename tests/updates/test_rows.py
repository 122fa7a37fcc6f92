"""Which options learn from a row: weights by hand, draws by frequency, the filter's posterior."""

import pytest
import torch

from claw_lightning import inference, losses
from claw_lightning.settings import Diversity
from claw_lightning.updates.rows import executed_probs, learning_rows, row_weight
from tests.runs import make_module
from tests.updates.support import constant, make_discrete, make_rows

PROBS, BETA = [0.2, 0.8], [0.25, 0.5]


def fixed(module, monkeypatch, probs=PROBS, beta=BETA):
    monkeypatch.setattr(module.policy, "option_probs", constant(probs))
    monkeypatch.setattr(module.policy, "beta", constant(beta))
    return module


def by_hand(option, previous, eta):
    """eta p(o | s, o_prev) + (1 - eta) 1[o = executed]."""
    if previous < 0:
        arriving = PROBS
    else:
        arriving = [BETA[previous] * p + (1 - BETA[previous]) * (o == previous) for o, p in enumerate(PROBS)]
    return [eta * p + (1 - eta) * (o == option) for o, p in enumerate(arriving)]


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_weights_mix_arrival_probabilities_with_the_executed_option(monkeypatch, eta):
    module = fixed(make_module(num_options=2, all_options=eta, build=True), monkeypatch)
    rows = make_rows(6, option=torch.tensor([0, 1, 0, 1, 0, 1]), previous=torch.tensor([-1, -1, 0, 0, 1, 1]))
    got = learning_rows(module, rows)
    want = [by_hand(o, p, eta) for o, p in zip(rows.option.tolist(), rows.previous.tolist())]
    torch.testing.assert_close(got.weight, torch.tensor(want))
    torch.testing.assert_close(got.weight.sum(1), torch.ones(6))
    assert got.option.tolist() == [0, 1, 0, 1, 0, 1]


def test_without_the_setting_the_executed_option_alone_learns():
    rows = make_rows(6)
    got = learning_rows(make_module(num_options=2, build=True), rows)
    assert got.weight is None and got.option is rows.option


def test_sampled_mode_draws_one_option_with_those_weights(monkeypatch):
    module = fixed(make_module(num_options=2, all_options=0.5, arrival="sampled", build=True), monkeypatch)
    n = 40_000
    option, previous = torch.arange(n) % 2, torch.arange(n) // 2 % 3 - 1
    got = learning_rows(module, make_rows(n, option=option.clone(), previous=previous))
    assert got.weight is None and got.option.dtype == torch.int64
    for o in (0, 1):
        for p in (-1, 0, 1):
            drawn = got.option[(option == o) & (previous == p)].float().mean()
            assert float(drawn) == pytest.approx(by_hand(o, p, 0.5)[1], abs=4 * 0.5 / (n / 6) ** 0.5)


def test_executed_probs_use_each_rows_own_state():
    module, rows = make_module(num_options=2, build=True), make_rows(5, length=3)
    got = executed_probs(module, rows)
    probs, beta = module.policy.option_probs(rows.obs), module.policy.beta(rows.obs)
    for b in range(5):
        for k in range(3):
            want = losses.executed_probs(probs[b, k][None], beta[b, k][None], rows.previous[b, k][None])
            torch.testing.assert_close(got[b, k], want[0])
    assert not got.requires_grad


def test_filter_gives_the_posterior_of_likelihoods_made_by_hand(monkeypatch):
    module = make_discrete(option_inference="filter", filter_length=3)
    fixed(module, monkeypatch)
    likelihood = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])  # [K, A] in every state
    monkeypatch.setattr(module.policy.actor, "forward_all", lambda obs: likelihood.log().expand(*obs.shape[:-1], 2, 3))
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    first = torch.tensor([[True, False, False], [False, False, False], [True, False, False]])
    rows = make_rows(3, length=3, num_actions=3, valid=valid, first=first)
    weight = learning_rows(module, rows).weight

    actions = rows.action.squeeze(-1).long()
    log_likelihood = likelihood.T[actions].log()
    want = inference.forward_filter(
        torch.tensor(PROBS).expand(3, 3, 2), torch.tensor(BETA).expand(3, 3, 2), log_likelihood, first, valid
    ).posterior
    torch.testing.assert_close(weight, torch.stack([want[0, 2], want[1, 1], want[2, 0]]))
    # The shortest segment once more, without any filter: Bayes.
    joint = torch.tensor(PROBS) * likelihood[:, actions[2, 0]]
    torch.testing.assert_close(weight[2], joint / joint.sum())


def test_filter_learns_from_the_last_valid_step():
    module = make_discrete(option_inference="filter", filter_length=3)
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    rows = make_rows(3, length=3, num_actions=3, valid=valid)
    got = learning_rows(module, rows)
    for name in ("obs", "next_obs", "reward", "action", "terminated", "first", "previous"):
        want = getattr(rows, name)
        assert torch.equal(getattr(got, name), torch.stack([want[0, 2], want[1, 1], want[2, 0]])), name
    assert got.valid is None


def test_segments_of_several_steps_learn_options_from_their_first_step():
    module = make_module(num_options=2, n_step=3, build=True)
    rows = make_rows(4, length=3)
    got = learning_rows(module, rows)
    assert torch.equal(got.obs, rows.obs[:, 0]) and torch.equal(got.option, rows.option[:, 0])
    assert got.weight is None and got.valid is None


@pytest.mark.parametrize("shares, factors", [([0.5, 0.5], [1.0, 1.0]), ([0.8, 0.2], [0.625, 2.5]),
                                             ([0.999, 0.001], [0.5005005, 3.0])])  # fmt: skip
def test_rare_options_weigh_more_up_to_a_bound(shares, factors):
    module = make_module(num_options=2, diversity=Diversity(adaptive_weights=True, max_weight=3.0), build=True)
    module.option_shares.copy_(torch.tensor(shares))
    rows = make_rows(3, option=torch.tensor([0, 1, 0]))
    torch.testing.assert_close(row_weight(module, rows), torch.tensor(factors)[[0, 1, 0]])
    rows.weight = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(row_weight(module, rows), rows.weight * torch.tensor(factors))
