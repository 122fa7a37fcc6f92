"""Minibatch: the rows of one update as the equations want them, normalised and scaled.

Shapes: U updates, B batch, L steps of a segment, K options. A stacked minibatch has [U, ...] in front; segments have L
after B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from claw_lightning.replay import ReplayBatch


def beside(obs: Tensor, states: Tensor | None) -> Tensor:
    """Observations [..., O] and their states side by side, [..., O + S]; observations alone without states."""
    return obs if states is None else torch.cat((obs, states), -1)


@dataclass
class Minibatch:
    """Transitions (s, o, a, r, s'), and of what came before them.

    Attributes:
        obs: [B, O] normalised.
        action: [B, A].
        option: [B] int64, executed (or drawn from the options that learn from this row).
        reward: [B], scaled.
        terminated: [B] bool.
        next_obs: [B, O] normalised true next observation.
        first: [B] bool, first step of an episode; this and the next five are None with one option.
        previous: [B] int64, option of the step before, -1 at first steps.
        switched: [B] bool, the option was selected at this step.
        age: [B] int32, steps since the option began.
        log_prob_action: [B] of the behaviour.
        log_prob_option: [B] of the behaviour.
        valid: [B, L] bool, steps of a segment that belong to it; None without segments.
        weight: [B, K], how much each option learns from the row; None: the executed one alone.
        importance: [B] importance weight of each sample; None: all one.
        raw_obs: [B, O] as the simulator gave it, for a teacher with a normaliser of its own; else None.
        image: [B, C, H, W] uint8 beside ``obs``, and likewise ``next_image``; None without images, and once ``obs`` and
            ``next_obs`` hold their features (:meth:`OptionCritic.perceived`).
        states: [B, S] normalised states that critics see beside ``obs``, and likewise ``next_states``; None where
            critics see what policies see.
    """

    obs: Tensor
    action: Tensor
    option: Tensor
    reward: Tensor
    terminated: Tensor
    next_obs: Tensor
    first: Tensor | None = None
    previous: Tensor | None = None
    switched: Tensor | None = None
    age: Tensor | None = None
    log_prob_action: Tensor | None = None
    log_prob_option: Tensor | None = None
    valid: Tensor | None = None
    weight: Tensor | None = None
    importance: Tensor | None = None
    raw_obs: Tensor | None = None
    image: Tensor | None = None
    next_image: Tensor | None = None
    states: Tensor | None = None
    next_states: Tensor | None = None

    @classmethod
    def of(
        cls, batch: ReplayBatch, normalizer: Callable[[Tensor], Tensor], reward: Tensor, options: bool,
        states_normalizer: Callable[[Tensor], Tensor] | None = None,
    ) -> Minibatch:  # fmt: skip
        """All updates of a replay batch, [U, ...]; ``reward`` is what is learned from."""
        made = cls(
            normalizer(batch.obs), batch.action, batch.option, reward, batch.terminated, normalizer(batch.next_obs),
            valid=batch.valid, importance=batch.weights, image=batch.image, next_image=batch.next_image,
        )  # fmt: skip
        if states_normalizer is not None:
            assert batch.states is not None
            assert batch.next_states is not None
            made.states, made.next_states = states_normalizer(batch.states), states_normalizer(batch.next_states)
        if options or batch.valid is not None:
            made.first, made.previous = batch.first, batch.previous_option
            made.switched, made.age = batch.switched, batch.option_age
            made.log_prob_action, made.log_prob_option = batch.log_prob_action, batch.log_prob_option
        return made

    @property
    def judged(self) -> Tensor:
        """What critics see of s: [B, O], with states [B, O + S]."""
        return beside(self.obs, self.states)

    @property
    def next_judged(self) -> Tensor:
        """What critics see of s': [B, O], with states [B, O + S]."""
        return beside(self.next_obs, self.next_states)

    def map(self, function: Callable[[Tensor], Tensor]) -> Minibatch:
        """Apply to every tensor."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        mapped: dict[str, Any] = {name: None if x is None else function(x) for name, x in values.items()}
        return Minibatch(**mapped)

    def at(self, u: int) -> Minibatch:
        """One update of a stacked minibatch."""
        return self.map(lambda x: x[u])

    def detached(self) -> Minibatch:
        """The same rows, with observations that let no gradient into an encoder."""
        return replace(self, obs=self.obs.detach())

    def step(self, k: int) -> Minibatch:
        """Step ``k`` of every segment, as a minibatch of single steps."""
        return self._single(lambda x: x[:, k])

    def last_step(self) -> Minibatch:
        """The last valid step of every segment."""
        assert self.valid is not None
        index = self.valid.sum(1) - 1
        rows = torch.arange(len(index), device=index.device)
        return self._single(lambda x: x[rows, index])

    def _single(self, step: Callable[[Tensor], Tensor]) -> Minibatch:
        """Single steps of segments; what belongs to whole samples stays."""
        made = replace(self, importance=None).map(step)
        made.valid, made.importance = None, self.importance
        return made
