"""The command: what it parses, what it says, and how it answers bad input, mostly within this process."""

import contextlib
import signal
from pathlib import Path

import pytest
import torch

from claw_lightning import cli
from claw_lightning.checkpoints import read_checkpoint
from claw_lightning.errors import ClawError, UsageError
from claw_lightning.rollout.envs.base import EnvSpec
from tests.runs import FAST, ROOT

OPTIONS = Path(__file__).parent / "cases" / "options.txt"
NO_LOGS = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]


pytestmark = pytest.mark.usefixtures("elsewhere")


def refused(capsys, status, *arguments):
    """Error line of a command that must fail with ``status``."""
    assert cli.main([*FAST, *NO_LOGS, *arguments]) == status
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "INFO" not in line]
    assert len(lines) == 1 and lines[0].startswith("lightning: error: "), err
    assert len(lines[0]) < 600
    assert "Traceback" in Path("error.log").read_text()
    return lines[0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data.batch_sise=3"], "did you mean data.batch_size?"),
        (["--data.batch_size=many"], "\"data.batch_size\": Expected a <class 'int'>"),
        (["--data.mode=fast"], "'overlapped', 'lockstep'"),
        (["--data.env.class_path=NoSuchEnv"], "NoSuchEnv is neither a shipped class nor a dotted import path"),
        (["--data.env.class_path=no_such.Env"], "No module named 'no_such'"),
        (["--data.env.init_args.tusk=x"], "tusk"),
        (["--trainer.callbacks+=NoSuchCallback"], "NoSuchCallback is neither"),
        (["--trainer.callbacks+=TargetUpdate", "--trainer.callbacks.taus=1"], "'taus' is not accepted"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(capsys, arguments, said):
    assert said in refused(capsys, 2, *arguments)


@pytest.mark.parametrize(
    "text, said",
    [
        ("model:\n  num_option: 4\n", "did you mean model.num_options?"),
        ("model: {num_options: 4\ndata: [\n", "own.yaml, line 2"),
        ("data:\n  env:\n    class_path: GymnasiumEnv\n    init_args: {tasc: x}\n", "'tasc' is not accepted"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(capsys, text, said):
    Path("own.yaml").write_text(text)
    assert said in refused(capsys, 2, "--config", "own.yaml")
    assert said in refused(capsys, 2, "--config=own.yaml")
    assert said in refused(capsys, 2, "-c", "own.yaml")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config", "no_such.yaml"], "no configuration file 'no_such.yaml'"),
        (["--data.env.init_args.task=NoSuch-v0"], "data.env.init_args.task: Gymnasium has no task 'NoSuch-v0'"),
        (["--data.env.init_args.task=CartPole-v1"], "discrete actions"),
        (["--model.num_options=0"], "model.num_options is 0; it must be at least 1"),
        (["--data.batch_size=1001"], "data.batch_size (1001) is larger than data.capacity (1000)"),
        (["--data.capacity=100000000000"], "GiB are free"),
        (["--data.env.init_args.num_envs=3"], "set data.envs_per_worker instead"),
        (["--trainer.callbacks+=TargetUpdate", "--trainer.callbacks.tau=3"], "TargetUpdate.tau is 3.0"),
        (["--trainer.max_time=00:00:00:180"], "00:00:00:180"),
        (["--trainer.strategy=fsdp", "--trainer.devices=2"], "trainer.strategy fsdp is not supported: it shards"),
        (["--trainer.strategy=ddp_spawn"], "trainer.strategy ddp_spawn is not supported"),
        (["--trainer.strategy=deepspeed_stage_2"], "use ddp"),
        (["--ckpt_path=no_such.ckpt"], "ckpt_path: no_such.ckpt does not exist"),
        (["--ckpt_path=/etc/hostname"], "ckpt_path: /etc/hostname is not a readable checkpoint"),
        (
            ["--data.mode=overlapped", "--data.worker_python=/no/such/python"],
            "data.worker_python: cannot start /no/such/python",
        ),
        (["--data.mode=overlapped", "--data.env.init_args.task=NoSuch-v0"], "Gymnasium has no task 'NoSuch-v0'"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(capsys, arguments, said):
    assert said in refused(capsys, 1, *arguments)


def test_a_truncated_checkpoint_is_refused_by_its_marker_and_one_without_is_read(capsys):
    file, marker = Path("own.ckpt"), Path("own.ckpt.done")
    spec = EnvSpec("Task", 3, 1, [-1.0], [1.0]).to_json()
    claw = {"spec": spec, "updates": 0, "env_steps": 0, "policy": {}}
    torch.save({"claw": claw, "state_dict": {"weights": torch.zeros(3)}, "hyper_parameters": {}}, file)
    read_checkpoint(str(file))
    size = file.stat().st_size
    for text in (f'{{"bytes": {size}}}', "no JSON", "[]", "{}"):  # what says nothing vouches for nothing
        marker.write_text(text)
        read_checkpoint(str(file))
    marker.write_text(f'{{"bytes": {size + 1000}}}')
    line = refused(capsys, 1, "--ckpt_path=own.ckpt")
    assert f"ckpt_path: own.ckpt has {size:,} bytes, but {size + 1000:,} according to own.ckpt.done" in line
    marker.unlink()
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a readable checkpoint" in refused(capsys, 1, "--ckpt_path=own.ckpt")


def test_a_text_of_several_lines_becomes_one(capsys):
    assert cli.report(ClawError("worker 0 failed: first\n  second (log: w.log)")) == 1
    assert capsys.readouterr().err.startswith("lightning: error: worker 0 failed: first second (log: w.log)")


def test_long_texts_are_cut_but_kept_in_the_log(capsys):
    assert cli.report(RuntimeError("x" * 3000)) == 1
    line = capsys.readouterr().err
    assert len(line) < 600 and "..." in line
    assert "x" * 3000 in Path("error.log").read_text()


def test_statuses_of_errors(capsys, monkeypatch):
    monkeypatch.setenv("CLAW_ERROR_LOG", "/no/such/folder/error.log")
    assert cli.report(UsageError("a")) == 2
    assert cli.report(ClawError("b")) == 1
    assert capsys.readouterr().err == "lightning: error: a\nlightning: error: b\n"


def test_an_error_that_nobody_can_read_has_a_status_all_the_same(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    assert cli.report(ClawError("b")) == 1


# -- signals before and after a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", cli.StartUpSignals.NUMBERS)
def test_a_signal_before_the_run_is_one_line_and_more_of_them_find_no_handler(monkeypatch, capsys, number):
    before = {each: signal.getsignal(each) for each in cli.StartUpSignals.NUMBERS}
    monkeypatch.setattr(cli, "make_cli_class", lambda: signal.raise_signal(number))
    try:
        assert cli.main([*FAST]) == 128 + number
        assert capsys.readouterr().err == f"lightning: {signal.Signals(number).name} before the run began\n"
        assert {signal.getsignal(each) for each in before} == {signal.SIG_DFL}  # no traceback while Python ends
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_errors_that_lead_to_each_other_are_each_told_once():
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__context__ = second, first
    assert list(cli.chain(first)) == [first, second]


def test_a_signal_that_a_library_has_swallowed_is_not_taken_for_its_error(monkeypatch, capsys):
    before = {each: signal.getsignal(each) for each in cli.StartUpSignals.NUMBERS}

    def stumble():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        raise KeyError("omegaconf+")

    monkeypatch.setattr(cli, "make_cli_class", stumble)
    try:
        assert cli.main([*FAST]) == 128 + signal.SIGTERM
        assert capsys.readouterr().err == "lightning: SIGTERM before the run began\n"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_without_a_signal_handlers_come_back(monkeypatch):
    before = [signal.getsignal(each) for each in cli.StartUpSignals.NUMBERS]
    monkeypatch.setattr(cli, "make_cli_class", lambda: [][0])
    assert cli.main([*FAST]) == 1
    assert [signal.getsignal(each) for each in cli.StartUpSignals.NUMBERS] == before


def test_a_signal_after_the_run_is_noted_and_a_second_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    with cli.StartUpSignals() as signals:
        signals.stand_by()
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM and not ended
        signal.raise_signal(signal.SIGTERM)  # to the process and to its group, as `timeout` does
        assert not ended
        signals._received_at -= 2.0
        signal.raise_signal(signal.SIGTERM)
        signals.received = None  # else the handlers of this process would not come back
    assert ended == [1]


def test_a_hang_up_that_was_to_be_ignored_is(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli.StartUpSignals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("has_units, expected", [(True, "bf16-mixed"), (False, "32-true")])
def test_bfloat16_is_used_where_the_processor_has_it(monkeypatch, caplog, has_units, expected):
    monkeypatch.setattr(cli, "computes_bfloat16", lambda: has_units)
    assert cli.usable_precision("bf16-mixed") == expected
    assert ("trainer.precision" in caplog.text) is not has_units


# -- help and options -------------------------------------------------------------------------------------------------


def exits_with_zero(*arguments):
    with pytest.raises(SystemExit) as leave:
        cli.main(list(arguments))
    assert leave.value.code in (0, None)


def test_help_of_command_and_subcommand(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # texts are shortened to the terminal's width
    exits_with_zero("--help")
    out = capsys.readouterr().out
    assert "{fit,validate,test,predict}" in out and "dexterous robot hands" in out
    assert "lightning fit --config pendulum " in out and "debug/fast" in out
    for command in ("fit", "validate", "test", "predict"):
        assert len([line for line in out.splitlines() if line.startswith(f"  {command:<12}")]) == 1
    assert "optimization routine" not in out and len(out.splitlines()) < 30
    exits_with_zero("fit", "--help")
    out = capsys.readouterr().out
    assert "--model.num_options" in out and "critic updates per update of the action policy" in out
    assert len(out.splitlines()) < 200 and max(map(len, out.splitlines())) <= 160
    # Every option of ours says what it is.
    ours = [line for line in out.splitlines() if line.startswith(("  --model.", "  --data."))]
    assert len(ours) == len(OPTIONS.read_text().split())
    assert not [line for line in ours if len(line) < 46]


def test_help_about_one_option_and_one_class(capsys):
    exits_with_zero("fit", "--help", "model.gamma")
    assert "discount per environment step. (type: float, default: 0.99)" in capsys.readouterr().out
    exits_with_zero("fit", "--help=data")
    out = capsys.readouterr().out
    assert "--data.batch_size" in out and "--model" not in out
    exits_with_zero("fit", "--trainer.callbacks.help", "Curriculum")
    assert "--trainer.callbacks.setting" in capsys.readouterr().out
    assert "did you mean model.gamma?" in refused(capsys, 2, "--help", "model.gama")


def test_print_config_prints_what_parses_again(capsys):
    exits_with_zero(*FAST, "--model.num_options=3", "--print_config")
    text = capsys.readouterr().out
    assert "num_options: 3" in text and "class_path: claw_lightning.rollout.envs.GymnasiumEnv" in text
    Path("printed.yaml").write_text(text)
    exits_with_zero("fit", "--config", "printed.yaml", "--print_config")
    assert capsys.readouterr().out == text


def test_option_names_are_frozen(monkeypatch):
    """A rename breaks users' files. If it is wanted: change tests/cases/options.txt together with the CHANGELOG."""
    found = []

    def error(message, keys):
        found.extend(keys)
        return message

    monkeypatch.setattr(cli, "explain_usage", error)
    assert cli.main([*FAST, "--no_such_option"]) == 2
    names = sorted({key for key in found if key.split(".")[0] in ("model", "data") and "." in key})
    names = [name for name in names if not name.endswith((".help", "+"))]
    assert names == OPTIONS.read_text().split()


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_says_what_is_useful_once(capsys):
    """And adds the callbacks that every run needs, whatever list the configuration gives."""
    assert cli.main([*FAST]) == 0
    out, err = capsys.readouterr()
    for noise in ("weights_only", "Tip", "TPU", "precision lowered"):
        assert noise not in out + err
    assert "val/return" in out
    folder = next(Path("runs").iterdir())
    names = ("best.ckpt", "best.ckpt.done", "last.ckpt", "last.ckpt.done", "replay")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == sorted(names)
    assert (folder / "config.yaml").is_file()
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {"RunCheckpoint"} & {key.split("{")[0] for key in stored["callbacks"]}

    # The checkpoint's counters, not its hyper-parameters, continue: the command line wins.
    last = str(folder / "checkpoints" / "last.ckpt")
    assert cli.main([*FAST, f"--ckpt_path={last}", "--data.max_env_steps=600", "--model.gamma=0.5"]) == 0
    again = torch.load("runs/version_1/checkpoints/last.ckpt", weights_only=True)
    assert again["claw"]["env_steps"] == 600 > stored["claw"]["env_steps"] == 400
    assert again["claw"]["updates"] > stored["claw"]["updates"] == 150
    assert again["hyper_parameters"]["gamma"] == 0.5

    capsys.readouterr()
    for command in ("validate", "test"):
        assert cli.main([command, *FAST[1:], *NO_LOGS, f"--ckpt_path={last}"]) == 0
        assert f"{'val' if command == 'validate' else 'test'}/return" in capsys.readouterr().out


def test_bars_and_checkpoints_of_the_user_are_kept(monkeypatch):
    seen = {}
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda self, *a, **k: seen.update(callbacks=self.callbacks))
    bar = ["--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar"]
    saver = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    assert cli.main([*FAST, "--trainer.enable_progress_bar=true", *bar, *saver]) == 0
    names = [type(c).__name__ for c in seen["callbacks"]]
    assert {"TQDMProgressBar", "ModelCheckpoint", "RunCheckpoint", "OrderlyStop", "OptionDiagnostics"} <= set(names)
    assert "TrainingProgress" not in names
    assert cli.main([*FAST, "--trainer.enable_progress_bar=true"]) == 0
    names = [type(c).__name__ for c in seen["callbacks"]]
    assert "TrainingProgress" in names and "TQDMProgressBar" not in names and "ModelCheckpoint" not in names


def test_shipped_configurations_live_in_the_tree():
    assert (ROOT / "conf/debug/fast.yaml").is_file()
