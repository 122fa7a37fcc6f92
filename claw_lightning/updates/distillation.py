"""Distillation: divergences between a policy and one it should stay near, the flat student, and the teacher's file.

Equations are in losses.py; here is which network is compared with which.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from claw_lightning import losses
from claw_lightning.errors import ConfigError
from claw_lightning.minibatch import Minibatch
from claw_lightning.ranks import times
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.networks import OptionActor, Policy

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


LOG_MULTIPLIER = (-9.0, 6.0)  # bounds of the dual variable's logarithm: coefficients from 1e-4 to 400


def action_divergence(actor: OptionActor, reference: Tensor, raw: Tensor, std: float) -> Tensor:
    """KL(reference || actor) of the action policies from their raw outputs, both [..., R] -> [...].

    ``std`` stands in for a deterministic actor's standard deviation. A tanh behind both leaves a Gaussian's divergence
    as it is.
    """
    if actor.kind == "gaussian":
        return losses.gaussian_kl(*actor.gaussian(reference), *actor.gaussian(raw))
    if actor.kind == "categorical":
        return losses.categorical_kl(reference.float().softmax(-1), raw.float().softmax(-1))
    return losses.deterministic_kl(actor.mean_action(reference).float(), actor.mean_action(raw).float(), std)


def reference_raw(reference: Policy, obs: Tensor, option: Tensor, all_options: bool) -> Tensor:
    """Raw outputs of the reference for the options that learn, [B, R], or for all of them, [B, K, R] or [B, 1, R].

    One without options answers for every option. ``obs`` is normalised as the reference wants it.
    """
    if all_options:
        return reference.actor.forward_all(obs)
    return reference.actor(obs, torch.zeros_like(option) if reference.num_options == 1 else option)


def student_loss(policy: Policy, obs: Tensor, previous: Tensor, std: float) -> Tensor:
    """Loss of the flat student, normalised [B, O], [B] int64 -> scalar; gradient into the student alone.

    L = mean sum_o p(o | s, o_prev) KL(pi_o || pi_S)

    Weighted by the probability with which each option is ACTIVE in s, not by the option policy: that one says only
    what is chosen where an option ends.
    """
    assert policy.student is not None
    with torch.no_grad():
        weight = losses.executed_probs(policy.option_probs(obs), policy.beta(obs), previous)
        teachers = policy.actor.forward_all(obs)
    raw = policy.student(obs, torch.zeros_like(previous)).unsqueeze(1).expand_as(teachers)
    return (weight * action_divergence(policy.student, teachers, raw, std)).sum(-1).mean()


def load_teacher(path: str, spec: EnvSpec, num_options: int, actor: str) -> Policy:
    """Frozen policy of a checkpoint of this product.

    Raises:
        ConfigError: no such file, not a checkpoint, or a policy of another shape.
    """
    key = "model.distillation.teacher"
    try:
        stored = torch.load(os.path.expanduser(path), map_location="cpu", weights_only=True)
        settings: dict[str, Any] = stored["claw"]["policy"]
        state = {name[7:]: x for name, x in stored["state_dict"].items() if name.startswith("policy.")}
        teacher = Policy(**settings)
        teacher.load_state_dict(state)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: no such file: {path}") from error
    except Exception as error:  # a file of any other kind fails in as many ways as there are kinds
        raise ConfigError(f"{key}: {path} is not a checkpoint of this version ({type(error).__name__})") from error
    sizes = (("obs_size", spec.obs_size), ("action_size", spec.num_actions or spec.action_size), ("actor", actor))
    for name, ours in sizes:
        if settings.get(name, "deterministic") != ours:
            raise ConfigError(
                f"{key}: the teacher in {path} has {name} {settings.get(name)}, this run has {name} {ours}"
            )
    shapes = [None if shape is None else tuple(shape) for shape in (settings.get("image_shape"), spec.image_shape)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{key}: the teacher in {path} has image_shape {shapes[0]}, this run has image_shape {shapes[1]}"
        )
    if teacher.num_options not in (1, num_options):
        raise ConfigError(
            f"{key}: the teacher in {path} has num_options {teacher.num_options}, model.num_options is "
            f"{num_options}; use a teacher with as many, or with one"
        )
    return teacher.requires_grad_(False).eval()


def distillation_loss(
    module: OptionCritic, rows: Minibatch, raw: Tensor, weight: Tensor, part: Tensor | float = 1.0
) -> Tensor:
    """Coefficient x KL(reference || actor) of the options that learn, and the coefficient's step.

    ``part`` is that of :meth:`Ranks.share`, and a factor of the divergence.
    """
    reference, d = module.reference_policy, module.distillation
    assert reference is not None
    with torch.no_grad():
        theirs = reference_raw(reference, reference_obs(module, rows), rows.option, all_options=raw.dim() == 3)
    divergence = losses.weighted_mean(action_divergence(module.policy.actor, theirs.expand_as(raw), raw, d.std), weight)
    divergence = times(part, divergence)
    if d.kl_limit is not None:
        module.descend("multiplier", losses.dual_loss(module.log_multiplier, divergence, d.kl_limit), None)
        # Without bounds it winds up while the limit holds, and overflows where the limit cannot be reached.
        module.log_multiplier.data.clamp_(*LOG_MULTIPLIER)
    module.record("loss/distillation", divergence)
    module.record("distillation/coefficient", distillation_coefficient(module))
    return distillation_coefficient(module) * divergence


def option_distillation_losses(module: OptionCritic, rows: Minibatch) -> tuple[Tensor, Tensor]:
    """Coefficient x divergences of option policy and termination from the reference's, at s; 0 where it has none."""
    reference, policy = module.reference_policy, module.policy
    if reference is None or reference.num_options == 1:
        return torch.zeros((), device=rows.obs.device), torch.zeros((), device=rows.obs.device)
    obs = reference_obs(module, rows)
    with torch.no_grad():
        probs, beta = reference.option_probs(obs), reference.beta(obs)
    choices = losses.categorical_kl(probs, policy.option_probs(rows.obs)).mean()
    ends = losses.bernoulli_kl(beta, policy.beta(rows.obs)).mean()
    return distillation_coefficient(module) * choices, distillation_coefficient(module) * ends


