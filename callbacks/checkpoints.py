"""RunCheckpoint: the last and the best state of a run, each written aside and renamed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import Checkpoint

from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError


class RunCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` after each validation and at the end, ``best.ckpt`` when ``monitor`` improves.

    Lightning's ModelCheckpoint counts optimiser steps and epochs, which mean little here. A file is complete or absent:
    it is written under another name, flushed to disk and renamed.

    Args:
        monitor: logged value that decides which is best.
        mode: max or min.
        dirpath: folder; None: ``checkpoints`` in the run's folder.
        at_minutes: also write ``minute-<m>.ckpt`` at these wall-clock minutes since the process was started.
    """

    def __init__(
        self,
        monitor: str = "val/return",
        mode: str = "max",
        dirpath: str | None = None,
        at_minutes: Sequence[float] = (),
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f"RunCheckpoint.mode is '{mode}'; use max or min")
        self.monitor, self.mode, self.dirpath = monitor, mode, dirpath
        self.best: float | None = None
        for minute in at_minutes:
            check_numbers("RunCheckpoint", {"at_minutes": minute}, above=0.0)
        self._marks = sorted(at_minutes)
        self._started = psutil.Process().create_time()

    def folder(self, trainer: pl.Trainer) -> Path:
        """Where the files go."""
        root = trainer.log_dir or trainer.default_root_dir
        return Path(self.dirpath) if self.dirpath else Path(root) / "checkpoints"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the newest, and the best by the monitored value."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None:
            score = float(value)
            sign = 1.0 if self.mode == "max" else -1.0
            if math.isfinite(score) and (self.best is None or sign * score > sign * self.best):
                self.best = score
                self._save(trainer, "best.ckpt")
        self._save(trainer, "last.ckpt")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the state at the marks."""
        while self._marks and time.time() - self._started >= 60.0 * self._marks[0]:
            self._save(trainer, f"minute-{self._marks.pop(0):g}.ckpt")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state at the end, also of a run that was asked to stop."""
        self._save(trainer, "last.ckpt")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what was learned before an error, where a state exists and can be written."""
        if trainer.state.fn == "fit" and trainer.global_step > 0:
            try:
                self._save(trainer, "last.ckpt")
            except OSError as error:
                pl_module.print(f"no checkpoint could be written: {error}")

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        if trainer.fast_dev_run or getattr(trainer.lightning_module, "diverged", False):  # type: ignore[attr-defined]
            return
        folder = self.folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{name}.{os.getpid()}"
        try:
            trainer.save_checkpoint(aside)
            if trainer.is_global_zero:
                with aside.open("rb") as file:
                    os.fsync(file.fileno())
                aside.replace(folder / name)
        finally:
            aside.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.best = state_dict["best"]
