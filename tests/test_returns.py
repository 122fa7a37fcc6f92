"""Targets over several steps against exact action values, by enumeration of everything that can happen.

What the module calls unbiased or a fixed point is checked in float64 over all sequences of next states, terminations,
options and actions; the wrong variants that its documentation warns of are shown to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_lightning import returns
from claw_lightning.losses import arrival_probs, arrival_value, td_target
from tests.mdp import OptionMDP, cyclic_mdp, random_mdp, solve

NAN = math.nan


def table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flags(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def mdp_b(cost: float = 0.0) -> OptionMDP:
    action_probs = [[[0.1, 0.9], [0.7, 0.3]], [[0.8, 0.2], [0.3, 0.7]]]
    return cyclic_mdp([[0.7, 0.3], [0.4, 0.6]], [[0.3, 0.6], [0.1, 0.2]], action_probs, cost)


def small_mdp(seed: int) -> OptionMDP:
    """Random, with an end in its last state and a cost in its returns."""
    return random_mdp(seed, num_states=3, num_options=2, num_actions=2)


def other_behaviour(mdp: OptionMDP, seed: int = 99) -> OptionMDP:
    """Same world, other terminations and other policies on both levels."""
    other = random_mdp(seed, *mdp.action_probs.shape)
    return mdp.but(option_probs=other.option_probs, beta=other.beta, action_probs=other.action_probs)


MDPS = {"b": mdp_b(), "b_cost": mdp_b(0.2), **{f"random{seed}": small_mdp(seed) for seed in range(3)}}
with_every_mdp = pytest.mark.parametrize("mdp", MDPS.values(), ids=MDPS.keys())


@dataclass
class Paths:
    """Every path of L steps from every (s_0, o_0, a_0), one per row."""

    start: Tensor  # [P] number of (s_0, o_0, a_0)
    probability: Tensor  # [P] given the start
    state: Tensor  # [P, L]
    next_state: Tensor  # [P, L]
    option: Tensor  # [P, L]
    action: Tensor  # [P, L]
    drawn: Tensor  # [P, L] beta's draw on arriving in s_{k+1}
    capped: Tensor  # [P, L] longest duration reached there
    trace_ratio: Tensor  # [P, L] target policy's probability of (o_k, a_k) over the behaviour's, 1 at the first step
    reward: Tensor  # [P, L] NaN beyond the end
    terminated: Tensor  # [P, L]
    valid: Tensor  # [P, L]

    @property
    def ended(self) -> Tensor:
        return self.drawn | self.capped

    def at_next(self, values: Tensor) -> Tensor:
        """values [S] at s_{k+1}, or [S, K] at (s_{k+1}, o_k); NaN beyond the end and where the task ended."""
        found = values[self.next_state] if values.dim() == 1 else values[self.next_state, self.option]
        return found.masked_fill(self.terminated | ~self.valid, NAN)

    def at(self, values: Tensor) -> Tensor:
        """values [S, K] or [S, K, A] at step k; NaN beyond the end."""
        index = (self.state, self.option, self.action)[: values.dim()]
        return values[index].masked_fill(~self.valid, NAN)

    def mean(self, target: Tensor) -> Tensor:
        """Expectation [number of starts] of a target [P]."""
        num_starts = int(self.start.max()) + 1
        return torch.zeros(num_starts, dtype=torch.float64).index_add_(0, self.start, self.probability * target)


def enumerate_paths(mdp: OptionMDP, num_steps: int, behaviour: OptionMDP | None = None, cap: int = 10**6) -> Paths:
    """All paths under the behaviour, the first option being new; starts are those of `starts`, in its order."""
    behaviour = behaviour or mdp
    num_states, num_options, num_actions = mdp.action_probs.shape
    target_arrival = arrival_probs(mdp.option_probs, mdp.beta)
    behaviour_arrival = arrival_probs(behaviour.option_probs, behaviour.beta)

    state, option, action = starts(mdp).T
    start = torch.arange(len(state))
    probability, age = torch.ones(len(state), dtype=torch.float64), torch.zeros_like(state)
    ratio, valid = probability, torch.ones_like(state, dtype=torch.bool)
    steps: list[list[Tensor]] = []

    def branch(*sizes: int) -> list[Tensor]:
        """Copy every path for each combination of outcomes, which are returned; a path that is over has only one."""
        nonlocal start, probability, state, option, action, age, valid, steps
        count = math.prod(sizes)
        rows = torch.arange(len(state)).repeat_interleave(count)
        outcome = torch.arange(count).repeat(len(state))
        kept = valid[rows] | (outcome == 0)
        rows, outcome = rows[kept], outcome[kept]
        start, probability, age, valid = start[rows], probability[rows], age[rows], valid[rows]
        state, option, action = state[rows], option[rows], action[rows]
        steps = [[column[rows] for column in step] for step in steps]
        return list(torch.unravel_index(outcome, sizes))

    def multiply(factor: Tensor) -> None:
        nonlocal probability
        probability = probability * torch.where(valid, factor, torch.ones_like(factor))

    for k in range(num_steps):
        if k > 0:
            next_option, next_action = branch(num_options, num_actions)
            ended = steps[-1][4] | steps[-1][5]
            multiply(torch.where(ended, behaviour.option_probs[state, next_option], (next_option == option).double()))
            multiply(behaviour.action_probs[state, next_option, next_action])
            ratio = target_arrival[state, option, next_option] / behaviour_arrival[state, option, next_option]
            ratio = ratio * mdp.action_probs[state, next_option, next_action]
            ratio = ratio / behaviour.action_probs[state, next_option, next_action]
            option, action, age = next_option, next_action, torch.where(ended, 0, age + 1)
        steps.append([state, option, action, ratio])  # kept here meanwhile, to be copied with the branches
        next_state, drawn = branch(num_states, 2)
        multiply(mdp.transition[state, action, next_state])
        beta = behaviour.beta[next_state, option]
        multiply(torch.where(drawn.bool(), beta, 1 - beta))
        reward = mdp.reward[state, action].masked_fill(~valid, NAN)
        terminated = mdp.terminal[next_state] & valid
        at_state, at_option, at_action, at_ratio = steps.pop()
        steps.append([at_state, next_state, at_option, at_action, drawn.bool(), age + 1 >= cap, at_ratio])
        steps[-1] += [reward, terminated, valid]
        state, valid = next_state, valid & ~terminated
    possible = probability > 0
    columns = (torch.stack(column, dim=1)[possible] for column in zip(*steps))
    return Paths(start[possible], probability[possible], *columns)


def starts(mdp: OptionMDP) -> Tensor:
    """All (s, o, a) with s not terminal, [N, 3]."""
    sizes = mdp.action_probs.shape
    rows = torch.cartesian_prod(*[torch.arange(size) for size in sizes])
    return rows[~mdp.terminal[rows[:, 0]]]


def true_values(mdp: OptionMDP) -> Tensor:
    return solve(mdp).q_action[tuple(starts(mdp).T)]


def executed_path(mdp: OptionMDP, paths: Paths, **changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "arrival": paths.at_next(solve(mdp).arrival),
        "ended": paths.ended,
        "deliberation_cost": mdp.cost,
        **changes,
    }
    return returns.executed_path_return(paths.reward, paths.terminated, paths.valid, gamma=mdp.gamma, **arguments)


def cut_at_switch(mdp: OptionMDP, paths: Paths, **changes: Any) -> Tensor:
    solution = solve(mdp)
    arguments: dict[str, Any] = {
        "ended": paths.ended,
        "by_cap": paths.capped,
        "arrival": paths.at_next(solution.arrival),
        "next_value": paths.at_next(solution.value),
        "deliberation_cost": mdp.cost,
        **changes,
    }
    return returns.cut_at_switch_return(paths.reward, paths.terminated, paths.valid, gamma=mdp.gamma, **arguments)


FORMS: dict[str, Callable[..., Tensor]] = {"executed_path": executed_path, "cut_at_switch": cut_at_switch}
with_both_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def error(mdp: OptionMDP, paths: Paths, target: Tensor) -> float:
    """Largest bias of a target [P] over all starts."""
    return (paths.mean(target) - true_values(mdp)).abs().max().item()


class TestEnumeration:
    @with_every_mdp
    def test_probabilities_sum_to_one(self, mdp: OptionMDP) -> None:
        for behaviour, cap in ((None, 10**6), (other_behaviour(mdp), 2)):
            paths = enumerate_paths(mdp, 3, behaviour, cap)
            total = paths.mean(torch.ones_like(paths.probability))
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)

    def test_figures_of_the_notes(self) -> None:
        expected = table([4.5125334372, 5.1786053974, 4.0319798531, 3.9997387909])
        torch.testing.assert_close(true_values(mdp_b())[:4], expected, rtol=0, atol=1e-9)


class TestRewardSums:
    @with_both_forms
    @with_every_mdp
    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_unbiased_on_policy(self, mdp: OptionMDP, num_steps: int, form: Callable[..., Tensor]) -> None:
        paths = enumerate_paths(mdp, num_steps)
        assert error(mdp, paths, form(mdp, paths)) < 1e-9

    def test_original_option_after_its_end(self) -> None:
        """Bootstrapping with o_0 after another option took over gives these figures; neither form does."""
        mdp = mdp_b()
        paths = enumerate_paths(mdp, 2)
        original = solve(mdp).arrival[paths.next_state, paths.option[:, :1].expand(-1, 2)]
        wrong = paths.mean(executed_path(mdp, paths, arrival=original))
        figures = table([4.5684, 5.2159, 3.6128, 3.9249, 6.2159, 4.5684, 4.9249, 3.6128])
        torch.testing.assert_close(wrong, figures, rtol=0, atol=5e-5)
        for form in FORMS.values():
            assert ((paths.mean(form(mdp, paths)) - figures).abs() > 0.03).all()

    def test_cost_is_paid_inside_the_path(self) -> None:
        mdp = mdp_b(0.2)
        paths = enumerate_paths(mdp, 3)
        assert error(mdp, paths, executed_path(mdp, paths, ended=None, deliberation_cost=0.0)) > 0.05
        assert error(mdp, paths, cut_at_switch(mdp, paths, deliberation_cost=0.0)) > 0.05

    @with_both_forms
    def test_biased_under_another_behaviour(self, form: Callable[..., Tensor]) -> None:
        paths = enumerate_paths(mdp_b(), 3, other_behaviour(mdp_b()))
        assert error(mdp_b(), paths, form(mdp_b(), paths)) > 0.1

    def test_cut_needs_terminations_of_the_target(self) -> None:
        """Other options after the switch do no harm to form 2; another beta does."""
        mdp, other = mdp_b(), other_behaviour(mdp_b())
        paths = enumerate_paths(mdp, 3, mdp.but(option_probs=other.option_probs))
        assert error(mdp, paths, cut_at_switch(mdp, paths)) < 1e-9
        paths = enumerate_paths(mdp, 3, mdp.but(beta=other.beta))
        assert error(mdp, paths, cut_at_switch(mdp, paths)) > 0.05

    def test_last_termination_is_not_looked_at(self) -> None:
        """U is already the mean over it: V after an end and U otherwise would count it twice."""
        mdp = mdp_b()
        paths = enumerate_paths(mdp, 2)
        flipped = paths.ended.clone()
        flipped[:, -1] ^= True
        for form in FORMS.values():
            assert torch.equal(form(mdp, paths), form(mdp, paths, ended=flipped))
        value = paths.at_next(solve(mdp).value)
        twice = torch.where(paths.ended, value, paths.at_next(solve(mdp).arrival))
        assert error(mdp, paths, cut_at_switch(mdp, paths, arrival=twice)) > 0.05

    @with_both_forms
    @with_every_mdp
    @pytest.mark.parametrize("cap", [1, 2])
    def test_cap_of_the_behaviour(self, mdp: OptionMDP, cap: int, form: Callable[..., Tensor]) -> None:
        paths = enumerate_paths(mdp, 3, cap=cap)
        assert error(mdp, paths, form(mdp, paths, by_cap=paths.capped)) < 1e-9

    def test_cap_must_be_told_by_age(self) -> None:
        """A cap that goes unseen, or is only seen where beta's draw let the option live, biases either form."""
        mdp = mdp_b()
        paths = enumerate_paths(mdp, 3, cap=2)
        for form in FORMS.values():
            assert error(mdp, paths, form(mdp, paths, by_cap=torch.zeros_like(paths.capped))) > 1e-3
            assert error(mdp, paths, form(mdp, paths, by_cap=paths.capped & ~paths.drawn)) > 1e-3

    @with_both_forms
    @with_every_mdp
    def test_truncation_inside_the_segment_bootstraps(self, mdp: OptionMDP, form: Callable[..., Tensor]) -> None:
        """A time limit after the second of three steps is no part of the task: the expectation stays Q_U."""
        paths = enumerate_paths(mdp, 3)
        paths.valid[:, 2] = False
        paths.reward[:, 2] = NAN
        paths.terminated[:, 2] = True
        assert error(mdp, paths, form(mdp, paths)) < 1e-9
        short = enumerate_paths(mdp, 2)
        torch.testing.assert_close(paths.mean(form(mdp, paths)), short.mean(form(mdp, short)))

    def test_by_hand(self) -> None:
        """Rows: full length, time limit after 2, end after 2, end after 2 wrongly followed by valid steps."""
        reward = table([[1.0, 2.0, 4.0], [1.0, 2.0, NAN], [1.0, 2.0, NAN], [1.0, 2.0, 4.0]])
        terminated = flags([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 0]])
        valid = flags([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]])
        arrival = table([[10.0, 20.0, 40.0], [10.0, 20.0, NAN], [10.0, NAN, NAN], [10.0, NAN, 40.0]])
        next_value = table([[100.0, 200.0, 400.0]] * 4)
        never, early, late = flags([[0, 0, 0]] * 4), flags([[1, 0, 0]] * 4), flags([[0, 1, 1]] * 4)
        whole = table([1 + 1 + 1 + 5, 1 + 1 + 5, 2.0, 2.0])
        path = returns.executed_path_return
        cut = returns.cut_at_switch_return
        assert torch.equal(path(reward, terminated, valid, arrival, 0.5), whole)
        toll = path(reward, terminated, valid, arrival, 0.5, ended=late, deliberation_cost=8.0)
        assert torch.equal(toll, whole - table([0.25 * 8, 0, 0, 0]))
        rest = (reward, terminated, valid)
        assert torch.equal(cut(*rest, never, never, arrival, next_value, 8.0, 0.5), whole)
        assert torch.equal(cut(*rest, early, never, arrival, next_value, 8.0, 0.5), table([1 + 0.5 * 92] * 4))
        assert torch.equal(cut(*rest, early, early, arrival, next_value, 8.0, 0.5), table([6.0] * 4))
        expected = table([1 + 1 + 0.25 * 192, 1 + 1 + 5, 2.0, 2.0])
        assert torch.equal(cut(*rest, late, never, arrival, next_value, 8.0, 0.5), expected)
        capped = path(reward, terminated, valid, arrival, 0.5, by_cap=early)
        assert torch.equal(capped, table([6.0] * 4))

    def test_gamma_may_differ_by_row(self) -> None:
        reward, valid = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
        arrival, gamma = torch.full((2, 2), 4.0), torch.tensor([0.5, 1.0])
        result = returns.executed_path_return(reward, ~valid, valid, arrival, gamma)
        assert result.tolist() == [1 + 0.5 + 1, 1 + 1 + 4]

    def test_cost_without_terminations_is_refused(self) -> None:
        row, flag = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
        for cost in (0.1, torch.tensor(0.0)):
            with pytest.raises(ValueError, match="ended"):
                returns.executed_path_return(row, ~flag, flag, row, 0.9, deliberation_cost=cost)


