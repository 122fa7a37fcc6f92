"""RunLogger: TensorBoard, without ending a run where the disk is full."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

log = logging.getLogger(__name__)

#: Seconds after which a logger that could not write tries again.
RETRY = 60.0


def _quiet(args: threading.ExceptHookArgs, before: Callable[..., Any] = threading.excepthook) -> None:
    """Keep the last words of TensorBoard's writer thread off the screen; RunLogger says in one line what it died of."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        before(args)


threading.excepthook = _quiet


class RunLogger(TensorBoardLogger):
    """Lightning's TensorBoardLogger, which after a failed write loses curves, not the run.

    TensorBoard's writer thread ends with the first error and then raises at every call. Here that is one line in the
    log, and a new writer (a new events file) is tried once a minute.
    """

    _silent_until = 0.0

    def _try(self, write: Callable[[], Any]) -> None:
        if time.monotonic() < self._silent_until:
            return
        try:
            write()
        except OSError as error:
            self._silent_until = time.monotonic() + RETRY
            self._experiment = None
            log.error("%s: curves cannot be written (%s); free the disk. The run goes on", self.log_dir, error)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(lambda: super(RunLogger, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(lambda: super(RunLogger, self).log_hyperparams(*args, **kwargs))

    @rank_zero_only
    def save(self) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(super().save)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """As TensorBoardLogger; an OSError is logged."""
        self._try(lambda: super(RunLogger, self).finalize(status))
