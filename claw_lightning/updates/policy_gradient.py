"""The policy-gradient variant: one update from stored segments, corrected for the policy that acted.

The critic here is Q_Omega(s, o), learned from rewards directly; hence importance ratios are needed, of stored
log-probabilities and clipped: rho of V-trace (arXiv 1802.01561) inside advantages, PPO's surrogate (arXiv 1707.06347)
for the policies. In many dimensions ratios are wild: for hands prefer the critics' gradient (the default).

Shapes: B batch, L steps, K options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from claw_lightning import losses, returns
from claw_lightning.minibatch import Minibatch
from claw_lightning.ranks import times
from claw_lightning.updates.critic import executed_raw
from claw_lightning.updates.distillation import (
    distillation_loss,
    move_reference,
    option_distillation_losses,
    update_student,
)
from claw_lightning.updates.options import update_option_value, update_options, update_state_value, watch_options
from claw_lightning.updates.rows import executed_probs

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


def update(module: OptionCritic, rows: Minibatch, last: bool) -> None:
    """One update of option values, actor, option policy, termination, and what distillation asks for."""
    settings = module.policy_gradient
    assert settings is not None
    if rows.valid is None:  # segments of one step come without their axis
        rows = rows.map(lambda x: x.unsqueeze(1))
        rows.valid = torch.ones_like(rows.terminated)
    seen = module.perceived(rows)
    rows = seen.detached() if module.policy.encoder is not None else seen
    assert rows.valid is not None
    values = option_values(module, rows)
    raw, log_ratio = action_ratios(module, rows)
    advantage, rho = advantages(module, rows, values, log_ratio)
    every = settings.options == "all"
    weight = learning_weight(module, rows) if every else rows.valid.float()
    if every:
        advantage, rho = spread_over_options(module, rows, values, log_ratio, advantage, rho)
    (part,) = module.ranks.share(rows.valid)  # the options' weights of a valid step sum to one
    update_option_values(module, seen, values, advantage, rho, weight, counted=last, part=part)
    update_actor(module, rows, raw, log_ratio, advantage, weight, part)
    steps = valid_steps(rows)
    if every:
        steps.weight = weight[rows.valid]
    if module.updates % module.settings.option_delay == 0:
        if every:
            update_options(module, steps)
        else:
            update_executed_choices(module, rows, values, advantage, part)
    if module.policy.student is not None:
        update_student(module, steps, part)
    if module.distillation.kind == "target":
        move_reference(module)
    if last:
        q = module.option_values(steps.judged)
        if module.option_critic is not None:  # else it is the policy's own that has learned from returns
            update_option_value(module, steps.obs, q, part)
        update_state_value(module, steps.obs, q, part)


def option_values(module: OptionCritic, rows: Minibatch) -> tuple[Tensor, Tensor]:
    """Target network's Q_Omega(s_k, .) and U(s_{k+1}, .), each [B, L, K]."""
    policy = module.policy
    with torch.no_grad():
        q, q_next = module.option_values(rows.judged), module.option_values(rows.next_judged)
        probs, beta = policy.option_probs(rows.next_obs), policy.beta(rows.next_obs)
        cost = policy.switch_cost if module.settings.deliberation_form == "full" else 0.0
        return q, losses.arrival_value(q_next, probs, beta, cost)


def action_ratios(module: OptionCritic, rows: Minibatch) -> tuple[Tensor, Tensor]:
    """Raw outputs of the actor and log pi(a|s, o) - log pi_b(a|s, o_executed): [B, L] executed, or [B, L, K] of all."""
    actor, stored = module.policy.actor, rows.log_prob_action
    assert stored is not None
    assert module.policy_gradient is not None
    if module.policy_gradient.options == "all":
        raw = actor.forward_all(rows.obs)
        actions = rows.action.unsqueeze(-2).expand(*raw.shape[:-1], -1)
        return raw, actor.log_prob(raw, actions) - stored.unsqueeze(-1)
    raw = executed_raw(module, rows)
    return raw, actor.log_prob(raw, rows.action) - stored


