"""OrderlyStop: Ctrl-C, SIGTERM and SIGHUP end a run after the current step, with a checkpoint."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from callbacks.checkpoints import RunCheckpoint
from claw_lightning import slurm
from claw_lightning.ranks import ranks_of
from claw_lightning.signals import SAME_REQUEST_SECONDS, StartUpSignals, release_closed_streams

log = logging.getLogger(__name__)

KILL_SECONDS = 2.0  # the most that ending the workers may take before the process ends regardless


class OrderlyStop(pl.Callback):
    """First signal: finish the ``training_step``, save, close the workers. Second signal: end now (exit status 1).

    A SIGTERM or SIGHUP within a second of the first signal is no second request; Ctrl-C is at any time. SIGHUP is left
    alone where the process was started to ignore it (``nohup``).
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._requeue_signal: int | None = None  # by which SLURM tells that the job's time is nearly over
        self._requeues = False
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}
        self._is_active = False
        self._is_alone = True
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the data module ask, so that waiting for experience or for an evaluation ends too."""
        self._trainer = trainer
        data: Any = getattr(trainer, "datamodule", None)
        if data is not None:
            data.stop_requested = lambda: self.received is not None
            data.stop_number = lambda: self.received or 0
            data.stopped_elsewhere = self._stopped_elsewhere
        connector: Any = getattr(trainer, "_signal_connector", None)
        self._is_alone = getattr(trainer, "world_size", 1) == 1
        if not self._is_alone and connector is not None:
            # Lightning's own handler calls all ranks from inside a signal, whatever they are doing, and they hang.
            connector._sigterm_notifier_fn = lambda number, frame: None
        self._is_active = True
        self._requeue_signal = slurm.requeue_signal(trainer) if stage == "fit" else None
        self._take(remember=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals back: Lightning wraps the handlers after ``on_fit_start`` and would raise instead."""
        self._take()
        if self.received is not None:  # Lightning's wrapper may have heard it as well
            connector: Any = getattr(trainer, "_signal_connector", None)
            if connector is not None:
                connector.received_sigterm = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for training."""
        self.on_train_start(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for training."""
        self.on_train_start(trainer, pl_module)

    def _take(self, remember: bool = False) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*self.SIGNALS, *([self._requeue_signal] if self._requeue_signal else ())):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._handle)
            if remember and previous != self._handle:
                self._previous[number] = previous
                if isinstance(previous, StartUpSignals):
                    previous.stand_by()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_active:  # the run is over, but Lightning has put this handler back after `on_exception`
            signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if number == signal.SIGHUP:
            release_closed_streams()
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
            self._requeues = number == self._requeue_signal
            # With several ranks the data module tells the others first, and all stop after the same step.
            if self._trainer is not None and self._is_alone:
                self._trainer.should_stop = True
            tell(f"\n{signal.Signals(number).name}: stopping after this step; once more to end at once\n")
        elif number == self._requeue_signal:
            return  # SLURM gives the time that it takes
        elif number == signal.SIGINT or now - self._received_at > SAME_REQUEST_SECONDS:
            self._end_now()

    def _stopped_elsewhere(self, number: int) -> None:
        """Another rank was asked to stop: this one ends with it, and with the same exit status."""
        if self.received is None and number in signal.valid_signals():
            self.received, self._received_at = number, time.monotonic()

    def _end_now(self) -> None:
        # This frame lies above whatever the process was doing; should a lock of that be waited for below, end all the
        # same. The kernel and the end of their standard input end the workers then.
        with contextlib.suppress(Exception):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(KILL_SECONDS, exit=True, file=nowhere)
        with contextlib.suppress(BaseException):
            for callback in getattr(self._trainer, "callbacks", ()):
                if isinstance(callback, RunCheckpoint):
                    callback.abandon()
        with contextlib.suppress(BaseException):
            data: Any = getattr(self._trainer, "datamodule", None)
            if data is not None:
                data.kill()
        tell("\nsecond signal: ending now\n")
        os._exit(1)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back; a job of SLURM that made way is requeued, now that its checkpoint is written."""
        if self._requeues and trainer.is_global_zero:
            self._requeues = False
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RunCheckpoint):
                    slurm.remember(callback.folder(trainer) / "last.ckpt", requeued=True)
            slurm.requeue()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._is_active = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the signals back; Lightning calls no ``teardown`` after an error."""
        ranks_of(trainer).fail(exception, trainer)
        self._requeues = False
        self.teardown(trainer, pl_module, "")


def tell(text: str) -> None:
    """Write to standard error from a signal handler: never waits, and does nothing where the terminal has gone."""
    if sys.__stderr__ is None:  # closed from the start: number 2 may be another file's by now
        return
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0.0)[1]:
            os.write(2, text.encode())
