"""StalenessMonitor: how old the policies were that collected what is being learned from."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.loggers import each_tensorboard
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch

log = logging.getLogger(__name__)


class StalenessMonitor(UpdateCallback):
    """Logs ``staleness/mean`` and ``staleness/max`` (updates) of each batch, a histogram, and the lag of collection.

    The age of a *sample* grows with the size of the replay and is no fault. What should stay small is the lag of
    *collection*: updates made since the version with which the workers act (``staleness/collection``). Above
    ``limit`` the monitor warns once.

    Args:
        limit: updates of collection lag above which it warns.
        histogram: also write a histogram of sample ages to a TensorBoard logger, at each logging step.
    """

    def __init__(self, limit: int = 100, histogram: bool = True) -> None:
        check_types("StalenessMonitor", {"limit": limit, "histogram": histogram}, StalenessMonitor.__init__)
        if limit < 1:
            raise ConfigError(f"StalenessMonitor.limit is {limit}; it must be at least 1")
        self.limit, self.histogram = limit, histogram
        self._warned = False
        self._sum: Any = 0.0  # tensors on the module's device between logging steps
        self._max: Any = 0.0
        self._count = 0
        self._last: torch.Tensor | None = None
        self._trainer: pl.Trainer | None = None
        self._collection: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember where to write histograms."""
        self._trainer = trainer

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Accumulate over batches; only every logging step looks at the numbers."""
        self._last = lag = (module.updates - batch.version).clamp_min(0)
        self._sum = self._sum + lag.double().mean()
        self._max = torch.maximum(torch.as_tensor(self._max, device=lag.device), lag.amax())
        self._count += 1
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        version = data.collection_version
        self._collection = None if version is None else module.updates - version
        if self._collection is not None and self._collection > self.limit:
            self._warn(self._collection)

    def _warn(self, lag: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "workers act with a policy that is %d updates old (limit %d): publish more often "
                "(PolicyPublisher.every) or pull more often (data.pull_every)",
                lag,
                self.limit,
            )

    def metrics(self) -> dict[str, Any]:
        """Mean and maximum since the last call."""
        if not self._count or self._last is None:
            return {}
        values = {"staleness/mean": float(self._sum / self._count), "staleness/max": float(self._max)}
        if self._collection is not None:
            values["staleness/collection"] = float(self._collection)
        if self.histogram and self._trainer is not None:
            lag, step = self._last.flatten(), self._trainer.lightning_module.env_steps
            each_tensorboard(self._trainer, lambda writer: writer.add_histogram("staleness/histogram", lag, step))
        self._sum, self._count, self._max = 0.0, 0, 0.0
        return values
