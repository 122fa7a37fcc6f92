"""PipelineThroughput: what passes through a run, and where the learner's time goes."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic


class PipelineThroughput(UpdateCallback):
    """Logs rates and the learner's shares of wall time since the last logging step.

    Lightning's own ``ThroughputMonitor`` counts batches of a loader; here a batch is several updates, and the axis is
    environment steps (``time/env_steps_per_s`` and ``time/updates_per_s`` are logged by the module).

    * ``throughput/samples_per_s``: samples that were learned from, those of segments counted once.
    * ``throughput/ring_mb_per_s``: megabytes (10^6) of rows that the workers wrote.
    * ``learner/sampling``: from the end of a training step to the beginning of the next, less the waiting for
      experience (``rate/learner_wait``): drawing rows, and copying them to the device.
    * ``learner/forward_backward``: losses, gradients and optimisers.
    * ``learner/publish``: callbacks between updates: targets, publication, supervision.
    * ``learner/logging``, ``learner/validation``.

    What is left of 1 is Lightning's and everybody else's. On a GPU these are times of the host, which runs ahead of it:
    what is waited for shows where results are read, as ``learner/logging``.
    """

    def __init__(self) -> None:
        self._module: OptionCritic | None = None
        self._data: Any = None
        self._mark: tuple[float, int, int, float] | None = None  # seconds, updates, environment steps, waited
        self._fetching_since: float | None = None
        self._validating_since = 0.0
        self._fetched = self._validated = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the module keep times of its phases."""
        assert isinstance(pl_module, OptionCritic)
        self._module, self._data = pl_module, trainer.datamodule  # type: ignore[attr-defined]
        pl_module.phase_seconds = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch has come."""
        if self._fetching_since is not None:
            self._fetched += time.perf_counter() - self._fetching_since

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """From now on the next one is fetched."""
        self._fetching_since = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation interrupts the fetching."""
        now = self._validating_since = time.perf_counter()
        if self._fetching_since is not None:
            self._fetched += now - self._fetching_since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The fetching goes on."""
        now = time.perf_counter()
        self._validated += now - self._validating_since
        if self._fetching_since is not None:
            self._fetching_since = now

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the run."""
        if self._module is not None:
            self._module.phase_seconds = None
        self._module = self._data = self._mark = self._fetching_since = None

    def metrics(self) -> dict[str, Any]:
        """Figures since the last call."""
        module = self._module
        if module is None or module.phase_seconds is None:
            return {}
        waited = getattr(self._data, "learner_wait", 0.0)
        now = (time.perf_counter(), module.updates, module.env_steps, waited)
        mark, self._mark = self._mark, now
        spent, module.phase_seconds = module.phase_seconds, {}
        fetched, validated, self._fetched, self._validated = self._fetched, self._validated, 0.0, 0.0
        if mark is None:
            return {}
        seconds, updates, env_steps, waiting = (b - a for a, b in zip(mark, now, strict=True))
        seconds = max(seconds, 1e-9)
        publish, logging = spent.pop("on_update_end", 0.0), spent.pop("log_training", 0.0)
        times = {
            "sampling": max(0.0, fetched - waiting), "forward_backward": sum(spent.values()), "publish": publish,
            "logging": logging, "validation": validated,
        }  # fmt: skip
        values = {f"learner/{name}": value / seconds for name, value in times.items()}
        values["throughput/samples_per_s"] = updates * getattr(self._data, "batch_size", 0) / seconds
        memory = getattr(self._data, "memory", None)
        if memory is not None:
            values["throughput/ring_mb_per_s"] = env_steps * memory.layout.row_bytes / seconds / 1e6
        return values
