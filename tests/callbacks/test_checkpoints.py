"""Which checkpoints are written when, and that a file is complete or absent."""

import errno
import json
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from callbacks import RunCheckpoint, checkpoints
from claw_lightning.errors import ClawError, ConfigError
from tests.runs import fit_fake, fit_lockstep, make_batch, make_module


class Stage:
    """As much of a Trainer as RunCheckpoint asks for."""

    def __init__(self, root):
        self.logger, self.log_dir, self.default_root_dir = None, None, str(root)
        self.sanity_checking, self.fast_dev_run, self.is_global_zero = False, False, True
        self.state = type("S", (), {"fn": "fit"})()
        self.lightning_module = None
        self.callback_metrics, self.global_step, self.saved = {}, 1, 0
        self.error = None

    def save_checkpoint(self, path):
        self.saved += 1
        path.write_text(f"{self.saved}" * self.saved)  # each is longer than the one before
        if self.error is not None:
            raise self.error


FULL = OSError(errno.ENOSPC, "No space left on device")


def names(folder):
    """Checkpoints in a folder: each with a marker of its own size, and nothing else but the replay."""
    found = sorted(p.name for p in folder.iterdir() if p.name != "replay")
    kept = [name for name in found if not name.endswith(".done")]
    assert found == sorted([*kept, *(f"{name}.done" for name in kept)])
    for name in kept:
        assert json.loads((folder / f"{name}.done").read_text())["bytes"] == (folder / name).stat().st_size
    return kept


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("mode, kept", [("max", "4"), ("min", "1")])
def test_best_follows_the_monitored_value_and_last_every_validation(tmp_path, mode, kept):
    stage, keep = Stage(tmp_path), RunCheckpoint(mode=mode)
    folder = tmp_path / "checkpoints"
    for value in (1.0, 1.0, 3.0, 2.0):  # writes best 1, last 2; last 3; best 4, last 5; last 6 (max)
        stage.callback_metrics = {"val/return": torch.tensor(value)}
        keep.on_validation_end(stage, None)
    assert names(folder) == ["best.ckpt", "last.ckpt"]
    assert (folder / "best.ckpt").read_text() == kept * int(kept)
    assert (folder / "last.ckpt").read_text() == str(stage.saved) * stage.saved


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    for value in (float("nan"), -100.0, float("inf"), -50.0):
        stage.callback_metrics = {"val/return": torch.tensor(value)}
        keep.on_validation_end(stage, None)
    assert keep.best == -50.0


def test_without_the_monitored_value_only_last_is_written(tmp_path):
    RunCheckpoint().on_validation_end(Stage(tmp_path), None)
    assert names(tmp_path / "checkpoints") == ["last.ckpt"]


def test_the_marker_counts_what_the_checkpoint_counts(tmp_path):
    """Workers insert while it is written; with two ranks the data module was ahead of the file."""
    stage = Stage(tmp_path)
    stage.lightning_module = SimpleNamespace(updates=3, env_steps=204)
    stage.datamodule = SimpleNamespace(env_steps=212)
    RunCheckpoint().on_validation_end(stage, stage.lightning_module)
    marker = json.loads((tmp_path / "checkpoints/last.ckpt.done").read_text())
    assert (marker["env_steps"], marker["updates"]) == (204, 3)


def test_nothing_outside_a_fit(tmp_path):
    stage = Stage(tmp_path)
    stage.state.fn = "validate"
    RunCheckpoint().on_validation_end(stage, None)
    stage.state.fn, stage.fast_dev_run = "fit", True
    RunCheckpoint().on_validation_end(stage, None)
    assert stage.saved == 0


def test_best_survives_a_resume(tmp_path):
    keep, resumed, stage = RunCheckpoint(), RunCheckpoint(), Stage(tmp_path)
    keep.best = 5.0
    resumed.load_state_dict(keep.state_dict())
    stage.callback_metrics = {"val/return": torch.tensor(4.0)}
    resumed.on_validation_end(stage, None)
    assert names(tmp_path / "checkpoints") == ["last.ckpt"]


def test_marks_in_minutes_are_written_once(tmp_path, monkeypatch):
    keep, stage = RunCheckpoint(at_minutes=[2, 0.5, 1]), Stage(tmp_path)
    for seconds, written in ((29, 0), (31, 1), (40, 1), (125, 3), (300, 3)):
        now = keep._started + seconds
        monkeypatch.setattr("callbacks.checkpoints.time.time", lambda now=now: now)
        keep.on_train_batch_end(stage, None, None, None, 0)
        assert stage.saved == written
    assert names(tmp_path / "checkpoints") == ["minute-0.5.ckpt", "minute-1.ckpt", "minute-2.ckpt"]


# -- what keeps a file from being written ----------------------------------------------------------------------------


