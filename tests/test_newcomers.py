"""Configurations as a new user writes them: all start; and what is wrong in them is told in one line."""

import logging
import re
import sys
from pathlib import Path

import pytest
import yaml

from claw_lightning import cli, configs
from tests.runs import FAST

NO_LOGS = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
PLUGIN = """
from lightning.pytorch import Callback
from claw_lightning.replay.samplers import Uniform
from claw_lightning.rollout.networks import NetworkBlock

class Mine(Callback):
    def __init__(self, beta: float = 1.0):
        self.beta = beta

class MySampler(Uniform):
    def __init__(self, power: float = 1.0):
        self.power = power

class Even(Callback):
    def __init__(self, n: int = 1):
        raise ValueError("n must be even,\\n not 1")

class Wrong(MySampler):
    def __init__(self):
        len(3)

class Quits(Callback):
    def __init__(self):
        quit()

class EvenBlock(NetworkBlock):
    def __init__(self, input_size: int, output_size: int):
        raise ValueError("sizes must be even,\\n both")

class QuittingBlock(NetworkBlock):
    def __init__(self, input_size: int, output_size: int):
        raise SystemExit("no licence")

class QuitsLater(Callback):
    def on_fit_start(self, trainer, module):
        raise SystemExit("enough")
"""


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """An empty folder with a module of the user's; nothing of a run is left in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(configs, "IMPORT_FOLDERS", [])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    for name in ("newcomer_plugin", "beside_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("newcomer_plugin.py").write_text(PLUGIN)
    level = logging.getLogger("claw_lightning").level
    yield
    logging.getLogger("claw_lightning").setLevel(level)


@pytest.fixture
def started(monkeypatch):
    """Runs a command up to the point where training begins: (trainer, module, data)."""

    def start(*arguments):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr("lightning.pytorch.Trainer.fit", lambda trainer, model, *a, datamodule, **k: seen.append(
                (trainer, model, datamodule)))  # fmt: skip
            patch.setattr(cli, "say", lambda line: None)
            assert cli.main(list(arguments)) == 0, Path("error.log").read_text()
        return seen[0]

    return start


def callback(trainer, name):
    return next(c for c in trainer.callbacks if type(c).__name__ == name)


def test_overrides_in_every_spelling(started):
    trainer, model, data = started(
        *FAST, *NO_LOGS, "--model.gamma=0.9", "--data.batch_size", "32", "--model.hidden_sizes=[24,24]",
        "--model.option_hidden_sizes+=4", "--trainer.max_time", "00:00:01:00", "--data.deadlines.step", "5",
        "--model.exploration.kind=ornstein_uhlenbeck", "--data.env.init_args.task=Acrobot-v1",
        "--model.actor", "categorical",
    )  # fmt: skip
    assert model.settings.gamma == 0.9 and data.batch_size == 32 and list(model.settings.hidden_sizes) == [24, 24]
    assert list(model.settings.option_hidden_sizes) == [8, 4] and data.deadlines == {"step": 5.0}
    assert model.exploration.kind == "ornstein_uhlenbeck" and data.env.init_args["task"] == "Acrobot-v1"


def test_callbacks_added_by_name_with_arguments_and_a_sampler_of_ones_own(started):
    trainer, _, data = started(
        *FAST, *NO_LOGS, "--trainer.callbacks+=newcomer_plugin.Mine", "--trainer.callbacks.beta=3",
        "--data.sampler=newcomer_plugin.MySampler", "--data.sampler.power=0.5",
    )  # fmt: skip
    assert callback(trainer, "Mine").beta == 3.0
    assert data.sampler.power == 0.5


def test_dictionaries_on_the_command_line(started):
    trainer, model, data = started(
        *FAST, *NO_LOGS, "--model.exploration={kind: gaussian, scale_max: 0.4}",
        "--trainer.callbacks+={class_path: newcomer_plugin.Mine, init_args: {beta: 2}}",
        "--data.env={class_path: FourRoomsEnv, init_args: {slip: 0.1}}", "--model.actor=categorical",
    )  # fmt: skip
    assert model.exploration.scale_max == 0.4 and callback(trainer, "Mine").beta == 2.0
    assert data.env.class_path.endswith("FourRoomsEnv") and data.env.init_args["slip"] == 0.1


def test_a_list_replaces_the_list_before_it_and_null_takes_a_setting_back(started):
    trainer, model, data = started(
        *FAST, *NO_LOGS, "--trainer.callbacks=[newcomer_plugin.Mine]", "--data.hindsight=null", "--data.seed=null",
        "--model.exploration=null",
    )  # fmt: skip
    names = [type(c).__name__ for c in trainer.callbacks]
    assert "Mine" in names and "OrderlyStop" in names and "TargetUpdate" not in names
    assert model.settings.tau == 0.01  # which the TargetUpdate that every run gets takes
    assert data.hindsight is None and model.exploration.kind == "gaussian"


FILES = {
    "short and long class paths": (
        "trainer:\n  callbacks+:\n  - newcomer_plugin.Mine\n  - class_path: Curriculum\n    init_args: {setting: g, "
        "stages: [10]}\ndata:\n  sampler: Prioritized\n",
        lambda t, m, d: callback(t, "Mine").beta == 1.0 and type(d.sampler).__name__ == "Prioritized",
    ),
    "samplers inside a sampler": (
        "data:\n  sampler:\n    class_path: Mixture\n    init_args:\n      samplers:\n      - Prioritized\n      - "
        "class_path: newcomer_plugin.MySampler\n        init_args: {power: 2}\n      shares: [0.5, 0.5]\n",
        lambda t, m, d: d.sampler.samplers[1].power == 2.0,
    ),
    "interpolation": (
        "model:\n  gamma: 0.9\n  trace: ${model.gamma}\n  hidden_sizes: [12, 12]\n  option_hidden_sizes: "
        "${model.hidden_sizes}\ntrainer:\n  default_root_dir: ${oc.env:NEWCOMER_DIR}/run\ndata:\n  capacity: "
        "${oc.decode:${oc.env:NEWCOMER_SIZE,2000}}\n",
        lambda t, m, d: m.settings.trace == 0.9 and d.capacity == 2000 and str(t.default_root_dir).endswith("here/run")
        and list(m.settings.option_hidden_sizes) == [12, 12],
    ),
    "anchors": (
        "model:\n  hidden_sizes: &sizes [12, 12]\n  option_hidden_sizes: *sizes\n  critic_lr: &lr 2.0e-4\n  "
        "actor_lr: *lr\n",
        lambda t, m, d: list(m.settings.option_hidden_sizes) == [12, 12] and m.settings.actor_lr == 2e-4,
    ),
    "numbers as people write them": (
        "model:\n  critic_lr: 1e-4\n  gamma: .95\ndata:\n  capacity: 2_000\n",
        lambda t, m, d: m.settings.critic_lr == 1e-4 and m.settings.gamma == 0.95 and d.capacity == 2000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own(name, started, monkeypatch):
    monkeypatch.setenv("NEWCOMER_DIR", "here")
    text, holds = FILES[name]
    Path("own.yaml").write_text(text)
    assert holds(*started(*FAST, *NO_LOGS, "--config", "own.yaml"))


@pytest.mark.parametrize("seed", ["99999999999", "-1"])
def test_a_seed_out_of_range_is_named(seed, capsys):
    assert cli.main([*FAST, *NO_LOGS, f"--seed_everything={seed}"]) == 1
    assert f"seed_everything is {seed}; give a number from 0 to 4294967295" in capsys.readouterr().err


def test_files_compose_and_what_is_typed_wins(started):
    Path("a.yaml").write_text("model: {gamma: 0.8, trace: 0.5}\ntrainer: {callbacks+: [newcomer_plugin.Mine]}\n")
    Path("b.yaml").write_text("model: {gamma: 0.7}\n")
    trainer, model, _ = started(
        "fit", "--config", "debug/fast", "-c", "a.yaml", "--config=b.yaml", *NO_LOGS, "--model.trace", "0.25"
    )
    assert model.settings.gamma == 0.7 and model.settings.trace == 0.25
    assert callback(trainer, "Mine")


def test_the_environment_stands_between_files_and_what_is_typed(started, monkeypatch):
    Path("a.yaml").write_text("model: {gamma: 0.8, trace: 0.5}\n")
    monkeypatch.setenv("CLAW_FIT__MODEL__GAMMA", "0.7")
    monkeypatch.setenv("CLAW_FIT__MODEL__TRACE", "0.1")
    monkeypatch.setenv("CLAW_FIT__DATA__ENV__INIT_ARGS__TASK", "MountainCarContinuous-v0")
    monkeypatch.setenv("CLAW_VALIDATE__DATA__EVAL_EPISODES", "9")
    _, model, data = started(*FAST, "--config", "a.yaml", *NO_LOGS, "--model.trace=0.25")
    assert model.settings.gamma == 0.7 and model.settings.trace == 0.25 and data.eval_episodes == 2
    assert data.env.init_args["task"] == "MountainCarContinuous-v0"


def test_plug_ins_beside_a_configuration_in_another_folder(started, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside_plugin.py").write_text(PLUGIN)
    (folder / "own.yaml").write_text("data: {sampler: beside_plugin.MySampler}\n")
    _, _, data = started(*FAST, *NO_LOGS, "--config", "project/own.yaml")
    assert type(data.sampler).__module__ == "beside_plugin"
    assert configs.IMPORT_FOLDERS[-1] == str(folder)


# -- through real runs ------------------------------------------------------------------------------------------------

SHORT = ["--data.max_env_steps=140", "--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false"]


def test_a_printed_configuration_runs_unchanged_and_the_one_beside_the_logs_again(capsys):
    with pytest.raises(SystemExit):
        cli.main([*FAST, *SHORT, "--model.gamma=0.9", "--trainer.callbacks+=newcomer_plugin.Mine", "--print_config"])
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["fit", "--config", "printed.yaml"]) == 0, Path("error.log").read_text()
    saved = Path("runs/version_0/config.yaml").read_text()
    assert yaml.safe_load(saved)["model"]["gamma"] == 0.9
    assert cli.main(["fit", "--config", "runs/version_0/config.yaml"]) == 0, Path("error.log").read_text()
    assert yaml.safe_load(Path("runs/version_1/config.yaml").read_text()) == yaml.safe_load(saved)


def test_the_configuration_of_a_run_finds_its_plug_ins_from_another_folder(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "beside_plugin.py").write_text(PLUGIN)
    (project / "own.yaml").write_text("data: {sampler: beside_plugin.MySampler}\n")
    assert cli.main([*FAST, *SHORT, "--config", "project/own.yaml"]) == 0, Path("error.log").read_text()
    saved = tmp_path / "runs" / "version_0" / "config.yaml"
    # As in a new process, from another working directory.
    configs.IMPORT_FOLDERS.clear()
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in (str(project), str(tmp_path))])
    monkeypatch.delitem(sys.modules, "beside_plugin")
    monkeypatch.chdir(elsewhere)
    assert cli.main(["fit", "--config", str(saved)]) == 0, Path("error.log").read_text()


def test_no_run_writes_over_a_configuration(capsys):
    """Neither the user's own in the working directory, nor that of the run whose folder a later command shares."""
    Path("config.yaml").write_text("# mine\nmodel: {gamma: 0.9}\n")
    assert cli.main([*FAST, *SHORT, "--config", "config.yaml", "--trainer.logger=false"]) == 0
    assert Path("config.yaml").read_text().startswith("# mine") and Path("logs/config.yaml").is_file()
    same = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv", "--trainer.logger.version=7"]
    assert cli.main([*FAST, *SHORT, *same]) == 0
    folder = Path("csv/version_7")
    before = (folder / "config.yaml").read_text()
    assert cli.main(["validate", *FAST[1:], *same]) == 0
    assert (folder / "config.yaml").read_text() == before and (folder / "validate.yaml").is_file()


