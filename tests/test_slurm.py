"""Jobs of SLURM: asked to make way, requeued, gone on with. The variables are made up, and so is scontrol."""

import json
import logging
import os
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch

from callbacks import OrderlyStop, RunCheckpoint
from claw_lightning import cli, slurm
from claw_lightning.hooks import UpdateCallback
from tests.runs import FAST

JOB = {
    "SLURM_NTASKS": "1", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "hand", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "localhost",
}  # fmt: skip


class TimeIsUp(UpdateCallback):
    """SLURM's signal amid a run, once."""

    sent = False

    def on_update_end(self, trainer, module):
        if module.updates == 21 and not TimeIsUp.sent:
            TimeIsUp.sent = True
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job, and the log of what scontrol was told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(Path(__file__).parents[1]), *sys.path])
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
    fake = tmp_path / "bin" / "scontrol"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\nexit ${{SCONTROL_STATUS:-0}}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("sys.argv", ["lightning", "fit"])
    level = logging.getLogger("claw_lightning").level
    yield tmp_path / "told"
    logging.getLogger("claw_lightning").setLevel(level)


def test_a_job_that_makes_way_is_requeued_and_goes_on_by_the_same_command(job, capsys):
    command = [*FAST, "--trainer.callbacks+=tests.test_slurm.TimeIsUp", "--trainer.limit_val_batches=1"]
    TimeIsUp.sent = False
    sys.modules["tests.test_slurm"] = sys.modules[__name__]
    assert cli.main(command) == 128 + signal.SIGUSR1
    assert job.read_text() == "requeue 4711\n"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    stored = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert 21 <= stored["claw"]["updates"] < 30
    assert (Path("runs/version_0/checkpoints/replay/DONE")).is_file()
    assert not list(Path().glob("hpc_ckpt*"))
    [note] = Path().glob(".slurm-4711-*.json")

    assert cli.main(command) == 0  # SLURM runs the script again
    going_on = torch.load("runs/version_1/checkpoints/last.ckpt", weights_only=True)
    assert going_on["claw"]["env_steps"] == 400 and going_on["claw"]["updates"] == 150
    assert not note.exists(), "done: the same command would begin anew"
    assert job.read_text() == "requeue 4711\n"


def test_a_note_is_of_one_job_and_one_command_and_counts_once_the_job_came_back(job, monkeypatch):
    checkpoint = Path("last.ckpt")
    checkpoint.touch()
    slurm.remember(checkpoint)
    assert slurm.last_checkpoint() is None, "the first run of the job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # put back by SLURM itself
    assert slurm.last_checkpoint() == checkpoint.resolve()
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    slurm.remember(checkpoint, requeued=True)
    assert slurm.last_checkpoint() == checkpoint.resolve()
    for name, value in (("SLURM_JOB_ID", "4712"), ("SLURM_JOB_NAME", "bash"), ("SLURM_ARRAY_JOB_ID", "7")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            assert slurm.last_checkpoint() is None
    with monkeypatch.context() as other:
        other.setattr("sys.argv", ["lightning", "fit", "--model.gamma=0.5"])
        assert slurm.last_checkpoint() is None
    [note] = Path().glob(".slurm-*.json")
    for text in ("", "[]", json.dumps({"checkpoint": "gone.ckpt", "requeued": True})):
        note.write_text(text)
        assert slurm.last_checkpoint() is None
    slurm.forget()
    slurm.forget()
    assert not note.exists()


def test_a_requeue_that_fails_is_told(job, monkeypatch, caplog):
    assert slurm.requeue() and job.read_text() == "requeue 4711\n"
    monkeypatch.setenv("SCONTROL_STATUS", "3")
    with caplog.at_level("ERROR"):
        assert not slurm.requeue()
    assert "job 4711 could not be requeued (scontrol: status 3); go on by --ckpt_path last" in caplog.text
    monkeypatch.setenv("PATH", "")
    assert not slurm.requeue()
    monkeypatch.delenv("SLURM_NTASKS")  # no job
    assert not slurm.requeue()
    slurm.remember(Path("x"))
    assert not list(Path().glob(".slurm-*"))


def test_array_jobs_are_requeued_by_their_task(job, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "99")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.requeue() and job.read_text() == "requeue 99_3\n"


def test_outside_of_jobs_the_signal_is_nobodys(monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert slurm.requeue_signal(object()) is None
    assert OrderlyStop()._requeue_signal is None and RunCheckpoint().best is None