def test_a_failing_save_leaves_the_old_file_and_training_goes_on(tmp_path, caplog):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    folder = tmp_path / "checkpoints"
    keep.on_validation_end(stage, None)
    stage.error = FULL
    keep.on_validation_end(stage, None)
    assert errors(caplog) == [
        f"{folder / 'last.ckpt'} could not be written (No space left on device): free space there, or set "
        "RunCheckpoint.dirpath to another disk; the one from before is kept"
    ]
    assert names(folder) == ["last.ckpt"]
    assert (folder / "last.ckpt").read_text() == "1"
    stage.error = None  # space again
    keep.on_validation_end(stage, None)
    assert (folder / "last.ckpt").read_text() == "333"
    assert names(folder) == ["last.ckpt"]


def test_at_the_end_a_failing_save_is_an_error(tmp_path, caplog):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    keep.on_validation_end(stage, None)
    stage.error = FULL
    with pytest.raises(ClawError, match=r"last\.ckpt could not be written \(No space left on device\): free space"):
        keep.on_train_end(stage, None)
    keep.on_exception(stage, None, ClawError("that one"))  # Lightning's answer to it
    assert stage.saved == 2 and not errors(caplog)
    assert (tmp_path / "checkpoints/last.ckpt").read_text() == "1"
    assert names(tmp_path / "checkpoints") == ["last.ckpt"]


def test_an_error_in_training_is_not_hidden_by_one_in_saving(tmp_path, caplog):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    stage.error = FULL
    keep.on_exception(stage, None, RuntimeError("first"))
    assert "No space left on device" in errors(caplog)[0]
    stage.global_step = 0
    keep.on_exception(stage, None, RuntimeError("nothing learned"))
    assert stage.saved == 1


