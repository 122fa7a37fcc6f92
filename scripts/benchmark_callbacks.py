"""The suite `callbacks` of benchmark.py: what diagnostics cost the learner, on rows of HandReachDense-v3's shape.

Runs of the learner alone, with batches that are ready: what is measured is not hidden behind waiting for experience.
Two figures: the time of runs with and without the callbacks, in turn, and the share of time inside their hooks, which
a busy machine disturbs less. EpisodeVideo takes no part: it limits its own share of wall time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from measuring import Bench, Row, Target
from torch.utils.data import DataLoader

import callbacks
from claw_lightning.hooks import UpdateCallback
from claw_lightning.loggers import RunLogger
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import FIRST, SWITCHED, RowLayout

OBS, ACTION, OPTIONS = 93, 20, 4
SPEC = EnvSpec("HandReachDense-v3", OBS, ACTION, [-1.0] * ACTION, [1.0] * ACTION, max_episode_steps=50)
#: As in conf/hand_reach_dense.yaml, where it matters for the time.
SETTINGS: dict[str, Any] = {
    "num_options": OPTIONS, "gamma": 0.95, "arrival": "sampled", "all_options": 0.5, "option_batch_size": 256,
    "option_delay": 4, "target_decision_rate": 0.1, "deliberation_form": "regularizer", "init": "torch",
}  # fmt: skip
BATCH, UPDATES, LOG_EVERY = 1024, 4, 20
DIAGNOSTICS = (
    callbacks.OptionDiagnostics, callbacks.QRange, callbacks.PipelineThroughput, callbacks.WorkerHealth,
)  # fmt: skip
#: Hooks in which they do something.
HOOKS = (
    "on_batch_sampled", "on_update_end", "metrics", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_end",
)  # fmt: skip

CALLBACK_ROWS = {
    "callbacks/run_time": Row(
        "callbacks", ("without", "with"), "time of a run with all diagnostics over one without", Target(1.02, False)
    ),
    "callbacks/share_of_hooks": Row(
        "hooks", ("run", "outside"), "time of a run over its time outside the diagnostics' hooks", Target(1.02, False)
    ),
}


def make_batch(layout: RowLayout, seed: int) -> ReplayBatch:
    """Noise in the shape of the task's rows."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((UPDATES, BATCH, layout.words), np.float32)
    flags = np.where(rng.random((UPDATES, BATCH)) < 0.1, SWITCHED, 0) | np.where(
        rng.random((UPDATES, BATCH)) < 0.02, FIRST | SWITCHED, 0
    )
    values = {
        "obs": rng.normal(size=(UPDATES, BATCH, OBS)),
        "action": rng.uniform(-1, 1, (UPDATES, BATCH, ACTION)),
        "reward": -rng.random((UPDATES, BATCH)),
        "option": rng.integers(0, OPTIONS, (UPDATES, BATCH)),
        "previous_option": np.where(flags & FIRST, -1, rng.integers(0, OPTIONS, (UPDATES, BATCH))),
        "flags": flags,
    }
    for name, value in values.items():
        layout.view(rows, name)[:] = value
    next_obs = rng.normal(size=(UPDATES, BATCH, OBS)).astype(np.float32)
    moments = batch_moments(rows[..., :OBS].reshape(-1, OBS))
    return ReplayBatch(torch.from_numpy(rows), torch.from_numpy(next_obs), layout, moments, env_steps=100)


class ReadyData(pl.LightningDataModule):
    """Hands out the same few batches again and again, as many as a run is to take."""

    collection_version, finished, learner_wait, batch_size = None, False, 0.0, BATCH

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.spec, self.steps = SPEC, steps
        self.memory = SimpleNamespace(layout=RowLayout(OBS, ACTION))
        self.batches = [make_batch(self.memory.layout, seed) for seed in range(4)]
        self.worker_listeners: list[Callable[[str, str, str], None]] = []

    def train_dataloader(self) -> DataLoader[ReplayBatch]:
        """One epoch is one run."""
        batches = [self.batches[i % len(self.batches)] for i in range(self.steps)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def publish(self, policy: Any, version: int) -> None:
        """Nobody follows."""

    def log_metrics(self) -> dict[str, float]:
        """Nothing to add."""
        return {}

    def supervise(self) -> None:
        """Nobody to look after."""

    def processes(self) -> dict[str, int]:
        """None but the learner."""
        return {}


def run_learner(steps: int, folder: str, extra: list[pl.Callback]) -> float:
    """Seconds of ``steps`` training steps, without the building of the run."""
    torch.manual_seed(0)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu", logger=RunLogger(folder, name=None), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, log_every_n_steps=LOG_EVERY, max_epochs=1,
        callbacks=[*extra, clock],
    )  # fmt: skip
    trainer.fit(OptionCritic(**SETTINGS), datamodule=ReadyData(steps))
    return clock.seconds


class Clock(pl.Callback):
    """Times the training alone."""

    seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start."""
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop."""
        self.seconds += time.perf_counter()


def timed(callback: UpdateCallback, spent: dict[str, float]) -> UpdateCallback:
    """A callback whose hooks add their time to ``spent``, under its class's name."""
    name = type(callback).__name__

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return measured

    for each in HOOKS:
        setattr(callback, each, wrap(getattr(callback, each)))
    return callback


def run_callbacks(bench: Bench) -> None:
    """Both groups."""
    steps, rounds = bench.args.steps, bench.args.rounds
    with tempfile.TemporaryDirectory() as folder:
        rates: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(rounds + 1):  # the first warms up
            for name, values in rates.items():
                extra: list[pl.Callback] = [cls() for cls in DIAGNOSTICS] if name == "with" else []
                seconds = run_learner(steps, folder, extra)
                if number > 0:
                    values.append(steps * UPDATES / seconds)
        bench.keep_rates("callbacks", rates)
        shares: dict[str, list[float]] = defaultdict(list)
        figures: dict[str, list[float]] = {"run": [], "outside": []}
        for _ in range(rounds):
            spent: dict[str, float] = defaultdict(float)
            seconds = run_learner(steps, folder, [timed(cls(), spent) for cls in DIAGNOSTICS])
            figures["run"].append(seconds)
            figures["outside"].append(seconds - sum(spent.values()))
            for name, value in spent.items():
                shares[name].append(100.0 * value / seconds)
        bench.keep_figures("hooks", figures)
    for name, values in shares.items():
        bench.note(f"{name}: {np.median(values):.2f} % of the run's time inside its hooks (up to {max(values):.2f} %)")


def add_callback_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``callbacks``."""
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run, four updates each (200)")


def check_callback_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them."""
    least = 2 * LOG_EVERY
    return f"--steps must be at least {least}: two logging steps" if args.steps < least else None
