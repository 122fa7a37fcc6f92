"""Which checkpoint is meant, what else a file may be, whose settings hold; through the command where it is cheap."""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from claw_lightning import cli
from claw_lightning.checkpoints import find_checkpoint, own_folder, read_checkpoint, run_folders, untyped
from claw_lightning.errors import ConfigError
from claw_lightning.module import OptionCritic
from tests.runs import FAST

LIMITS = ["--trainer.limit_val_batches=1", "--data.eval_episodes=1"]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a finished run of the command: gamma 0.9, three options, distilled."""
    folder = tmp_path_factory.mktemp("made")
    before = os.getcwd()
    os.chdir(folder)
    try:
        options = ["--model.gamma=0.9", "--model.num_options=3", "--model.distillation.kind=student",
                   "--model.distillation.student_lr=0.002", "--data.max_env_steps=200"]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["lightning"])
            assert cli.main([*FAST, *LIMITS, *options]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def runs(made):
    """The same, to be written into."""
    shutil.copytree(made / "runs", "runs")
    shutil.copytree(made / "runs/version_0/checkpoints/replay", "replay_as_made")
    return Path("runs")


def refused(capsys, *arguments, command="fit"):
    """The one line with which the command ends; it has written no checkpoint and left nothing running."""
    before, folders_before = tree(), folders()
    assert cli.main([command, *FAST[1:], *LIMITS, *arguments]) == 1
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "INFO" not in line and "WARNING" not in line]
    assert len(lines) == 1 and lines[0].startswith("lightning: error: "), err
    after = tree()
    assert {name: after[name] for name in before} == before
    assert set(after) == set(before)
    assert folders() == folders_before  # no number of a run is used up by what is refused
    return lines[0]


def folders():
    return sorted(str(path) for path in Path("runs").rglob("*") if path.is_dir())


def tree():
    """Size and time of every file of the runs."""
    # But of this process, whose log of an earlier run is open still.
    stats = {str(p): p.stat() for p in Path("runs").rglob("*") if p.is_file() and p.name != "learner.log"}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


# -- which file -------------------------------------------------------------------------------------------------------


def made_replay(runs):
    """The replay of the run as it was made, aside."""
    return runs.with_name("replay_as_made")


def touch(path, seconds=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (1e9 + seconds, 1e9 + seconds))


def test_last_and_best_are_those_of_the_run_that_wrote_last(tmp_path):
    touch(tmp_path / "version_0/checkpoints/last.ckpt", 30)
    touch(tmp_path / "version_0/checkpoints/best.ckpt", 10)
    touch(tmp_path / "version_1/checkpoints/last.ckpt", 20)
    touch(tmp_path / "version_1/checkpoints/best.ckpt", 15)
    (tmp_path / "version_2/checkpoints").mkdir(parents=True)
    for name in ("last", "best"):
        assert find_checkpoint(name, [tmp_path]) == str(tmp_path / f"version_0/checkpoints/{name}.ckpt")
    (tmp_path / "version_0/checkpoints/best.ckpt").unlink()
    with pytest.raises(ConfigError, match="there is no best.ckpt in "):
        find_checkpoint("best", [tmp_path])
    for given in ("version_1", "version_1/checkpoints"):
        assert find_checkpoint(str(tmp_path / given), []) == str(tmp_path / "version_1/checkpoints/last.ckpt")
    with pytest.raises(ConfigError, match="is a folder without"):
        find_checkpoint(str(tmp_path / "version_2"), [])
    assert find_checkpoint("some.ckpt", []) == "some.ckpt" and find_checkpoint(None, []) is None


def test_with_the_configuration_of_a_run_its_own_checkpoints_are_meant(tmp_path):
    for number in (0, 1):
        touch(tmp_path / f"version_{number}/checkpoints/last.ckpt", number)
    files = [tmp_path / "version_0/config.yaml", tmp_path / "conf/mine.yaml"]
    assert own_folder(files) == tmp_path / "version_0"
    assert find_checkpoint("last", [own_folder(files)]) == str(tmp_path / "version_0/checkpoints/last.ckpt")
    assert own_folder([*files, tmp_path / "version_1/config.yaml"]) == tmp_path / "version_1"
    assert own_folder(["pendulum.yaml"]) is None and own_folder([]) is None


@pytest.mark.parametrize(
    "trainer, folder",
    [
        ({"logger": {"class_path": "X", "init_args": {"save_dir": "runs", "name": None}}}, "runs"),
        ({"logger": [{"class_path": "X", "init_args": {"save_dir": "logs", "name": "mine"}}]}, "logs/mine"),
        ({"logger": False, "default_root_dir": "there"}, "there"),
        ({"logger": None}, "."),
        ({"logger": True}, "lightning_logs"),
        ({"callbacks": [{"class_path": "callbacks.RunCheckpoint", "init_args": {"dirpath": "kept"}}]}, "kept"),
    ],
)
def test_where_runs_lie(trainer, folder):
    assert run_folders(trainer) == [Path(folder)]


# -- what a file is ---------------------------------------------------------------------------------------------------


def test_foreign_and_broken_files_are_told_in_one_line_each(capsys, runs):
    whole = (runs / "version_0/checkpoints/last.ckpt").read_bytes()
    Path("half.ckpt").write_bytes(whole[: len(whole) // 2])
    Path("empty.ckpt").write_bytes(b"")
    Path("text.ckpt").write_text("seed_everything: 0\n")
    with zipfile.ZipFile("sb3.zip", "w") as archive:  # as stable-baselines3 writes them
        for name in ("data", "pytorch_variables.pth", "policy.pth", "_stable_baselines3_version"):
            archive.writestr(name, "x")
    torch.save({"actor.weight": torch.zeros(3)}, "weights.ckpt")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6", "loops": {}}, "foreign.ckpt")
    torch.save({"claw": Path("x")}, "unsafe.ckpt")
    content = torch.load(runs / "version_0/checkpoints/last.ckpt", weights_only=True)
    torch.save({**content, "claw": {}}, "gutted.ckpt")
    torch.save({**content, "hyper_parameters": 7}, "numb.ckpt")
    torch.save({**content, "optimizer_states": []}, "still.ckpt")
    claw, spec = content["claw"], content["claw"]["spec"]
    damaged = {
        "emptied": {"spec": {}},
        "none": {"spec": None},
        "worded": {"spec": "Pendulum-v1"},
        "halved": {"spec": {"task": "Pendulum-v1"}},
        "newer": {"spec": {**spec, "smell_size": 3}},
        "wordy": {"spec": {**spec, "obs_size": "three"}},
        "negative": {"spec": {**spec, "obs_size": -3}},
        "boundless": {"spec": {**spec, "action_low": None}},
        "countless": {"updates": "many"},
        "owing": {"env_steps": -1},
        "listed": {"policy": []},
        "grouped": {"groups": 3},
    }
    for name, change in damaged.items():
        torch.save({**content, "claw": {**claw, **change}}, f"{name}.ckpt")
    for name, said in {
        "nothing.ckpt": "does not exist",
        "half.ckpt": "it is truncated",
        "empty.ckpt": "it is empty",
        "text.ckpt": "a file of another kind",
        "sb3.zip": "an archive of something else, with _stable_baselines3_version",
        "weights.ckpt": "not written by claw-lightning; give a run's last.ckpt or best.ckpt (it holds weights alone)",
        "foreign.ckpt": "not written by claw-lightning",
        "unsafe.ckpt": "objects that are not loaded",
        "gutted.ckpt": "lacks spec",
        "numb.ckpt": "lacks hyper_parameters",
        "still.ckpt": "lacks optimizer_states",
        "emptied.ckpt": "damaged spec (the description of a task lacks task)",
        "none.ckpt": "damaged spec (a description of a task is a mapping, not NoneType)",
        "worded.ckpt": "damaged spec (a description of a task is a mapping, not str)",
        "halved.ckpt": "damaged spec (the description of a task lacks obs_size)",
        "newer.ckpt": "damaged spec (the description of a task has the unknown field smell_size)",
        "wordy.ckpt": "damaged spec (the description of a task holds a wrong value (invalid literal",
        "negative.ckpt": "damaged spec (the description of a task has obs_size -3)",
        "boundless.ckpt": "damaged spec (the description of a task holds a wrong value (",
        "countless.ckpt": "has updates 'many', which is no count",
        "owing.ckpt": "has env_steps '-1', which is no count",
        "listed.ckpt": "policy is no mapping",
        "grouped.ckpt": "groups is no mapping",
        ".": "is not a plain file",
    }.items():
        with pytest.raises(ConfigError, match="ckpt_path") as error:
            read_checkpoint(name, training=True)
        assert said in str(error.value) and "\n" not in str(error.value)
    assert read_checkpoint("still.ckpt") is not None  # enough to be evaluated
    with pytest.raises(ConfigError, match="ckpt_path: the checkpoint has a damaged spec"):
        OptionCritic.load_from_checkpoint("emptied.ckpt")
    assert "emptied.ckpt has a damaged spec" in refused(capsys, "--ckpt_path=emptied.ckpt")
    name = next(name for name, value in content["state_dict"].items() if value.is_floating_point())
    content["state_dict"][name].fill_(float("nan"))
    torch.save(content, "sick.ckpt")
    with pytest.raises(ConfigError, match=f"ckpt_path: {name} of the checkpoint is not finite"):
        OptionCritic.load_from_checkpoint("sick.ckpt")
    for name, said in {"hpc": "Lightning's own files", "": "ckpt_path is empty"}.items():
        with pytest.raises(ConfigError, match=said):
            find_checkpoint(name, [])
    assert "an archive of something else" in refused(capsys, "--ckpt_path=sb3.zip")
    shutil.rmtree("runs")
    assert "ckpt_path last: no run in runs has written checkpoints" in refused(capsys, "--ckpt_path=last")
    assert "ckpt_path best: no run" in refused(capsys, "--ckpt_path=best", command="validate")


def test_another_task_another_k_and_a_broken_replay_are_refused_and_nothing_is_overwritten(capsys, runs):
    line = refused(capsys, "--ckpt_path=last", "--model.num_options=5")
    assert "made with model.num_options 3; this run has model.num_options 5" in line
    other = "--data.env.init_args.task=MountainCarContinuous-v0"
    line = refused(capsys, "--ckpt_path=last", "--model.num_options=3", other)
    assert "task Pendulum-v1" in line and "task MountainCarContinuous-v0" in line
    rows = runs / "version_0/checkpoints/replay/ring_0.rows"
    rows.write_bytes(rows.read_bytes()[:-1000])
    line = refused(capsys, "--ckpt_path=runs/version_0", "--model.num_options=3", "--data.max_env_steps=300")
    assert "ring_0.rows has" in line and "copy it anew" in line


def test_a_damaged_replay_says_what_to_remove_and_then_the_run_goes_on(capsys, runs):
    header = runs / "version_0/checkpoints/replay/replay.json"
    resume = ["--ckpt_path=runs/version_0", "--model.num_options=3", "--data.max_env_steps=240"]
    for text in ("{}", "[]", "null", "7", '{"format": 1}', "", '{"rings": {}}'):
        header.write_text(text)
        assert f"remove {header.parent}" in refused(capsys, *resume)
    rows = header.with_name("ring_0.rows")
    shutil.copytree(made_replay(runs), header.parent, dirs_exist_ok=True)
    rows.unlink()
    assert f"or remove {header.parent}, and the memory is filled anew" in refused(capsys, *resume)
    shutil.rmtree(header.parent)
    assert cli.main([*FAST, *LIMITS, *resume]) == 0


def test_a_damaged_checkpoint_is_told_wherever_the_damage_is(tmp_path):
    """Also in the weights, whose checksums torch does not look at, and where the archive's own table is hit."""
    file = tmp_path / "last.ckpt"
    torch.save({"claw": {}, "state_dict": {"weight": torch.arange(500.0)}, "optimizer_states": []}, file)
    content = file.read_bytes()
    weights = content.index(torch.arange(500.0).numpy().tobytes())
    table = content.index(b"PK\x01\x02")
    for at, value, told in (
        (weights + 99, b"\x7f", "checksum"),
        (table, b"\0", "table"),
        (table + 50, b"\xff", "table"),
    ):
        file.write_bytes(content[:at] + value + content[at + 1 :])
        with pytest.raises(ConfigError, match=f"not a readable checkpoint .it is damaged: .*{told}"):
            read_checkpoint(str(file))
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="lacks spec"):
        read_checkpoint(str(file))


