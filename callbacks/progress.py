"""TrainingProgress: a bar in the units of reinforcement learning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from claw_lightning.module import OptionCritic


class TrainingProgress(TQDMProgressBar):
    """Shows environment steps, updates per second, returns and policy lag beside Lightning's batches.

    Args:
        refresh_rate: batches between refreshes.
    """

    def __init__(self, refresh_rate: int = 20) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Short names for the values of the last logging step."""
        if not isinstance(pl_module, OptionCritic):
            return dict(super().get_metrics(trainer, pl_module))
        latest = pl_module.latest_metrics
        shown: dict[str, Any] = {"env_steps": f"{pl_module.env_steps:,}"}
        for label, name, form in (
            ("upd/s", "time/updates_per_s", "{:.0f}"),
            ("return", "rollout/return", "{:.3g}"),
            ("success", "rollout/success", "{:.2f}"),
            ("lag", "staleness/collection", "{:.0f}"),
        ):
            if name in latest:
                shown[label] = form.format(latest[name])
        value = trainer.callback_metrics.get("val/return")
        if value is not None:
            shown["val"] = f"{float(value):.3g}"
        return shown