@torch.no_grad()
def advantages(
    module: OptionCritic, rows: Minibatch, values: tuple[Tensor, Tensor], log_ratio: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantage of what was executed over Q_Omega(s_k, o_k), and the clipped ratio rho of its action, both [B, L]."""
    settings = module.policy_gradient
    assert settings is not None
    assert rows.valid is not None
    assert rows.log_prob_option is not None
    index = rows.option.unsqueeze(-1)
    q, arrival = (x.gather(-1, index).squeeze(-1) for x in values)
    if log_ratio.dim() == 3:
        log_ratio = log_ratio.gather(-1, index).squeeze(-1)
    rho = log_ratio.clamp(-20.0, 20.0).exp().clamp_max(settings.ratio_clip)
    executed = executed_probs(module, rows).gather(-1, index).squeeze(-1)
    joint = log_ratio + executed.clamp_min(1e-12).log() - rows.log_prob_option
    decay = {"one_step": 0.0, "n_step": 1.0, "gae": settings.trace}[settings.advantage]
    trace = decay * joint.clamp(-20.0, 20.0).exp().clamp_max(settings.ratio_clip)
    gamma = module.settings.gamma
    return returns.generalized_advantage(rows.reward, rows.terminated, rows.valid, q, arrival, trace, gamma), rho


@torch.no_grad()
def learning_weight(module: OptionCritic, rows: Minibatch) -> Tensor:
    """p(o|s, o_prev) of valid steps, [B, L, K]: every option learns as far as it would have been active."""
    assert rows.valid is not None
    return executed_probs(module, rows) * rows.valid.unsqueeze(-1)


@torch.no_grad()
def spread_over_options(
    module: OptionCritic, rows: Minibatch, values: tuple[Tensor, Tensor], log_ratio: Tensor, advantage: Tensor,
    rho: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and ratios of all options, [B, L, K]: the executed one's own path, one step for the others.

    What follows a step belongs to the option that was executed; for another option only r + gamma U(s', o) is right.
    """
    settings = module.policy_gradient
    assert settings is not None
    q, arrival = values
    going_on = (~rows.terminated).float()
    reward, discount = rows.reward.unsqueeze(-1), (module.settings.gamma * going_on).unsqueeze(-1)
    one_step = reward + discount * arrival - q
    executed = F.one_hot(rows.option, q.shape[-1]).bool()
    ratios = log_ratio.clamp(-20.0, 20.0).exp().clamp_max(settings.ratio_clip)
    return torch.where(executed, advantage.unsqueeze(-1), one_step), torch.where(executed, rho.unsqueeze(-1), ratios)


def update_option_values(
    module: OptionCritic, rows: Minibatch, values: tuple[Tensor, Tensor], advantage: Tensor, rho: Tensor,
    weight: Tensor, counted: bool, part: Tensor | float = 1.0,
) -> None:  # fmt: skip
    """Q_Omega(s, o) towards ``Q_Omega + rho A``."""
    network, name = module.value_network
    predicted = module.policy.option_values(rows.obs) if name == "option_value" else network(rows.judged).float()
    q = values[0]
    if advantage.dim() == 2:
        predicted, q = (x.gather(-1, rows.option.unsqueeze(-1)).squeeze(-1) for x in (predicted, q))
    loss = losses.critic_loss(predicted.unsqueeze(0), q + rho * advantage, weight)
    module.descend(name, times(part, loss), module.with_encoder(network), counted)
    module.record(f"loss/{name}", loss)
    module.record("q/mean", predicted)


@torch.no_grad()
def root_mean_square(module: OptionCritic, value: Tensor, weight: Tensor) -> Tensor:
    """Weighted, over the rows of all ranks; two tensors of one shape -> []."""
    if module.ranks.size == 1:
        return losses.weighted_mean(value.square(), weight).sqrt().clamp_min(1e-8)
    total, count = module.ranks.mean((weight * value.square()).sum(), weight.sum())
    return (total / count.clamp_min(1e-12)).sqrt().clamp_min(1e-8)


def update_actor(
    module: OptionCritic, rows: Minibatch, raw: Tensor, log_ratio: Tensor, advantage: Tensor, weight: Tensor,
    part: Tensor | float = 1.0,
) -> None:  # fmt: skip
    """Action policies by the clipped surrogate, with an entropy bonus."""
    settings, actor = module.policy_gradient, module.policy.actor
    assert settings is not None
    scale = root_mean_square(module, advantage, weight)
    loss = losses.clipped_surrogate_loss(log_ratio, advantage / scale, settings.surrogate_clip, weight)
    if actor.kind == "categorical":
        entropy = losses.categorical_entropy(raw.float().softmax(-1))
    else:
        _, log_prob = actor.sample(raw)
        entropy = -log_prob
    total = times(part, loss - settings.entropy * losses.weighted_mean(entropy, weight))
    if module.reference_policy is not None:
        flat = rows.map(lambda x: x.flatten(0, 1))
        total = total + distillation_loss(module, flat, raw.flatten(0, 1), weight.flatten(0, 1), part)
    module.descend("actor", total, actor)
    module.record("loss/actor", loss)
    module.record("ratio/action", losses.weighted_mean(log_ratio.clamp(-20.0, 20.0).exp(), weight))


def update_executed_choices(
    module: OptionCritic, rows: Minibatch, values: tuple[Tensor, Tensor], advantage: Tensor, part: Tensor | float = 1.0
) -> None:
    """Option policy and termination together, from the options that were executed (the high level of DAC).

    The choice at step k is o_k given o_{k-1}, of probability p(o_k | s_k, o_{k-1}), which holds beta and pi_Omega
    both. Its advantage is Q_Omega(s_k, o_k) + A_k over U(s_k, o_{k-1}), or over V(s_0) at first steps, both without
    the cost of this very switch: that one is c beta in the mean, whose gradient needs no sample.
    """
    settings, policy, h = module.policy_gradient, module.policy, module.settings
    assert settings is not None
    assert rows.valid is not None
    assert rows.previous is not None
    assert rows.log_prob_option is not None
    probs, beta = policy.option_probs(rows.obs), policy.beta(rows.obs)
    previous = rows.previous.clamp_min(0).unsqueeze(-1)
    with torch.no_grad():
        q = values[0]
        before = losses.arrival_value(q, probs, beta, 0.0).gather(-1, previous).squeeze(-1)
        opening = rows.previous < 0
        baseline = torch.where(opening, losses.state_value(q, probs), before)
        gain = q.gather(-1, rows.option.unsqueeze(-1)).squeeze(-1) + advantage - baseline
    chosen = losses.executed_probs(probs, beta, rows.previous).gather(-1, rows.option.unsqueeze(-1)).squeeze(-1)
    weight = rows.valid.float()
    scale = root_mean_square(module, gain, weight)
    log_ratio = chosen.clamp_min(1e-12).log() - rows.log_prob_option
    loss = losses.clipped_surrogate_loss(log_ratio, gain / scale, settings.surrogate_clip, weight)
    ends = beta.gather(-1, previous).squeeze(-1) * ~opening
    loss = loss + policy.switch_cost / scale * losses.weighted_mean(ends, weight)
    entropies = h.option_entropy * losses.categorical_entropy(probs)
    entropies = entropies + h.termination_entropy * losses.bernoulli_entropy(beta).mean(-1)
    choices_apart, ends_apart = option_distillation_losses(module, valid_steps(rows))
    total = times(part, loss - losses.weighted_mean(entropies, weight) + choices_apart + ends_apart)
    module.descend_together({"option_policy": policy.option_policy, "termination": policy.termination}, total)
    arrived = F.one_hot(rows.previous.clamp_min(0), h.num_options) * (rows.valid & ~opening).unsqueeze(-1)
    watch_options(module, beta.detach(), arrived.float(), rows.option[rows.valid], scale)
    module.record("loss/option_policy", loss)
    module.record("option/policy_entropy", losses.categorical_entropy(probs.detach()))
    module.record("option/beta", beta)
    module.record("option/beta_extreme", ((beta < 0.01) | (beta > 0.99)).float())


def valid_steps(rows: Minibatch) -> Minibatch:
    """All valid steps of all segments as single steps."""
    assert rows.valid is not None
    valid = rows.valid
    made = rows.map(lambda x: x[valid])
    made.valid = None
    return made
