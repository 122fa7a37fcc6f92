"""The equations against exact solutions of option MDPs, closed-form figures, and each other.

The gradient checks take the loss function as an argument, so that deliberately broken ones can be shown to fail them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_lightning import losses
from tests.mdp import OptionMDP, Solution, acyclic_mdp, cyclic_mdp, random_mdp, solve

SEEDS = range(10)
COSTS = ["0.0", "0.05", "0.2"]
LossFunction = Callable[..., Tensor]


def load_cases() -> dict[str, Any]:
    """Read the figures from $CLAW_CASES (file or folder), from beside the repository, or from the copy in tests."""
    root = Path(__file__).resolve().parents[1]
    places = [root.parent / "shared" / "cases" / "option_mdps.json", root / "tests" / "cases" / "option_mdps.json"]
    named = os.environ.get("CLAW_CASES")
    if named:
        path = Path(named)
        places = [path / "option_mdps.json" if path.is_dir() else path]
    found = next(place for place in places if place.is_file())
    cases: dict[str, Any] = json.loads(found.read_text())
    return cases


CASES = load_cases()
MDP_B = CASES["mdp_b"]
EXPECTED_B = MDP_B["expected"]


def table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Any, rtol: float = 1e-6) -> None:
    expected = expected if isinstance(expected, Tensor) else table(expected)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=1e-12)


def mdp_b(cost: float = 0.0) -> OptionMDP:
    return cyclic_mdp(MDP_B["option_policy"], MDP_B["termination"], MDP_B["action_policy"], cost)


def symmetric_mdp(cost: float = 0.0) -> OptionMDP:
    stay, move = [0.8, 0.2], [0.2, 0.8]
    return cyclic_mdp([[0.5, 0.5]] * 2, [[0.5, 0.25], [0.25, 0.5]], [[move, stay], [stay, move]], cost)


def leaf(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_()


def grad(output: Tensor, *inputs: Tensor) -> Tensor:
    """Gradient with respect to the one input given."""
    return torch.autograd.grad(output, inputs)[0]


# ---------------------------------------------------------------------------------------------------------------------
# True gradients of the return, and the same built from the losses


def true_beta_gradient(mdp: OptionMDP) -> Tensor:
    """dJ/dbeta [S, K] through the linear solve."""
    beta = leaf(mdp.beta)
    return grad(solve(mdp.but(beta=beta)).objective, beta)


def true_option_logit_gradient(mdp: OptionMDP) -> Tensor:
    """dJ/dh [S, K] for a softmax policy over options, through the linear solve."""
    logits = leaf(mdp.option_probs.log())
    return grad(solve(mdp.but(option_probs=logits.softmax(-1))).objective, logits)


def true_action_logit_gradient(mdp: OptionMDP) -> Tensor:
    """dJ/dtheta [S, K, A] for softmax policies inside options, through the linear solve."""
    logits = leaf(mdp.action_probs.log())
    return grad(solve(mdp.but(action_probs=logits.softmax(-1))).objective, logits)


def termination_loss_gradient(mdp: OptionMDP, solution: Solution, cost: float, loss: LossFunction) -> Tensor:
    """Gradient of the termination loss [S, K] under arrival weights, with the mean turned back into the sum."""
    beta = leaf(mdp.beta)
    weight = solution.arrived
    return grad(loss(beta, solution.q, mdp.option_probs, cost, weight), beta) * weight.sum()


def option_policy_loss_gradient(mdp: OptionMDP, solution: Solution, loss: LossFunction) -> Tensor:
    """Gradient of the option-policy loss [S, K] under selection weights, with the mean turned back into the sum."""
    logits = leaf(mdp.option_probs.log())
    weight = solution.selected
    return grad(loss(logits.softmax(-1), solution.q, weight), logits) * weight.sum()


def check_termination_loss(mdp: OptionMDP, loss: LossFunction) -> None:
    """The loss descends exactly along the gradient of the return (full form: q has the cost inside)."""
    assert_close(termination_loss_gradient(mdp, solve(mdp), mdp.cost, loss), -true_beta_gradient(mdp))


def check_option_policy_loss(mdp: OptionMDP, loss: LossFunction) -> None:
    assert_close(option_policy_loss_gradient(mdp, solve(mdp), loss), -true_option_logit_gradient(mdp))


def check_bellman(mdp: OptionMDP, target: LossFunction) -> None:
    """E[td_target] over next states is Q_U again, with terminal states masked by the target alone."""
    solution = solve(mdp)
    num_states, num_options = mdp.beta.shape
    q_action = torch.zeros_like(solution.q_action)
    for option in range(num_options):
        for next_state in range(num_states):
            reward = mdp.reward.flatten()
            terminated = mdp.terminal[next_state].expand_as(reward)
            arrival = solution.arrival[next_state, option].expand_as(reward)
            y = target(reward, terminated, arrival, mdp.gamma).view_as(mdp.reward)
            q_action[:, option] += mdp.transition[:, :, next_state] * y
    assert_close(q_action, solution.q_action)


# ---------------------------------------------------------------------------------------------------------------------


class TestCyclicMDP:
    """Every figure of the continuing MDP in the file of cases."""

    def test_values(self) -> None:
        solution = solve(mdp_b())
        assert_close(solution.q, EXPECTED_B["Q_omega"])
        assert_close(solution.value, EXPECTED_B["V"])
        assert_close(solution.arrival, EXPECTED_B["U"])
        assert_close(solution.q_action, EXPECTED_B["Q_u"])
        assert_close(losses.advantage(solution.q, mdp_b().option_probs), EXPECTED_B["A"])
        assert_close(solution.q, table([[1232929107, 970113807], [1409811277, 1042468827]]) / 241183400)

    def test_functions_on_the_tables_of_the_file(self) -> None:
        q, option_probs, beta = table(EXPECTED_B["Q_omega"]), mdp_b().option_probs, mdp_b().beta
        assert_close(losses.state_value(q, option_probs), EXPECTED_B["V"])
        assert_close(losses.arrival_value(q, option_probs, beta, 0.0), EXPECTED_B["U"])
        reward = mdp_b().reward[:, None, :].expand(2, 2, 2)
        next_state = torch.tensor([[0, 1], [1, 0]])  # [state, action]
        arrival = table(EXPECTED_B["U"])[next_state].transpose(1, 2)
        target = losses.td_target(reward, torch.zeros(2, 2, 2, dtype=torch.bool), arrival, 0.9)
        assert_close(target, EXPECTED_B["Q_u"])

    def test_occupancies(self) -> None:
        solution = solve(mdp_b())
        assert_close(solution.executed, EXPECTED_B["executed_occupancy"])
        assert_close(solution.arrived, EXPECTED_B["arrival_occupancy"])
        assert_close(solution.selected, EXPECTED_B["selection_occupancy"])
        assert_close(solution.executed.sum(), 10.0)
        assert_close(solution.arrived.sum(), 9.0)

    @pytest.mark.parametrize("cost", COSTS[1:])
    def test_values_with_cost(self, cost: str) -> None:
        solution = solve(mdp_b(float(cost)))
        assert_close(solution.q, EXPECTED_B["Q_omega_with_cost"][cost])
        assert_close(solution.value, EXPECTED_B["V_with_cost"][cost])

    @pytest.mark.parametrize("cost", COSTS)
    def test_full_form_of_the_termination_gradient(self, cost: str) -> None:
        mdp = mdp_b(float(cost))
        expected = table(EXPECTED_B["dJ_dbeta"][cost])
        assert_close(true_beta_gradient(mdp), expected)
        assert_close(termination_loss_gradient(mdp, solve(mdp), mdp.cost, losses.termination_loss), -expected)

    @pytest.mark.parametrize(
        ("cost", "expected"),
        [
            (0.05, [[-0.4636837415, 0.8945439099], [-5.7608436172, 0.3007878941]]),
            (0.2, [[-0.6482187178, 0.7062937713], [-6.6573798713, 0.2201092632]]),
        ],
    )
    def test_regulariser_form_of_the_termination_gradient(self, cost: float, expected: list[list[float]]) -> None:
        free = mdp_b()
        gradient = termination_loss_gradient(free, solve(free), cost, losses.termination_loss)
        assert_close(gradient, -table(expected))
        # The two forms agree in sign and differ in size.
        full = true_beta_gradient(mdp_b(cost))
        assert torch.equal(full.sign(), -gradient.sign())
        assert ((full + gradient).abs() > 5e-3).all()

    def test_gradient_of_the_termination_logits(self) -> None:
        mdp, solution = mdp_b(), solve(mdp_b())
        logits = leaf(mdp.beta.logit())
        expected = table([[-0.0844561374, 0.2297505495], [-0.4915798379, 0.0524289234]])
        assert_close(grad(solve(mdp.but(beta=logits.sigmoid())).objective, logits), expected)
        loss = losses.termination_loss(logits.sigmoid(), solution.q, mdp.option_probs, 0.0, solution.arrived)
        assert_close(grad(loss, logits) * solution.arrived.sum(), -expected)

    def test_gradient_of_the_option_logits(self) -> None:
        expected = table(EXPECTED_B["dJ_dlogit_option1"])
        assert_close(true_option_logit_gradient(mdp_b())[:, 0], expected)
        gradient = option_policy_loss_gradient(mdp_b(), solve(mdp_b()), losses.option_policy_loss)
        assert_close(gradient, -torch.stack([expected, -expected], dim=-1))

    def test_gradient_of_the_action_logits(self) -> None:
        mdp = mdp_b()
        logits = leaf(mdp.action_probs[..., 1].logit())
        action_probs = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], dim=-1)
        expected = [[0.1406711556, -0.0077091771], [-1.5091472980, -0.1734447781]]
        assert_close(grad(solve(mdp.but(action_probs=action_probs)).objective, logits), expected)

    def test_symmetric_variant(self) -> None:
        solution = solve(symmetric_mdp())
        assert_close(solution.q, [[3.5452702703, 2.3047297297], [4.3452702703, 2.5047297297]])
        assert_close(solution.value, [2.925, 3.425])
        expected = table([[-0.5582432432, 2.2329729730], [-3.3129729730, 0.8282432432]])
        assert_close(true_beta_gradient(symmetric_mdp()), expected)
        check_termination_loss(symmetric_mdp(), losses.termination_loss)
        # Here the cost shifts all of Q alike, so that the two forms coincide.
        full = termination_loss_gradient(symmetric_mdp(), solve(symmetric_mdp(0.1)), 0.1, losses.termination_loss)
        free = termination_loss_gradient(symmetric_mdp(), solve(symmetric_mdp()), 0.1, losses.termination_loss)
        assert_close(full, free)

    def two_step_returns(self, bootstrap_with_executed: bool) -> Tensor:
        """Expected two-step returns [S, K, A], the bootstrap through `td_target` with gamma per row."""
        mdp, solution = mdp_b(), solve(mdp_b())
        after = [[0, 1], [1, 0]]  # next state by [state][action]
        reselect = losses.arrival_probs(mdp.option_probs, mdp.beta)
        result = torch.zeros(2, 2, 2, dtype=torch.float64)
        for state, option, action, second, second_action in torch.cartesian_prod(*[torch.arange(2)] * 5).tolist():
            middle = after[state][action]
            last = after[middle][second_action]
            rewards = mdp.reward[state, action] + mdp.gamma * mdp.reward[middle, second_action]
            arrival = solution.arrival[last, second if bootstrap_with_executed else option]
            gamma = table([mdp.gamma**2])
            target = losses.td_target(rewards[None], torch.tensor([False]), arrival[None], gamma)[0]
            probability = reselect[middle, option, second] * mdp.action_probs[middle, second, second_action]
            result[state, option, action] += probability * target
        return result

    def test_two_step_target(self) -> None:
        assert_close(self.two_step_returns(bootstrap_with_executed=True), EXPECTED_B["Q_u"])
        # Bootstrapping with the option that began the window, although another one ended it, is wrong:
        wrong = [[[4.5684, 5.2159], [3.6128, 3.9249]], [[6.2159, 4.5684], [4.9249, 3.6128]]]
        assert_close(self.two_step_returns(bootstrap_with_executed=False), wrong, rtol=2e-5)


class TestAcyclicMDP:
    """Every figure of the episodic MDP in the file of cases, and those that follow from its formulas."""

    @pytest.mark.parametrize("case", CASES["mdp_a"]["cases"])
    def test_file(self, case: dict[str, Any]) -> None:
        mdp = acyclic_mdp(case["beta_y"], case["w"])
        assert mdp.gamma == CASES["mdp_a"]["gamma"]
        logits = leaf(mdp.beta.logit())
        mdp = mdp.but(beta=logits.sigmoid())
        solution = solve(mdp)
        assert_close(solution.q[1], [0.75, 0.25])
        assert_close(solution.value[1], case["V_y"])
        assert_close(losses.advantage(solution.q, mdp.option_probs)[1], case["A_y"])
        assert_close(solution.arrival[1], case["U_y"])
        assert_close(solution.q[0], case["Q_omega_x"])
        assert_close(grad(solution.q[0].sum(), logits)[1], case["dQx_dlogit_beta"])

    @pytest.mark.parametrize(
        ("beta_y", "w", "value_x", "loss_gradient", "action_gradient"),
        [
            ([0.5, 0.5], 0.5, 0.45, [0.075, -0.05], 0.1265625),
            ([0.2, 0.6], 0.5, 0.495, [0.048, -0.048], 0.151875),
            ([0.2, 0.6], 0.8, 0.549, [0.024, -0.084], 0.162),
        ],
    )
    def test_formulas(
        self, beta_y: list[float], w: float, value_x: float, loss_gradient: list[float], action_gradient: float
    ) -> None:
        mdp = acyclic_mdp(beta_y, w)
        solution = solve(mdp)
        assert_close(solution.value[0], value_x)

        # The loss in y with cost 0.05 and weight 1 for either option lowers beta_1 and raises beta_2.
        logits = leaf(mdp.beta[1:2].logit())
        weight = torch.ones(1, 2, dtype=torch.float64)
        loss = losses.termination_loss(logits.sigmoid(), solution.q[1:2], mdp.option_probs[1:2], 0.05, weight)
        assert_close(grad(loss, logits)[0] * weight.sum(), loss_gradient)

        action_logit = leaf(table(math.log(3)))
        one = torch.stack([action_logit.sigmoid(), 1 - action_logit.sigmoid()])
        action_probs = torch.stack([mdp.action_probs[0], torch.stack([one, table([0.25, 0.75])]), mdp.action_probs[2]])
        assert_close(grad(solve(mdp.but(action_probs=action_probs)).q[0, 0], action_logit), action_gradient)

    def test_certain_choice_has_no_advantage(self) -> None:
        mdp = acyclic_mdp([0.5, 0.5], 1.0)
        assert_close(losses.advantage(solve(mdp).q, mdp.option_probs)[1], [0.0, -0.5])

    def test_end_contributes_nothing(self) -> None:
        mdp = acyclic_mdp([0.2, 0.6], 0.8, cost=0.05)
        solution = solve(mdp)
        assert solution.arrived[2].sum() == 0
        assert solution.value[2] > 0.9  # what a missing mask would bring in
        check_bellman(mdp, losses.td_target)
        gradient = termination_loss_gradient(mdp, solution, mdp.cost, losses.termination_loss)
        assert (gradient[2] == 0).all()
        check_termination_loss(mdp, losses.termination_loss)

    def test_truncation_bootstraps(self) -> None:
        """A time limit reached on entering y changes nothing: U(y, o) of the true final observation is used."""
        solution = solve(acyclic_mdp([0.2, 0.6], 0.8))
        target = losses.td_target(table([0.0, 0.0]), torch.tensor([False, False]), solution.arrival[1], 0.9)
        assert_close(target, [0.657, 0.441])


class TestChecksOfTheFile:
    """The list `checks` at the end of the file, in its order; it must not have grown unnoticed."""

    def test_list_is_the_one_covered_here(self) -> None:
        assert [check.split()[0] for check in CASES["checks"]] == [
            "sum",
            "minimising",
            "no",
            "terminated",
            "truncated",
            "reward",
        ]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_mean_advantage_is_zero(self, seed: int) -> None:
        mdp = random_mdp(seed)
        mean = (mdp.option_probs * losses.advantage(solve(mdp).q, mdp.option_probs)).sum(-1)
        assert mean.abs().max() < 1e-12

    @pytest.mark.parametrize("cost", [0.0, 0.05, 0.2])
    def test_step_moves_beta_against_advantage_plus_cost(self, cost: float) -> None:
        mdp, solution = mdp_b(cost), solve(mdp_b(cost))
        logits = leaf(mdp.beta.logit())
        optimiser = torch.optim.SGD([logits], lr=0.1)
        losses.termination_loss(logits.sigmoid(), solution.q, mdp.option_probs, cost, solution.arrived).backward()
        optimiser.step()
        push = losses.advantage(solution.q, mdp.option_probs) + cost
        assert (push > 0).any()
        assert (push < 0).any()
        assert torch.equal((logits.sigmoid() - mdp.beta).sign(), -push.sign())

    def test_no_gradient_reaches_the_critics(self) -> None:
        q, beta, option_logits = leaf(torch.randn(4, 3)), leaf(torch.rand(4, 3)), leaf(torch.randn(4, 3))
        weight = leaf(torch.rand(4, 3))
        option_probs = option_logits.softmax(-1)
        losses.termination_loss(beta, q, option_probs, 0.1, weight).backward()
        assert beta.grad is not None
        assert q.grad is None
        assert option_logits.grad is None
        assert weight.grad is None
        losses.option_policy_loss(option_logits.softmax(-1), q, weight[:, 0]).backward()
        assert option_logits.grad is not None
        assert option_logits.grad.abs().sum() > 0
        assert q.grad is None
        assert weight.grad is None

    def test_terminated_steps(self) -> None:
        terminated = torch.tensor([True, False])
        arrival = table([math.nan, 2.0])  # what is stored after an end may be anything
        assert_close(losses.td_target(table([1.0, 1.0]), terminated, arrival, 0.9), [1.0, 2.8])
        beta, q, option_probs = leaf(torch.rand(2, 3)), torch.randn(2, 3), torch.randn(2, 3).softmax(-1)
        weight = (~terminated).to(q.dtype)[:, None].expand(2, 3)
        gradient = grad(losses.termination_loss(beta, q, option_probs, 0.1, weight), beta)
        assert (gradient[0] == 0).all()
        assert (gradient[1] != 0).all()

    @pytest.mark.parametrize(("limit_is_an_end", "expected"), [(False, 10.0), (True, 4.0951)])
    def test_time_limit(self, limit_is_an_end: bool, expected: float) -> None:
        """Reward 1, gamma 0.9, limit 5; one row per age, the last row's next observation being the true final one.

        The critic does not see the age, hence the value of the final observation is that of the start.
        """
        terminated = torch.tensor([False] * 4 + [limit_is_an_end])
        value = torch.zeros(5, dtype=torch.float64)
        for _ in range(400):
            value = losses.td_target(torch.ones_like(value), terminated, value.roll(-1), 0.9)
        assert_close(value[0], expected)


class TestRandomMDPs:
    """Autograd through the exact solution equals what the losses build from values and occupancies."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_termination(self, seed: int) -> None:
        mdp = random_mdp(seed)
        check_termination_loss(mdp, losses.termination_loss)
        check_termination_loss(mdp.but(cost=0.0), losses.termination_loss)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_option_policy(self, seed: int) -> None:
        check_option_policy_loss(random_mdp(seed), losses.option_policy_loss)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_action_policies(self, seed: int) -> None:
        """Discrete actions inside an option have the form of the policy over options, weighted by execution."""
        mdp = random_mdp(seed)
        solution = solve(mdp)
        logits = leaf(mdp.action_probs.log())
        weight = solution.executed.flatten()
        loss = losses.option_policy_loss(logits.softmax(-1).flatten(0, 1), solution.q_action.flatten(0, 1), weight)
        assert_close(grad(loss, logits) * weight.sum(), -true_action_logit_gradient(mdp))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_bellman_equations(self, seed: int) -> None:
        mdp = random_mdp(seed)
        solution = solve(mdp)
        check_bellman(mdp, losses.td_target)
        assert_close((mdp.action_probs * solution.q_action).sum(-1), solution.q)
        assert_close(
            solution.objective,
            (solution.executed[..., None] * mdp.action_probs * mdp.reward[:, None]).sum()
            - mdp.cost * (solution.arrived * mdp.beta).sum(),
        )

    @pytest.mark.parametrize("seed", SEEDS)
    def test_arrival_probs(self, seed: int) -> None:
        mdp = random_mdp(seed)
        q = solve(mdp).q
        reselect = losses.arrival_probs(mdp.option_probs, mdp.beta)
        assert_close(reselect.sum(-1), torch.ones_like(q))
        assert_close((reselect @ q.unsqueeze(-1)).squeeze(-1), losses.arrival_value(q, mdp.option_probs, mdp.beta, 0.0))
        assert_close(reselect[1, 0, 2], mdp.beta[1, 0] * mdp.option_probs[1, 2])
        assert_close(reselect[1, 2, 2], 1 - mdp.beta[1, 2] * (1 - mdp.option_probs[1, 2]))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_values_by_gradcheck(self, seed: int) -> None:
        """Autograd of the values, on which all of the above rests, against central differences."""
        mdp = random_mdp(seed, num_states=3, num_options=2, num_actions=2)
        inputs = tuple(leaf(values) for values in (mdp.beta, mdp.option_probs, mdp.action_probs))

        def objective(beta: Tensor, option_probs: Tensor, action_probs: Tensor) -> Tensor:
            return solve(mdp.but(beta=beta, option_probs=option_probs, action_probs=action_probs)).objective

        assert torch.autograd.gradcheck(objective, inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Broken versions must fail the checks above


def mean(value: Tensor, weight: Tensor) -> Tensor:
    return (weight * value).sum() / weight.sum()


def wrong_sign(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return -losses.termination_loss(beta, q, option_probs, cost, weight)


def maximum_for_expectation(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return mean(beta * (q - q.max(-1, keepdim=True).values + cost).detach(), weight)


def cost_subtracted(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return losses.termination_loss(beta, q, option_probs, -cost, weight)


def cost_forgotten(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return losses.termination_loss(beta, q, option_probs, 0.0, weight)


def value_alone(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return mean(beta * (q + cost).detach(), weight)


def options_swapped(beta: Tensor, q: Tensor, option_probs: Tensor, cost: float, weight: Tensor) -> Tensor:
    return losses.termination_loss(beta, q.flip(-1), option_probs.flip(-1), cost, weight)


class TestBrokenVersionsFail:
    """The checks discriminate: each common mistake is caught by them."""

    @pytest.mark.parametrize(
        "broken",
        [wrong_sign, maximum_for_expectation, cost_subtracted, cost_forgotten, value_alone, options_swapped],
    )
    @pytest.mark.parametrize("mdp", [mdp_b(0.2), random_mdp(0), acyclic_mdp([0.2, 0.6], 0.8, 0.05)])
    def test_termination_loss(self, broken: LossFunction, mdp: OptionMDP) -> None:
        check_termination_loss(mdp, losses.termination_loss)
        with pytest.raises(AssertionError):
            check_termination_loss(mdp, broken)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_termination_at_the_state_left(self, seed: int) -> None:
        """beta at s with the executed option (weights x) in place of s' with the arriving one (weights m)."""
        for mdp in (mdp_b(0.05), random_mdp(seed)):
            solution, beta = solve(mdp), leaf(mdp.beta)
            loss = losses.termination_loss(beta, solution.q, mdp.option_probs, mdp.cost, solution.executed)
            gradient, truth = grad(loss, beta) * solution.executed.sum(), -true_beta_gradient(mdp)
            # It points the same way: only exact figures show the mistake, even after a common rescaling.
            assert torch.nn.functional.cosine_similarity(gradient.flatten(), truth.flatten(), dim=0) < 1 - 1e-4
            with pytest.raises(AssertionError):
                assert_close(gradient, truth)

    def test_index_mistake_in_mdp_b_has_a_high_cosine(self) -> None:
        mdp, solution = mdp_b(), solve(mdp_b())
        slope = mdp.beta * (1 - mdp.beta) * losses.advantage(solution.q, mdp.option_probs)
        truth, mistake = ((-occupancy * slope).flatten() for occupancy in (solution.arrived, solution.executed))
        assert torch.nn.functional.cosine_similarity(truth, mistake, dim=0).item() == pytest.approx(0.987, abs=1e-3)

    def test_maximum_form_in_mdp_b(self) -> None:
        mdp, solution = mdp_b(), solve(mdp_b())
        logits = leaf(mdp.beta.logit())
        loss = maximum_for_expectation(logits.sigmoid(), solution.q, mdp.option_probs, 0.0, solution.arrived)
        expected = table([[0.0, 0.3282], [0.0, 0.1311]])
        torch.testing.assert_close(-grad(loss, logits) * solution.arrived.sum(), expected, rtol=0, atol=5e-5)

    @pytest.mark.parametrize("mdp", [mdp_b(0.2), random_mdp(0), acyclic_mdp([0.2, 0.6], 0.8)])
    def test_option_policy_loss(self, mdp: OptionMDP) -> None:
        def sign(option_probs: Tensor, q: Tensor, weight: Tensor) -> Tensor:
            return -losses.option_policy_loss(option_probs, q, weight)

        def every_step(option_probs: Tensor, q: Tensor, weight: Tensor) -> Tensor:
            """Applied at every step rather than where an option is chosen."""
            visits = solve(mdp).executed.sum(-1)
            return losses.option_policy_loss(option_probs, q, visits) * visits.sum() / weight.sum()

        for broken in (sign, every_step):
            with pytest.raises(AssertionError):
                check_option_policy_loss(mdp, broken)

    @pytest.mark.parametrize("mdp", [random_mdp(0), acyclic_mdp([0.2, 0.6], 0.8)])
    def test_target_without_terminal_mask(self, mdp: OptionMDP) -> None:
        def unmasked(reward: Tensor, terminated: Tensor, arrival: Tensor, gamma: float) -> Tensor:
            return losses.td_target(reward, torch.zeros_like(terminated), arrival, gamma)

        with pytest.raises(AssertionError):
            check_bellman(mdp, unmasked)
        # The solver itself sees the difference as well.
        unended = solve(mdp.but(terminal=torch.zeros_like(mdp.terminal)))
        assert not torch.allclose(unended.q, solve(mdp).q, rtol=1e-3)

    def test_values_of_other_arrival_rules_in_mdp_b(self) -> None:
        """Never, always, and only where it pays to end an option: known values, all unlike those of the file."""
        mdp = mdp_b()
        assert_close(solve(mdp.but(beta=torch.zeros_like(mdp.beta))).value, [4.4045, 3.3376], rtol=2e-5)
        assert_close(solve(mdp.but(beta=torch.ones_like(mdp.beta))).value, [2.7045, 3.1219], rtol=2e-5)
        pays = table([[0.0, 1.0], [0.0, 1.0]])
        assert_close(solve(mdp.but(beta=pays)).value, [5.7293, 5.9871], rtol=2e-5)

    @pytest.mark.parametrize("swap", ["beta", "cost"])
    def test_arrival_value(self, swap: str) -> None:
        q, mdp = table(EXPECTED_B["Q_omega"]), mdp_b()
        beta = 1 - mdp.beta if swap == "beta" else mdp.beta
        cost = 0.05 if swap == "cost" else 0.0
        with pytest.raises(AssertionError):
            assert_close(losses.arrival_value(q, mdp.option_probs, beta, cost), EXPECTED_B["U"])


# ---------------------------------------------------------------------------------------------------------------------


def quadrature(num: int = 24) -> tuple[Tensor, Tensor]:
    """Nodes and weights with sum(weights f(nodes)) = E f(N(0, 1)), exact for polynomials (Golub-Welsch)."""
    off_diagonal = torch.arange(1, num, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return nodes, vectors[0].square()


class TestContinuousActions:
    @pytest.mark.parametrize("alpha", [0.0, 0.3])
    def test_gaussian_actor_on_a_quadratic_bandit(self, alpha: float) -> None:
        """Q = -(a - m)^2: E Q = -((mu - m)^2 + sigma^2), d/dmu = -2 (mu - m), d/dlog sigma = -2 sigma^2 (+ alpha)."""
        noise, weight = quadrature()
        goal, mu, log_std = 0.7, leaf(table(-0.4)), leaf(table(-0.5))
        std = log_std.exp()
        action = mu + std * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        loss = losses.gaussian_actor_loss(-(action - goal).square(), log_prob, alpha, weight)
        entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
        assert_close(loss, (mu - goal) ** 2 + std**2 - alpha * entropy)
        to_mu, to_log_std = torch.autograd.grad(loss, (mu, log_std))
        assert_close(to_mu, 2 * (mu - goal))
        assert_close(to_log_std, 2 * std**2 - alpha)

    def test_deterministic_actor(self) -> None:
        goal, penalty = table([[0.5, -1.0]]), 0.1
        action = leaf(table([[1.0, 2.0], [0.0, 1.0], [9.0, 9.0]]))
        weight = table([3.0, 1.0, 0.0])
        q = -(action - goal).square().sum(-1)
        loss = losses.deterministic_actor_loss(q, action, weight, penalty)
        assert_close(loss, (3 * (0.25 + 9) + (0.25 + 4)) / 4 + penalty * (3 * 2.5 + 0.5) / 4)
        share = weight[:, None] / 4
        assert_close(grad(loss, action), share * (2 * (action - goal) + penalty * action))

    def test_gaussian_kl(self) -> None:
        zero, one, two = table([0.0]), table([1.0]), table([2.0])
        assert_close(losses.gaussian_kl(zero, one, one, two), 0.4431471806)
        assert_close(losses.gaussian_kl(one, two, zero, one), 1.3068528194)
        assert_close(losses.gaussian_kl(one, two, one, two), 0.0)

    def test_gaussian_kl_against_torch(self) -> None:
        mean_p, mean_q = torch.randn(2, 5, 3, 7, dtype=torch.float64)
        std_p, std_q = torch.rand(2, 5, 3, 7, dtype=torch.float64) + 0.1
        normal = torch.distributions.Normal
        expected = torch.distributions.kl_divergence(normal(mean_p, std_p), normal(mean_q, std_q)).sum(-1)
        assert_close(losses.gaussian_kl(mean_p, std_p, mean_q, std_q), expected)

    def test_option_filter(self) -> None:
        """One step of the forward filter over options: prediction = posterior x arrival probabilities."""
        mdp = mdp_b()
        posterior = table([0.9992884107, 0.0007115893])
        prediction = posterior @ losses.arrival_probs(mdp.option_probs, mdp.beta)[1]
        assert_close(prediction, [0.9393880332, 0.0606119668])

    def test_squashed_log_prob_against_torch(self) -> None:
        mean_, std, pre_tanh = torch.randn(5, 4, dtype=torch.float64), table([0.3, 0.5, 1.0, 2.0]), torch.randn(5, 4)
        pre_tanh = pre_tanh.double()
        base = torch.distributions.Normal(mean_, std)
        expected = (base.log_prob(pre_tanh) - torch.log1p(-pre_tanh.tanh().square())).sum(-1)
        assert_close(losses.squashed_gaussian_log_prob(pre_tanh, mean_, std), expected)

    def test_squashed_density_integrates_to_one(self) -> None:
        action = torch.linspace(-1, 1, 20002, dtype=torch.float64)[1:-1]
        log_prob = losses.squashed_gaussian_log_prob(action.atanh()[:, None], table([0.3]), table([0.6]))
        assert torch.trapezoid(log_prob.exp(), action).item() == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_squashed_log_prob_is_stable(self, dtype: torch.dtype) -> None:
        """Far into saturation tanh is 1 in either precision; log(1 - tanh^2) is then 2 log 2 - 2 |u|."""
        pre_tanh = torch.tensor([[60.0], [-60.0]], dtype=dtype).requires_grad_()
        log_prob = losses.squashed_gaussian_log_prob(pre_tanh, pre_tanh.detach(), torch.ones_like(pre_tanh))
        expected = -0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 120.0)
        torch.testing.assert_close(log_prob.detach(), torch.full((2,), expected, dtype=dtype))
        torch.testing.assert_close(grad(log_prob.sum(), pre_tanh), torch.tensor([[2.0], [-2.0]], dtype=dtype))

    def test_log_density_of_a_hand_has_full_gradient(self) -> None:
        """Twenty joints at one standard deviation: density 1e-8 at the mean, yet the gradient must not fade."""
        mean_ = leaf(torch.zeros(1, 20))
        log_prob = losses.squashed_gaussian_log_prob(torch.full((1, 20), 0.5), mean_, torch.ones(1, 20))
        torch.testing.assert_close(grad(log_prob.sum(), mean_), torch.full((1, 20), 0.5))

    @pytest.mark.parametrize(("log_prob", "direction"), [(5.0, 1), (-5.0, -1)])
    def test_temperature_follows_the_entropy(self, log_prob: float, direction: int) -> None:
        """Entropy -5 under a target of -2 calls for more temperature, entropy 5 for less."""
        log_alpha, log_probs = leaf(table(-3.0)), leaf(table([log_prob, 99.0]))
        loss = losses.temperature_loss(log_alpha, log_probs, -2.0, table([1.0, 0.0]))
        loss.backward()
        assert log_alpha.grad is not None
        assert log_probs.grad is None
        assert_close(log_alpha.grad, -(log_prob - 2.0))
        assert math.copysign(1, -log_alpha.grad.item()) == direction

    def test_temperature_per_option(self) -> None:
        log_alpha, option = leaf(torch.zeros(2, dtype=torch.float64)), torch.tensor([0, 1, 1])
        loss = losses.temperature_loss(log_alpha[option], table([1.0, 2.0, 3.0]), 0.0, table([1.0, 1.0, 1.0]))
        assert_close(grad(loss, log_alpha), [-1 / 3, -5 / 3])


class TestCritics:
    def test_value_and_gradient(self) -> None:
        q, target = leaf(table([[1.0, 2.0], [0.0, 4.0]])), leaf(table([0.0, 2.0]))
        loss = losses.critic_loss(q, target)
        assert_close(loss, (1 + 0) / 2 + (0 + 4) / 2)
        loss.backward()
        assert target.grad is None
        assert q.grad is not None
        assert_close(q.grad, [[1.0, 0.0], [0.0, 2.0]])

    def test_every_critic_learns(self) -> None:
        q = leaf(torch.randn(3, 8))
        assert (grad(losses.critic_loss(q, torch.randn(8), torch.rand(8) + 0.1), q).abs().sum(-1) > 0).all()

    def test_weight(self) -> None:
        q, target = table([[1.0, 2.0], [0.0, 4.0]]), table([0.0, 2.0])
        assert_close(losses.critic_loss(q, target, table([3.0, 1.0])), (3 * 1 + 1 * 4) / 4)
        assert_close(losses.critic_loss(q, target, table([7.0, 7.0])), losses.critic_loss(q, target))

    def test_target_is_constant(self) -> None:
        reward, arrival = leaf(torch.randn(3)), leaf(torch.randn(3))
        target = losses.td_target(reward, torch.tensor([True, False, False]), arrival, torch.rand(3))
        assert not target.requires_grad

    def test_gamma_per_row(self) -> None:
        gamma = table([0.9, 0.81, 0.729])
        target = losses.td_target(table([1.0, 1.9, 2.71]), torch.zeros(3, dtype=torch.bool), table([10.0] * 3), gamma)
        assert_close(target, [10.0, 10.0, 10.0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
    def test_terminated_must_be_boolean(self, dtype: torch.dtype) -> None:
        """An integer mask would be inverted bitwise, and a float one is usually a discount: neither is guessed at."""
        with pytest.raises(TypeError, match="boolean"):
            losses.td_target(torch.ones(2), torch.zeros(2, dtype=dtype), torch.ones(2), 0.9)

    def test_value_regression(self) -> None:
        prediction, target = leaf(table([1.0, 3.0])), leaf(table([0.0, 1.0]))
        loss = losses.value_regression_loss(prediction, target)
        assert_close(loss, 2.5)
        loss.backward()
        assert target.grad is None


class TestEntropies:
    def test_values(self) -> None:
        probs = table([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
        assert_close(losses.categorical_entropy(probs), [math.log(4), 0.0, math.log(2)])
        assert_close(
            losses.bernoulli_entropy(table([[0.5, 0.0], [1.0, 0.5]])), [[math.log(2), 0.0], [0.0, math.log(2)]]
        )

    def test_two_outcomes_agree(self) -> None:
        beta = torch.rand(7, dtype=torch.float64)
        assert_close(losses.bernoulli_entropy(beta), losses.categorical_entropy(torch.stack([beta, 1 - beta], -1)))

    def test_gradient(self) -> None:
        beta = leaf(table([0.2, 0.7]))
        assert_close(grad(losses.bernoulli_entropy(beta).sum(), beta), -table([0.2, 0.7]).logit())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_gradient_is_finite_at_the_border(self, dtype: torch.dtype) -> None:
        probs, beta = leaf(torch.tensor([1.0, 0.0], dtype=dtype)), leaf(torch.tensor([1.0, 0.0], dtype=dtype))
        assert grad(losses.categorical_entropy(probs), probs).isfinite().all()
        assert grad(losses.bernoulli_entropy(beta).sum(), beta).isfinite().all()


class TestWeightsAndShapes:
    def test_all_weights_zero(self) -> None:
        """A batch of nothing but terminal steps: loss 0 and gradient 0, never NaN."""
        x = leaf(torch.rand(4, 3))
        none, none_each = torch.zeros(4), torch.zeros(4, 3)
        other = torch.randn(4, 3)
        for loss in (
            losses.termination_loss(x, other, other.softmax(-1), 0.1, none_each),
            losses.option_policy_loss(x, other, none),
            losses.critic_loss(x.T, other[:, 0], none),
            losses.deterministic_actor_loss(x[:, 0], x, none, 0.1),
            losses.gaussian_actor_loss(x[:, 0], x[:, 1], 0.2, none),
            losses.temperature_loss(x[:, 0], other[:, 0], -1.0, none),
        ):
            assert loss.item() == 0
            assert (grad(loss, x) == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_is_cast(self, dtype: torch.dtype) -> None:
        q, probs, beta = (torch.rand(4, 3, dtype=dtype) for _ in range(3))
        row, ended = q[:, 0], torch.zeros(4, dtype=torch.bool)
        results = [
            losses.state_value(q, probs),
            losses.advantage(q, probs),
            losses.arrival_value(q, probs, beta, 0.1),
            losses.arrival_probs(probs, beta),
            losses.td_target(row, ended, row, 0.9),
            losses.td_target(row, ended, row, row),
            losses.critic_loss(q.T, row, row),
            losses.value_regression_loss(q, beta),
            losses.termination_loss(beta, q, probs, 0.1, q),
            losses.option_policy_loss(probs, q, row),
            losses.deterministic_actor_loss(row, q, row, 0.1),
            losses.gaussian_actor_loss(row, row, 0.1, row),
            losses.temperature_loss(row, row, -1.0, row),
            losses.squashed_gaussian_log_prob(q, q, beta),
            losses.gaussian_kl(q, beta, q, beta),
            losses.categorical_entropy(probs),
            losses.bernoulli_entropy(beta),
        ]
        assert {result.dtype for result in results} == {dtype}

    def test_silent_broadcasts_are_refused(self) -> None:
        """[B] meeting [B, 1], and with B = K a weight per row where one per option is due."""
        row, column, square = torch.ones(3), torch.ones(3, 1), torch.ones(3, 3)
        ended = torch.zeros(3, dtype=torch.bool)
        calls: list[Callable[[], Tensor]] = [
            lambda: losses.state_value(square, row),
            lambda: losses.arrival_value(square, square, column, 0.0),
            lambda: losses.arrival_probs(square, row),
            lambda: losses.td_target(column, ended, row, 0.9),
            lambda: losses.td_target(row, ended, row, column),
            lambda: losses.critic_loss(square, column),
            lambda: losses.critic_loss(square, row, column),
            lambda: losses.value_regression_loss(row, column),
            lambda: losses.termination_loss(square, square, square, 0.0, row),
            lambda: losses.option_policy_loss(square, square, square),
            lambda: losses.deterministic_actor_loss(column, square, row, 0.0),
            lambda: losses.gaussian_actor_loss(row, column, 0.1, row),
            lambda: losses.temperature_loss(row, column, -1.0, row),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="shapes differ"):
                call()

    def test_cost_and_temperature_may_be_tensors(self) -> None:
        """An auto-tuned cost or temperature is a constant to the losses that use it."""
        cost, q = leaf(torch.tensor(0.1)), torch.randn(4, 3)
        beta = leaf(torch.rand(4, 3))
        losses.termination_loss(beta, q, q.softmax(-1), cost, torch.ones(4, 3)).backward()
        losses.gaussian_actor_loss(leaf(q[:, 0]), q[:, 1], cost, torch.ones(4)).backward()
        assert cost.grad is None
        assert beta.grad is not None
