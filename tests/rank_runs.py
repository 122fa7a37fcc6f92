"""Runs of several ranks for tests: processes forked from one that has imported everything, and what they do.

Each is started as a node of its own, by the variables with which Lightning is started on several machines.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from callbacks import OrderlyStop, RunCheckpoint
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.strategy import RankStrategy
from tests.runs import QUIET, FakeData, make_batch, make_data, make_module, tensors

PATIENCE = 240.0  # seconds after which ranks are killed; never part of what is judged
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.rank_runs"])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Group:
    """Processes of all ranks; ``results`` holds what each returned, or its error as text."""

    def __init__(self, function: Any, *args: Any, size: int = 2) -> None:
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, args=(theirs, function, rank, size, port, args))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def join(self) -> list[Any]:
        """Wait for all; what they returned, "Kind: text" of an error, None of one that was killed."""
        deadline, found = time.monotonic() + PATIENCE, []
        for pipe in self.pipes:
            try:
                is_there = pipe.poll(max(0.0, deadline - time.monotonic()))
                found.append(pickle.loads(pipe.recv_bytes()) if is_there else "hangs")
            except EOFError:
                found.append(None)
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        return found


def run_ranks(function: Any, *args: Any, size: int = 2) -> list[Any]:
    """``function(rank, size, *args)`` on every rank; results in the order of ranks."""
    return Group(function, *args, size=size).join()


def _child(pipe: Any, function: Any, rank: int, size: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    if size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK=str(rank), LOCAL_RANK="0",
                          WORLD_SIZE=str(size))  # fmt: skip
    try:
        pipe.send_bytes(pickle.dumps(function(rank, size, *args)))
    except BaseException as error:
        if os.environ.get("CLAW_TEST_TRACES"):
            traceback.print_exc()
        pipe.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # past the handlers of a process that was forked in the middle of another


def trainer_of(size: int, **settings: Any) -> pl.Trainer:
    """A quiet trainer of so many nodes of one device."""
    several = {"num_nodes": size, "devices": 1, "strategy": RankStrategy()} if size > 1 else {}
    return pl.Trainer(**{**QUIET, "max_epochs": -1, **several, **settings})


# -- what ranks do ----------------------------------------------------------------------------------------------------


def noise_of_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of normal noise: the same for the same row, whichever batch it is in."""
    return torch.sin(1e3 * x.detach().double().sum(-1, keepdim=True) + torch.arange(x.shape[-1])).to(x.dtype)


def gradients(rank: int, size: int, batch: dict[str, Any], settings: dict[str, Any], strategy: str = "") -> Any:
    """Gradients of all networks after one update of this rank's part of a batch, by parameter."""
    torch.randn_like = noise_of_rows
    whole = make_batch(updates=1, **batch)
    length = whole.rows.shape[1] // size
    part = slice(rank * length, (rank + 1) * length)
    whole.rows, whole.next_obs = whole.rows[:, part], whole.next_obs[:, part]
    lrs = ("critic", "actor", "option_policy", "termination", "value", "temperature")
    common = {f"{name}_lr": 1e-12 for name in lrs} | {"policy_delay": 1, "option_delay": 1}
    module = make_module(normalize_observations=False, **common, **settings)
    several = {"strategy": strategy} if strategy and size > 1 else {}
    trainer_of(size, max_epochs=1, **several).fit(module, datamodule=FakeData([whole]))
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {**found, "scale": getattr(module, "advantage_scale", torch.zeros(()))}


def lockstep(
    rank: int, size: int, root: Path, data: dict[str, Any], model: dict[str, Any], ckpt: str | None = None,
    callbacks: Any = (), **trainer: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run in lock-step with checkpoints: tensors, counters and what this rank's replay holds."""
    module, made = make_module(seed=rank, **model), make_data(seed=0, **data)  # other parameters on each rank
    limits = {"enable_checkpointing": True, "limit_train_batches": 10, "check_val_every_n_epoch": 4, **trainer}
    callbacks = [OrderlyStop(), RunCheckpoint(dirpath=str(root / "checkpoints")), *callbacks]
    runner = trainer_of(size, default_root_dir=root, callbacks=callbacks, **limits)
    runner.fit(module, datamodule=made, ckpt_path=ckpt)
    memory = made.memory
    assert memory is not None
    rings = memory.written
    return {
        "tensors": dict(tensors(module)),
        "env_steps": (module.env_steps, made.env_steps, made.limiter.inserted),
        "updates": module.updates,
        "sampled": made.limiter.sampled,
        "val": float(runner.callback_metrics.get("val/return", float("nan"))),
        "metrics": module.latest_metrics,
        "obs": torch.from_numpy(rings[0].layout.view(rings[0].rows, "obs")[: rings[0].head].copy()),
        "stored": memory.stored,
        "moments": float(module.moments.count),
        "received": callbacks[0].received,
    }


class Spoiler(UpdateCallback):
    """On rank 1, after a few updates: changes a parameter there alone, or fails."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_update_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_rank == 1 and module.updates == 5 and self.kind == "drift":
            next(module.policy.actor.parameters()).data[0] += 1e-3
        if trainer.global_rank == 1 and module.updates == 5 and self.kind == "error":
            raise ConfigError("model.nonsense is 7")


def wrong(rank: int, size: int, root: Path, kind: str) -> Any:
    """A run in which something goes wrong on rank 1 alone."""
    data = {"batch_size": 24 if kind == "settings" and rank == 1 else 16}
    return lockstep(rank, size, root, data, {"num_options": 1}, callbacks=[Spoiler(kind)])


def wait_for(path: Path, group: Group) -> None:
    """Until a file is there; fails if a rank ends before."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        assert all(process.is_alive() for process in group.processes), group.join()
        time.sleep(0.05)
