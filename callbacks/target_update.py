"""TargetUpdate: moves target networks after critic updates."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic


class TargetUpdate(UpdateCallback):
    """Soft: ``target <- (1 - tau) target + tau online``; hard: a copy. Every ``every`` critic updates.

    Args:
        mode: soft or hard.
        tau: step of the soft update, in (0, 1].
        every: critic updates between target updates. With TD3's ``policy_delay`` 2, ``every: 2`` is the paper's choice.
    """

    def __init__(self, mode: Literal["soft", "hard"] = "soft", tau: float = 0.005, every: int = 1) -> None:
        if mode not in ("soft", "hard"):
            raise ConfigError(f"TargetUpdate.mode is '{mode}'; use soft or hard")
        if not 0.0 < tau <= 1.0:
            raise ConfigError(f"TargetUpdate.tau is {tau}; it must lie in (0, 1]")
        if every < 1:
            raise ConfigError(f"TargetUpdate.every is {every}; it must be at least 1")
        self.weight = tau if mode == "soft" else 1.0
        self.every = every
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget tensors of an earlier run: moving a module to a device may replace them."""
        self._pairs = None

    @torch.no_grad()
    def on_update_end(self, trainer: pl.Trainer, module: OptionCritic) -> None:
        """Move all targets in one fused call."""
        if module.updates % self.every:
            return
        if self._pairs is None:
            pairs = module.target_pairs
            self._pairs = (
                [p for online, _ in pairs for p in online.parameters()],
                [p for _, target in pairs for p in target.parameters()],
            )
        online, targets = self._pairs
        torch._foreach_lerp_(targets, online, self.weight)