# -- whose files may be written over ----------------------------------------------------------------------------------

WITHOUT = ["--trainer.logger=false", "--data.max_env_steps=140", *LIMITS]


def test_runs_without_a_logger_leave_each_others_checkpoints_alone(capsys):
    """And so do two with the same version of a logger, or with the same folder of checkpoints."""

    def files(pattern):
        return {str(path): path.read_bytes() for path in Path().glob(pattern)}

    assert cli.main([*FAST, *WITHOUT]) == 0
    first = files("checkpoints/*.*")
    assert {"checkpoints/last.ckpt", "checkpoints/best.ckpt"} <= set(first)
    assert cli.main([*FAST, *WITHOUT, "--model.gamma=0.8"]) == 0
    assert files("checkpoints/*.*") == first and files("checkpoints_1/*.*").keys() >= {"checkpoints_1/last.ckpt"}
    assert find_checkpoint("last", run_folders({"logger": False})) == "checkpoints_1/last.ckpt"
    assert find_checkpoint(".", []) == "checkpoints_1/last.ckpt"
    # A run that goes on from there is the same run.
    assert cli.main([*FAST, *WITHOUT, "--ckpt_path=last", "--data.max_env_steps=200"]) == 0
    assert files("checkpoints/*.*") == first and not Path("checkpoints_2").exists()
    assert torch.load("checkpoints_1/last.ckpt", weights_only=True)["claw"]["env_steps"] == 200
    capsys.readouterr()
    fixed = ["--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.dirpath=checkpoints"]
    line = refused(capsys, *WITHOUT, *fixed)
    assert "RunCheckpoint.dirpath: checkpoints holds the checkpoints of another run" in line
    assert files("checkpoints/*.*") == first
    assert cli.main([*FAST, *WITHOUT, *fixed, "--ckpt_path=checkpoints", "--data.max_env_steps=200"]) == 0
    assert torch.load("checkpoints/last.ckpt", weights_only=True)["claw"]["env_steps"] == 200


