"""The equations of the option-critic, once and in one place: pure functions of tensors.

Notation: B = batch, K = options, A = action dimensions, C = critics. Where a function says [B, K], further leading
dimensions are allowed as long as all tensors agree. Nothing is cast: the result has the precision of the inputs.

    q             Q_Omega(s, o), value of executing option o in s
    option_probs  pi_Omega(o | s)
    beta          beta_o(s), probability that option o ends on ARRIVING in s
    weight        importance of each element, always taken as a constant; a weighted mean divides by the sum of the
                  weights and is 0, with gradient 0, where that sum is 0

Shapes are checked rather than broadcast: [B] against [B, 1] would otherwise silently become [B, B].

Sources:
    [OC]   Bacon, Harb, Precup, The Option-Critic Architecture, arXiv 1609.05140
    [DC]   Harb, Bacon, Klissarov, Precup, When Waiting is not an Option: learning options with a deliberation cost,
           arXiv 1709.04571
    [DAC]  Zhang, Whiteson, DAC: The Double Actor-Critic Architecture for Learning Options, arXiv 1904.12691
    [TD3]  Fujimoto, van Hoof, Meger, Addressing Function Approximation Error in Actor-Critic Methods, arXiv 1802.09477
    [SAC]  Haarnoja et al., Soft Actor-Critic Algorithms and Applications, arXiv 1812.05905
    [SACD] Christodoulou, Soft Actor-Critic for Discrete Action Settings, arXiv 1910.07207
    [MOC]  Klissarov, Precup, Flexible Option Learning, arXiv 2112.03097
    [MPO]  Abdolmaleki et al., Maximum a Posteriori Policy Optimisation, arXiv 1806.06920
    [PPO]  Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from claw_lightning.rollout.distributions import squashed_gaussian_log_prob

__all__ = [
    "advantage",
    "arrival_probs",
    "arrival_value",
    "bernoulli_entropy",
    "bernoulli_kl",
    "categorical_actor_loss",
    "categorical_entropy",
    "categorical_kl",
    "clipped_surrogate_loss",
    "controlled_cost",
    "critic_loss",
    "deterministic_actor_loss",
    "gaussian_actor_loss",
    "deterministic_kl",
    "dual_loss",
    "executed_probs",
    "gaussian_kl",
    "learning_weights",
    "option_policy_loss",
    "option_spread",
    "squashed_gaussian_log_prob",
    "state_value",
    "td_target",
    "temperature_loss",
    "termination_loss",
    "value_regression_loss",
    "weighted_mean",
]

Scalar: TypeAlias = float | Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Values over options


def state_value(q: Tensor, option_probs: Tensor) -> Tensor:
    """Value of a state in which the option is yet to be chosen, [B, K], [B, K] -> [B].

    V(s) = sum_o pi_Omega(o|s) Q_Omega(s, o)                                                              [OC]

    The expectation, not the maximum: with the maximum the best option's advantage is 0 and it is never told to persist.
    Differentiable in both arguments.
    """
    _same_shape(q=q, option_probs=option_probs)
    return (option_probs * q).sum(dim=-1)


def advantage(q: Tensor, option_probs: Tensor) -> Tensor:
    """Advantage of each option over choosing afresh, [B, K], [B, K] -> [B, K].

    A(s, o) = Q_Omega(s, o) - V(s), so that sum_o pi_Omega(o|s) A(s, o) = 0                                [OC]

    V is computed from the same q: a separately learned V would break that sum and let beta drift by the mismatch.
    Differentiable in both arguments.
    """
    return q - state_value(q, option_probs).unsqueeze(-1)


def arrival_value(q: Tensor, option_probs: Tensor, beta: Tensor, deliberation_cost: Scalar) -> Tensor:
    """Value of arriving in s with option o still active, three times [B, K] -> [B, K].

    U(s, o) = (1 - beta_o(s)) Q_Omega(s, o) + beta_o(s) (V(s) - c)                                         [OC, DC]

    A cost here is part of the return ("full" form). With cost 0 here and c in `termination_loss` alone, it only
    regularises. Differentiable in all arguments.
    """
    _same_shape(q=q, option_probs=option_probs, beta=beta)
    value = state_value(q, option_probs).unsqueeze(-1)
    return (1 - beta) * q + beta * (value - deliberation_cost)


def arrival_probs(option_probs: Tensor, beta: Tensor) -> Tensor:
    """Distribution of the next option given the arriving one, [B, K], [B, K] -> [B, K, K] (row o, column o').

    p(o' | s, o) = (1 - beta_o(s)) 1[o' = o] + beta_o(s) pi_Omega(o' | s)                                  [DAC]

    Every row sums to 1. Differentiable in both arguments.
    """
    _same_shape(option_probs=option_probs, beta=beta)
    return torch.diag_embed(1 - beta) + beta.unsqueeze(-1) * option_probs.unsqueeze(-2)


def executed_probs(option_probs: Tensor, beta: Tensor, previous: Tensor) -> Tensor:
    """Distribution of the option executed in s given the one before, [B, K], [B, K], [B] int64 -> [B, K].

    p(o | s, o_prev) of `arrival_probs`; pi_Omega(. | s) where there is none before (previous -1, first steps). [DAC]
    """
    _same_shape(option_probs=option_probs, beta=beta)
    before = torch.nn.functional.one_hot(previous.clamp_min(0), option_probs.shape[-1]).to(option_probs.dtype)
    ended = (before * beta).sum(-1, keepdim=True)
    later = (1 - ended) * before + ended * option_probs
    return torch.where((previous < 0).unsqueeze(-1), option_probs, later)


def learning_weights(option: Tensor, executed: Tensor, eta: float) -> Tensor:
    """How much each option learns from a step, [B] int64, [B, K] of `executed_probs`, number -> [B, K], a constant.

    w_o = eta p(o | s, o_prev) + (1 - eta) 1[o = o_executed]                                               [MOC]

    Sums to 1. With a critic Q(s, o, a) every option may learn from every action without an importance ratio: the
    target r + gamma U(s', o) is right for each.
    """
    one_hot = torch.nn.functional.one_hot(option, executed.shape[-1]).to(executed.dtype)
    return (eta * executed + (1 - eta) * one_hot).detach()


# ---------------------------------------------------------------------------------------------------------------------
# Critics


def td_target(reward: Tensor, terminated: Tensor, arrival: Tensor, gamma: Scalar) -> Tensor:
    """Target of the critics, [B], [B], [B] -> [B], a constant: no gradient flows into any argument.

    y = r + gamma (1 - terminated) U(s', o)                                                               [OC]

    terminated: boolean; true ends of the task only. A time limit is not one: it bootstraps from the true final
        observation, hence `arrival` must be U of that observation, never of the one after the reset.
    gamma: a number, or [B] with gamma^n of an n-step return whose rewards are summed in `reward`.

    Raises TypeError where `terminated` is not boolean, ValueError where shapes differ.
    """
    if terminated.dtype != torch.bool:
        raise TypeError(f"terminated must be boolean, got {terminated.dtype}")
    _same_shape(reward=reward, terminated=terminated, arrival=arrival)
    if isinstance(gamma, Tensor) and gamma.dim() > 0:
        _same_shape(reward=reward, gamma=gamma)
    with torch.no_grad():
        # Selected rather than multiplied by zero: what a simulator leaves after an end may be anything, also NaN.
        return torch.where(terminated, reward, reward + gamma * arrival)


def critic_loss(q: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Squared error of all critics, [C, B], [B], [B] or None -> scalar; no gradient into `target`.

    L = sum_i mean_w (Q_i(s, o, a) - y)^2                                                                 [TD3]
    """
    _same_shape(q=q[0], target=target)
    return weighted_mean((q - target.detach()).square().sum(dim=0), weight)


def value_regression_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, two tensors of one shape -> scalar; no gradient into `target`.

    L = mean (prediction - target)^2
    """
    _same_shape(prediction=prediction, target=target)
    return (prediction - target.detach()).square().mean()


# ---------------------------------------------------------------------------------------------------------------------
# Options: termination and the policy over options


def termination_loss(
    beta: Tensor, q: Tensor, option_probs: Tensor, deliberation_cost: Scalar, weight: Tensor
) -> Tensor:
    """Loss of the termination functions, four tensors [B, K] and a number -> scalar; gradient into beta alone.

    L = mean_w beta_o(s') stop_gradient(A(s', o) + c)                                                     [OC, DC]

    The policy gradient is dJ/dbeta_o(s') = -m(s', o) (A(s', o) + c), with m the discounted probability of ARRIVING in
    s' with option o active: every argument belongs to s', and column o to the option that was executed on the way.

    weight: 0 where s' is terminal, and for options that did not arrive (or their share, if all options learn).
    """
    _same_shape(beta=beta, q=q, option_probs=option_probs, weight=weight)
    with torch.no_grad():
        push = advantage(q, option_probs) + deliberation_cost
    return weighted_mean(beta * push, weight)


def option_policy_loss(option_probs: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Loss of the policy over options, [B, K], [B, K], [B] -> scalar; no gradient into q.

    L = -mean_w sum_o pi_Omega(o|s) stop_gradient(Q_Omega(s, o))                                          [OC]

    All options contribute, hence no sample of o is needed. For a softmax the gradient of a logit is
    -pi_Omega(o|s) A(s, o).

    weight: probability that an option is chosen in s: 1 at the first step of an episode, beta of the arriving option
        later.
    """
    _same_shape(option_probs=option_probs, q=q)
    return -weighted_mean(state_value(q.detach(), option_probs), weight)


def controlled_cost(cost: Scalar, rate: Scalar, target: float, step: Scalar) -> Tensor:
    """Deliberation cost after one step of integral control, numbers or [] -> [].

    c <- max(0, c + step (rate - target))

    rate: decision rate, the mean probability that an arriving option ends. A cost can only lower it: options that
    persist more than the target asks for at c = 0 are left alone.
    """
    return (torch.as_tensor(cost) + step * (torch.as_tensor(rate) - target)).clamp_min(0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Policies inside options


def deterministic_actor_loss(q: Tensor, action: Tensor, weight: Tensor, action_penalty: float) -> Tensor:
    """Loss of a deterministic actor, [B], [B, A], [B] and a number -> scalar.

    L = -mean_w Q(s, o, a) + penalty * mean_w (1/A) sum_j a_j^2,  a = mu_o(s)                             [TD3]

    The gradient reaches the actor through q and through `action`; the caller decides which form of the action (before
    or after squashing) is penalised.
    """
    _same_shape(q=q, action=action[..., 0])
    penalty = action.square().mean(dim=-1)
    return weighted_mean(action_penalty * penalty - q, weight)


def gaussian_actor_loss(q: Tensor, log_prob: Tensor, alpha: Scalar, weight: Tensor) -> Tensor:
    """Loss of a stochastic actor with reparameterised actions, [B], [B], number, [B] -> scalar.

    L = mean_w (alpha log pi(a|s, o) - Q(s, o, a)),  a = a(noise; s, o)                                   [SAC]

    alpha: temperature, a number, [] or [B] (one per row's option); taken as a constant.
    """
    _same_shape(q=q, log_prob=log_prob)
    if isinstance(alpha, Tensor):
        alpha = alpha.detach()
    return weighted_mean(alpha * log_prob - q, weight)


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float, weight: Tensor) -> Tensor:
    """Loss of the temperature, [] or [B], [B], number, [B] -> scalar; gradient into log_alpha alone.

    L = -mean_w log_alpha stop_gradient(log pi(a|s, o) + target_entropy)                                  [SAC]

    alpha rises while the entropy is below its target. Linear in log_alpha rather than alpha, so that the pull does not
    vanish where alpha is small.
    """
    gap = log_prob.detach() + target_entropy
    return -weighted_mean(log_alpha * gap, weight)


def categorical_actor_loss(log_probs: Tensor, q: Tensor, alpha: Scalar, weight: Tensor) -> Tensor:
    """Loss of an actor over discrete actions, [..., A], [..., A], number, [...] -> scalar; no gradient into q.

    L = mean_w sum_a pi(a|s, o) (alpha log pi(a|s, o) - Q(s, o, a))                                       [SACD]

    The sum replaces SAC's sample: no reparameterisation is needed.
    """
    _same_shape(log_probs=log_probs, q=q)
    if isinstance(alpha, Tensor):
        alpha = alpha.detach()
    return weighted_mean((log_probs.exp() * (alpha * log_probs - q.detach())).sum(-1), weight)


def clipped_surrogate_loss(log_ratio: Tensor, advantages: Tensor, clip: float, weight: Tensor) -> Tensor:
    """Policy gradient from the data of an older policy, [...], [...], number, [...] -> scalar; none into advantages.

    L = -mean_w min(rho A, clip(rho, 1 - eps, 1 + eps) A),  rho = pi / pi_behaviour                        [PPO]

    log_ratio: log rho, from stored log-probabilities; clamped to +-20 so that exp stays finite.
    """
    _same_shape(log_ratio=log_ratio, advantages=advantages)
    ratio, advantages = log_ratio.clamp(-20.0, 20.0).exp(), advantages.detach()
    return -weighted_mean(torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages), weight)


def option_spread(actions: Tensor, length_scale: float) -> Tensor:
    """How different the options act, [..., K, A], number -> [...] in [0, 1).

    D = mean_{o != o'} 1 - exp(-d^2 / (2 l^2)),  d^2 = (1/A) sum_j (a_oj - a_o'j)^2

    Bounded, so that a bonus on it cannot outgrow the return: options that are already far apart gain nothing by moving
    further. For discrete actions pass the probabilities.
    """
    num_options = actions.shape[-2]
    difference = actions.unsqueeze(-2) - actions.unsqueeze(-3)
    apart = 1 - torch.exp(-difference.square().mean(-1) / (2 * length_scale**2))
    return apart.sum((-2, -1)) / (num_options * (num_options - 1))


def dual_loss(log_multiplier: Tensor, divergence: Scalar, limit: float) -> Tensor:
    """Loss of the multiplier of a constraint divergence <= limit, [] , number, number -> []; gradient into it alone.

    L = log_lambda stop_gradient(limit - D)                                                                [MPO]

    The multiplier rises while the constraint is violated. Linear in its logarithm, as in `temperature_loss`.
    """
    if isinstance(divergence, Tensor):
        divergence = divergence.detach()
    return log_multiplier * (limit - divergence)


# ---------------------------------------------------------------------------------------------------------------------
# Divergences and entropies


def gaussian_kl(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """KL(p || q) of diagonal Gaussians, four times [..., A] -> [...], summed over actions.

    KL = sum_j log(std_q / std_p) + (std_p^2 + (mean_p - mean_q)^2) / (2 std_q^2) - 1/2

    Holds as it is for two tanh-squashed policies: an invertible map of the action leaves the divergence unchanged.
    """
    scaled = (std_p.square() + (mean_p - mean_q).square()) / (2 * std_q.square())
    return (std_q.log() - std_p.log() + scaled - 0.5).sum(dim=-1)


def deterministic_kl(action_p: Tensor, action_q: Tensor, std: float) -> Tensor:
    """Divergence of two deterministic policies, [..., A], [..., A], number -> [...], summed over actions.

    KL(N(a_p, std^2) || N(a_q, std^2)) = sum_j (a_pj - a_qj)^2 / (2 std^2)
    """
    _same_shape(action_p=action_p, action_q=action_q)
    return (action_p - action_q).square().sum(-1) / (2 * std**2)


def categorical_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats, [..., K], [..., K] -> [...]; finite also at 0.

    KL = sum_o p_o (log p_o - log q_o)
    """
    _same_shape(p=p, q=q)
    return (p * (_safe_log(p) - _safe_log(q))).sum(-1)


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two coins in nats, two tensors of one shape -> that shape; finite also at 0 and 1.

    KL = p log(p / q) + (1 - p) log((1 - p) / (1 - q))
    """
    _same_shape(p=p, q=q)
    return p * (_safe_log(p) - _safe_log(q)) + (1 - p) * (_safe_log(1 - p) - _safe_log(1 - q))


def categorical_entropy(probs: Tensor) -> Tensor:
    """Entropy in nats, [..., K] -> [...]; finite with a finite gradient also at p = 0.

    H = -sum_o p_o log p_o
    """
    return -(probs * _safe_log(probs)).sum(dim=-1)


def bernoulli_entropy(beta: Tensor) -> Tensor:
    """Entropy in nats of each element, [...] -> [...]; finite with a finite gradient also at 0 and 1.

    H = -beta log beta - (1 - beta) log(1 - beta)
    """
    return -beta * _safe_log(beta) - (1 - beta) * _safe_log(1 - beta)


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def _safe_log(probs: Tensor) -> Tensor:
    """Log that is finite at 0; exact for every normal positive number."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def weighted_mean(value: Tensor, weight: Tensor | None) -> Tensor:
    """Sum of weight x value over the sum of weights, two tensors of one shape -> scalar; 0 where all weights are 0."""
    if weight is None:
        return value.mean()
    _same_shape(value=value, weight=weight)
    weight = weight.detach()
    total = weight.sum()
    # A device-side choice: comparing in Python would wait for the accelerator.
    return (weight * value).sum() / torch.where(total == 0, torch.ones_like(total), total)


def _same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, naming the tensors, unless all shapes are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")
