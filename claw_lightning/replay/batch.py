"""ReplayBatch: what one ``training_step`` receives, as two packed tensors that move to a device in two copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from claw_lightning.rollout.normalizer import Moments
from claw_lightning.rollout.ring import FIRST, INTEGER_FIELDS, SWITCHED, TERMINATED, RowLayout


@dataclass
class ReplayBatch:
    """Rows and their successors for U updates of B samples each.

    Attributes:
        rows: [U, B, W] float32, packed rows (see :class:`RowLayout`).
        next_obs: [U, B, O] raw true next observations.
        layout: where each field lies in a row.
        moments: count, mean and squared deviations of the observations that arrived since the last batch, for the
            running normalisation.
        env_steps: environment steps inserted so far.
    """

    rows: Tensor
    next_obs: Tensor
    layout: RowLayout
    moments: Moments
    env_steps: int = 0

    def to(self, device: torch.device | str, **kwargs: Any) -> ReplayBatch:
        """Copy to a device (called by Lightning)."""
        return ReplayBatch(
            self.rows.to(device, **kwargs),
            self.next_obs.to(device, **kwargs),
            self.layout,
            self.moments,
            self.env_steps,
        )

    def __len__(self) -> int:
        """Number of updates U."""
        return self.rows.shape[0]

    def field(self, name: str) -> Tensor:
        """Field of all rows: [U, B, size], or [U, B] for one-word fields (int32 for integers)."""
        start, stop = self.layout.fields[name]
        part = self.rows[..., start:stop]
        if name in INTEGER_FIELDS:
            part = part.contiguous().view(torch.int32)
        return part if name in ("obs", "states", "action") else part[..., 0]

    @property
    def obs(self) -> Tensor:
        """[U, B, O] raw observations."""
        return self.field("obs")

    @property
    def action(self) -> Tensor:
        """[U, B, A] in [-1, 1]."""
        return self.field("action")

    @property
    def reward(self) -> Tensor:
        """[U, B]."""
        return self.field("reward")

    @property
    def option(self) -> Tensor:
        """[U, B] int64, option executed."""
        return self.field("option").long()

    @property
    def version(self) -> Tensor:
        """[U, B] int32, updates at publication of the policy that acted."""
        return self.field("version")

    @property
    def terminated(self) -> Tensor:
        """[U, B] bool."""
        return (self.field("flags") & TERMINATED) != 0

    @property
    def first(self) -> Tensor:
        """[U, B] bool, first step of an episode."""
        return (self.field("flags") & FIRST) != 0

    @property
    def switched(self) -> Tensor:
        """[U, B] bool, the option was selected at this step."""
        return (self.field("flags") & SWITCHED) != 0
