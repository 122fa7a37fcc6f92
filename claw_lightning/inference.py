"""Which option is active, inferred from states and actions alone, so that stored rows need no option label.

The options of a segment are the hidden states of a Markov chain: o_t is drawn from the arrival probabilities
p(o'|s_t, o) = (1 - beta_o(s_t)) 1[o' = o] + beta_o(s_t) pi_Omega(o'|s_t) of the option o before it, and emits the
action with density pi(a_t|s_t, o_t). Rewards and next states tell nothing more about it, as they depend on state and
action alone. Caps and minimum durations of the behaviour are no part of the model.

Notation: B = batch, L = steps of a segment in time order, K options.

    option_probs    [B, L, K]  pi_Omega(. | s_t)
    beta            [B, L, K]  beta_o(s_t), probability that option o ends on arriving in s_t
    log_likelihood  [B, L, K]  log pi(a_t | s_t, o), for example the log density of a Gaussian actor; -inf is allowed
    first           [B, L]     boolean: s_t opens an episode, so o_t is drawn from pi_Omega whatever came before
    valid           [B, L]     boolean, true for a number of first steps of each row; other fields of the rest may hold
                               anything, also NaN
    prior           [B, K]     distribution of the option of the row's first step before its action is seen, unless that
                               step is `first`; None: pi_Omega(. | s_0). After a preceding segment it is
                               posterior[:, -1] @ arrival_probs(option_probs, beta), both of the new segment's s_0

Everything is computed with logarithms: densities of many joints leave the range of floating numbers quickly. Results
are differentiable in option_probs, beta, log_likelihood and prior; a probability of exactly 0 gets gradient 0.

Sources:
    [HO2]  Wulfmeier et al., Data-efficient Hindsight Off-policy Option Learning, arXiv 2007.15588
    [DAC]  Zhang, Whiteson, DAC: The Double Actor-Critic Architecture for Learning Options, arXiv 1904.12691
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from claw_lightning.losses import _same_shape

__all__ = ["FilterResult", "forward_filter", "smooth"]

# Logarithm of "never". Finite, since the gradient of a difference of infinities is NaN; far below the log of any
# density, far above the least float32.
_LOG_ZERO = -1e30


class FilterResult(NamedTuple):
    """What a filter knows of the option at each step; rows of invalid steps are 0."""

    prediction: Tensor  # [B, L, K], f_t(o) = p(o_t = o | actions before t)
    posterior: Tensor  # [B, L, K], w_t(o) = p(o_t = o | actions up to t)
    log_likelihood: Tensor  # [B], log density of all valid actions of the row


def forward_filter(
    option_probs: Tensor,
    beta: Tensor,
    log_likelihood: Tensor,
    first: Tensor,
    valid: Tensor,
    prior: Tensor | None = None,
) -> FilterResult:
    """Distribution of the option given the past, three times [B, L, K], two flags [B, L] and a prior [B, K].

    f_0(o)      = pi_Omega(o|s_0), or the prior; f_t(o) = pi_Omega(o|s_t) wherever an episode begins
    w_t(o)      = f_t(o) pi(a_t|s_t, o) / sum_o' f_t(o') pi(a_t|s_t, o')
    f_{t+1}(o') = sum_o w_t(o) p(o'|s_{t+1}, o)
    log-likelihood = sum_t log sum_o f_t(o) pi(a_t|s_t, o)                        [HO2; forward pass of an HMM]

    A row's actions that no option could have produced have log-likelihood -inf; its posterior is then arbitrary, and
    the log-likelihood's gradient leaves those steps out.

    Raises TypeError where a flag is not boolean, ValueError where shapes differ.
    """
    chain = _Chain(option_probs, beta, log_likelihood, first, valid, prior)
    log_predictions, log_posteriors, evidence = chain.forward()
    keep = valid.unsqueeze(-1)
    return FilterResult(
        prediction=_probs(log_predictions, keep),
        posterior=_probs(log_posteriors, keep),
        log_likelihood=evidence.masked_fill(~valid, 0.0).sum(dim=1),
    )


def smooth(
    option_probs: Tensor,
    beta: Tensor,
    log_likelihood: Tensor,
    first: Tensor,
    valid: Tensor,
    prior: Tensor | None = None,
) -> Tensor:
    """Distribution of the option given all actions of the segment, arguments of `forward_filter` -> [B, L, K].

    b_t(o) = sum_o' p(o'|s_{t+1}, o) pi(a_{t+1}|s_{t+1}, o') b_{t+1}(o'); 1 at the last valid step of an episode
    p(o_t = o | all) = w_t(o) b_t(o) / sum_o' w_t(o') b_t(o')                                 [backward pass of an HMM]

    Raises TypeError where a flag is not boolean, ValueError where shapes differ.
    """
    chain = _Chain(option_probs, beta, log_likelihood, first, valid, prior)
    _, log_posteriors, _ = chain.forward()
    return _probs((log_posteriors + chain.backward()).log_softmax(dim=-1), valid.unsqueeze(-1))


# ---------------------------------------------------------------------------------------------------------------------


class _Chain:
    """Logarithms of a checked hidden Markov chain, with harmless numbers in place of invalid steps."""

    def __init__(
        self,
        option_probs: Tensor,
        beta: Tensor,
        log_likelihood: Tensor,
        first: Tensor,
        valid: Tensor,
        prior: Tensor | None,
    ) -> None:
        for name, flag in (("first", first), ("valid", valid)):
            if flag.dtype != torch.bool:
                raise TypeError(f"{name} must be boolean, got {flag.dtype}")
        _same_shape(option_probs=option_probs, beta=beta, log_likelihood=log_likelihood)
        if option_probs.dim() != 3 or option_probs.shape[1] == 0:
            raise ValueError(f"option_probs is [B, L, K] with L > 0, got {list(option_probs.shape)}")
        _same_shape(rows_of_option_probs=option_probs[..., 0], first=first, valid=valid)

        # Replaced before any arithmetic: a NaN that is dropped afterwards would still make the gradient NaN.
        drop = ~valid.unsqueeze(-1)
        option_probs = option_probs.masked_fill(drop, 1.0 / option_probs.shape[-1])
        beta = beta.masked_fill(drop, 0.5)
        self.log_choice = _log(option_probs)
        self.log_end, self.log_stay = _log(beta), _log(1 - beta)
        self.log_likelihood = log_likelihood.masked_fill(drop, 0.0).clamp_min(_LOG_ZERO)
        self.num_steps = option_probs.shape[1]
        self.first = first.unsqueeze(-1)
        # Steps after which nothing more is learned of the option: the next one is another episode's, or invalid.
        self.connected = (valid & ~first).unsqueeze(-1)
        self.log_prior = self.log_choice[:, 0]
        if prior is not None:
            _same_shape(prior=prior, first_of_option_probs=option_probs[:, 0])
            self.log_prior = torch.where(self.first[:, 0], self.log_choice[:, 0], _log(prior))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log predictions [B, L, K], log posteriors [B, L, K], log-likelihood of each action [B, L]."""
        log_predictions: list[Tensor] = []
        log_posteriors: list[Tensor] = []
        evidence: list[Tensor] = []
        log_prediction = self.log_prior
        for t in range(self.num_steps):
            if t > 0:
                log_prediction = torch.where(
                    self.first[:, t], self.log_choice[:, t], self._arrive(log_posteriors[-1], t)
                )
            joint = log_prediction + self.log_likelihood[:, t]
            total = joint.logsumexp(dim=-1, keepdim=True)
            log_predictions.append(log_prediction)
            # From below, lest "never" minus "likely" runs out of range in a long segment.
            log_posteriors.append((joint - total).clamp_min(_LOG_ZERO))
            evidence.append(total[:, 0])
        stacked = torch.stack(evidence, dim=1)
        stacked = stacked.masked_fill(stacked < _LOG_ZERO / 2, -torch.inf)
        return torch.stack(log_predictions, dim=1), torch.stack(log_posteriors, dim=1), stacked

    def backward(self) -> Tensor:
        """Logarithms of b_t(o), each step up to a constant, [B, L, K]."""
        message = torch.zeros_like(self.log_prior)
        messages = [message]
        for t in reversed(range(1, self.num_steps)):
            onward = self.log_likelihood[:, t] + message
            chosen = (self.log_choice[:, t] + onward).logsumexp(dim=-1, keepdim=True)
            arrived = torch.logaddexp(self.log_stay[:, t] + onward, self.log_end[:, t] + chosen)
            arrived = (arrived - arrived.amax(dim=-1, keepdim=True).detach()).clamp_min(_LOG_ZERO)
            message = torch.where(self.connected[:, t], arrived, torch.zeros_like(arrived))
            messages.append(message)
        return torch.stack(messages[::-1], dim=1)

    def _arrive(self, log_posterior: Tensor, t: int) -> Tensor:
        """Log of sum_o w(o) p(o'|s_t, o), [B, K], the arrival probabilities of [DAC] without their matrix."""
        stays = log_posterior + self.log_stay[:, t]
        ends = (log_posterior + self.log_end[:, t]).logsumexp(dim=-1, keepdim=True)
        return torch.logaddexp(stays, ends + self.log_choice[:, t]).clamp_min(_LOG_ZERO)


def _log(probs: Tensor) -> Tensor:
    """Logarithm with `_LOG_ZERO` and gradient 0 at 0."""
    never = probs <= 0
    return probs.masked_fill(never, 1.0).log().masked_fill(never, _LOG_ZERO)


def _probs(log_probs: Tensor, keep: Tensor) -> Tensor:
    return log_probs.exp().masked_fill(~keep, 0.0)