def test_what_cannot_be_written_into_is_refused_before_anything_is_done(capsys):
    """The system's own folder refuses root too."""
    line = refused(capsys, "--trainer.logger.save_dir=/sys/claw")
    assert "run's folder /sys/claw cannot be made" in line and "set save_dir of trainer.logger" in line
    fixed = ["--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.dirpath=/sys/claw"]
    assert "checkpoints cannot be written into /sys/claw" in refused(capsys, *fixed, "--trainer.logger=false")
    Path("file").write_text("")
    assert "trainer.logger cannot write" in refused(
        capsys, "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=file"
    )


@pytest.fixture
def archive(made):
    """The run in a folder into which nothing can be written, as on a disk of finished runs."""
    folder = Path("archive").absolute()  # a test may go elsewhere, and it is to be unmounted all the same
    folder.mkdir()
    if os.geteuid() == 0 and not mount(folder, "size=64m"):  # permissions do not apply to root
        pytest.skip("a read-only disk for root needs the right to mount one")
    try:
        shutil.copytree(made / "runs/version_0", folder / "version_0")
        if os.geteuid() == 0:
            assert mount(folder, "remount,ro")
        else:
            allow(folder, 0o555)
        with pytest.raises(OSError):
            (folder / "version_0/x").write_text("")
        yield folder
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        else:
            allow(folder, 0o755)


