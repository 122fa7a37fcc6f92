"""OrderlyStop: Ctrl-C, SIGTERM and SIGHUP end a run after the current step, with a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl

log = logging.getLogger(__name__)


class OrderlyStop(pl.Callback):
    """First signal: finish the ``training_step``, save, close the workers. Second signal: end now (exit status 1)."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}
        self._is_active = False
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the data module ask, so that waiting for experience or for an evaluation ends too."""
        self._trainer = trainer
        data: Any = getattr(trainer, "datamodule", None)
        if data is not None:
            data.stop_requested = lambda: self.received is not None
        self._is_active = True
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                previous = signal.signal(number, self._handle)
                if previous != self._handle:
                    self._previous[number] = previous

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals back: Lightning wraps the handlers after ``on_fit_start`` and would raise instead."""
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                signal.signal(number, self._handle)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for training."""
        self.on_train_start(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for training."""
        self.on_train_start(trainer, pl_module)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_active:  # the run is over, but Lightning has put this handler back after `on_exception`
            signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if self.received is not None:
            os.write(2, b"\nsecond signal: ending now\n")
            data: Any = getattr(self._trainer, "datamodule", None)
            if data is not None:
                data.kill()
            os._exit(1)
        self.received = number
        os.write(2, f"\n{signal.Signals(number).name}: stopping after this step; once more to end at once\n".encode())
        if self._trainer is not None:
            self._trainer.should_stop = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._is_active = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the signals back; Lightning calls no ``teardown`` after an error."""
        self.teardown(trainer, pl_module, "")