def distillation_coefficient(module: OptionCritic) -> Tensor:
    """Weight of the divergence: fixed, by schedule over environment steps, or the constraint's multiplier."""
    d = module.distillation
    if d.kl_limit is not None:
        return module.log_multiplier.detach().exp()
    return torch.tensor(d.at(module.env_steps), device=module.device)


def reference_obs(module: OptionCritic, rows: Minibatch) -> Tensor:
    """Observations as the reference wants them: a teacher brings its own normaliser and its own encoder.

    A slow copy compares policies on the features of the present encoder: its own are none of its business.
    """
    if not module._teacher:
        return rows.obs
    assert rows.raw_obs is not None
    teacher = module._teacher[0]
    obs = teacher.normalizer(rows.raw_obs)
    if teacher.encoder is None:
        return obs
    assert rows.image is not None
    return teacher.perceive(obs, rows.image)


@torch.no_grad()
def move_reference(module: OptionCritic) -> None:
    """The slow copy follows the policy by ``tau`` per update."""
    assert module.reference is not None
    torch._foreach_lerp_(list(module.reference.parameters()), list(module.policy.parameters()), module.distillation.tau)


def update_student(module: OptionCritic, rows: Minibatch, part: Tensor | float = 1.0) -> None:
    """The flat student towards the options that would be active."""
    assert rows.previous is not None
    loss = student_loss(module.policy, rows.obs, rows.previous, module.distillation.std)
    module.descend("student", times(part, loss), module.policy.student)
    module.record("loss/distillation", loss)
