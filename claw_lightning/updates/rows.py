"""Which options learn from which row: the executed one, all by weight, or one drawn of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from claw_lightning import inference, losses
from claw_lightning.minibatch import Minibatch

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


def learning_rows(module: OptionCritic, rows: Minibatch) -> Minibatch:
    """Single steps with the options that learn from them: the executed one, all by weight, or one drawn of all."""
    h = module.settings
    if rows.valid is not None:
        weight = inferred_options(module, rows) if h.option_inference == "filter" else None
        rows = rows.last_step() if h.option_inference == "filter" else rows.step(0)
        rows.weight = weight
    elif h.all_options > 0 and h.num_options > 1:
        assert rows.previous is not None
        executed = executed_probs(module, rows)
        rows.weight = losses.learning_weights(rows.option, executed, h.all_options)
    if rows.weight is not None and h.arrival == "sampled":
        rows.option, rows.weight = torch.multinomial(rows.weight, 1).squeeze(1), None
    return rows


@torch.no_grad()
def executed_probs(module: OptionCritic, rows: Minibatch) -> Tensor:
    """p(o | s, o_prev) by the current policy, [B, K]."""
    assert rows.previous is not None
    probs, beta = module.policy.option_probs(rows.obs), module.policy.beta(rows.obs)
    return losses.executed_probs(probs, beta, rows.previous)


@torch.no_grad()
def inferred_options(module: OptionCritic, rows: Minibatch) -> Tensor:
    """Posterior of the option at the last valid step of each segment, by the current policy; [B, K]."""
    assert rows.valid is not None
    assert rows.first is not None
    policy = module.policy
    raw = policy.actor.forward_all(rows.obs)
    actions = rows.action.unsqueeze(-2).expand(*raw.shape[:-1], -1)
    result = inference.forward_filter(
        policy.option_probs(rows.obs), policy.beta(rows.obs), policy.actor.log_prob(raw, actions), rows.first,
        rows.valid,
    )  # fmt: skip
    index = (rows.valid.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, raw.shape[-2])
    return result.posterior.gather(1, index).squeeze(1)


def row_weight(module: OptionCritic, rows: Minibatch) -> Tensor | None:
    """Weight of each row and option in the losses of critic and actor: [B], [B, K], or None (all alike).

    Of segments [B, L]. Importance weights of the sampler are part of it.
    """
    weight = rows.weight
    if module.diversity.adaptive_weights and module.settings.num_options > 1:
        with torch.no_grad():
            factor = 1.0 / (len(module.option_shares) * module.option_shares)
            factor = factor.clamp_max(module.diversity.max_weight)
            weight = factor[rows.option] if weight is None else weight * factor
    if rows.importance is None:
        return weight
    importance = rows.importance.view(-1, *(1 for _ in rows.option.shape[1:])).expand_as(rows.option)
    if weight is None:
        return importance
    return weight * importance if weight.dim() == importance.dim() else weight * importance.unsqueeze(-1)
