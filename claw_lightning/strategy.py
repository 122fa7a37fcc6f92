"""Strategies: Lightning's DDP without its reducer, and what is said of the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from claw_lightning import ranks
from claw_lightning.errors import ConfigError

#: Names that the command understands; the reducer's settings mean nothing here, as there is none.
NAMES = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
#: Seconds that other ranks of this machine may take to end after this one.
PATIENCE = 30.0
REASONS = {
    "fsdp": "it shards the parameters of one network, and here several small ones are stepped one by one",
    "deepspeed": "it drives the optimisers itself, and here each network has its own",
    "model_parallel": "it splits one network over devices, and here networks fit on each",
    "ddp_spawn": "it hands the whole run to other processes as a pickle, simulators and shared memory included",
    "ddp_fork": "it forks a process that has threads, shared memory and perhaps a GPU",
    "ddp_notebook": "it forks a process that has threads, shared memory and perhaps a GPU",
    "dp": "Lightning has given it up",
}


def refuse(name: str) -> None:
    """Refuse a strategy that cannot train this module.

    Raises:
        ConfigError: one line with the name, the reason and the cure.
    """
    if name in ("auto", *NAMES):
        return
    for beginning in sorted(REASONS, key=len, reverse=True):
        if name.startswith(beginning):
            raise ConfigError(f"trainer.strategy {name} is not supported: {REASONS[beginning]}; use ddp")


def check_strategy(strategy: Any) -> None:
    """Refuse a strategy that was made by the user's own code; see :func:`refuse`."""
    if isinstance(strategy, DDPStrategy):
        method = getattr(strategy, "_start_method", "popen")
        if method != "popen":
            refuse("ddp_spawn" if "spawn" in method else "ddp_fork")
        return
    if isinstance(strategy, SingleDeviceStrategy):
        return
    kind = type(strategy).__name__
    names = {"FSDPStrategy": "fsdp", "DeepSpeedStrategy": "deepspeed", "ModelParallelStrategy": "model_parallel"}
    refuse(names.get(kind, ""))
    if getattr(strategy, "lightning_module", None) is not None and strategy.lightning_module.trainer.world_size > 1:
        raise ConfigError(f"trainer.strategy {kind} is not supported with several ranks; use ddp")


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this machine, as Lightning does, and sees that none of them outlives the run.

    Lightning's own observer kills all ranks five seconds after one has failed, in the middle of what they are writing.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run the function on this rank, with the others beside it."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[ranks.PARENT_VARIABLE] = str(os.getpid())
            self._call_children_scripts()
            first = environment.node_rank() * self.num_processes
            ranks.children.update({first + index: process for index, process in enumerate(self.procs, start=1)})
            atexit.register(self.wait)
        ranks.watch_family(environment.node_rank() * self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException:
            if not ranks.has_met(trainer):  # they would wait for this one at the meeting point
                self._end(signal.SIGTERM)
            raise

    def wait(self) -> None:
        """Wait for the other ranks of this machine to end; kill those that do not."""
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        for process in self.procs:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    process.send_signal(number)


class RankStrategy(DDPStrategy):
    """Lightning's DDP in everything but gradients, which :meth:`Learner.descend_together` averages by itself.

    The reducer of DistributedDataParallel expects one backward pass per step. Without the wrapper nothing hooks into
    backward passes, and parameters and buffers are made equal once, at the start.
    """

    def _configure_launcher(self) -> None:
        if self._start_method != "popen":
            super()._configure_launcher()
            return
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def configure_ddp(self) -> None:
        """Rank 0's parameters and buffers for all."""
        assert self.model is not None
        _sync_module_states(self.model)


def register() -> None:
    """Let ``ddp``, and what Lightning itself chooses for several devices, mean :class:`RankStrategy`."""
    for name in NAMES:
        StrategyRegistry.register(
            name, RankStrategy, description="DDP with one all-reduce per backward pass", override=True,
            start_method="popen",
        )  # fmt: skip
