"""NextValues: which twin, which options, which noise, by networks that are plain functions of their input."""

import pytest
import torch

from claw_lightning.values import NextValues
from tests.runs import make_module
from tests.updates.support import constant, make_discrete


@pytest.fixture
def stubbed(monkeypatch):
    """K = 2. Networks that are plain functions of their input, so that a wrong index or state shows."""
    module = make_module(num_options=2, gamma=0.9, deliberation_cost=0.25, target_noise=0.0, build=True)
    twin = torch.tensor([[[1.0, 2.0]], [[3.0, 0.5]]])  # the smaller twin is another one for each option
    monkeypatch.setattr(module.target_actor, "forward_all", lambda x: torch.zeros(len(x), 2, 2))
    monkeypatch.setattr(module.target_critic, "forward_all", lambda x, a: twin + x[:, 0].view(1, -1, 1))
    monkeypatch.setattr(module.policy, "option_probs", constant([0.2, 0.8]))
    monkeypatch.setattr(module.policy, "beta", lambda x: torch.stack([x[..., 1], 1 - x[..., 1]], -1))
    return module


def arrival_of(next_obs, option, cost=0.25):
    # Twin minimum per option first: (1.0, 0.5) + x0; then the mixture of pi = (0.2, 0.8).
    q = [1.0 + next_obs[0], 0.5 + next_obs[0]]
    beta = [next_obs[1], 1 - next_obs[1]][option]
    return (1 - beta) * q[option] + beta * (0.2 * q[0] + 0.8 * q[1] - cost)


def test_smaller_twin_is_taken_per_option_before_anything_is_mixed(stubbed):
    next_obs = torch.tensor([[0.0, 0.3, 0.0], [2.0, 0.3, 0.0]])
    torch.testing.assert_close(stubbed.next_values.options(next_obs), torch.tensor([[1.0, 0.5], [3.0, 2.5]]))


@pytest.mark.parametrize("form, cost", [("full", 0.25), ("regularizer", 0.0)])
def test_arrivals_mix_all_options_at_the_next_state(stubbed, form, cost):
    stubbed.settings.deliberation_form = form
    next_obs = torch.tensor([[0.0, 0.3, 0.0], [2.0, 0.9, 0.0]])
    want = torch.tensor([[arrival_of(x.tolist(), o, cost) for o in (0, 1)] for x in next_obs])
    torch.testing.assert_close(stubbed.next_values.arrivals(next_obs), want)
    torch.testing.assert_close(stubbed.next_values.arrival(next_obs, torch.tensor([1, 0])), want[[0, 1], [1, 0]])


def test_the_cost_is_the_one_of_now(stubbed):
    stubbed.policy.switch_cost.fill_(0.5)
    next_obs = torch.tensor([[0.0, 0.3, 0.0]])
    assert float(stubbed.next_values.arrivals(next_obs)[0, 0]) == pytest.approx(arrival_of([0.0, 0.3], 0, 0.5))


def test_sampled_arrival_has_the_expected_one_as_its_mean(stubbed, monkeypatch):
    n = 20_000
    next_obs, option = torch.tensor([[1.0, 0.3, 0.0]]).repeat(n, 1), torch.arange(n) % 2
    monkeypatch.setattr(stubbed.target_actor, "forward", lambda x, option: torch.zeros(len(x), 2))
    monkeypatch.setattr(
        stubbed.target_critic,
        "forward",
        lambda x, action, option: stubbed.target_critic.forward_all(x, None).gather(
            2, option.view(1, -1, 1).repeat(2, 1, 1)
        )[..., 0],
    )
    torch.manual_seed(0)
    expected = stubbed.next_values.arrival(next_obs, option)
    stubbed.settings.arrival = "sampled"
    drawn = stubbed.next_values.arrival(next_obs, option)
    assert len(set(drawn.tolist())) > 2
    for o in (0, 1):
        assert float(expected[o]) == pytest.approx(arrival_of([1.0, 0.3], o), rel=1e-5)
        # Standard deviation of one draw below 0.4: four standard errors.
        assert float(drawn[option == o].mean()) == pytest.approx(float(expected[o]), abs=4 * 0.4 / (n / 2) ** 0.5)


