"""RunLogger: a full disk costs curves, not the run."""

import errno
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from claw_lightning import cli, loggers
from claw_lightning.loggers import RunLogger
from tests.runs import FAST


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
    logger._experiment = SimpleNamespace(add_custom_scalars=lambda layout: None)
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


def test_runs_that_begin_at_once_have_numbers_of_their_own_and_evaluations_use_up_none(tmp_path):
    loggers = [RunLogger(str(tmp_path), name=None) for _ in range(5)]
    assert {logger.version for logger in loggers} == {0}
    assert all(logger.experiment.add_scalar("x", 1.0) is None for logger in loggers)
    assert not list(tmp_path.iterdir())  # nothing before the run is accepted
    for logger, command in zip(loggers, ("fit", "validate", "fit", "predict", "validate"), strict=True):
        logger.command = command
        logger.claim()
        logger.claim()
    names = ["predict_0", "validate_0", "validate_1", "version_0", "version_1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    given = RunLogger(str(tmp_path), name=None, version=7)
    given.claim()
    assert given.log_dir == str(tmp_path / "version_7")


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


# -- through the command ----------------------------------------------------------------------------------------------

SHORT = ["--data.max_env_steps=200", "--trainer.enable_checkpointing=false"]


def test_several_loggers_at_once_over_environment_steps_and_a_profiler_with_our_phases(elsewhere, monkeypatch):
    """CSV is complete before the run ends: by itself that logger would write at steps that end in 99."""
    Path("own.yaml").write_text(
        "trainer:\n  logger:\n  - class_path: CSVLogger\n    init_args: {save_dir: a, name: null}\n"
        "  - class_path: TensorBoardLogger\n    init_args: {save_dir: b, name: null}\n"
        "  profiler:\n    class_path: lightning.pytorch.profilers.SimpleProfiler\n"
        "    init_args: {dirpath: ., filename: times}\n"
    )
    monkeypatch.setattr("lightning.pytorch.loggers.CSVLogger.finalize", lambda self, status: None)
    assert cli.main([*FAST, *SHORT, "--config", "own.yaml"]) == 0, Path("error.log").read_text()
    names, *rows = Path("a/version_0/metrics.csv").read_text().splitlines()
    steps = [int(row.split(",")[names.split(",").index("step")]) for row in rows]
    assert "loss/critic" in names and steps == sorted(steps) and 100 < steps[0] <= steps[-1] <= 200
    assert list(Path("b/version_0").glob("events.*")) and Path("a/version_0/config.yaml").is_file()
    report = Path("fit-times.txt").read_text()
    for phase in ("update_critic", "update_actor", "update_options", "on_update_end"):
        assert f"[OptionCritic]{phase}" in report


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra `wandb`)")
def test_weights_and_biases_offline(elsewhere, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = ["--trainer.logger=WandbLogger", "--trainer.logger.save_dir=w", "--trainer.logger.project=claw"]
    command = [
        *FAST,
        "--data.max_env_steps=200",
        *logger,
        "--trainer.logger.offline=true",
        "--trainer.logger.name=null",
    ]
    try:
        assert cli.main(command) == 0, Path("error.log").read_text()
    finally:
        wandb.finish()
    assert list(Path("w/wandb").glob("offline-run-*/*.wandb"))
    (folder,) = Path("w/claw").iterdir()  # a folder for each run, although the logger has none of its own
    assert (folder / "config.yaml").is_file() and (folder / "checkpoints" / "last.ckpt").is_file()
    assert (folder / "logs" / "learner.log").is_file()
