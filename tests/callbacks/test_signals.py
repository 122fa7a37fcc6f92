"""OrderlyStop inside one process; tests/test_exit.py looks at whole runs."""

import faulthandler
import os
import signal
import sys
import time

import pytest

from callbacks import OrderlyStop, RunCheckpoint
from claw_lightning.hooks import UpdateCallback
from claw_lightning.signals import release_closed_streams
from tests.runs import fit_lockstep


class Signal(UpdateCallback):
    """Sends a signal to this process at an update."""

    def __init__(self, number):
        self.number = number

    def on_update_end(self, trainer, module):
        if module.updates == 21:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_and_handlers_come_back(tmp_path, number, capfd):
    before = signal.getsignal(number)
    stop = OrderlyStop()
    trainer, module, data = fit_lockstep(tmp_path, callbacks=[stop, Signal(number)])
    assert stop.received == number
    # The step of two updates was finished, and no evaluation played.
    assert module.updates == 22 and not data.finished
    assert "val/return" not in trainer.callback_metrics
    assert signal.getsignal(number) == before
    err = capfd.readouterr().err
    assert f"{number.name}: stopping after this step" in err


def test_handlers_come_back_after_an_error_too(tmp_path):
    class Broken(UpdateCallback):
        def on_update_end(self, trainer, module):
            raise RuntimeError("broken")

    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RuntimeError, match="broken"):
            fit_lockstep(tmp_path, callbacks=[OrderlyStop(), Broken()])
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_hang_up_that_was_to_be_ignored_is(tmp_path):
    """``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = OrderlyStop()
        _, module, data = fit_lockstep(tmp_path, callbacks=[stop, Signal(signal.SIGHUP)])
        assert stop.received is None and data.finished
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Twice(UpdateCallback):
    """Two signals, so many seconds apart by the clock that OrderlyStop reads."""

    def __init__(self, first, second, apart, monkeypatch):
        self.numbers, self.apart, self.monkeypatch = (first, second), apart, monkeypatch

    def on_update_end(self, trainer, module):
        if module.updates == 21:
            for number, now in zip(self.numbers, (1000.0, 1000.0 + self.apart)):
                self.monkeypatch.setattr("callbacks.signals.time.monotonic", lambda now=now: now)
                signal.raise_signal(number)


class Ended(BaseException):
    pass


@pytest.mark.parametrize(
    "first, second, apart, ends",
    [
        (signal.SIGINT, signal.SIGINT, 0.01, True),
        (signal.SIGTERM, signal.SIGINT, 0.01, True),
        (signal.SIGTERM, signal.SIGTERM, 0.5, False),  # a scheduler that repeats itself
        (signal.SIGHUP, signal.SIGTERM, 0.5, False),
        (signal.SIGTERM, signal.SIGTERM, 5.0, True),
        (signal.SIGINT, signal.SIGHUP, 5.0, True),
    ],
)
def test_what_counts_as_a_second_signal(tmp_path, monkeypatch, capfd, first, second, apart, ends):
    statuses = []

    def leave(status):
        statuses.append(status)
        raise Ended

    monkeypatch.setattr("callbacks.signals.os._exit", leave)
    stop = OrderlyStop()
    try:
        fit_lockstep(tmp_path, callbacks=[stop, Twice(first, second, apart, monkeypatch)])
    except Ended:
        pass
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert stop.received == first
    assert statuses == ([1] if ends else [])
    assert ("second signal: ending now" in capfd.readouterr().err) == ends


def test_ending_now_survives_workers_that_cannot_be_killed_and_removes_a_part(tmp_path, monkeypatch):
    """Each step on its own: an error in one does not keep the process from ending."""
    removed, statuses, dumps = [], [], []

    class Data:
        def kill(self):
            raise RuntimeError("in the middle of something")

    keep = RunCheckpoint()
    monkeypatch.setattr(keep, "abandon", lambda: removed.append(True))
    monkeypatch.setattr("callbacks.signals.os._exit", statuses.append)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: dumps.append(kwargs["exit"]))
    stop = OrderlyStop()
    stop._trainer = type("T", (), {"callbacks": [stop, keep], "datamodule": Data()})()
    stop._end_now()
    assert removed == [True] and statuses == [1] and dumps == [True]


class StuckData:
    """Waits for ever, as for a lock that the interrupted code holds."""

    def kill(self):
        time.sleep(600)


def in_a_fork(function):
    """Exit status of a fork of this process that calls ``function``."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def active_stop():
    stop = OrderlyStop()
    stop._trainer = type("T", (), {"callbacks": [], "datamodule": StuckData(), "should_stop": False})()
    stop._is_active = True
    return stop


def test_ending_now_ends_also_where_the_workers_end_cannot_be_awaited(monkeypatch):
    monkeypatch.setattr("callbacks.signals.KILL_SECONDS", 0.1)

    def twice():
        signal.signal(signal.SIGINT, active_stop()._handle)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert in_a_fork(twice) == 1


def test_nothing_is_written_into_a_file_that_has_the_number_of_a_closed_standard_error(tmp_path):
    def once():
        os.dup2(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY), 2)
        sys.__stderr__ = None  # as Python has it then
        stop = active_stop()
        stop._handle(signal.SIGTERM, None)
        os._exit(5 if stop.received else 6)

    assert in_a_fork(once) == 5
    assert (tmp_path / "file").read_text() == ""


def test_a_full_pipe_does_not_hold_the_handler_up(tmp_path):
    def once():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writer, True)
        os.dup2(writer, 2)
        active_stop()._handle(signal.SIGTERM, None)
        os._exit(5)

    assert in_a_fork(once) == 5


def test_a_hang_up_releases_streams_that_nobody_reads():
    def once():
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        release_closed_streams()
        os._exit(5 if os.write(1, bytes(100_000)) == 100_000 else 6)

    assert in_a_fork(once) == 5
