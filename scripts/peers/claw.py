"""Arms of this product: the real ``fit`` with live workers, and workers that collect without a learner."""

from __future__ import annotations

import os
import select
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from serve import cores, cpu_seconds

from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.rate import RateLimiter
from claw_lightning.trainer import make_trainer

#: Of peers too: TD3 as its paper has it, and what the recipe of compare_sb3.py shares.
MODEL = {
    "num_options": 1,
    "actor": "deterministic",
    "gamma": 0.95,
    "tau": 0.02,
    "target_delay": 2,
    "policy_delay": 2,
    "hidden_sizes": [256, 256],
    "init": "torch",
    "normalize_observations": False,
    "critic_lr": 1e-3,
    "actor_lr": 1e-3,
}
SAC = {"actor": "gaussian", "target_delay": 1, "policy_delay": 1, "tau": 0.005}
DATA = {"num_workers": 1, "envs_per_worker": 16, "capacity": 1_000_000, "updates_per_step": 8, "learner_threads": 1}
FILLED = "benchmark-stand-in"


def env_config(settings: dict[str, Any]) -> EnvConfig:
    """The simulator: a task of EnvPool, or the stand-in."""
    if settings.get("task"):
        return EnvConfig(settings.get("adapter", "EnvPoolEnv"), {"task": settings["task"]})
    rows = settings["rows"]
    # Workers import it by name.
    return EnvConfig("stand_in.StandIn", {"task": FILLED, "fill": rows, "pause": settings.get("pause", 7e-4)})


def make_run(settings: dict[str, Any], callbacks: list[pl.Callback]) -> tuple[OptionCritic, ReplayDataModule, Any]:
    """Module, data module and trainer as the command makes them.

    Settings: ``model`` and ``data`` (beyond the defaults above), ``sac``, ``precision``, ``task`` or ``rows``,
    ``accelerator``.
    """
    if not settings.get("task"):
        folder = stand_in_folder()
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), folder])  # for workers
        sys.path.append(folder)
    pl.seed_everything(settings.get("seed", 0), verbose=False)
    model = {**MODEL, **(SAC if settings.get("sac") else {}), **settings.get("model", {})}
    if isinstance(model.get("exploration"), float):
        noise = model["exploration"]
        model["exploration"] = Exploration(kind="gaussian", scale_min=noise, scale_max=noise)
    module = OptionCritic(**model)
    data = ReplayDataModule(
        env=env_config(settings),
        **{**DATA, "warmup_steps": settings.get("rows", 1000), "batch_size": settings.get("batch", 256),
           "samples_per_insert": 256, **settings.get("data", {})},
    )  # fmt: skip
    os.chdir(tempfile.mkdtemp(prefix="claw-benchmark-run-"))
    trainer = make_trainer(
        accelerator=settings.get("accelerator", "cpu"), devices=1, precision=settings.get("precision", "32-true"),
        callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_train_batches=500, check_val_every_n_epoch=1_000_000, log_every_n_steps=20,
    )  # fmt: skip
    return module, data, trainer


def stand_in_folder() -> str:
    """A folder of that file alone: the one where it lies holds files that are named like packages."""
    folder = Path(tempfile.mkdtemp(prefix="claw-benchmark-env-"))
    (folder / "stand_in.py").symlink_to(Path(__file__).parent / "stand_in.py")
    return str(folder)


def pin(pid: int, places: list[int]) -> None:
    """All threads of a process, on cores at these places among ours."""
    wanted = cores(places)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except OSError:  # has ended meanwhile
            continue


def pin_workers(data: ReplayDataModule, settings: dict[str, Any]) -> None:
    """Those that run now; one that is restarted has the cores of the learner."""
    if "worker_cores" in settings:
        for pid in data.processes().values():
            pin(pid, settings["worker_cores"])


def worker_cpu(data: ReplayDataModule) -> float:
    """Seconds that the workers were computing."""
    import psutil

    total = 0.0
    for pid in data.processes().values():
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


