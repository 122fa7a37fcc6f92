"""Looks at networks for diagnostics that leave no trace: no gradients, no random numbers, no statistics.

Shapes: R rows, S steps of recorded episodes, O observation, A action, K options, C critics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from claw_lightning import losses
from claw_lightning.minibatch import Minibatch, beside
from claw_lightning.replay.batch import TENSORS, ReplayBatch
from claw_lightning.rollout.networks import OptionActor, Policy

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic


@contextmanager
def undisturbed(*networks: nn.Module) -> Iterator[None]:
    """Evaluate networks without gradients, in full precision and evaluation mode; all is as before afterwards.

    In training mode a user's block may move statistics or draw numbers. Under autocast a copy of the weights would be
    kept that later gradients do not reach.
    """
    parts = [part for network in networks for part in network.modules() if part.training]
    for part in parts:
        part.training = False
    device = next((p.device.type for network in networks for p in network.parameters()), "cpu")
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for part in parts:
            part.training = True


def networks_that_see(module: OptionCritic) -> list[nn.Module]:
    """What :func:`sampled_rows` evaluates, and the policy."""
    if module.policy.encoder is None:
        return [module.policy]
    assert module.target_encoder is not None
    return [module.policy, module.target_encoder]


def sampled_rows(module: OptionCritic, batch: ReplayBatch, rows: int) -> Minibatch:
    """At most so many rows [R, ...] of a batch, evenly spaced, as the equations want them: call it undisturbed.

    Of segments the first step. Observations hold the features of their images. The reward is the task's, scaled.
    """

    def chosen(x: Tensor) -> Tensor:
        x = (x if batch.valid is None else x[:, :, 0]).flatten(0, 1)
        return x[:: max(1, -(-len(x) // rows))].unsqueeze(0)

    present = {name: getattr(batch, name) for name in TENSORS if name not in ("valid", "weights")}
    picked: dict[str, Any] = {name: chosen(x) for name, x in present.items() if x is not None}
    few = replace(batch, **picked, valid=None, weights=None, places=None)
    states = module.states_normalizer if module.sees_states else None
    reward = few.reward * module.settings.reward_scale
    found = Minibatch.of(few, module.policy.normalizer, reward, True, states).at(0)
    if found.image is None or found.next_image is None:
        return found
    assert module.target_encoder is not None
    obs = module.policy.perceive(found.obs, found.image)
    next_obs = torch.cat((found.next_obs, module.target_encoder(found.next_image)), -1)
    return replace(found, obs=obs, next_obs=next_obs, image=None, next_image=None)


def action_divergence(actor: OptionActor, raw: Tensor) -> Tensor:
    """How far apart the options act: raw outputs of all options [R, K, ...] -> [K, K], means over rows.

    Deterministic actors: root mean square distance of the actions, over rows and components (0 to 2). Stochastic ones:
    symmetric Kullback-Leibler divergence, (KL(p|q) + KL(q|p)) / 2 in nats; that of Gaussians is taken before the tanh,
    which does not change it.
    """
    if actor.kind == "categorical":
        log_probs = raw.float().log_softmax(-1)
        ratio = log_probs.unsqueeze(2) - log_probs.unsqueeze(1)
        kl = (log_probs.exp().unsqueeze(2) * ratio).sum(-1)
    elif actor.kind == "gaussian":
        mean, std = actor.gaussian(raw)
        (m, s), (n, t) = ([x.unsqueeze(axis) for x in (mean, std)] for axis in (2, 1))
        kl = losses.gaussian_kl(m, s, n, t)
    else:
        action = actor.mean_action(raw).float()
        return (action.unsqueeze(2) - action.unsqueeze(1)).square().mean((0, 3)).sqrt()
    return ((kl + kl.transpose(1, 2)) / 2.0).mean(0)


def seen_by(module: OptionCritic, policy: Policy, steps: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """What policy and critics see of recorded steps (``obs`` [S, O], ``image``, ``states``): two tensors [S, any]."""

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(steps[name]).to(module.device)

    obs = policy.normalizer(tensor("obs"))
    if policy.encoder is not None:
        obs = policy.perceive(obs, tensor("image"))
    return obs, beside(obs, module.states_normalizer(tensor("states")) if module.sees_states else None)


def judge_episodes(module: OptionCritic, steps: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the networks say of recorded steps, with the policy that evaluations play with.

    Args:
        module: with its networks.
        steps: as :meth:`ReplayDataModule.record` returns them, S steps.

    Returns:
        ``termination`` [S]: probability that the running option ends here, NaN at first steps and with K = 1;
        ``option_probs`` [S, K]; ``q`` [S, K]: value of every option with its own noise-free action, for the running
        option with the action that was taken, in units of the task's reward: the smaller of the critics, or with
        ``policy_gradient`` the learned value of the options. All float32.
    """
    policy, h = module.evaluated_policy, module.settings
    option = torch.from_numpy(steps["option"]).long().to(module.device)
    networks = [policy, *((module.critic,) if module.policy_gradient is None else (module.value_network[0],))]
    with undisturbed(*networks):
        obs, judged = seen_by(module, policy, steps)
        probs, beta = policy.option_probs(obs), policy.beta(obs)
        if module.policy_gradient is not None:
            q = module.value_network[0](judged)
        else:
            actions = policy.actor.mean_action(policy.actor.forward_all(obs)).float()
            actions = actions.view(len(obs), h.num_options, -1)
            taken = torch.from_numpy(steps["action"]).float().to(module.device)
            actions[torch.arange(len(obs), device=module.device), option] = taken.view(len(obs), -1)
            q = module.critic.forward_all(judged, actions).amin(0)
    termination = np.full(len(option), np.nan, np.float32)
    inner = np.flatnonzero(steps["step"] > 0)
    if h.num_options > 1:
        termination[inner] = beta.cpu().numpy()[inner, steps["option"][inner - 1]]
    return {
        "termination": termination,
        "option_probs": probs.float().cpu().numpy(),
        "q": (q.float() / h.reward_scale).cpu().numpy(),
    }
