"""Every shipped configuration runs two training steps through the real command, small, lock-step where it can."""

import sys
from pathlib import Path

import pytest
import torch

from claw_lightning import cli, configs
from tests.pythons import python_38
from tests.rollout.envs.isaac import ANY_PYTHON, STAND_IN, yaml_folder

SMALL = [
    "--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--trainer.logger=false", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.mode=lockstep",
    "--data.num_workers=1", "--data.envs_per_worker=2", "--data.capacity=400", "--data.batch_size=8",
    "--data.updates_per_step=2", "--data.samples_per_insert=8", "--data.warmup_steps=20", "--data.max_env_steps=0",
    "--data.learner_threads=1", "--model.hidden_sizes=[8,8]", "--model.option_hidden_sizes=[8]",
]  # fmt: skip
#: Isaac Gym must be imported before torch, which only a worker's process can do.
IN_A_WORKER = [name for name in configs.list_configs() if name.startswith("isaacgym_")]


def fit(folder, *arguments):
    """The command's checkpoint."""
    assert cli.main(["fit", *arguments]) == 0, Path("error.log").read_text()
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    return tmp_path


@pytest.mark.parametrize("name", [name for name in configs.list_configs() if name not in IN_A_WORKER])
def test_configuration_runs(name, here):
    stored = fit(here, "--config", name, *SMALL)
    assert (stored["global_step"], stored["claw"]["updates"]) == (2, 4)


@pytest.mark.parametrize("name", IN_A_WORKER)
def test_configuration_of_isaac_gym_runs(name, here, monkeypatch):
    """With the stand-in, whose files a worker finds as a user's own: beside a configuration.

    One of them under Python 3.8, where there is one, the other under this one.
    """
    python = (python_38()[0] if "shadow" in name else None) or sys.executable
    monkeypatch.setenv(ANY_PYTHON, "1")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(here / "extensions"))
    configs.IMPORT_FOLDERS.extend([str(STAND_IN), yaml_folder(here)])
    stored = fit(here, "--config", name, *SMALL, "--data.mode=overlapped", "--data.worker_device=cpu",
                 f"--data.worker_python={python}")  # fmt: skip
    assert (stored["global_step"], stored["claw"]["updates"]) == (2, 4)
    own = "python %d.%d" % sys.version_info[:2]
    assert ("python 3.8" if python != sys.executable else own) in (here / "logs" / "worker_0.log").read_text()


def test_configurations_of_isaac_gym_are_known():
    assert IN_A_WORKER == ["isaacgym_allegro_hand.yaml", "isaacgym_shadow_hand.yaml"]