class Fit(UpdateCallback):
    """The command's ``fit`` that stops between training steps until it is asked to go on.

    Settings beyond those of :func:`make_run`: ``learner_cores`` and ``worker_cores``; ``count``: ``updates``,
    ``samples`` or ``env_steps`` (those that were both taken and paid for by samples).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.is_ready = False

    def drive(self, channel: Any) -> None:
        """Answer requests from within the run."""
        self.channel = channel
        module, data, trainer = make_run(self.settings, [self])
        trainer.fit(module, datamodule=data)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a training step: is the work done that was asked for?"""
        data: ReplayDataModule = trainer.datamodule
        if not self.is_ready:
            if batch_idx < self.settings.get("warm_steps", 3):
                return
            self.is_ready = True
            self._pin(data)
            self.channel.ready(torch.get_num_threads())
            self._next(trainer, pl_module)
            return
        elapsed = time.perf_counter() - self.started
        done = self._count(pl_module, data) - self.count
        asked = self.request
        if not (elapsed >= asked["seconds"] if asked.get("count") is None else done >= asked["count"]):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - self.started
        self.channel.answer(count=done, seconds=elapsed, cpu=cpu_seconds() - self.cpu, workers_cpu=worker_cpu(data))
        self._next(trainer, pl_module)

    def _pin(self, data: ReplayDataModule) -> None:
        if "learner_cores" in self.settings:
            pin(os.getpid(), self.settings["learner_cores"])
        pin_workers(data, self.settings)

    def _next(self, trainer: Any, module: Any) -> None:
        data: ReplayDataModule = trainer.datamodule
        while True:
            # The workers run ahead as far as the rate limiter lets them, and wait; they are looked after meanwhile.
            while not select.select([self.channel.source], [], [], 1.0)[0]:
                data.supervise()
            request = self.channel.receive()
            if request is None:
                trainer.should_stop = True
                trainer.check_val_every_n_epoch = None
                data.stop_requested = lambda: True
                raise KeyboardInterrupt
            if request["do"] == "pids":
                self.channel.answer(learner=os.getpid(), workers=list(data.processes().values()))
                continue
            if request["do"] == "evaluate":
                self.channel.answer(**{"return": self._evaluate(module, request["episodes"])})
                continue
            if request["do"] == "publish":
                self.channel.answer(**time_publish(trainer, module, request["seconds"]))
                continue
            break
        self.request = request
        self.count, self.cpu = self._count(module, data), cpu_seconds()
        self.started = time.perf_counter()

    def _evaluate(self, module: OptionCritic, episodes: int) -> float:
        """Mean return of noise-free episodes, played in this process."""
        from serve import compare_sb3

        compare = compare_sb3()
        agent = module.agent(num_lanes=compare.EVAL_LANES, seed=compare.EVAL_SEED)
        return compare.play(agent, episodes, self.settings["task"])["return"]

    def _count(self, module: OptionCritic, data: ReplayDataModule) -> float:
        unit = self.settings.get("count", "updates")
        if unit == "updates":
            return module.updates
        samples = module.updates * data.batch_size
        if unit == "samples":
            return samples
        assert data.memory is not None
        return min(data.memory.inserted - data.limiter.warmup, samples / data.samples_per_insert)


def time_publish(trainer: Any, module: Any, seconds: float) -> dict[str, float]:
    """Seconds per call: the publisher's whole call, the mailbox's part, and a copy of as many bytes."""
    from callbacks import PolicyPublisher

    publisher = next(each for each in trainer.callbacks if isinstance(each, PolicyPublisher))
    values = module.policy.flatten()
    target = np.empty_like(values)
    mailbox = trainer.datamodule.mailbox(module.policy)

    def whole() -> None:
        publisher._last = module.updates - publisher.every
        publisher.on_update_end(trainer, module)

    calls = {
        "publisher": whole,
        "mailbox": lambda: mailbox.publish(values, module.updates),
        "memcpy": lambda: np.copyto(target, values),
    }
    found = {}
    for name, call in calls.items():
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds / len(calls):
            for _ in range(8):
                call()
            done += 8
        found[name] = (time.perf_counter() - started) / done
    return found


class Closed(RateLimiter):
    """Lets workers insert only while it is open, and the learner never sample."""

    is_open = True

    @property
    def can_sample(self) -> bool:
        """Never."""
        return False

    @property
    def inserts_allowed(self) -> int:
        """As far as the workers can see, or not a step further."""
        return self.inserted + 1_000_000 if self.is_open else self.inserted


class Collect(pl.Callback):
    """The command's ``fit`` whose learner never gets a batch: workers collect with the policy as it was built.

    Settings beyond those of :func:`make_run`: ``worker_cores``, one list for all.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def drive(self, channel: Any) -> None:
        """Answer requests from a thread beside the run."""
        settings = {**self.settings, "data": {**self.settings.get("data", {}), "warmup_steps": 0}}
        module, data, trainer = make_run(settings, [self])
        module.updates = 1  # the policy acts: before the first update actions would be drawn uniformly
        limiter = data.limiter
        data.limiter = Closed(1.0, 0, 1, data.lanes)
        assert limiter.request > 0
        thread = threading.Thread(target=self._answer, args=(channel, data), daemon=True)
        thread.start()
        trainer.fit(module, datamodule=data)

    def _answer(self, channel: Any, data: Any) -> None:
        limiter = data.limiter
        while data.memory is None or data.memory.inserted < 4 * data.lanes:
            time.sleep(0.01)
        limiter.is_open = False
        pin_workers(data, self.settings)
        channel.ready(torch.get_num_threads())
        while (request := channel.receive()) is not None:
            before, cpu = data.memory.inserted, cpu_seconds() + worker_cpu(data)
            started = time.perf_counter()
            limiter.is_open = True
            if request.get("count") is None:
                time.sleep(request["seconds"])
            else:
                while data.memory.inserted - before < request["count"]:
                    time.sleep(0.001)
            count, elapsed = data.memory.inserted - before, time.perf_counter() - started
            limiter.is_open = False
            channel.answer(count=count, seconds=elapsed, cpu=cpu_seconds() + worker_cpu(data) - cpu)
            time.sleep(0.05)  # a step that had begun
        data.stop_requested = lambda: True


ARMS = {"fit": Fit, "collect": Collect}
