"""docs/new_simulator.md: its example is run through the command; docs/simulators.md: its table knows every adapter."""

import re
from pathlib import Path

import numpy as np
import pytest

from claw_lightning import cli
from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout import envs
from tests.builders import collector_of
from tests.runs import FAST, ROOT

PAGE = (ROOT / "docs" / "simulators.md").read_text()
NEW = (ROOT / "docs" / "new_simulator.md").read_text()
EXAMPLE = re.search(r"```python\n# spinner\.py\n(.*?)```", NEW, re.S).group(1)


@pytest.fixture
def spinner():
    content = {}
    exec(compile(EXAMPLE, "spinner.py", "exec"), content)
    return content["Spinner"]


def test_the_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "spinner", raising=False)
    Path("spinner.py").write_text(EXAMPLE)
    task = ["--data.env.class_path=spinner.Spinner", "--data.env.init_args.task=spin"]
    small = ["--data.max_env_steps=200", "--trainer.limit_val_batches=0"]
    assert cli.main([*FAST, *task, *small]) == 0, Path("error.log").read_text()


def test_what_is_learned_from_the_example_is_true(spinner):
    """One step of the wheel leads from each row to its next observation, at the ends of episodes too."""
    collector, ring, _ = collector_of(spinner(num_envs=4))
    for _ in range(60):
        collector.step()
    batch = ReplayMemory([ring], 0).sample(1, 2000, 1)
    obs, following = batch.obs[0].numpy(), batch.next_obs[0].numpy()
    reward, ended = batch.reward[0].numpy(), batch.truncated[0].numpy()
    assert ended.any()
    np.testing.assert_allclose(reward, -np.abs(following[:, 0]), atol=1e-6)
    assert np.abs(following - obs).max() < 0.2 * (1.0 + 20 * 0.2) + 1e-6


def test_the_example_refuses_other_tasks(spinner):
    with pytest.raises(envs.EnvError, match="Spinner has the task"):
        spinner(task="roll")


def test_every_adapter_has_its_line():
    adapters = {name for name in envs.__all__ if name.endswith("Env") and name != "VectorEnv"}
    rows = " ".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert adapters <= set(re.findall(r"`(\w+Env)`", rows))
