"""Which checkpoints are written when, and that a file is complete or absent."""

import pytest
import torch

from callbacks import RunCheckpoint
from claw_lightning.errors import ConfigError
from tests.runs import fit_fake, fit_lockstep, make_batch, make_module


class Stage:
    """As much of a Trainer as RunCheckpoint asks for."""

    def __init__(self, root):
        self.log_dir, self.default_root_dir = None, str(root)
        self.sanity_checking, self.fast_dev_run, self.is_global_zero = False, False, True
        self.state = type("S", (), {"fn": "fit"})()
        self.lightning_module = None
        self.callback_metrics, self.global_step, self.saved = {}, 1, 0
        self.error = None

    def save_checkpoint(self, path):
        self.saved += 1
        path.write_text(f"{self.saved}")
        if self.error is not None:
            raise self.error


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("mode, kept", [("max", "4"), ("min", "1")])
def test_best_follows_the_monitored_value_and_last_every_validation(tmp_path, mode, kept):
    stage, keep = Stage(tmp_path), RunCheckpoint(mode=mode)
    folder = tmp_path / "checkpoints"
    for value in (1.0, 1.0, 3.0, 2.0):  # writes best 1, last 2; last 3; best 4, last 5; last 6 (max)
        stage.callback_metrics = {"val/return": torch.tensor(value)}
        keep.on_validation_end(stage, None)
    assert names(folder) == ["best.ckpt", "last.ckpt"]
    assert (folder / "best.ckpt").read_text() == kept
    assert (folder / "last.ckpt").read_text() == str(stage.saved)


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    for value in (float("nan"), -100.0, float("inf"), -50.0):
        stage.callback_metrics = {"val/return": torch.tensor(value)}
        keep.on_validation_end(stage, None)
    assert keep.best == -50.0


def test_without_the_monitored_value_only_last_is_written(tmp_path):
    RunCheckpoint().on_validation_end(Stage(tmp_path), None)
    assert names(tmp_path / "checkpoints") == ["last.ckpt"]


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


def test_a_failing_save_leaves_the_old_file_and_no_part_of_a_new_one(tmp_path):
    stage, keep = Stage(tmp_path), RunCheckpoint()
    keep.on_train_end(stage, None)
    stage.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        keep.on_train_end(stage, None)
    assert names(tmp_path / "checkpoints") == ["last.ckpt"]
    assert (tmp_path / "checkpoints/last.ckpt").read_text() == "1"


def test_an_error_in_training_is_not_hidden_by_one_in_saving(tmp_path):
    stage, keep, printed = Stage(tmp_path), RunCheckpoint(), []
    stage.error = OSError("disk full")
    module = type("M", (), {"print": lambda self, text: printed.append(text)})()
    keep.on_exception(stage, module, RuntimeError("first"))
    assert "disk full" in printed[0]
    stage.global_step = 0
    keep.on_exception(stage, module, RuntimeError("nothing learned"))
    assert stage.saved == 1


def test_wrong_mode_is_named():
    with pytest.raises(ConfigError, match=r"RunCheckpoint\.mode"):
        RunCheckpoint(mode="best")


def test_real_run_writes_files_that_load_with_weights_only(tmp_path):
    fit_lockstep(tmp_path, callbacks=[RunCheckpoint()], enable_checkpointing=True)
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
