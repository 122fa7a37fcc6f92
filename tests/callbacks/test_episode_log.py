"""Lines of the episode log, against the statistics that the data module keeps."""

import csv
import logging
import math
import os
from types import SimpleNamespace

import pytest

from callbacks import EpisodeLog, episode_log
from claw_lightning.errors import ConfigError
from claw_lightning.metrics import EpisodeStatistics
from claw_lightning.rollout.collector import Episode
from tests.runs import fit_lockstep

HEADER = ["episode", "env_steps", "return", "length", "success"]
SHORT = {"task": "ClawIdentity-v0"}  # episodes of one step


def rows(path):
    with path.open() as stream:
        return list(csv.reader(stream))


class Stage:
    """As much of a Trainer as EpisodeLog asks for."""

    def __init__(self, root, total=0):
        self.logger, self.log_dir, self.default_root_dir = None, None, str(root)
        self.fast_dev_run, self.is_global_zero = False, True
        self.datamodule = SimpleNamespace(episodes=EpisodeStatistics(), env_steps=0)
        self.datamodule.episodes.total = total

    def report(self, steps, *episodes):
        self.datamodule.env_steps = steps
        self.datamodule.episodes.add(iter(episodes))


def test_lines_are_the_episodes_in_order(tmp_path):
    stage, log = Stage(tmp_path), EpisodeLog()
    log.on_fit_start(stage, None)
    stage.report(100, Episode(1.0, 12, 1.0), Episode(-2.5, 7, 0.0))
    stage.report(128, Episode(math.nan, 3, math.nan))
    log.on_train_end(stage, None)
    expected = [HEADER, ["1", "100", "1", "12", "1"], ["2", "100", "-2.5", "7", "0"], ["3", "128", "nan", "3", ""]]
    assert rows(tmp_path / "episodes.csv") == expected
    stage.report(130, Episode(0.0, 1, 0.0))  # while the workers are closed
    log.teardown(stage, None, "fit")
    assert rows(tmp_path / "episodes.csv") == [*expected, ["4", "130", "0", "1", "0"]]
    assert stage.datamodule.episodes.listeners == []


def test_a_resumed_run_appends_and_counts_on(tmp_path):
    path = tmp_path / "made" / "log.csv"
    for total in (0, 1):
        stage, log = Stage(tmp_path, total), EpisodeLog(str(path))
        log.on_fit_start(stage, None)
        stage.report(10, Episode(1.0, 2, 1.0))
        log.teardown(stage, None, "fit")
    assert [line[0] for line in rows(path)] == ["episode", "1", "2"]


def test_lines_are_written_now_and_then(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(episode_log.time, "monotonic", lambda: now[0])
    stage, log = Stage(tmp_path), EpisodeLog()
    log.on_fit_start(stage, None)

    def written():
        return len(rows(tmp_path / "episodes.csv")) - 1

    stage.report(1, Episode(1.0, 2, 1.0))
    log.on_train_batch_end(stage, None, None, None, 0)
    assert written() == 0
    now[0] += 1.0
    log.on_train_batch_end(stage, None, None, None, 1)
    assert written() == 1
    now[0] += 1.0
    stage.report(2, Episode(1.0, 2, 1.0))  # also while no batches come
    assert written() == 2
    stage.report(3, Episode(1.0, 2, 1.0))
    log.on_exception(stage, None, ValueError())
    assert written() == 3


def test_nothing_outside_a_fit_or_in_a_trial_run(tmp_path):
    stage = Stage(tmp_path)
    stage.fast_dev_run = True
    log = EpisodeLog()
    log.on_fit_start(stage, None)
    log.on_train_end(stage, None)
    log.teardown(stage, None, "fit")
    assert not list(tmp_path.iterdir()) and stage.datamodule.episodes.listeners == []


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda root: root, "Is a directory"),
        (lambda root: (root / "file").write_text("x") and root / "file" / "log.csv", "File exists"),
        (lambda root: (root / "other.csv").write_text("a,b\n1,2\n") and root / "other.csv", "no log of episodes"),
        (lambda root: (root / "binary").write_bytes(b"\xff\xfe\x00") and root / "binary", "not a text file"),
    ],
)
def test_an_unusable_path_is_one_line(tmp_path, make, words):
    path = make(tmp_path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=r"EpisodeLog\.path") as caught:
        EpisodeLog(str(path)).on_fit_start(Stage(tmp_path), None)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert before is None or path.read_bytes() == before


def test_a_file_that_is_lost_later_ends_the_log_and_not_the_run(tmp_path, caplog):
    folder = tmp_path / "gone"
    stage, log = Stage(tmp_path), EpisodeLog(str(folder / "log.csv"))
    log.on_fit_start(stage, None)
    os.remove(folder / "log.csv")
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            stage.report(1, Episode(1.0, 2, 1.0))
            log.on_train_end(stage, None)
        log.teardown(stage, None, "fit")
    assert len([r for r in caplog.records if "cannot be written any more" in r.getMessage()]) == 1
    assert stage.datamodule.episodes.listeners == []


def test_a_real_run_logs_every_training_episode_and_no_other(tmp_path):
    settings = {**SHORT, "max_env_steps": 160}
    runner, _, data = fit_lockstep(tmp_path, callbacks=[EpisodeLog()], data=settings, check_val_every_n_epoch=1)
    lines = rows(tmp_path / "episodes.csv")
    assert lines[0] == HEADER
    assert [int(line[0]) for line in lines[1:]] == list(range(1, data.episodes.total + 1)) and len(lines) > 50
    assert {line[3] for line in lines[1:]} == {"1"} and {line[4] for line in lines[1:]} == {""}
    steps = [int(line[1]) for line in lines[1:]]
    assert steps == sorted(steps) and 0 <= steps[0] <= steps[-1] <= data.env_steps
    recent = [float(line[2]) for line in lines[1:]][-100:]
    assert recent == pytest.approx([episode.ret for episode in data.episodes.recent])
    assert data.episodes.listeners == []