def retrace_operator(mdp: OptionMDP, paths: Paths, q: Tensor, lambda_: float) -> Tensor:
    """Expected Retrace target of the first step under a table q [S, K, A]; terminal states keep their row."""
    q_omega = (mdp.action_probs * q).sum(-1)
    arrival = arrival_value(q_omega, mdp.option_probs, mdp.beta, mdp.cost)
    trace = returns.retrace_trace(paths.trace_ratio.log(), lambda_)
    arguments = (paths.at(q), paths.reward, paths.terminated, paths.valid, paths.at_next(arrival), trace, mdp.gamma)
    result = q.clone()
    result[tuple(starts(mdp).T)] = paths.mean(returns.retrace_targets(*arguments)[:, 0])
    return result


class TestRetrace:
    @with_every_mdp
    @pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
    def test_fixed_point_under_another_behaviour(self, mdp: OptionMDP, lambda_: float) -> None:
        paths = enumerate_paths(mdp, 3, other_behaviour(mdp))
        q = solve(mdp).q_action
        assert (retrace_operator(mdp, paths, q, lambda_) - q).abs().max() < 1e-9

    @with_every_mdp
    def test_approaches_the_fixed_point(self, mdp: OptionMDP) -> None:
        """From zero values; with traces faster than without."""
        paths, truth = enumerate_paths(mdp, 3, other_behaviour(mdp)), solve(mdp).q_action
        truth = truth.masked_fill(mdp.terminal[:, None, None], 0.0)
        left = {}
        for lambda_ in (0.0, 1.0):
            q = torch.zeros_like(truth)
            for _ in range(15):
                q = retrace_operator(mdp, paths, q, lambda_)
            left[lambda_] = (q - truth).abs().max().item()
        assert left[1.0] < left[0.0] < truth.abs().max().item()

    def test_original_option_breaks_it(self) -> None:
        mdp = mdp_b()
        paths = enumerate_paths(mdp, 3, other_behaviour(mdp))
        original = solve(mdp).arrival[paths.next_state, paths.option[:, :1].expand(-1, 3)]
        trace = returns.retrace_trace(paths.trace_ratio.log(), 1.0)
        q = paths.at(solve(mdp).q_action)
        target = returns.retrace_targets(q, paths.reward, paths.terminated, paths.valid, original, trace, mdp.gamma)
        assert error(mdp, paths, target[:, 0]) > 0.05

    def test_without_traces_it_is_the_one_step_target(self) -> None:
        q, reward, arrival = torch.randn(3, 5, 4, dtype=torch.float64)
        terminated, valid = flags([[0, 0, 0, 1]] * 5), flags([[1, 1, 1, 1]] * 5)
        result = returns.retrace_targets(q, reward, terminated, valid, arrival, torch.zeros_like(q), 0.9)
        torch.testing.assert_close(result, td_target(reward, terminated, arrival, 0.9))

    def test_by_hand(self) -> None:
        """Rows: whole, time limit after 2, end after 2. gamma 1/2; delta = r + U / 2 - q."""
        q = table([[1.0, 2.0, 3.0], [1.0, 2.0, NAN], [1.0, 2.0, NAN]])
        reward = table([[1.0, 1.0, 1.0], [1.0, 1.0, NAN], [1.0, 1.0, NAN]])
        arrival = table([[4.0, 6.0, 8.0], [4.0, 6.0, NAN], [4.0, NAN, NAN]])
        trace = table([[NAN, 0.5, 1.0], [NAN, 0.5, NAN], [NAN, 0.5, NAN]])
        terminated, valid = flags([[0, 0, 0], [0, 0, 1], [0, 1, 1]]), flags([[1, 1, 1], [1, 1, 0], [1, 1, 0]])
        # delta = 2, 2, 2 | 2, 2 | 2, -1
        expected = table([[1 + 2 + 0.25 * 3, 2 + 2 + 0.5 * 2, 5.0], [1 + 2 + 0.25 * 2, 4.0, 0.0], [2.75, 1.0, 0.0]])
        assert torch.equal(returns.retrace_targets(q, reward, terminated, valid, arrival, trace, 0.5), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_trace(self, dtype: torch.dtype) -> None:
        log_ratio = torch.tensor([[0.0, math.log(0.5), 300.0, -math.inf]], dtype=dtype)
        trace = returns.retrace_trace(log_ratio, 0.8)
        torch.testing.assert_close(trace, torch.tensor([[0.8, 0.4, 0.8, 0.0]], dtype=dtype))
        cut = returns.retrace_trace(log_ratio, 0.8, flags([[0, 1, 1, 0]]))
        torch.testing.assert_close(cut, torch.tensor([[0.8, 0.0, 0.0, 0.0]], dtype=dtype))


class TestGeneralizedAdvantage:
    REWARD = table([[1.0, 2.0, 3.0]])
    VALUE = table([[2.0, 4.0, 8.0]])
    ARRIVAL = table([[4.0, 8.0, 16.0]])  # equal to the next value where there is one
    GOES_ON = flags([[0, 0, 0]])

    def advantage(self, lambda_: float, terminated: Tensor = GOES_ON, valid: Tensor = ~GOES_ON) -> Tensor:
        trace = torch.full_like(self.REWARD, lambda_)
        return returns.generalized_advantage(self.REWARD, terminated, valid, self.VALUE, self.ARRIVAL, trace, 0.5)

    def test_by_hand(self) -> None:
        # delta = 1 + 2 - 2, 2 + 4 - 4, 3 + 8 - 8
        assert torch.equal(self.advantage(0.0), table([[1.0, 2.0, 3.0]]))
        assert torch.equal(self.advantage(1.0), table([[1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3.0]]))
        assert torch.equal(self.advantage(0.5), table([[1 + 0.25 * 2 + 0.0625 * 3, 2 + 0.25 * 3, 3.0]]))

    def test_end_and_time_limit(self) -> None:
        two = flags([[1, 1, 0]])
        assert torch.equal(self.advantage(1.0, valid=two), table([[2.0, 2.0, 0.0]]))
        assert torch.equal(self.advantage(1.0, flags([[0, 1, 0]]), two), table([[1 + 0.5 * -2, -2.0, 0.0]]))
        assert torch.equal(self.advantage(1.0, flags([[0, 1, 0]])), table([[0.0, -2.0, 0.0]]))

    def test_full_trace_is_the_path_return(self) -> None:
        path = returns.executed_path_return(self.REWARD, self.GOES_ON, ~self.GOES_ON, self.ARRIVAL, 0.5)
        assert torch.equal(self.advantage(1.0)[:, 0], path - self.VALUE[:, 0])

    @with_every_mdp
    @pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
    def test_unbiased_on_policy(self, mdp: OptionMDP, lambda_: float) -> None:
        paths, solution = enumerate_paths(mdp, 3), solve(mdp)
        value, arrival = paths.at(solution.q), paths.at_next(solution.arrival)
        trace = returns.retrace_trace(paths.trace_ratio.log(), lambda_)
        torch.testing.assert_close(trace, torch.full_like(trace, lambda_).masked_fill(trace == 0, 0.0))
        arguments = (paths.reward, paths.terminated, paths.valid, value, arrival, trace, mdp.gamma)
        advantage = returns.generalized_advantage(*arguments)[:, 0]
        assert error(mdp, paths, advantage + value[:, 0]) < 1e-9

    def test_clipped_ratios_shrink_the_error_of_another_behaviour(self) -> None:
        """Ratios at most 1 in the present policy's favour: bias remains, as in V-trace, but less than without."""
        mdp = mdp_b()
        paths, solution = enumerate_paths(mdp, 3, other_behaviour(mdp)), solve(mdp)
        value, arrival = paths.at(solution.q), paths.at_next(solution.arrival)
        errors = []
        for log_ratio in (paths.trace_ratio.log(), torch.zeros_like(value)):
            trace = returns.retrace_trace(log_ratio, 1.0)
            arguments = (paths.reward, paths.terminated, paths.valid, value, arrival, trace, mdp.gamma)
            errors.append(error(mdp, paths, returns.generalized_advantage(*arguments)[:, 0] + value[:, 0]))
        assert 1e-3 < errors[0] < errors[1]


def calls(row: Tensor, flag: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every function on the same values and the same flag."""
    return {
        "path": lambda: returns.executed_path_return(row, ~flag, flag, row, 0.9, ended=flag, deliberation_cost=0.1),
        "cut": lambda: returns.cut_at_switch_return(row, ~flag, flag, ~flag, ~flag, row, row, 0.1, 0.9),
        "retrace": lambda: returns.retrace_targets(row, row, ~flag, flag, row, row, 0.9),
        "advantage": lambda: returns.generalized_advantage(row, ~flag, flag, row, row, row, 0.9),
    }


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", ["path", "cut", "retrace", "advantage"])
    def test_constant_and_nothing_is_cast(self, name: str, dtype: torch.dtype) -> None:
        row = torch.rand(4, 3, dtype=dtype).requires_grad_()
        result = calls(row, torch.ones(4, 3, dtype=torch.bool))[name]()
        assert result.dtype == dtype
        assert not result.requires_grad

    @pytest.mark.parametrize("name", ["path", "cut", "retrace", "advantage"])
    @pytest.mark.parametrize("filling", [NAN, math.inf, -1e30])
    def test_invalid_steps_do_not_leak(self, name: str, filling: float) -> None:
        valid = flags([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
        clean = torch.rand(3, 4, dtype=torch.float64).masked_fill(~valid, 0.0)
        filled = clean.masked_fill(~valid, filling)
        expected, result = calls(clean, valid)[name](), calls(filled, valid)[name]()
        assert result.isfinite().all()
        assert torch.equal(result, expected)
        if result.dim() == 2:
            assert (result[~valid] == 0).all()

    @pytest.mark.parametrize("name", ["path", "cut", "retrace", "advantage"])
    def test_flags_must_be_boolean(self, name: str) -> None:
        with pytest.raises(TypeError, match="boolean"):
            calls(torch.rand(4, 3), torch.ones(4, 3, dtype=torch.uint8))[name]()

    @pytest.mark.parametrize("name", ["path", "cut", "retrace", "advantage"])
    def test_shapes(self, name: str) -> None:
        flag = torch.ones(3, 3, dtype=torch.bool)
        for row in (torch.ones(3), torch.ones(3, 1), torch.ones(3, 3, 1)):
            with pytest.raises(ValueError, match="shapes differ"):
                calls(row, flag)[name]()
        with pytest.raises(ValueError, match="L > 0"):
            calls(torch.ones(3, 0), flag[:, :0])[name]()

    def test_gamma_and_trace_shapes(self) -> None:
        row, flag = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool)
        with pytest.raises(ValueError, match="shapes differ"):
            returns.executed_path_return(row, ~flag, flag, row, torch.ones(2))
        with pytest.raises(ValueError, match="shapes differ"):
            returns.retrace_trace(row, 1.0, flag[:, :1])
        with pytest.raises(TypeError, match="boolean"):
            returns.retrace_trace(row, 1.0, row)
