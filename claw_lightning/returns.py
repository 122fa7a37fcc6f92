"""Targets and advantages over several steps of a stored segment, all constants: no gradient flows into any argument.

Notation: B = batch, L = steps of a segment in time order. Step k has state s_k, option o_k, action a_k, reward r_k.

    reward      [B, L]  r_k
    terminated  [B, L]  boolean: the task ended on entering s_{k+1}; nothing is bootstrapped from there
    valid       [B, L]  boolean: true for the first n >= 1 steps of a row, false from then on. An episode that is cut by
                        a time limit after step k has its last valid step there and is bootstrapped. Other fields of
                        invalid steps may hold anything, also NaN; steps after a termination count as invalid
    arrival     [B, L]  U(s_{k+1}, o_k), s_{k+1} being the true final observation where the episode ends
    ended       [B, L]  boolean: o_k ended on arriving in s_{k+1} (`switched` of the following row), whether or not the
                        same option was drawn again. Ignored at the last valid step, where no following row need exist
    by_cap      [B, L]  boolean: o_k reached its longest permitted duration on arriving in s_{k+1}
    gamma       number, [] or [B]

U contains the mean over the next option. Hence a bootstrap must not look at whether the option really ended there: U
after steps that went on and V - c after those that did not would count the termination twice.

For the same reason `by_cap` has to say that the cap was reached whatever beta's draw was, which the age alone tells
(option_age + 1 >= longest duration). A flag set only where the draw let the option live is not that: it would need
Q_Omega(s_{k+1}, o_k) in place of U.

The unbiasedness told below means: the expectation is Q_U(s_0, o_0, a_0) once `arrival` is exact.

Sources:
    [OC]       Bacon, Harb, Precup, The Option-Critic Architecture, arXiv 1609.05140
    [Q(beta)]  Harutyunyan et al., Learning with Options that Terminate Off-Policy, arXiv 1711.03817
    [Retrace]  Munos et al., Safe and Efficient Off-Policy Reinforcement Learning, arXiv 1606.02647
    [GAE]      Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation,
               arXiv 1506.02438
    [V-trace]  Espeholt et al., IMPALA, arXiv 1802.01561
"""

from __future__ import annotations

import torch
from torch import Tensor

from claw_lightning.losses import Scalar, _same_shape

__all__ = [
    "cut_at_switch_return",
    "executed_path_return",
    "generalized_advantage",
    "retrace_targets",
    "retrace_trace",
]


# ---------------------------------------------------------------------------------------------------------------------
# Plain sums of rewards


@torch.no_grad()
def executed_path_return(
    reward: Tensor,
    terminated: Tensor,
    valid: Tensor,
    arrival: Tensor,
    gamma: Scalar,
    *,
    ended: Tensor | None = None,
    by_cap: Tensor | None = None,
    deliberation_cost: Scalar = 0.0,
) -> Tensor:
    """Return along the path that was executed, through switches of the option, four times [B, L] -> [B].

    y = sum_{k<n} gamma^k (r_k - gamma c 1[k < n-1 and o_k ended]) + gamma^n (1 - terminated_{n-1}) U(s_n, o_{n-1})

    with n the number of valid steps. The bootstrap belongs to the option executed LAST; with o_0 after o_0 ended, the
    target is wrong.

    Unbiased if a_1, a_2, ... and o_1, o_2, ... were drawn from the present policies and terminations. No ratio is
    applied.

    ended: needed with a cost in the "full" form only, which is paid inside the path by each step that ended an option.
    by_cap: if given, the sum stops where the cap was reached and bootstraps there with U(s_{k+1}, o_k), since a cap is
        no part of the policy [Q(beta)].

    Raises TypeError where a flag is not boolean, ValueError where shapes differ or a cost comes without `ended`.
    """
    flags = {"terminated": terminated, "valid": valid, "ended": ended, "by_cap": by_cap}
    _check(reward, gamma, flags, arrival=arrival)
    if ended is None and (isinstance(deliberation_cost, Tensor) or deliberation_cost != 0):
        raise ValueError("a deliberation cost needs `ended`, the steps that pay it")
    going_on = _going_on(terminated, valid)
    if by_cap is not None:
        going_on = going_on & ~by_cap
    toll = torch.zeros_like(reward) if ended is None else ended.to(reward.dtype) * deliberation_cost
    return _sum_rewards(reward, terminated, valid, going_on, arrival, toll, gamma)


