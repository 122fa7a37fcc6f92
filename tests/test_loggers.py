"""RunLogger: a full disk costs curves, not the run."""

import errno
import threading

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from claw_lightning import loggers
from claw_lightning.loggers import RunLogger


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    return now


def test_a_full_disk_is_one_line_a_minute_and_then_a_new_writer(tmp_path, clock, caplog, monkeypatch):
    logger, calls, full = RunLogger(tmp_path, name=None), [], [True]

    def log_metrics(self, metrics, step=None):
        calls.append(metrics)
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoardLogger, "log_metrics", log_metrics)
    logger._experiment = object()
    for value in range(5):
        logger.log_metrics({"a": value}, 1)
    assert calls == [{"a": 0}] and logger._experiment is None
    assert caplog.text.count("curves cannot be written") == 1 and "No space left" in caplog.text
    clock[0] += 61.0
    full[0] = False
    logger.log_metrics({"a": 9}, 2)
    logger.log_metrics({"a": 10}, 2)
    assert calls[1:] == [{"a": 9}, {"a": 10}]


@pytest.mark.parametrize("name, arguments", [("save", ()), ("finalize", ("success",)), ("log_hyperparams", ({},))])
def test_the_other_writes_are_no_errors_either(tmp_path, clock, monkeypatch, caplog, name, arguments):
    def broken(self, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(TensorBoardLogger, name, broken)
    getattr(RunLogger(tmp_path, name=None), name)(*arguments)
    assert "Input/output error" in caplog.text


def test_curves_are_written(tmp_path):
    logger = RunLogger(tmp_path, name=None)
    logger.log_metrics({"a": 1.0}, 1)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.glob("version_0/events.out.tfevents.*"))


@pytest.mark.parametrize(
    "module, error, is_told",
    [
        ("tensorboard.summary.writer", OSError(errno.ENOSPC, "No space left on device"), False),
        ("tensorboard.summary.writer", ValueError("a fault"), True),
        ("mine", OSError(errno.ENOSPC, "No space left on device"), True),
    ],
)
def test_what_the_writer_thread_dies_of_is_told_once(module, error, is_told):
    writer, told = type("Writer", (threading.Thread,), {"__module__": module})(), []
    loggers._quiet(threading.ExceptHookArgs((type(error), error, None, writer)), told.append)
    assert bool(told) is is_told