def test_what_could_not_be_saved_is_not_the_best(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    stage.error = FULL
    stage.callback_metrics = {"val/return": torch.tensor(5.0)}
    keep.on_validation_end(stage, None)
    assert keep.best is None
    stage.error = None
    stage.callback_metrics = {"val/return": torch.tensor(4.0)}
    keep.on_validation_end(stage, None)
    assert keep.best == 4.0 and names(tmp_path / "checkpoints") == ["best.ckpt", "last.ckpt"]


def test_a_mark_that_failed_is_tried_again_later_and_at_the_end(tmp_path, monkeypatch, caplog):
    keep, stage = RunCheckpoint(at_minutes=[1, 5]), Stage(tmp_path)

    def at(seconds):
        monkeypatch.setattr("callbacks.checkpoints.time.time", lambda: keep._started + seconds)

    stage.error = FULL
    for seconds, tried in ((61, 1), (62, 1), (120, 1), (122, 2), (130, 2)):
        at(seconds)
        keep.on_train_batch_end(stage, None, None, None, 0)
        assert stage.saved == len(errors(caplog)) == tried
    stage.error = None
    at(190)
    keep.on_train_batch_end(stage, None, None, None, 0)
    assert names(tmp_path / "checkpoints") == ["minute-1.ckpt"]
    stage.error = FULL
    at(301)
    keep.on_train_batch_end(stage, None, None, None, 0)
    stage.error = None
    keep.on_train_end(stage, None)
    assert names(tmp_path / "checkpoints") == ["last.ckpt", "minute-1.ckpt", "minute-5.ckpt"]


def test_the_system_s_reason_is_found_in_a_plug_in_s_error_and_others_pass(tmp_path, caplog):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    wrapped = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    wrapped.__context__ = FULL
    for error in (wrapped, RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")):
        stage.error = error
        keep.on_validation_end(stage, None)
    assert "(No space left on device)" in errors(caplog)[0]
    assert "is the disk full?" in errors(caplog)[1]
    for error in (RuntimeError("state_dict of a callback"), TypeError("cannot pickle")):
        stage.error = error
        with pytest.raises(type(error), match=str(error)):
            keep.on_validation_end(stage, None)


def test_a_folder_that_cannot_be_made_is_reported_too(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file in its place")
    RunCheckpoint().on_validation_end(Stage(tmp_path), None)
    assert "could not be written (File exists)" in errors(caplog)[0]


def test_a_marker_that_cannot_be_written_costs_nothing_but_the_marker(tmp_path, monkeypatch, caplog):
    real = Path.open

    def fail(path, *args, **kwargs):
        if ".done." in path.name:
            raise FULL
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    keep, stage = RunCheckpoint(), Stage(tmp_path)
    keep.on_train_end(stage, None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert not errors(caplog) and "the checkpoint itself was" in caplog.text


def test_a_real_run_outlives_a_disk_that_is_full_for_a_while(tmp_path, monkeypatch, caplog):
    from claw_lightning.hooks import UpdateCallback

    real, full = os.fsync, []

    def sync(number):
        if full:
            raise FULL
        real(number)

    class Filling(UpdateCallback):
        def on_update_end(self, trainer, module):
            full[:] = [True] if 30 <= module.updates < 80 else []

    monkeypatch.setattr(os, "fsync", sync)
    fit_lockstep(tmp_path, callbacks=[Filling(), RunCheckpoint()], enable_checkpointing=True, check_val_every_n_epoch=1)
    assert any("last.ckpt could not be written (No space left on device)" in line for line in errors(caplog))
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["claw"]["updates"] == 100
    assert "last.ckpt" in names(tmp_path / "checkpoints")


# -- a stop at any point ----------------------------------------------------------------------------------------------


def die_at(step, save):
    """Run ``save`` in a fork that dies before its ``step``-th change of the disk; whether it lived to the end."""
    pid = os.fork()
    if pid == 0:
        left = [step]

        def counted(function):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return function(*args, **kwargs)

            return call

        os.fsync = counted(os.fsync)
        Path.replace, Path.unlink = counted(Path.replace), counted(Path.unlink)
        Path.open, Path.write_text = counted(Path.open), counted(Path.write_text)
        try:
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_death_at_any_point_leaves_a_whole_checkpoint_and_no_marker_of_another(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    last, marker = tmp_path / "checkpoints/last.ckpt", tmp_path / "checkpoints/last.ckpt.done"
    keep.on_train_end(stage, None)
    seen, step, has_ended = set(), 0, False
    while not has_ended:
        has_ended = die_at(step, lambda: keep.on_train_end(stage, None))
        text = last.read_text()
        assert text in ("1", "22")
        if marker.exists():
            assert json.loads(marker.read_text())["bytes"] == len(text)
        seen.add((text, marker.exists()))
        RunCheckpoint().on_train_end(Stage(tmp_path), None)  # another process, later: back to the state of before
        assert names(last.parent) == ["last.ckpt"]
        step += 1
    assert step > 10
    # The marker of the old file went first, that of the new one came last.
    assert seen == {("1", True), ("1", False), ("22", False), ("22", True)}


def test_parts_left_by_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / f".last.ckpt.{os.getppid()}").touch()
    for name in (".last.ckpt.99999999", ".best.ckpt.done.99999999", f".minute-1.ckpt.{os.getpid()}", ".mine.99999999"):
        (folder / name).touch()
    RunCheckpoint().on_train_end(Stage(tmp_path), None)
    left = {path.name for path in folder.iterdir()}
    assert left == {"last.ckpt", "last.ckpt.done", f".last.ckpt.{os.getppid()}", ".mine.99999999"}


def test_abandon_removes_what_is_being_written(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    keep.abandon()  # nothing is
    seen = []

    def save(path):
        path.write_text("half")
        seen.append(path.exists())
        keep.abandon()
        seen.append(path.exists())

    stage.save_checkpoint = save
    keep.on_validation_end(stage, None)
    assert seen == [True, False]
    assert not list((tmp_path / "checkpoints").iterdir())


# -- settings and real runs -------------------------------------------------------------------------------------------


def test_two_runs_that_begin_at_once_have_folders_of_their_own(tmp_path):
    base = tmp_path / "run" / "checkpoints"
    taken = [checkpoints.take_folder(base, None, is_fixed=False) for _ in range(3)]
    assert [path.name for path in taken] == ["checkpoints", "checkpoints_1", "checkpoints_2"]
    going_on = base.with_name("checkpoints_1") / "last.ckpt"
    assert checkpoints.take_folder(going_on.parent, going_on, is_fixed=False) == going_on.parent
    assert not checkpoints.holds_others(base, None)
    (base / "minute-5.ckpt").write_text("x")
    assert checkpoints.holds_others(base, None) and not checkpoints.holds_others(base, base / "best.ckpt")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        checkpoints.take_folder(tmp_path / "file", None, is_fixed=False)


def test_a_disk_that_is_full_at_the_beginning_may_be_free_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **kwargs: (_ for _ in ()).throw(FULL))
    assert checkpoints.take_folder(tmp_path / "checkpoints", None, is_fixed=False) == tmp_path / "checkpoints"


def test_wrong_mode_is_named():
    with pytest.raises(ConfigError, match=r"RunCheckpoint\.mode"):
        RunCheckpoint(mode="best")


def test_real_run_writes_files_that_load_with_weights_only(tmp_path, monkeypatch):
    # Where Lightning itself writes them first, whence a SIGKILL would leave them.
    monkeypatch.setattr(tempfile, "mkstemp", lambda *args, **kwargs: pytest.fail("a temporary file"))
    trainer, module, data = fit_lockstep(tmp_path, callbacks=[RunCheckpoint()], enable_checkpointing=True)
    assert type(trainer.strategy.checkpoint_io) is not checkpoints.DirectIO
    marker = json.loads((tmp_path / "checkpoints/last.ckpt.done").read_text())
    size = (tmp_path / "checkpoints/last.ckpt").stat().st_size
    assert marker == {"bytes": size, "env_steps": module.env_steps, "updates": module.updates}
    for name in ("best.ckpt", "last.ckpt"):
        stored = torch.load(tmp_path / "checkpoints" / name, weights_only=True)
        assert stored["claw"]["updates"] == 100


def test_an_exception_in_training_keeps_what_was_learned(tmp_path):
    from claw_lightning.hooks import UpdateCallback

    class Broken(UpdateCallback):
        def on_update_end(self, trainer, module):
            if module.updates == 5:
                raise RuntimeError("broken plug-in")

    keep = RunCheckpoint(dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match="broken plug-in"):
        fit_fake(make_module(), [make_batch(2, seed=s) for s in range(4)], [Broken(), keep], enable_checkpointing=True)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["claw"]["updates"] == 5