@torch.no_grad()
def cut_at_switch_return(
    reward: Tensor,
    terminated: Tensor,
    valid: Tensor,
    ended: Tensor,
    by_cap: Tensor,
    arrival: Tensor,
    next_value: Tensor,
    deliberation_cost: Scalar,
    gamma: Scalar,
) -> Tensor:
    """Return while the first option lasts, five times [B, L] (two of them flags), [B, L], [B, L] -> [B].

    y = sum_{k<m} gamma^k r_k + gamma^m B_m, where m is the first step with
        o_0 capped on arriving in s_m      B_m = U(s_m, o_0), whether or not beta's draw had ended it as well
        o_0 ended on arriving in s_m, m<n  B_m = V(s_m) - c
        m = n, the number of valid steps   B_m = U(s_m, o_0), whether or not it ended
    and B_m = 0 where the task terminated at m.

    Unbiased if a_1, a_2, ... were drawn from the present pi(.|s, o_0) and, since the cut at m happens with probability
    beta_{o_0}(s_m), if the behaviour's beta was the present one: a minimum duration, or old data, break that. No ratio
    is applied. Options after the switch play no role, unlike in `executed_path_return`.

    next_value: V(s_{k+1}), the expectation over pi_Omega.
    deliberation_cost: c in the "full" form, as inside U; 0 if c only regularises the termination loss.

    Raises TypeError where a flag is not boolean, ValueError where shapes differ.
    """
    flags: dict[str, Tensor | None] = {"terminated": terminated, "valid": valid, "ended": ended, "by_cap": by_cap}
    _check(reward, gamma, flags, arrival=arrival, next_value=next_value)
    inside = _going_on(terminated, valid)
    bootstrap = torch.where(inside & ended & ~by_cap, next_value - deliberation_cost, arrival)
    going_on = inside & ~(ended | by_cap)
    return _sum_rewards(reward, terminated, valid, going_on, bootstrap, torch.zeros_like(reward), gamma)


# ---------------------------------------------------------------------------------------------------------------------
# Sums of temporal differences, with traces


@torch.no_grad()
def retrace_targets(
    q: Tensor, reward: Tensor, terminated: Tensor, valid: Tensor, arrival: Tensor, trace: Tensor, gamma: Scalar
) -> Tensor:
    """Targets of the action values at every step, six times [B, L] -> [B, L]; 0 at invalid steps.

    delta_k = r_k + gamma (1 - terminated_k) U(s_{k+1}, o_k) - Q(s_k, o_k, a_k)
    y_k     = Q(s_k, o_k, a_k) + sum_{j>=k} gamma^{j-k} (prod_{i=k+1..j} trace_i) delta_j                  [Retrace]

    q: Q(s_k, o_k, a_k) of the critics that `arrival` comes from (the targets).
    trace: from `retrace_trace`; that of a row's first step is not used.

    Given (s_j, o_j, a_j) the expectation of delta_j depends on nothing that the behaviour chose, and is 0 for the true
    values: whatever the traces, Q_U is a fixed point, and the cost inside U needs no other treatment. The traces decide
    how fast, and whether, the fixed point is approached; up to the ratio they are safe.
    """
    return _traced_sum(q, reward, terminated, valid, arrival, trace, gamma, add_baseline=True)


@torch.no_grad()
def retrace_trace(log_ratio: Tensor, lambda_: float, switched: Tensor | None = None) -> Tensor:
    """Traces of each step, [B, L] -> [B, L].

    trace_k = lambda min(1, ratio_k)                                                                       [Retrace]
    ratio_k = p(o_k | s_k, o_{k-1}) pi(a_k | s_k, o_k) / the same of the behaviour,
    p the arrival probabilities of `losses.arrival_probs`

    log_ratio: log of ratio_k. The behaviour's probability of an option should be the one it was really drawn with,
        e.g. pi_Omega(o_k|s_k) after a cap.
    switched: for deterministic actors, which have no density pi: true at the step whose option was newly chosen (that
        row's own `switched`, not the one before). The trace is 0 there, so that a correction never reaches back over a
        switch; the ratio is then the survival ratio of the option, or 1.
    """
    trace = lambda_ * log_ratio.clamp_max(0).exp()
    if switched is None:
        return trace
    _check_flags(switched=switched)
    _same_shape(log_ratio=log_ratio, switched=switched)
    return torch.where(switched, torch.zeros_like(trace), trace)


