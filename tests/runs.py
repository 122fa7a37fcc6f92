"""Short runs for tests: a fake data module without processes, real lock-step runs, and the command in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import lightning.pytorch as pl
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import RowLayout

ROOT = Path(__file__).resolve().parents[1]
SPEC = EnvSpec("fake", obs_size=3, action_size=2, action_low=[-1.0, -1.0], action_high=[1.0, 1.0])
TINY = {"hidden_sizes": [16], "option_hidden_sizes": [8]}
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
}  # fmt: skip


class IdentityTask(gymnasium.Env):
    """One step; the best action is the observation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._obs = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self._obs, {}

    def step(self, action):
        return self._obs, -float((action[0] - self._obs[0]) ** 2), True, False, {}


if "ClawIdentity-v0" not in gymnasium.registry:
    gymnasium.register("ClawIdentity-v0", entry_point=IdentityTask)


def make_batch(updates: int = 2, size: int = 8, num_options: int = 4, seed: int = 0, **fields: Any) -> ReplayBatch:
    """Random batch of the task SPEC; ``fields`` replaces fields of the rows by given arrays."""
    rng = np.random.default_rng(seed)
    layout = RowLayout(SPEC.obs_size, SPEC.action_size)
    rows = np.zeros((updates, size, layout.words), np.float32)
    values = {
        "obs": rng.normal(size=(updates, size, SPEC.obs_size)),
        "action": rng.uniform(-1, 1, (updates, size, SPEC.action_size)),
        "reward": rng.normal(size=(updates, size)),
        "option": rng.integers(0, num_options, (updates, size)),
        **fields,
    }
    for name, value in values.items():
        layout.view(rows, name)[:] = value
    next_obs = rng.normal(size=(updates, size, SPEC.obs_size)).astype(np.float32)
    moments = batch_moments(rows[..., : SPEC.obs_size].reshape(-1, SPEC.obs_size))
    return ReplayBatch(torch.from_numpy(rows), torch.from_numpy(next_obs), layout, moments, env_steps=100)


class FakeData(pl.LightningDataModule):
    """Hands out ready batches; publications are kept in ``published`` as (version, exploration)."""

    def __init__(self, batches: list[ReplayBatch]) -> None:
        super().__init__()
        self.batches, self.spec, self.finished = batches, SPEC, False
        self.collection_version: int | None = None
        self.published: list[tuple[int, list[float]]] = []

    def train_dataloader(self) -> DataLoader[ReplayBatch]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def publish(self, policy: Any, version: int) -> None:
        self.published.append((version, policy.exploration.tolist()))

    def log_metrics(self) -> dict[str, float]:
        return {}


def fit_fake(
    module: OptionCritic, batches: list[ReplayBatch], callbacks: Any = (), data: FakeData | None = None, **trainer: Any
) -> tuple[pl.Trainer, FakeData]:
    """One pass over the batches."""
    data = data or FakeData(batches)
    made = pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": list(callbacks), **trainer})
    made.fit(module, datamodule=data)
    return made, data


def make_module(seed: int = 0, build: bool = False, **settings: Any) -> OptionCritic:
    """Tiny OptionCritic, with the networks of SPEC if ``build``."""
    torch.manual_seed(seed)
    module = OptionCritic(**{**TINY, **settings})
    if build:
        module.build(SPEC)
    return module


def make_data(**settings: Any) -> ReplayDataModule:
    """Pendulum in lock-step, 300 steps."""
    task = settings.pop("task", "Pendulum-v1")
    defaults: dict[str, Any] = {
        "env": EnvConfig("GymnasiumEnv", {"task": task}), "mode": "lockstep", "envs_per_worker": 4, "capacity": 2000,
        "batch_size": 16, "updates_per_step": 2, "samples_per_insert": 8, "warmup_steps": 100, "max_env_steps": 300,
        "eval_episodes": 2, "eval_envs": 2, "learner_threads": 1,
    }  # fmt: skip
    return ReplayDataModule(**{**defaults, **settings})


def fit_lockstep(
    root: Path,
    seed: int = 0,
    callbacks: Any = (),
    model: Any = None,
    data: Any = None,
    ckpt: Any = None,
    **trainer: Any,
) -> tuple[pl.Trainer, OptionCritic, ReplayDataModule]:
    """A whole run in this process."""
    module, made = make_module(seed, **(model or {})), make_data(seed=seed, **(data or {}))
    settings = {**QUIET, "max_epochs": -1, "limit_train_batches": 10, "check_val_every_n_epoch": 1000}
    runner = pl.Trainer(default_root_dir=root, callbacks=list(callbacks), **{**settings, **trainer})
    runner.fit(module, datamodule=made, ckpt_path=ckpt)
    return runner, module, made


# -- the command in a process of its own --------------------------------------------------------------------------

FAST = [
    "fit", "--config", str(ROOT / "conf/debug/fast.yaml"), "--trainer.enable_progress_bar=false",
]  # fmt: skip
COMMAND = [sys.executable, "-m", "claw_lightning"]
ENDLESS = [*FAST, "--data.mode=overlapped", "--data.max_env_steps=0", "--data.capacity=20000"]


def start(folder: Path, *arguments: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
    """``python -m claw_lightning`` in ``folder``; its output goes to ``out.txt`` and ``err.txt`` there."""
    env = dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1", COLUMNS="80")
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        return subprocess.Popen([*command, *arguments], cwd=folder, env=env, stdout=out, stderr=err, text=True)


def run(folder: Path, *arguments: str, timeout: float = 180.0) -> tuple[int, str, str]:
    """Run the command to its end: status, standard output and error."""
    process = start(folder, *arguments)
    try:
        status = process.wait(timeout)
    finally:
        process.kill()
    return status, (folder / "out.txt").read_text(), (folder / "err.txt").read_text()


def wait_until(condition: Any, seconds: float, what: str) -> None:
    """Poll; fails with ``what`` when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes that a running command has started."""
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def learning(folder: Path) -> bool:
    """Whether the run in ``folder`` has begun to learn: its first validation has left a checkpoint."""
    return any(folder.glob("runs/*/checkpoints/last.ckpt"))


def checkpoint(folder: Path) -> dict[str, Any]:
    """The newest run's last checkpoint, read as the command reads it."""
    paths = sorted(folder.glob("runs/version_*/checkpoints/last.ckpt"))
    return torch.load(paths[-1], weights_only=True)


def tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, in order."""
    yield from module.state_dict().items()
