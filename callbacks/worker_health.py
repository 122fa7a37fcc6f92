"""WorkerHealth: supervision between updates; memory, processor share, threads and lives of every process of a run."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.limits import GIB, Room, tightest_room
from claw_lightning.module import OptionCritic

log = logging.getLogger(__name__)

#: Seconds between looks at the workers while updates are made: a death is noticed within one of them and an update.
SUPERVISE_SECONDS = 0.2
#: Share of a limit of memory below which what is free is called little.
LITTLE_FREE = 0.05
LEARNER = "learner"
#: Columns of the file of events.
COLUMNS = ("seconds", "env_steps", "worker", "event", "detail")


def private_memory(process: psutil.Process) -> int:
    """Bytes of a process that no other one shares: resident pages without those of files and shared blocks.

    The replay's rings and the libraries' code are resident in every process that has touched them. Without them the
    numbers of several processes can be added up.
    """
    info = process.memory_info()
    return int(info.rss - getattr(info, "shared", 0))


@dataclass
class Watched:
    """What is remembered of one process. ``base``: private bytes after its warm-up, None before."""

    process: psutil.Process
    since: float
    marked: float
    cpu_seconds: float
    base: int | None = None
    has_warned: bool = False


class WorkerHealth(UpdateCallback):
    """Watches the processes of a run: the learner, ``worker_<i>`` and the evaluator.

    Between updates it lets the data module look after its workers, so that a death is noticed at once also where a
    ``training_step`` is long. At logging steps it measures; a process is ``learner``, ``worker_<i>`` or ``evaluator``:

    * ``memory/<process>_gb``: private memory in GiB, which is resident memory less shared pages. The replay's rings
      and the libraries' code are resident in every process that touches them; they are left out, so that the numbers
      can be added up.
    * ``memory/free_gb``: what can still be had, by machine and control groups, in GiB.
    * ``cpu/<process>``: processor seconds per second since the last measurement; 1 is one core.
    * ``threads/<process>``: its threads.
    * ``gpu/memory_gb``: tensors on the module's GPU, in GiB; ``gpu/utilization``: its load, 0 to 1, where the driver's
      library tells.

    What happens to the workers' processes is a line each of ``worker_events.csv`` in the run's folder, with the columns
    ``seconds`` (of wall time since the run's start), ``env_steps``, ``worker`` (``worker_<i>`` or ``evaluator``),
    ``event`` and ``detail`` (a text). Events: ``start``, ``ready`` (its simulator is built), ``death`` and ``hang``
    (the detail says why), ``restart`` (a successor was started), ``recycle`` (it is asked to make room for one),
    ``give_up`` (the run goes on without it, or ends) and ``stop`` (it is stopped at the end). A file that exists is
    continued; further ranks write ``rank_<r>_worker_events.csv``. Lock-step runs have no workers, and no such file.

    It warns once per process whose private memory has grown by more than ``growth_limit_gb`` since its warm-up (a
    process that was restarted is a new one), and once when less than a twentieth of the memory is free.

    Args:
        growth_limit_gb: GiB.
        warmup_minutes: age of a process at which its memory becomes what growth is measured from.
        every_seconds: shortest time between measurements; logging steps that come sooner log none of this.
    """

    def __init__(self, growth_limit_gb: float = 1.0, warmup_minutes: float = 5.0, every_seconds: float = 1.0) -> None:
        values = {
            "growth_limit_gb": growth_limit_gb, "warmup_minutes": warmup_minutes, "every_seconds": every_seconds,
        }  # fmt: skip
        check_numbers("WorkerHealth", values, least=0.0)
        if growth_limit_gb == 0:
            raise ConfigError("WorkerHealth.growth_limit_gb is 0; it must be positive")
        self.growth_limit_gb, self.warmup_minutes = growth_limit_gb, warmup_minutes
        self.every_seconds = every_seconds
        self._watched: dict[str, Watched] = {}
        self._data: Any = None
        self._device: torch.device | None = None
        self._supervised = -math.inf
        self._measured = -math.inf
        self._has_warned_of_little = False
        self._knows_utilization = True
        self._began = time.monotonic()
        self._writes = False  # events

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember whose processes to watch."""
        self._data = getattr(trainer, "datamodule", None)
        self._began = time.monotonic()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to what happens to the workers, from before they are started."""
        listeners = getattr(self._data, "worker_listeners", None)
        if listeners is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._writes = True
            listeners.append(self._note)

    def _note(self, event: str, worker: str, detail: str) -> None:
        """Write one line at once: the next thing may be the end of this process."""
        if not self._writes:
            return
        ranks = self._data.ranks
        path = self._data.run_folder / f"{f'rank_{ranks.rank}_' if ranks.rank else ''}worker_events.csv"
        line = io.StringIO()
        seconds = round(time.monotonic() - self._began, 3)
        csv.writer(line, lineterminator="\n").writerow(
            (seconds, self._data.env_steps, worker, event, " ".join(detail.split()))
        )
        try:
            with path.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    file.write(",".join(COLUMNS) + "\n")
                file.write(line.getvalue())
        except OSError as error:
            log.warning("WorkerHealth: %s cannot be written (%s); the run goes on", path, error.strerror)
            self._writes = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module is on its device by now; processor time counts from here."""
        self._device = pl_module.device
        self._watch(LEARNER, os.getpid())

    def on_update_end(self, trainer: pl.Trainer, module: OptionCritic) -> None:
        """Let the data module notice deaths and hangs, where it is time."""
        now = time.monotonic()
        if now - self._supervised < SUPERVISE_SECONDS:
            return
        self._supervised = now
        supervise = getattr(self._data, "supervise", None)
        if supervise is not None:
            supervise()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the run."""
        if self._note in getattr(self._data, "worker_listeners", ()):
            self._data.worker_listeners.remove(self._note)
        self._writes = False
        self._data = self._device = None
        self._watched.clear()

    def metrics(self) -> dict[str, Any]:
        """Measure all processes, if the last time is long enough ago. About a millisecond for a few of them."""
        if time.monotonic() - self._measured < self.every_seconds:
            return {}
        self._measured = time.monotonic()
        values: dict[str, float] = {}
        processes = {LEARNER: os.getpid(), **self._processes()}
        for name, pid in processes.items():
            watched = self._watch(name, pid)
            if watched is not None:
                values.update(self._measure(name, watched))
        for name in self._watched.keys() - processes.keys():
            del self._watched[name]
        room = tightest_room()
        values["memory/free_gb"] = room.free / GIB
        self._warn_of_little(room)
        values.update(self._measure_gpu())
        return values

    def _processes(self) -> dict[str, int]:
        found = getattr(self._data, "processes", None)
        return dict(found()) if found is not None else {}

    def _watch(self, name: str, pid: int) -> Watched | None:
        """What is remembered of a process; None where it has just gone."""
        known = self._watched.get(name)
        if known is not None and known.process.pid == pid:
            return known
        self._watched.pop(name, None)
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
        except psutil.Error:
            return None
        now = time.monotonic()
        self._watched[name] = watched = Watched(process, now, now, times.user + times.system)
        return watched

    def _measure(self, name: str, watched: Watched) -> dict[str, float]:
        try:
            with watched.process.oneshot():  # one look at each of the kernel's files
                memory = private_memory(watched.process)
                times = watched.process.cpu_times()
                threads = watched.process.num_threads()
        except psutil.Error:  # it has gone; the supervision sees to that
            self._watched.pop(name, None)
            return {}
        values = {f"memory/{name}_gb": memory / GIB, f"threads/{name}": float(threads)}
        now, seconds = time.monotonic(), times.user + times.system
        if now > watched.marked:
            values[f"cpu/{name}"] = max(0.0, seconds - watched.cpu_seconds) / (now - watched.marked)
        watched.marked, watched.cpu_seconds = now, seconds
        self._warn_of_growth(name, watched, memory, now)
        return values

    def _warn_of_growth(self, name: str, watched: Watched, memory: int, now: float) -> None:
        if watched.base is None:
            if now - watched.since >= 60.0 * self.warmup_minutes:
                watched.base = memory
            return
        grown = (memory - watched.base) / GIB
        if watched.has_warned or grown <= self.growth_limit_gb:
            return
        watched.has_warned = True
        cure = "look for a callback or logger that keeps what it is given"
        if name != LEARNER:
            cure = "simulators leak; data.recycle_steps replaces a worker's process now and then"
        log.warning(
            "%s has grown by %.1f GiB of private memory in %.0f minutes, to %.1f GiB: %s",
            name, grown, (now - watched.since) / 60.0, memory / GIB, cure,
        )  # fmt: skip

    def _warn_of_little(self, room: Room) -> None:
        if self._has_warned_of_little or room.free >= LITTLE_FREE * room.total:
            return
        self._has_warned_of_little = True
        log.warning(
            "only %.2f GiB of %.1f GiB memory are free (limit: %s): the run may be killed; lower data.capacity or "
            "data.num_workers",
            room.free / GIB, room.total / GIB, room.where,
        )  # fmt: skip

    def _measure_gpu(self) -> dict[str, float]:
        if self._device is None or self._device.type != "cuda":
            return {}
        values = {"gpu/memory_gb": torch.cuda.memory_allocated(self._device) / GIB}
        if self._knows_utilization:
            try:
                values["gpu/utilization"] = torch.cuda.utilization(self._device) / 100.0
            except Exception:  # its library is missing or refuses (ModuleNotFoundError, RuntimeError, its own errors)
                self._knows_utilization = False
        return values
