"""Every shipped configuration runs two training steps through the real command, lock-step and small."""

from pathlib import Path

import pytest
import torch

from claw_lightning import cli, configs

SMALL = [
    "--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--trainer.logger=false", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.mode=lockstep",
    "--data.num_workers=1", "--data.envs_per_worker=2", "--data.capacity=400", "--data.batch_size=8",
    "--data.updates_per_step=2", "--data.samples_per_insert=8", "--data.warmup_steps=20", "--data.max_env_steps=0",
    "--data.learner_threads=1", "--model.hidden_sizes=[8,8]", "--model.option_hidden_sizes=[8]",
]  # fmt: skip


@pytest.mark.parametrize("name", configs.list_configs())
def test_configuration_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    assert cli.main(["fit", "--config", name, *SMALL]) == 0, Path("error.log").read_text()
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (stored["global_step"], stored["claw"]["updates"]) == (2, 4)
