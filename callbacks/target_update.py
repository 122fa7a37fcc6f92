"""TargetUpdate: moves target networks after critic updates."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic

TAU = 0.005  # where nobody gives one


class TargetUpdate(UpdateCallback):
    """Soft: ``target <- (1 - tau) target + tau online``; hard: a copy. Every ``every`` critic updates.

    Every run has one, whatever list of callbacks is given; ``model.tau`` and ``model.target_delay`` are its settings.

    Args:
        mode: soft or hard.
        tau: step of the soft update, in (0, 1]; None: ``model.tau``, or 0.005.
        every: critic updates between target updates; None: ``model.target_delay``, or 1.

    Raises:
        ConfigError: a value without meaning, or a ``tau`` that a copy would ignore; one line.
    """

    def __init__(
        self, mode: Literal["soft", "hard"] = "soft", tau: float | None = None, every: int | None = None
    ) -> None:
        check_types("TargetUpdate", {"mode": mode, "tau": tau, "every": every}, TargetUpdate.__init__)
        if mode == "hard" and tau is not None:
            raise ConfigError(f"TargetUpdate.tau {tau} does nothing with TargetUpdate.mode hard; leave one of them out")
        if tau is not None and not 0.0 < tau <= 1.0:
            raise ConfigError(f"TargetUpdate.tau is {tau}; it must lie in (0, 1]")
        if every is not None and every < 1:
            raise ConfigError(f"TargetUpdate.every is {every}; it must be at least 1")
        self.mode, self._tau, self._every = mode, tau, every
        self._settle(None, None)
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the module's settings; forget tensors of an earlier run: moving a module to a device may replace them.

        Raises:
            ConfigError: the module's settings and this callback's own differ.
        """
        self._pairs = None
        settings: Any = getattr(pl_module, "settings", {})
        self._settle(settings.get("tau"), settings.get("target_delay"))

    def _settle(self, tau: float | None, every: int | None) -> None:
        if self.mode == "hard" and tau is not None:
            raise ConfigError(f"model.tau {tau} does nothing with TargetUpdate.mode hard; leave one of them out")
        for ours, theirs, names in (
            (self._tau, tau, ("TargetUpdate.tau", "model.tau")),
            (self._every, every, ("TargetUpdate.every", "model.target_delay")),
        ):
            if None not in (ours, theirs) and ours != theirs:
                raise ConfigError(f"{names[0]} {ours} and {names[1]} {theirs} contradict each other; keep the latter")
        chosen = tau if self._tau is None else self._tau
        self.weight = 1.0 if self.mode == "hard" else (TAU if chosen is None else chosen)
        self.every = next((each for each in (self._every, every) if each is not None), 1)

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