@torch.no_grad()
def generalized_advantage(
    reward: Tensor, terminated: Tensor, valid: Tensor, value: Tensor, arrival: Tensor, trace: Tensor, gamma: Scalar
) -> Tensor:
    """Advantages of the actions inside their options at every step, six times [B, L] -> [B, L]; 0 at invalid steps.

    delta_k = r_k + gamma (1 - terminated_k) U(s_{k+1}, o_k) - Q_Omega(s_k, o_k)
    A_k     = delta_k + gamma trace_{k+1} A_{k+1}                                                     [GAE, V-trace]

    value: Q_Omega(s_k, o_k), so that A_k estimates Q_U(s_k, o_k, a_k) - Q_Omega(s_k, o_k).
    trace: lambda times the clipped ratio, from `retrace_trace`; that of a row's first step is not used, as A_k is the
        advantage of the action that was taken. On policy (ratio 1) lambda = 0 gives the one-step advantage, lambda = 1
        the n-step one, values between them that of [GAE], all unbiased if `value` and `arrival` are exact. Off policy
        the clipped ratio leaves the bias of [V-trace] where lambda > 0: unlike in `retrace_targets`, the expectation of
        delta_k depends on the policy that chose a_k.
    """
    return _traced_sum(value, reward, terminated, valid, arrival, trace, gamma, add_baseline=False)


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def _going_on(terminated: Tensor, valid: Tensor) -> Tensor:
    """Whether step k is followed by a further step of the same episode inside the segment, [B, L]."""
    last = torch.zeros_like(valid[:, :1])
    return ~terminated & torch.cat([valid[:, 1:], last], dim=1)


def _sum_rewards(
    reward: Tensor,
    terminated: Tensor,
    valid: Tensor,
    going_on: Tensor,
    bootstrap: Tensor,
    toll: Tensor,
    gamma: Scalar,
) -> Tensor:
    """Backward sum from the first step, [B]: each step is followed by the next one less its toll, or a bootstrap.

    Selects everywhere instead of multiplying by zero, so that whatever stands in steps beyond the end is dropped.
    """
    total = torch.zeros_like(reward[:, 0])
    for k in reversed(range(reward.shape[1])):
        following = torch.where(going_on[:, k], total - toll[:, k], bootstrap[:, k])
        total = torch.where(terminated[:, k], reward[:, k], reward[:, k] + gamma * following)
    return torch.where(valid[:, 0], total, torch.zeros_like(total))


def _traced_sum(
    baseline: Tensor,
    reward: Tensor,
    terminated: Tensor,
    valid: Tensor,
    arrival: Tensor,
    trace: Tensor,
    gamma: Scalar,
    add_baseline: bool,
) -> Tensor:
    """Backward sum of traced temporal differences from every step, [B, L], on top of the baseline if asked."""
    flags: dict[str, Tensor | None] = {"terminated": terminated, "valid": valid}
    _check(reward, gamma, flags, value=baseline, arrival=arrival, trace=trace)
    reached = torch.cat([valid[:, :1], _going_on(terminated, valid)[:, :-1]], dim=1)
    alive = reached.cumprod(dim=1).bool()
    zero = torch.zeros_like(reward[:, 0])
    total, next_trace, sums = zero, zero, []
    for k in reversed(range(reward.shape[1])):
        target = torch.where(terminated[:, k], reward[:, k], reward[:, k] + gamma * arrival[:, k])
        # From the end on total and trace are 0, hence the last step before it needs no case of its own.
        total = torch.where(alive[:, k], target - baseline[:, k] + gamma * next_trace * total, zero)
        next_trace = torch.where(alive[:, k], trace[:, k], zero)
        sums.append(total)
    stacked = torch.stack(sums[::-1], dim=1)
    return torch.where(alive, stacked + baseline, stacked) if add_baseline else stacked


def _check(reward: Tensor, gamma: Scalar, flags: dict[str, Tensor | None], **values: Tensor) -> None:
    """Raise TypeError for flags that are not boolean, ValueError unless all shapes are that of the reward, [B, L]."""
    present = {name: flag for name, flag in flags.items() if flag is not None}
    _check_flags(**present)
    _same_shape(reward=reward, **present, **values)
    if reward.dim() != 2 or reward.shape[1] == 0:
        raise ValueError(f"a segment is [B, L] with L > 0, got {list(reward.shape)}")
    if isinstance(gamma, Tensor) and gamma.dim() > 0:
        _same_shape(gamma=gamma, rows_of_reward=reward[:, 0])


def _check_flags(**flags: Tensor) -> None:
    """Raise TypeError for flags that are not boolean."""
    for name, flag in flags.items():
        if flag.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean, got {flag.dtype}")
