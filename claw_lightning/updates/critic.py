"""Critics: towards r + gamma U(s', o), expected or distributional, after one step or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from claw_lightning import distributional, losses, returns
from claw_lightning.minibatch import Minibatch
from claw_lightning.networks import TwinCritic
from claw_lightning.ranks import times
from claw_lightning.updates.rows import executed_probs, row_weight

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


def update_critic(module: OptionCritic, rows: Minibatch, counted: bool) -> None:
    """Twin critics towards ``r + gamma (1 - terminated) U(s', o)``."""
    h, weight = module.settings, row_weight(module, rows)
    if h.critic_atoms > 0:
        loss, q = distributional_loss(module, rows, weight)
    elif rows.weight is None:
        arrival = module.next_values.arrival(rows.next_judged, rows.option)
        target = bounded(module, losses.td_target(rows.reward, rows.terminated, arrival, h.gamma))
        q = module.critic(rows.judged, rows.action, rows.option)
        loss = losses.critic_loss(q, target, weight)
        module.note_errors(q, target)
    else:
        arrivals = module.next_values.arrivals(rows.next_judged)
        reward, terminated = (x.unsqueeze(1).expand_as(arrivals) for x in (rows.reward, rows.terminated))
        target = bounded(module, losses.td_target(reward, terminated, arrivals, h.gamma))
        q = module.critic.forward_all(rows.judged, rows.action.unsqueeze(1).expand(-1, h.num_options, -1))
        loss = losses.critic_loss(q, target, weight)
        module.note_errors(q, target, rows.weight)
    (part,) = module.ranks.share(weight)
    module.descend("critic", times(part, loss), module.with_encoder(module.critic), counted)
    module.record("loss/critic", loss)
    module.record("q/mean", q)


def bounded(module: OptionCritic, target: Tensor) -> Tensor:
    """Targets within ``target_range``: what the task cannot return is an error of the critics, and would feed itself.

    With hindsight, critics are asked about goals that no episode has reached; there nothing else corrects them.
    """
    limits = module.settings.target_range
    return target if limits is None else target.clamp(*limits)


def distributional_loss(module: OptionCritic, rows: Minibatch, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy of categorical critics to the projected arrival distribution, and their values."""
    h, critic = module.settings, module.critic
    assert isinstance(critic, TwinCritic)
    probs = module.next_values.arrival_distributions(rows.next_judged)
    discount = h.gamma * (~rows.terminated).float()
    if rows.weight is None:
        probs = probs.gather(1, rows.option.view(-1, 1, 1).expand(-1, 1, probs.shape[2])).squeeze(1)
        logits = critic.logits(rows.judged, rows.action, rows.option)
        reward = rows.reward
    else:
        actions = rows.action.unsqueeze(1).expand(-1, h.num_options, -1)
        logits = critic.logits_all(rows.judged, actions).flatten(1, 2)
        probs, weight = probs.flatten(0, 1), weight.flatten() if weight is not None else None
        reward = rows.reward.repeat_interleave(h.num_options)
        discount = discount.repeat_interleave(h.num_options)
    target = distributional.project(probs, reward, discount, critic.support)
    q = logits.detach().softmax(-1) @ critic.support
    if rows.weight is None:
        module.note_errors(q, target @ critic.support)
    else:
        shape = rows.weight.shape
        module.note_errors(q.view(len(q), *shape), (target @ critic.support).view(shape), rows.weight)
    return distributional.cross_entropy(logits, target, weight), q


def update_critic_over_segments(module: OptionCritic, rows: Minibatch, counted: bool) -> None:
    """Critics towards a return of several steps (``n_step_form``)."""
    h = module.settings
    assert rows.valid is not None
    judged, next_obs, option = (x.flatten(0, 1) for x in (rows.judged, rows.next_obs, rows.option))
    shape = rows.valid.shape
    q_next = module.next_values.options(rows.next_judged.flatten(0, 1))
    probs, beta = module.policy.option_probs(next_obs), module.policy.beta(next_obs)
    arrival = losses.arrival_value(q_next, probs, beta, module.next_values.cost)
    arrival = arrival.gather(1, option.unsqueeze(1)).view(shape)
    if h.n_step_form == "retrace":
        with torch.no_grad():
            q_target = module.target_critic(judged, rows.action.flatten(0, 1), option).amin(0).view(shape)
            trace = returns.retrace_trace(log_ratio(module, rows), h.trace, switched_here(module, rows))
        target = returns.retrace_targets(q_target, rows.reward, rows.terminated, rows.valid, arrival, trace, h.gamma)
        target = bounded(module, target)
        q = module.critic(judged, rows.action.flatten(0, 1), option)
        module.note_errors(q.view(len(q), *shape), target, rows.valid.float() / rows.valid.sum(1, keepdim=True))
        weight, valid = row_weight(module, rows), rows.valid.float()
        weight = (valid if weight is None else weight * valid).flatten()
        loss = losses.critic_loss(q, target.flatten(), weight)
    else:
        ended, capped, cost = ended_after(rows), capped_after(module, rows), module.next_values.cost
        if h.n_step_form == "executed":
            target = returns.executed_path_return(
                rows.reward, rows.terminated, rows.valid, arrival, h.gamma,
                ended=ended, by_cap=capped, deliberation_cost=cost,
            )  # fmt: skip
        else:
            target = returns.cut_at_switch_return(
                rows.reward, rows.terminated, rows.valid, ended, capped, arrival,
                losses.state_value(q_next, probs).view(shape), cost, h.gamma,
            )  # fmt: skip
        first, target = rows.step(0), bounded(module, target)
        q = module.critic(first.judged, first.action, first.option)
        module.note_errors(q, target)
        weight = row_weight(module, first)
        loss = losses.critic_loss(q, target, weight)
    (part,) = module.ranks.share(weight)
    module.descend("critic", times(part, loss), module.with_encoder(module.critic), counted)
    module.record("loss/critic", loss)
    module.record("q/mean", q)


def ended_after(rows: Minibatch) -> Tensor:
    """Whether the option of each step ended in the next state, [B, L] bool.

    The next row knows; after the last one of a segment nothing is known, and the return goes on there.
    """
    assert rows.valid is not None
    assert rows.switched is not None
    none = torch.zeros_like(rows.valid[:, :1])
    return torch.cat((rows.switched[:, 1:] & rows.valid[:, 1:], none), 1)


def capped_after(module: OptionCritic, rows: Minibatch) -> Tensor:
    """Whether the option of each step reached its longest duration on arriving in the next state, [B, L] bool.

    Told by the age, whatever termination's draw was: the next row's flag knows only of options that were drawn to live.
    """
    assert rows.age is not None
    longest = module.settings.max_option_duration
    if longest == 0 or module.settings.num_options == 1:
        return torch.zeros_like(rows.terminated)
    return rows.age + 1 >= longest


def switched_here(module: OptionCritic, rows: Minibatch) -> Tensor | None:
    """Where traces are cut: at switches of deterministic actors, whose actions have no ratio."""
    return rows.switched if module.settings.actor == "deterministic" else None


@torch.no_grad()
def log_ratio(module: OptionCritic, rows: Minibatch) -> Tensor:
    """Log of p(o|s, o_prev) pi(a|s, o) over the behaviour's, [B, L]; 0 for deterministic actors (K = 1: a alone)."""
    policy = module.policy
    ratio = torch.zeros_like(rows.reward)
    if module.settings.actor == "deterministic":
        return ratio
    assert rows.log_prob_action is not None
    raw = executed_raw(module, rows)
    ratio = policy.actor.log_prob(raw, rows.action) - rows.log_prob_action
    if module.settings.num_options > 1:
        assert rows.log_prob_option is not None
        executed = executed_probs(module, rows).gather(-1, rows.option.unsqueeze(-1)).squeeze(-1)
        ratio = ratio + executed.clamp_min(1e-12).log() - rows.log_prob_option
    return ratio


def executed_raw(module: OptionCritic, rows: Minibatch) -> Tensor:
    """Raw actor outputs of the executed options in segments, [B, L, R]."""
    raw = module.policy.actor(rows.obs.flatten(0, -2), rows.option.flatten())
    return raw.view(*rows.option.shape, -1)