def test_smoothing_noise_is_clipped_and_actions_stay_in_bounds(monkeypatch):
    module = make_module(num_options=2, target_noise=10.0, target_noise_clip=0.5, build=True)
    monkeypatch.setattr(module.target_actor, "forward_all", lambda x: torch.atanh(torch.full((len(x), 2, 2), 0.8)))
    seen = {}

    def forward_all(obs, actions):
        seen["actions"] = actions
        return torch.zeros(2, len(obs), 2)

    monkeypatch.setattr(module.target_critic, "forward_all", forward_all)
    module.next_values.options(torch.zeros(64, 3))
    assert float(seen["actions"].max()) == 1.0
    assert float(seen["actions"].min()) == pytest.approx(0.3)
    assert not torch.equal(seen["actions"][:, 0], seen["actions"][:, 1])  # a draw of its own for each option


def test_gaussian_values_hold_the_entropy_bonus(monkeypatch):
    module = make_module(num_options=2, actor="gaussian", initial_temperature=0.5, build=True)
    action, log_prob = torch.zeros(1, 2, 2), torch.tensor([[2.0, -1.0]])
    monkeypatch.setattr(module.policy.actor, "sample", lambda raw: (action, log_prob))
    monkeypatch.setattr(module.target_critic, "forward_all", lambda x, a: torch.tensor([[[1.0, 2.0]], [[3.0, 0.5]]]))
    q = module.next_values.options(torch.zeros(1, 3))
    torch.testing.assert_close(q, torch.tensor([[1.0 - 0.5 * 2.0, 0.5 + 0.5 * 1.0]]))


def test_categorical_values_sum_over_actions_the_smaller_twin_of_each(monkeypatch):
    module = make_discrete(initial_temperature=0.5)
    probs = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 1e-9, 1e-9]]])
    table = torch.tensor([[[[1.0, 5.0, 3.0], [2.0, 9.0, 9.0]]], [[[4.0, 2.0, 3.0], [7.0, 9.0, 9.0]]]])
    monkeypatch.setattr(module.policy.actor, "forward_all", lambda x: probs.log())
    monkeypatch.setattr(module.target_critic, "table", lambda x: table)
    q = module.next_values.options(torch.zeros(1, 3))
    entropy = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(4.0).log()
    expected = torch.tensor([[0.5 * 1 + 0.25 * 2 + 0.25 * 3 + 0.5 * entropy, 2.0]])
    torch.testing.assert_close(q, expected, atol=1e-6, rtol=1e-6)


def test_arrival_distributions_have_the_means_of_arrivals(monkeypatch):
    module = make_module(
        num_options=3, critic_atoms=41, value_range=(-10.0, 10.0), deliberation_cost=0.25, target_noise=0.0, build=True
    )
    with torch.no_grad():  # twins that differ by option
        module.target_critic.last.weight.mul_(100.0)
    monkeypatch.setattr(module.policy, "beta", constant([0.3, 0.6, 0.0]))
    next_obs = torch.randn(32, 3)
    values: NextValues = module.next_values
    probs = values.arrival_distributions(next_obs)
    torch.testing.assert_close(probs.sum(-1), torch.ones(32, 3))
    # The lowest atom, of mass 1/41, cannot pay: hence the tolerance, below the cost's own 0.25 beta.
    torch.testing.assert_close(probs @ module.critic.support, values.arrivals(next_obs), atol=0.02, rtol=0)
    lower = module.target_critic.forward_all(next_obs, values.action(values.actor.forward_all(next_obs))[0]).argmin(0)
    assert 0 < float(lower.float().mean()) < 1
