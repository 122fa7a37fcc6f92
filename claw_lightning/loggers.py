"""RunLogger: TensorBoard, without ending a run where the disk is full."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

log = logging.getLogger(__name__)

#: Seconds after which a logger that could not write tries again.
RETRY = 60.0


#: Charts of TensorBoard's tab "Custom scalars": by group and title, patterns of logged names.
LAYOUT = {
    "returns": {
        "training episodes": ["Multiline", ["rollout/return"]],
        "evaluation": ["Multiline", ["val/return", "val/student_return"]],
        "success": ["Multiline", ["rollout/success", "val/success"]],
    },
    "options": {
        "shares": ["Multiline", [r"option/share_\d+"]],
        "durations": ["Multiline", [r"option/duration_\d+", "option/mean_duration"]],
        "decisions": ["Multiline", ["option/decision_rate", "option/beta$", "option/beta_extreme"]],
        "entropies": ["Multiline", ["entropy/.*", "option/usage_entropy"]],
        "differences": ["Multiline", ["option/action_divergence.*", "option/embedding_cosine.*"]],
    },
    "critics": {
        "values": ["Margin", ["q/p50", "q/p05", "q/p95"]],
        "range": ["Multiline", ["q/min", "q/max", "q/target_min", "q/target_max"]],
        "disagreement": ["Multiline", ["q/disagreement"]],
        "losses": ["Multiline", ["loss/.*"]],
        "gradients": ["Multiline", ["grad_norm/.*"]],
    },
    "pipeline": {
        "rates": ["Multiline", ["time/env_steps_per_s", "time/updates_per_s"]],
        "who waits": ["Multiline", ["rate/learner_wait", "rate/worker_wait"]],
        "learner's time": ["Multiline", ["learner/.*"]],
        "workers' time": ["Multiline", ["phase/.*"]],
        "staleness": ["Multiline", ["staleness/mean", "staleness/collection"]],
    },
    "health": {
        "memory": ["Multiline", ["memory/.*_gb"]],
        "processors": ["Multiline", ["cpu/.*"]],
        "workers": ["Multiline", ["worker/.*"]],
    },
}


def _quiet(args: threading.ExceptHookArgs, before: Callable[..., Any] = threading.excepthook) -> None:
    """Keep the last words of TensorBoard's writer thread off the screen; RunLogger says in one line what it died of."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        before(args)


threading.excepthook = _quiet


def each_tensorboard(trainer: pl.Trainer, write: Callable[[Any], Any]) -> None:
    """Call ``write`` with every ``SummaryWriter`` among a run's loggers, or what has its methods, on the first rank.

    For what Lightning's loggers have no method for: histograms, images. A disk that is full ends no run by it.
    """
    if not getattr(trainer, "is_global_zero", True):
        return
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.attempt(write)
            continue
        writer = getattr(logger, "experiment", None)
        if hasattr(writer, "add_histogram"):
            with suppress(OSError):
                write(writer)


class RunLogger(TensorBoardLogger):
    """Lightning's TensorBoardLogger, which after a failed write loses curves, not the run.

    TensorBoard's writer thread ends with the first error and then raises at every call. Here that is one line in the
    log, and a new writer (a new events file) is tried once a minute.
    """

    _silent_until = 0.0
    _is_claimed = False
    _has_layout = False
    #: The command whose folder this is; the data module sets it.
    command = "fit"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._root_dir = os.path.expanduser(self._root_dir)  # Lightning reads "~" in some of its paths alone
        self._version_given = self._version

    def claim(self) -> None:
        """Make the folder of a run that begins, one that no other run has; called on the first rank.

        Unless a version was given, the command ``fit`` gets ``version_<n>``, and the other commands ``validate_<n>``
        and so on, so that they use up no numbers of runs.

        Raises:
            OSError: it cannot be made.
        """
        if self._is_claimed:
            return
        if self._version_given is not None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            self._is_claimed = True
            return
        root = Path(self.root_dir)
        root.mkdir(parents=True, exist_ok=True)
        name = "version" if self.command == "fit" else self.command
        taken = [path.name.removeprefix(f"{name}_") for path in root.glob(f"{name}_*")]
        number = 1 + max((int(each) for each in taken if each.isdecimal()), default=-1)
        while True:
            try:
                (root / f"{name}_{number}").mkdir()  # fails where another run has just taken it
                break
            except FileExistsError:
                number += 1
        self._version = number if self.command == "fit" else f"{name}_{number}"
        self._is_claimed = True

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer; before the run is accepted something that does nothing: Lightning asks early."""
        return super().experiment if self._is_claimed else _DummyExperiment()

    def _try(self, write: Callable[[], Any]) -> None:
        if time.monotonic() < self._silent_until:
            return
        try:
            write()
        except OSError as error:
            self._silent_until = time.monotonic() + RETRY
            self._experiment = None
            log.error("%s: curves cannot be written (%s); free the disk. The run goes on", self.log_dir, error)

    def attempt(self, write: Callable[[Any], Any]) -> None:
        """Call ``write`` with the ``SummaryWriter``; an OSError is logged, and ends nothing."""
        self._try(self.claim)  # where nobody has
        self._try(lambda: write(self.experiment))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(self.claim)  # where nobody has
        if not self._has_layout and self.command == "fit":
            self._has_layout = True
            self._try(lambda: self.experiment.add_custom_scalars(LAYOUT))
        self._try(lambda: super(RunLogger, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(self.claim)
        self._try(lambda: super(RunLogger, self).log_hyperparams(*args, **kwargs))

    @rank_zero_only
    def save(self) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(super().save)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(lambda: super(RunLogger, self).finalize(status))
