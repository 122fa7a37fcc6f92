"""NextValues: what states are worth to the targets, from target networks and without gradients.

Shapes: B batch, O observation, J what critics see of a state (O, or O + S with privileged states behind the
observation), K options, Z atoms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from claw_lightning import distributional, losses
from claw_lightning.networks import DiscreteCritic, TwinCritic
from claw_lightning.rollout.networks import OptionActor, Policy


class NextValues:
    """Q_Omega and U of next states, from what critics see of them; policies see the beginning of it, the observation.

    Args:
        policy: option policy and termination; also the actor where there is no target actor.
        actor: target actor (deterministic) or the policy's own.
        critic: target critics.
        log_temperature: of stochastic actors, or None.
        settings: the module's.
    """

    def __init__(
        self, policy: Policy, actor: OptionActor, critic: TwinCritic | DiscreteCritic, log_temperature: Tensor | None,
        settings: Any,
    ) -> None:  # fmt: skip
        self.policy, self.actor, self.critic = policy, actor, critic
        self.log_temperature, self.settings = log_temperature, settings

    def seen(self, judged: Tensor) -> Tensor:
        """What policies see of it: [B, J] -> [B, O]."""
        return judged[..., : self.policy.input_size]

    @property
    def cost(self) -> Tensor | float:
        """Deliberation cost inside U: c in the full form, none in the regulariser form."""
        return self.policy.switch_cost if self.settings.deliberation_form == "full" else 0.0

    def action(self, raw: Tensor) -> tuple[Tensor, Tensor | float]:
        """Action of the target policy [..., A] and the entropy bonus [...] (0 for deterministic actors).

        Deterministic: the target actor's action with clipped noise (TD3's smoothing), one draw per option.
        Gaussian: a sample of the current policy and ``-alpha log pi`` (SAC).
        """
        h = self.settings
        if self.log_temperature is not None:
            action, log_prob = self.actor.sample(raw)
            return action, -self.log_temperature.exp() * log_prob
        action = self.actor.mean_action(raw).float()
        noise = (torch.randn_like(action) * h.target_noise).clamp_(-h.target_noise_clip, h.target_noise_clip)
        return (action + noise).clamp_(-1.0, 1.0), 0.0

    @torch.no_grad()
    def options(self, judged: Tensor) -> Tensor:
        """Q_Omega(s, o) of all options: the smaller twin per option, before any mixing; [B, J] -> [B, K]."""
        raw = self.actor.forward_all(self.seen(judged))
        if isinstance(self.critic, DiscreteCritic):
            assert self.log_temperature is not None
            log_probs = raw.float().log_softmax(-1)
            q = self.critic.table(judged).amin(0)
            return (log_probs.exp() * (q - self.log_temperature.exp() * log_probs)).sum(-1)
        actions, bonus = self.action(raw)
        return self.critic.forward_all(judged, actions).amin(0) + bonus

    @torch.no_grad()
    def arrivals(self, judged: Tensor) -> Tensor:
        """U(s', o) of all options, exactly mixed: [B, J] -> [B, K]."""
        next_obs = self.seen(judged)
        probs, beta = self.policy.option_probs(next_obs), self.policy.beta(next_obs)
        return losses.arrival_value(self.options(judged), probs, beta, self.cost)

    @torch.no_grad()
    def arrival(self, judged: Tensor, option: Tensor) -> Tensor:
        """U(s', o) of the executed options, [B, J], [B] -> [B]; by one draw where ``arrival`` is ``sampled``.

        The draw (end with beta, then take one from the option policy) is unbiased, at the price of one option's value
        in place of K; its extra variance is that of Q_Omega(s', .) over options, small beside the spread over states.
        """
        mixes = self.settings.arrival == "expected" and self.settings.num_options > 1
        if mixes or isinstance(self.critic, DiscreteCritic):
            return self.arrivals(judged).gather(1, option.unsqueeze(1)).squeeze(1)
        next_obs = self.seen(judged)
        option, ended = self._draw(next_obs, option)
        action, bonus = self.action(self.actor(next_obs, option))
        return self.critic(judged, action, option).amin(0) + bonus - self.cost * ended

    def _draw(self, next_obs: Tensor, option: Tensor) -> tuple[Tensor, Tensor]:
        ended = torch.zeros_like(option, dtype=torch.bool)
        if self.settings.num_options > 1:
            beta = self.policy.beta(next_obs).gather(1, option.unsqueeze(1)).squeeze(1)
            ended = torch.rand_like(beta) < beta
            selected = torch.multinomial(self.policy.option_probs(next_obs), 1).squeeze(1)
            option = torch.where(ended, selected, option)
        return option, ended

    @torch.no_grad()
    def arrival_distributions(self, judged: Tensor) -> Tensor:
        """Distribution of U(s', o) over the atoms, all options: [B, J] -> [B, K, Z].

        The twin with the smaller mean is taken whole, per option and before mixing.
        """
        assert isinstance(self.critic, TwinCritic)
        z, next_obs = self.critic.support, self.seen(judged)
        actions, bonus = self.action(self.actor.forward_all(next_obs))
        probs = distributional.lower_twin(self.critic.logits_all(judged, actions).softmax(-1), z)
        if isinstance(bonus, Tensor):  # SAC's entropy moves the whole distribution
            probs = distributional.project(probs, bonus, torch.ones_like(bonus), z)
        option_probs, beta = self.policy.option_probs(next_obs), self.policy.beta(next_obs)
        return distributional.mix_options_with_cost(probs, option_probs, beta, z, self.cost)
