"""Paths that users write with a tilde: every setting that names one reads it as the home folder."""

import os

import pytest
import torch

from callbacks import EpisodeLog, RolloutWriter, RunCheckpoint
from claw_lightning.checkpoints import find_checkpoint, run_folders
from claw_lightning.data import EnvConfig
from claw_lightning.files import expand
from claw_lightning.loggers import RunLogger
from tests.runs import make_data


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    "given, found",
    [("~/a", "{home}/a"), ("~", "{home}"), ("a/~", "a/~"), ("python3", "python3"), ("", None), (None, None)],
)
def test_a_tilde_is_the_home_folder(home, given, found):
    assert expand(given) == (found if found is None else found.format(home=home))


@pytest.mark.parametrize("name", ["worker_python", "replay_path", "initial_replay", "replay_events"])
def test_paths_of_the_data_module(home, name):
    env = EnvConfig("CodedEnv", {"task": "coded"})
    assert getattr(make_data(env=env, mode="overlapped", **{name: "~/x"}), name) == f"{home}/x"


def test_paths_of_callbacks(home):
    assert EpisodeLog(path="~/x.csv").path == RunCheckpoint(dirpath="~/x.csv").dirpath == f"{home}/x.csv"
    writer = RolloutWriter(path="~/x.npz", video="~/x.mp4")
    assert (writer.path, writer.video) == (f"{home}/x.npz", f"{home}/x.mp4")


def test_runs_and_checkpoints(home, tmp_path):
    logger = RunLogger("~/runs", None)
    logger.claim()
    assert (tmp_path / "runs/version_0").is_dir() and os.listdir(home) == ["runs"] and logger.save_dir == f"{home}/runs"
    folder = tmp_path / "runs/version_0/checkpoints"
    folder.mkdir()
    torch.save({}, folder / "last.ckpt")
    for path in ("~/runs/version_0", "~/runs/version_0/checkpoints/last.ckpt"):
        assert find_checkpoint(path, []) == str(folder / "last.ckpt")
    for trainer in ({"logger": {"init_args": {"save_dir": "~/runs"}}}, {"default_root_dir": "~/runs"}):
        assert find_checkpoint("last", run_folders(trainer)) == str(folder / "last.ckpt")
