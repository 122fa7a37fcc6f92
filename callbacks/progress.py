"""TrainingProgress: one bar for the whole run, in the units of reinforcement learning."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.module import OptionCritic


class TrainingProgress(TQDMProgressBar):
    """Counts environment steps (towards ``data.max_env_steps``) and shows updates per second, returns and policy lag.

    Where the output is no terminal, it prints a line now and then instead of a bar that is drawn over and over.

    Args:
        refresh_rate: training steps between refreshes of the bar.
        line_seconds: seconds between lines where the output is no terminal.
    """

    def __init__(self, refresh_rate: int = 20, line_seconds: float = 30.0) -> None:
        values = {"refresh_rate": refresh_rate, "line_seconds": line_seconds}
        check_types("TrainingProgress", values, TrainingProgress.__init__)
        if not line_seconds > 0:
            raise ConfigError(f"TrainingProgress.line_seconds is {line_seconds}; it must be positive")
        super().__init__(refresh_rate=refresh_rate)
        self.line_seconds = line_seconds
        self._is_terminal = sys.stdout.isatty()
        self._last_line = 0.0

    def init_train_tqdm(self) -> Tqdm:
        """A bar over environment steps."""
        return Tqdm(
            desc="train", unit=" steps", unit_scale=True, dynamic_ncols=True, file=sys.stdout, leave=True,
            disable=self.is_disabled or not self._is_terminal,
        )  # fmt: skip

    def init_validation_tqdm(self) -> Tqdm:
        """No bar: an evaluation is one item of a few seconds."""
        return Tqdm(disable=True)

    def init_test_tqdm(self) -> Tqdm:
        """As for validation."""
        return Tqdm(disable=True)

    def on_train_start(self, *args: Any) -> None:
        """Open the bar with the run's length as its total."""
        super().on_train_start(*args)
        trainer = args[0]
        self.train_progress_bar.total = getattr(trainer.datamodule, "max_env_steps", 0) or None
        self._last_line = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The bar spans virtual epochs."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The bar spans virtual epochs."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar, or print a line where it is time."""
        if self.is_disabled or not isinstance(pl_module, OptionCritic):
            return
        if self._is_terminal:
            if self.refresh_rate and (batch_idx + 1) % self.refresh_rate == 0:
                self._advance(trainer, pl_module)
        elif time.monotonic() - self._last_line >= self.line_seconds:
            self._last_line = time.monotonic()
            values = "  ".join(f"{name} {value}" for name, value in self.get_metrics(trainer, pl_module).items())
            print(f"steps {pl_module.env_steps:,}  updates {pl_module.updates:,}  {values}", flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the bar at the last count."""
        if self._is_terminal and isinstance(pl_module, OptionCritic):
            self._advance(trainer, pl_module)
        self.train_progress_bar.close()

    def _advance(self, trainer: pl.Trainer, module: OptionCritic) -> None:
        self.train_progress_bar.n = module.env_steps
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, module))

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Short names for the values of the last logging step."""
        if not isinstance(pl_module, OptionCritic):
            return dict(super().get_metrics(trainer, pl_module))
        latest = pl_module.latest_metrics
        shown: dict[str, Any] = {}
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