def mount(folder, options):
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def allow(folder, mode):
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(mode)


def test_a_run_on_a_disk_that_is_read_only_goes_on_elsewhere(archive, monkeypatch):
    """Also with its own configuration; and it is no place to write to."""
    before = {path: path.stat() for path in archive.rglob("*")}
    own = ["fit", "--config", str(archive / "version_0/config.yaml"), "--ckpt_path=last", *LIMITS]
    assert cli.main([*own, "--data.max_env_steps=260"]) == 0
    assert {path: path.stat() for path in archive.rglob("*")} == before
    folder = Path("runs/version_0/checkpoints")
    content = torch.load(folder / "last.ckpt", weights_only=True)
    assert content["claw"]["env_steps"] == 260
    assert read_checkpoint(str(folder / "best.ckpt")) and (folder / "replay/DONE").is_file()
    header = json.loads((folder / "replay/replay.json").read_text())
    assert sum(ring["head"] for ring in header["rings"]) > 100  # with the experience from there
    assert not Path("error.log").exists()


def test_a_run_cannot_go_on_within_a_disk_that_is_read_only(archive, capsys, monkeypatch):
    assert cli.main([*FAST, *LIMITS, "--ckpt_path=archive/version_0", "--model.num_options=3",
                     "--trainer.logger.save_dir=archive"]) == 1  # fmt: skip
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "run's folder archive/version_1 cannot be made" in line and "set save_dir of trainer.logger" in line
    monkeypatch.chdir(archive)  # not even the log of the error can be written
    assert cli.main([*FAST, *LIMITS, "--ckpt_path=version_0", "--model.num_options=3"]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("lightning: error: ") and "cannot be made" in line and "traceback" not in line


# -- whose settings hold ----------------------------------------------------------------------------------------------


def test_what_was_typed_wins_and_what_was_not_goes_on():
    groups = {"exploration": {"kind": "none", "final": 0.5}, "diversity": None, "distillation": {"kind": "x"}}
    stored = {
        "hyper_parameters": {"gamma": 0.9, "critic_lr": 1e-4, "gone": 1, "_instantiator": "x"},
        "claw": {"groups": groups},
    }
    present = dict.fromkeys(("gamma", "critic_lr", "exploration", "diversity", "distillation"))
    typed = {"critic_lr": 1e-3, "exploration": {"final": 0.1}, "distillation": None}
    assert untyped(stored, present, typed) == {
        "gamma": 0.9, "exploration": {"kind": "none", "final": 0.1}, "diversity": None,
    }  # fmt: skip


def test_a_resumed_run_keeps_settings_but_for_those_that_are_typed_and_overwrites_nothing(capsys, runs):
    """Learning rates too, which the optimisers would bring back; and the best so far is at hand in the new folder."""
    before, old = tree(), torch.load(runs / "version_0/checkpoints/last.ckpt", weights_only=True)
    assert cli.main([*FAST, *LIMITS, "--ckpt_path=last", "--model.num_options=3", "--model.critic_lr=0.0005",
                     "--data.max_env_steps=300"]) == 0  # fmt: skip
    assert {name: value for name, value in tree().items() if name in before} == before
    new = torch.load(runs / "version_1/checkpoints/last.ckpt", weights_only=True)
    assert new["claw"]["env_steps"] == 300 and new["global_step"] > old["global_step"]
    assert new["hyper_parameters"]["gamma"] == 0.9
    assert new["claw"]["groups"]["distillation"]["student_lr"] == 0.002
    lr = {name: state["param_groups"][0]["lr"] for name, state in zip(new["claw"]["rates"], new["optimizer_states"])}
    assert (lr["critic"], lr["actor"], lr["student"]) == (0.0005, 0.001, 0.002)
    best = new["callbacks"]["RunCheckpoint"]["best"]
    assert best >= old["callbacks"]["RunCheckpoint"]["best"]
    stored = torch.load(runs / "version_1/checkpoints/best.ckpt", weights_only=True)
    assert stored["callbacks"]["RunCheckpoint"]["best"] == best

    capsys.readouterr()
    # An evaluation is that of the checkpoint's model, or refused.
    for name in ("best", "last"):
        assert cli.main(["validate", *FAST[1:], *LIMITS, f"--ckpt_path={name}", "--model.num_options=3"]) == 0
    assert "val/return" in capsys.readouterr().out
    # Evaluations have numbers of their own.
    names = sorted(path.name for path in runs.iterdir())
    assert names == ["validate_0", "validate_1", "version_0", "version_1"]
    assert (runs / "validate_0/validate.yaml").is_file() and (runs / "validate_0/logs/learner.log").is_file()
    assert "model.num_options" in refused(capsys, "--ckpt_path=best", "--model.num_options=2", command="validate")
    line = refused(capsys, "--ckpt_path=last", "--model.num_options=3", "--model.initial_termination=0.3")
    assert "model.initial_termination 0.3 would do nothing" in line