def test_every_shipped_configuration_is_printed_as_it_is_read(monkeypatch):
    """As --print_config prints it; one parser serves for all."""

    class Stop(Exception):
        pass

    kept = []

    def stop(self, parser, args):
        kept.append(self._parser("fit") if hasattr(self, "subcommand") else self._subcommand_parsers["fit"])
        raise Stop

    monkeypatch.setattr("lightning.pytorch.cli.LightningCLI.parse_arguments", stop)
    assert cli.main(list(FAST)) == 1  # Stop is told like any error
    for name in configs.list_configs():
        printed = kept[0].dump(kept[0].parse_args(["--config", str(configs.find_config(name))]), skip_none=False)
        Path("printed.yaml").write_text(printed)
        assert kept[0].dump(kept[0].parse_args(["--config", "printed.yaml"]), skip_none=False) == printed, name


# -- what is wrong ----------------------------------------------------------------------------------------------------


def refused(capsys, status, *arguments):
    assert cli.main([*FAST, *NO_LOGS, *arguments]) == status
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "INFO" not in each]
    assert line.startswith("lightning: error: ") and len(line) < 600
    return line


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--trainer.callbacks+=newcomer_plugin.MySampler"], "no Callback"),
        (["--data.sampler=newcomer_plugin.Mine"], "no Sampler"),
        (["--data.env.class_path=newcomer_plugin.Mine"], "newcomer_plugin.Mine is no VectorEnv"),
        (["--trainer.callbacks+=newcomer_plugin.Mien"], "has no attribute 'Mien'"),
        (["--trainer.callbacks+=newcomer_plugni.Mine"], "No module named 'newcomer_plugni'"),
        (["--trainer.callbacks+=newcomer_plugin.Mine", "--trainer.callbacks.bta=3"], "did you mean beta?"),
        (["--data.sampler=Prioritised"], "did you mean Prioritized?"),
        (["--model.network=newcomer_plugin.Mine"], "newcomer_plugin.Mine is no NetworkBlock"),
        (["--model.trace=${model.gama}"], "model.trace: there is no value of 'model.gama' to take (did you mean"),
        (
            ["--model.trace=${model.trace}"],
            "model.trace: 'model.trace' cannot be taken: interpolations lead in a circle",
        ),
        (["--model.trace=${model.gamma}", "--model.gamma=${model.trace}"], "interpolations lead in a circle"),
        (["--model.trace=${oc.env:NO_SUCH_VARIABLE}"], "environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_wrong_names_are_told_in_one_line(capsys, arguments, said):
    assert said in refused(capsys, 2, *arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--trainer.callbacks+=newcomer_plugin.Even"], "Even: its constructor failed (ValueError: n must be even,"),
        (["--data.sampler=newcomer_plugin.Wrong"], "newcomer_plugin.Wrong: its constructor failed (TypeError: object"),
        (["--trainer.callbacks+=newcomer_plugin.Quits"], "newcomer_plugin.Quits: its constructor ended the program"),
        (["--trainer.callbacks+=newcomer_plugin.QuitsLater"], "exit(enough) was called by"),
        (["--trainer.callbacks+=quits_plugin.Mine"], "quits_plugin.py, line 1, in <module>"),
        (["--trainer.callbacks=[TargetUpdate,TargetUpdate]"], "TargetUpdate more than once"),
        (["--trainer.callbacks+=TargetUpdate", "--trainer.callbacks.tau=0.3"], "TargetUpdate.tau 0.3 and model.tau"),
        (["--config="], "--config is empty"),
        (["--model.network=newcomer_plugin.EvenBlock"], "constructor of newcomer_plugin.EvenBlock failed (ValueError:"),
        (
            ["--model.network=newcomer_plugin.QuittingBlock"],
            "constructor of newcomer_plugin.QuittingBlock failed (it called exit(no licence))",
        ),
    ],
)  # fmt: skip
def test_what_fails_in_plug_ins_is_told_in_one_line(capsys, arguments, said):
    Path("quits_plugin.py").write_text("raise SystemExit(0)\n")
    assert said in refused(capsys, 1, *arguments)


def test_an_interpolation_in_a_file_that_refers_to_itself(capsys):
    Path("own.yaml").write_text("model:\n  trace: ${model.trace}\n")
    assert "model.trace: an interpolation that refers to itself" in refused(capsys, 2, "--config", "own.yaml")


def test_wrong_variables_are_told_in_one_line(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CLAW_FIT__MODEL__GAMA", "0.5")
        line = refused(capsys, 2)
        assert "did you mean model.gamma?" in line and "CLAW_FIT__MODEL__GAMA" in line
    for name in ("CLAW_MODEL__GAMMA", "CLAW_FIT_MODEL_GAMMA"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0.5")
            assert name in refused(capsys, 2)


def test_a_folder_given_as_configuration(capsys):
    Path("folder").mkdir()
    assert "this is a folder" in refused(capsys, 1, "--config", "folder")


def test_fifteen_configurations_were_tried():
    """The number that the tests above start, so that it does not shrink unnoticed."""
    source = Path(__file__).read_text()
    starts = len(re.findall(r"= started\(", source)) + len(FILES) + len(re.findall(r"assert cli\.main\(\[", source)) - 1
    assert starts >= 15
