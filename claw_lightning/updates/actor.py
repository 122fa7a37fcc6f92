"""Action policies: uphill on the critics, near a reference, apart from one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from claw_lightning import losses
from claw_lightning.minibatch import Minibatch
from claw_lightning.networks import DiscreteCritic, TwinCritic
from claw_lightning.ranks import times
from claw_lightning.updates.distillation import distillation_loss
from claw_lightning.updates.options import option_rows
from claw_lightning.updates.rows import row_weight

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


def update_actor(module: OptionCritic, rows: Minibatch) -> None:
    """Action policies of the options that learn, uphill on the critics, whose weights stay as they are."""
    actor, all_options = module.policy.actor, rows.weight is not None
    weight = row_weight(module, rows)
    module.critic.requires_grad_(False)
    raw = actor.forward_all(rows.obs) if all_options else actor(rows.obs, rows.option)
    (part,) = module.ranks.share(weight)
    if weight is None:
        weight = torch.ones(len(rows.obs), device=rows.obs.device)
    if actor.kind == "categorical":
        loss, action = categorical_loss(module, rows, raw, weight, part)
    elif actor.kind == "gaussian":
        loss, action = gaussian_loss(module, rows, raw, weight, part)
    else:
        action = actor.mean_action(raw)
        q = action_values(module, rows, action, first=1)[0]
        loss = losses.deterministic_actor_loss(q, action.float(), weight, module.settings.action_penalty)
    module.record("loss/actor", loss)
    loss = times(part, loss)
    if module.reference_policy is not None:
        loss = loss + distillation_loss(module, rows, raw, weight, part)
    if module.diversity.bonus > 0 and module.settings.num_options > 1:
        loss = loss - module.diversity.bonus * option_spread(module, rows, raw if all_options else None)
    module.descend("actor", loss, actor)
    module.critic.requires_grad_(True)
    if actor.kind != "categorical":
        module.record("action/saturation", (action.detach().abs() > 0.99).float())


def action_values(module: OptionCritic, rows: Minibatch, action: Tensor, first: int | None = None) -> Tensor:
    """Q_i(s, o, a) with gradients into the action: [B, A] -> [C, B], or of all options [B, K, A] -> [C, B, K]."""
    assert isinstance(module.critic, TwinCritic)
    if action.dim() == 3:
        return module.critic.forward_all(rows.judged, action, first)
    return module.critic(rows.judged, action, rows.option, first=first)


def gaussian_loss(
    module: OptionCritic, rows: Minibatch, raw: Tensor, weight: Tensor, part: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """SAC's actor loss, and the temperature's step."""
    action, log_prob = module.policy.actor.sample(raw)
    q = action_values(module, rows, action).amin(0)
    assert module.log_temperature is not None
    loss = losses.gaussian_actor_loss(q, log_prob, module.log_temperature.exp(), weight)
    update_temperature(module, log_prob, weight, part)
    return loss, action


def categorical_loss(
    module: OptionCritic, rows: Minibatch, raw: Tensor, weight: Tensor, part: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Discrete SAC's actor loss, and the temperature's step."""
    assert isinstance(module.critic, DiscreteCritic)
    assert module.log_temperature is not None
    log_probs = raw.float().log_softmax(-1)
    with torch.no_grad():
        q = module.critic.table(rows.judged).amin(0)
    if rows.weight is None:
        q = q[torch.arange(len(q), device=q.device), rows.option]
    loss = losses.categorical_actor_loss(log_probs, q, module.log_temperature.exp(), weight)
    update_temperature(module, (log_probs.exp() * log_probs).sum(-1), weight, part)
    return loss, raw


def update_temperature(module: OptionCritic, log_prob: Tensor, weight: Tensor, part: Tensor | float = 1.0) -> None:
    """Alpha towards the target entropy; ``part`` as of :meth:`Ranks.share`."""
    assert module.log_temperature is not None
    module.record("temperature", module.log_temperature.exp())
    if module.settings.tune_temperature:
        loss = losses.temperature_loss(module.log_temperature, log_prob.detach(), module.target_entropy, weight)
        module.descend("temperature", times(part, loss), None)


def option_spread(module: OptionCritic, rows: Minibatch, raw: Tensor | None) -> Tensor:
    """Mean spread of the options' actions over the rows."""
    actor = module.policy.actor
    raw = actor.forward_all(option_rows(module, rows.obs)) if raw is None else raw
    actions = raw.float().softmax(-1) if actor.kind == "categorical" else actor.mean_action(raw).float()
    spread = losses.option_spread(actions, module.diversity.length_scale).mean()
    module.record("option/spread", spread)
    return spread
