"""Option policy, termination and values of options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from claw_lightning import losses
from claw_lightning.minibatch import Minibatch
from claw_lightning.ranks import times
from claw_lightning.updates.distillation import option_distillation_losses

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


def option_rows(module: OptionCritic, x: Tensor) -> Tensor:
    """The rows from which options learn."""
    size = module.settings.option_batch_size
    return x[:size] if size > 0 else x


def update_options(module: OptionCritic, rows: Minibatch) -> None:
    """Option policy and termination, by expected gradients over all options.

    Termination learns at s' for the option that arrives there; the option policy learns where a choice is made: at
    s' with the probability that the arriving option ends, and at the first steps of episodes for certain.
    """
    h, policy = module.settings, module.policy
    assert policy.option_policy is not None
    assert policy.termination is not None
    assert rows.first is not None
    if rows.weight is None:
        arriving = nn.functional.one_hot(option_rows(module, rows.option), h.num_options).float()
    else:
        arriving = option_rows(module, rows.weight)
    arriving = arriving * (~option_rows(module, rows.terminated)).float().unsqueeze(1)
    opens, next_obs = option_rows(module, rows.first), option_rows(module, rows.next_obs)
    opening = option_rows(module, rows.obs)[opens]
    judged = torch.cat((option_rows(module, rows.next_judged), option_rows(module, rows.judged)[opens]))
    q, probs = module.option_values(judged), policy.option_probs(torch.cat((next_obs, opening)))
    q_next, probs_next = q[: len(next_obs)], probs[: len(next_obs)]
    beta = policy.beta(next_obs)
    choices_apart, ends_apart = option_distillation_losses(module, rows)
    scale = scale_of_advantages(module, losses.advantage(q_next, probs_next.detach()))
    ending = (arriving * beta).sum(1).detach()
    choosing = torch.cat((ending, torch.ones(len(opening), device=ending.device)))
    # Of all ranks' choices, ends and rows; those of these rows of all.
    choices, ends, part = module.ranks.share(choosing, arriving, torch.ones_like(ending))
    if not isinstance(h.option_selection, int) and h.option_selection != "random":
        policy_loss = losses.option_policy_loss(probs, q / scale, choosing)
        entropy = losses.weighted_mean(losses.categorical_entropy(probs), choosing)
        total = times(choices, policy_loss - h.option_entropy * entropy) + times(part, choices_apart)
        module.descend("option_policy", total, policy.option_policy)
        module.record("loss/option_policy", policy_loss)
    cost = policy.switch_cost / scale
    termination_loss = losses.termination_loss(beta, q_next / scale, probs_next.detach(), cost, arriving)
    entropy = losses.weighted_mean(losses.bernoulli_entropy(beta), arriving)
    total = times(ends, termination_loss - h.termination_entropy * entropy) + times(part, ends_apart)
    module.descend("termination", total, policy.termination)
    watch_options(module, beta.detach(), arriving, rows.option, scale)
    for name, value in (
        ("loss/termination", termination_loss),
        ("option/policy_entropy", losses.categorical_entropy(probs_next.detach())),
        ("option/beta", beta),
        ("option/beta_extreme", ((beta < 0.01) | (beta > 0.99)).float()),
        ("option/value_spread", q_next.std(1)),
    ):
        module.record(name, value)


@torch.no_grad()
def scale_of_advantages(module: OptionCritic, advantages: Tensor) -> Tensor:
    """Running root mean square of A, [] (1 where it is not wanted)."""
    if not module.settings.normalize_advantages:
        return torch.ones_like(module.advantage_scale)
    (square,) = module.ranks.mean(advantages.square().mean())
    now = square.sqrt()
    module.advantage_scale.copy_(torch.where(module.advantage_scale > 0, module.advantage_scale.lerp(now, 0.01), now))
    return module.advantage_scale.clamp_min(1e-8)


@torch.no_grad()
def watch_options(module: OptionCritic, beta: Tensor, arriving: Tensor, option: Tensor, scale: Tensor) -> None:
    """Running shares of the options, and the deliberation cost towards its target decision rate; over all ranks."""
    h = module.settings
    counts = nn.functional.one_hot(option, h.num_options).float().mean(0)
    if module.ranks.size > 1:
        counts, ends, arrivals = module.ranks.mean(counts, (beta * arriving).sum(), arriving.sum())
    module.option_shares.lerp_(counts, 0.01)
    if h.target_decision_rate is not None:
        one = module.ranks.size == 1
        rate = losses.weighted_mean(beta, arriving) if one else ends / arrivals.clamp_min(1e-12)
        step = h.deliberation_cost_lr * scale
        module.policy.switch_cost.copy_(
            losses.controlled_cost(module.policy.switch_cost, rate, h.target_decision_rate, step)
        )
        module.record("option/expected_decision_rate", rate)
    module.record("option/cost", module.policy.switch_cost)


def update_values(module: OptionCritic, rows: Minibatch) -> None:
    """Q_Omega(s, .) and V(s) as networks of the state alone, once per ``training_step``.

    For diagnostics and interruption; targets and advantages never use them: A from two separately learned values
    would not sum to zero over options. Both see observations alone, also where critics see more: workers ask the first,
    and have no states. They learn the mean over the states that go with an observation.
    """
    next_obs = option_rows(module, rows.next_obs)
    q_next = module.option_values(option_rows(module, rows.next_judged))
    update_option_value(module, next_obs, q_next)
    update_state_value(module, next_obs, q_next)


def update_option_value(module: OptionCritic, obs: Tensor, q: Tensor, part: Tensor | float = 1.0) -> None:
    """The policy's own Q_Omega(s, .) by regression on option values [B, K]."""
    assert module.policy.option_value is not None
    value_loss = losses.value_regression_loss(module.policy.option_values(obs), q)
    module.descend("option_value", times(part, value_loss), module.policy.option_value)
    module.record("loss/option_value", value_loss)


def update_state_value(module: OptionCritic, obs: Tensor, q: Tensor, part: Tensor | float = 1.0) -> None:
    """V(s) by regression on the mixed option values."""
    with torch.no_grad():
        value = losses.state_value(q, module.policy.option_probs(obs))
    state_loss = losses.value_regression_loss(module.state_value(obs).float().squeeze(1), value)
    module.descend("state_value", times(part, state_loss), module.state_value)
    module.record("loss/state_value", state_loss)
