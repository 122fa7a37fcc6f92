"""Exact solution of small option MDPs by differentiable linear solves.

S = states, K = options, A = actions. V, U and the arrival probabilities come from `claw_lightning.losses`, so that
every number checked against this solver checks those functions too; nothing here repeats their equations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from claw_lightning.losses import arrival_probs, arrival_value, state_value


@dataclass(frozen=True)
class OptionMDP:
    """A tabular MDP together with everything that acts in it; floating tensors are float64."""

    transition: Tensor  # [S, A, S]
    reward: Tensor  # [S, A]
    terminal: Tensor  # [S] boolean: entering such a state ends the episode, whatever its row of transition says
    start: Tensor  # [S], distribution of the first state
    gamma: float
    option_probs: Tensor  # [S, K]
    beta: Tensor  # [S, K]
    action_probs: Tensor  # [S, K, A]
    cost: float = 0.0  # deliberation cost inside U ("full" form)

    def but(self, **changes: Any) -> OptionMDP:
        """Copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Solution:
    """Exact values and discounted occupancies."""

    q: Tensor  # [S, K], Q_Omega
    value: Tensor  # [S], V
    arrival: Tensor  # [S, K], U
    q_action: Tensor  # [S, K, A], Q_U
    executed: Tensor  # [S, K], x: discounted visits of s executing o
    arrived: Tensor  # [S, K], m: discounted arrivals in s (not terminal) with o active
    selected: Tensor  # [S], n: discounted number of choices of an option in s
    objective: Tensor  # [], J: expected return from `start`, the first option drawn from pi_Omega


def solve(mdp: OptionMDP) -> Solution:
    """Solve for values and occupancies; differentiable in the option policy, terminations and action policies."""
    num_states, num_options = mdp.beta.shape
    size = num_states * num_options
    eye = torch.eye(size, dtype=torch.float64)

    def arrive(q: Tensor, cost: float) -> Tensor:
        """U of n tables of values, [n, S, K] -> [n, S, K]."""
        num = q.shape[0]
        option_probs, beta = (table.expand(num, -1, -1).flatten(0, 1) for table in (mdp.option_probs, mdp.beta))
        return arrival_value(q.flatten(0, 1), option_probs, beta, cost).view_as(q)

    # U is affine in Q_Omega: its matrix is U of the unit tables, its offset U of the zero table.
    unit_tables = eye.view(size, num_states, num_options)
    arrival_matrix = arrive(unit_tables, 0.0).flatten(1).T
    arrival_offset = arrive(torch.zeros_like(unit_tables[:1]), mdp.cost).flatten()

    # Probability of moving from s to a non-terminal s' while executing o; the option stays the same on the way.
    going_on = mdp.transition * (~mdp.terminal)
    moves = torch.einsum("ska,sat->skt", mdp.action_probs, going_on)
    carry = torch.einsum("skt,kl->sktl", moves, torch.eye(num_options, dtype=torch.float64)).reshape(size, size)
    mean_reward = torch.einsum("ska,sa->sk", mdp.action_probs, mdp.reward).flatten()

    # Q_Omega = r + gamma T (M Q_Omega + b)
    right = mean_reward + mdp.gamma * carry @ arrival_offset
    q = torch.linalg.solve(eye - mdp.gamma * carry @ arrival_matrix, right).view(num_states, num_options)
    value = state_value(q, mdp.option_probs)
    arrival = arrive(q[None], mdp.cost)[0]
    q_action = mdp.reward[:, None, :] + mdp.gamma * torch.einsum("sat,tk->ska", going_on, arrival)

    # Occupancies: x = x_0 + P^T m,  m = gamma T^T x
    reselect = arrival_probs(mdp.option_probs, mdp.beta)
    reselect_matrix = torch.einsum("skl,st->sktl", reselect, torch.eye(num_states, dtype=torch.float64))
    reselect_matrix = reselect_matrix.reshape(size, size)
    first = (mdp.start[:, None] * mdp.option_probs).flatten()
    step = mdp.gamma * carry @ reselect_matrix
    executed = torch.linalg.solve(eye - step.T, first)
    arrived = (mdp.gamma * carry.T @ executed).view(num_states, num_options)

    return Solution(
        q=q,
        value=value,
        arrival=arrival,
        q_action=q_action,
        executed=executed.view(num_states, num_options),
        arrived=arrived,
        selected=mdp.start + (arrived * mdp.beta).sum(dim=-1),
        objective=(mdp.start * value).sum(),
    )


def acyclic_mdp(beta_y: list[float], w: float, cost: float = 0.0) -> OptionMDP:
    """x -> y -> end. In x (state 0) nothing is paid; in y (state 1) action 0 pays 1, action 1 pays 0.

    State 2 is the end. Its row is a loop with reward 1, which only shows if the terminal mask is missing.
    """
    transition = torch.zeros(3, 2, 3, dtype=torch.float64)
    transition[0, :, 1] = transition[1, :, 2] = transition[2, :, 2] = 1.0
    return OptionMDP(
        transition=transition,
        reward=_table([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]),
        terminal=torch.tensor([False, False, True]),
        start=_table([1.0, 0.0, 0.0]),
        gamma=0.9,
        option_probs=_table([[0.5, 0.5], [w, 1.0 - w], [0.5, 0.5]]),
        beta=_table([[0.5, 0.5], beta_y, [0.5, 0.5]]),
        action_probs=_table([[[0.5, 0.5]] * 2, [[0.75, 0.25], [0.25, 0.75]], [[0.5, 0.5]] * 2]),
        cost=cost,
    )


def cyclic_mdp(option_probs: Any, beta: Any, action_probs: Any, cost: float = 0.0) -> OptionMDP:
    """Two states without end; action 0 stays, action 1 moves; staying in state 1 pays 1. Starts in state 0."""
    stay_or_move = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    return OptionMDP(
        transition=_table(stay_or_move),
        reward=_table([[0.0, 0.0], [1.0, 0.0]]),
        terminal=torch.tensor([False, False]),
        start=_table([1.0, 0.0]),
        gamma=0.9,
        option_probs=_table(option_probs),
        beta=_table(beta),
        action_probs=_table(action_probs),
        cost=cost,
    )


def random_mdp(seed: int, num_states: int = 5, num_options: int = 3, num_actions: int = 4) -> OptionMDP:
    """Random dense MDP whose last state is terminal, with random policies, start and cost."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    terminal = torch.zeros(num_states, dtype=torch.bool)
    terminal[-1] = True
    return OptionMDP(
        transition=normal(num_states, num_actions, num_states).softmax(-1),
        reward=normal(num_states, num_actions),
        terminal=terminal,
        start=normal(num_states).masked_fill(terminal, -torch.inf).softmax(-1),
        gamma=0.95,
        option_probs=normal(num_states, num_options).softmax(-1),
        beta=normal(num_states, num_options).sigmoid(),
        action_probs=normal(num_states, num_options, num_actions).softmax(-1),
        cost=float(normal(1).abs()) * 0.2,
    )


def _table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
