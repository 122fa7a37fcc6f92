"""Plug-ins as README.md, docs/plugins.md and the pages it leads to show them, run through the command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from callbacks import OrderlyStop
from claw_lightning import cli
from claw_lightning.errors import ConfigError
from claw_lightning.trainer import make_trainer
from tests.runs import FAST, ROOT, make_module, run

BLOCK = re.compile(r"```(?:python|yaml)\n# (\S+\.(?:py|yaml))\n(.*?)```", re.S)

FACTORY = """
import json
from lightning.pytorch import Callback

class Installed(Callback):
    def on_fit_end(self, trainer, module):
        with open("callbacks.json", "w") as file:
            json.dump([type(each).__name__ for each in trainer.callbacks], file)

def make_callbacks():
    return [Installed()]
"""


def write_examples(page, folder):
    """Code blocks whose first line names a file."""
    found = dict(BLOCK.findall((ROOT / page).read_text()))
    for name, text in found.items():
        (folder / name).write_text(text)
    return sorted(found)


@pytest.mark.slow
def test_every_kind_of_plug_in_of_the_page_in_one_run(tmp_path):
    """Beside the configuration, not in the working directory, with workers; and a callback by the entry point."""
    beside = tmp_path / "mine"
    beside.mkdir()
    pages = ("docs/plugins.md", "docs/new_callback.md", "docs/new_simulator.md")
    names = {name for page in pages for name in write_examples(page, beside)}
    assert names == {
        "blocks.py", "curiosity.py", "every_epoch.py", "line_world.py", "plugins.yaml", "samplers.py", "spinner.py",
        "td_spread.py", "text_logger.py",
    }  # fmt: skip
    (tmp_path / "third_party.py").write_text(FACTORY)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightning.pytorch.callbacks_factory]\nthird_party = third_party:make_callbacks\n"
    )
    overlapped = ["--data.mode=overlapped", "--data.envs_per_worker=4"]
    status, out, err = run(tmp_path, *FAST, "--config", "mine/plugins.yaml", *overlapped, timeout=240)
    assert status == 0, err
    curves = (tmp_path / "curves.txt").read_text()
    assert {"critic/spread", "reward/intrinsic", "val/return"} <= set(curves.split())
    assert re.search(r"^\d+ environment steps, \d+ updates$", out, re.M)
    lengths = re.findall(r" val/length (\S+)", curves)
    assert lengths and set(lengths) == {"10"}
    used = json.loads((tmp_path / "callbacks.json").read_text())
    assert used.count("Installed") == 1 and {"EveryEpoch", "TdSpread", "Effort", "TargetUpdate"} <= set(used)
    for shipped in ("OrderlyStop", "RunCheckpoint", "WorkerHealth", "TargetUpdate", "PolicyPublisher"):
        assert used.count(shipped) == 1, shipped
    saved = (tmp_path / "runs/text/curves/config.yaml").read_text()
    assert "class_path: blocks.Residual" in saved and "width: 1.5" in saved


def test_the_diagnostic_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "diagnostics", raising=False)
    assert write_examples("README.md", tmp_path) == ["diagnostics.py"]
    assert len((tmp_path / "diagnostics.py").read_text().strip().splitlines()) <= 15
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"]
    small = ["--data.max_env_steps=200", "--trainer.limit_val_batches=0"]
    command = [*FAST, *logger, *small, "--trainer.callbacks+=diagnostics.ActionNorm"]
    assert cli.main(command) == 0, Path("error.log").read_text()
    (metrics,) = Path("csv").rglob("metrics.csv")
    assert "action/norm" in metrics.read_text().splitlines()[0]


@pytest.mark.slow
def test_a_training_from_python(tmp_path):
    """The page's script as it stands: two runs, the second of which goes on from the first."""
    assert write_examples("docs/python.md", tmp_path) == ["train.py"]
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "400 steps, val/return -" in done.stdout and "600 steps in all" in done.stdout
    for number in (0, 1):
        assert (tmp_path / f"runs/version_{number}/checkpoints/last.ckpt").is_file()
        assert (tmp_path / f"runs/version_{number}/logs/learner.log").is_file()


def test_what_is_forgotten_in_python_is_told(elsewhere):
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    with pytest.raises(ConfigError, match="OptionCritic needs a ReplayDataModule"):
        make_trainer(**settings).fit(make_module(), [1])
    with pytest.raises(ConfigError, match="fsdp is not supported"):
        make_trainer(strategy="fsdp", **settings)
    mine = OrderlyStop()
    trainer = make_trainer(callbacks=mine, **settings)
    names = [type(each).__name__ for each in trainer.callbacks]
    assert {"WorkerHealth", "OptionDiagnostics"} <= set(names) and names.count("OrderlyStop") == 1
    assert mine in trainer.callbacks and "RunCheckpoint" not in names
