"""Supervision between updates; memory, processor share and threads of fake processes and of a real one."""

import csv
import os
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
import torch

from callbacks import WorkerHealth, worker_health
from claw_lightning.errors import ConfigError
from claw_lightning.limits import GIB, Room
from tests.runs import FakeData, fit_fake, make_batch, make_module

Memory = namedtuple("Memory", "rss shared")
Times = namedtuple("Times", "user system")


class FakeProcess:
    """A process of psutil whose figures are set by hand."""

    def __init__(self, pid, private=GIB, shared=5 * GIB):
        self.pid, self.private, self.shared = pid, private, shared
        self.seconds, self.threads, self.is_gone = 0.0, 3, False

    def oneshot(self):
        import contextlib

        return contextlib.nullcontext()

    def _there(self, value):
        if self.is_gone:
            raise psutil.NoSuchProcess(self.pid)
        return value

    def memory_info(self):
        return self._there(Memory(self.private + self.shared, self.shared))

    def cpu_times(self):
        return self._there(Times(self.seconds, 0.0))

    def num_threads(self):
        return self._there(self.threads)


class World:
    """Fake clock, processes and free memory under a :class:`WorkerHealth`."""

    def __init__(self, monkeypatch, **settings):
        self.now, self.room, self.supervised = 1000.0, Room(8 * GIB, 16 * GIB, "this machine"), 0
        self.table = {os.getpid(): FakeProcess(os.getpid()), 11: FakeProcess(11), 12: FakeProcess(12)}
        self.pids = {"worker_0": 11, "evaluator": 12}
        monkeypatch.setattr(worker_health, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(worker_health.psutil, "Process", self.find)
        monkeypatch.setattr(worker_health, "tightest_room", lambda: self.room)
        self.health = WorkerHealth(**settings)
        data = SimpleNamespace(processes=lambda: self.pids, supervise=self.supervise)
        self.trainer, self.module = SimpleNamespace(datamodule=data), SimpleNamespace(device=torch.device("cpu"))
        self.health.setup(self.trainer, self.module, "fit")
        self.health.on_train_start(self.trainer, self.module)

    def find(self, pid):
        if pid not in self.table:
            raise psutil.NoSuchProcess(pid)
        return self.table[pid]

    def supervise(self):
        self.supervised += 1

    def after(self, seconds):
        self.now += seconds
        return self.health.metrics()


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_private_memory_processor_share_and_threads_of_every_process(world):
    world.after(10.0)
    world.table[11].seconds += 5.0
    world.table[os.getpid()].seconds += 15.0
    world.table[11].private = 2 * GIB
    assert world.after(10.0) == {
        "memory/learner_gb": 1.0, "memory/worker_0_gb": 2.0, "memory/evaluator_gb": 1.0, "memory/free_gb": 8.0,
        "cpu/learner": 1.5, "cpu/worker_0": 0.5, "cpu/evaluator": 0.0,
        "threads/learner": 3.0, "threads/worker_0": 3.0, "threads/evaluator": 3.0,
    }  # fmt: skip


def test_logging_steps_in_quick_succession_measure_once(world):
    assert world.after(10.0)
    assert world.after(0.5) == {}
    assert world.after(0.6)


def test_a_process_that_vanishes_is_no_error(world):
    world.after(10.0)
    world.table[11].is_gone = True
    assert "memory/worker_0_gb" not in world.after(10.0)
    del world.table[11]
    assert "memory/worker_0_gb" not in world.after(10.0)
    world.pids = {}
    assert set(world.after(10.0)) == {"memory/learner_gb", "memory/free_gb", "cpu/learner", "threads/learner"}


def test_a_restarted_process_is_counted_from_its_own_start(world):
    world.table[11].seconds = 500.0
    world.after(10.0)
    world.table[21] = FakeProcess(21)
    world.pids["worker_0"] = 21
    world.after(10.0)
    world.table[21].seconds = 4.0
    assert world.after(10.0)["cpu/worker_0"] == 0.4


def test_a_data_module_without_processes_has_a_learner_only(world):
    world.trainer.datamodule = SimpleNamespace()
    world.health.setup(world.trainer, world.module, "fit")
    world.health.on_update_end(world.trainer, world.module)
    assert "memory/learner_gb" in world.after(10.0)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "callbacks.worker_health"]


def test_growth_since_the_warm_up_is_told_once_per_process(world, caplog):
    world.after(0.0)
    world.table[11].private = 3 * GIB  # still warming up
    world.after(301.0)
    world.table[11].private = 4 * GIB
    world.after(60.0)
    assert warnings(caplog) == []
    world.table[11].private = 4 * GIB + GIB // 5
    world.after(60.0)
    world.after(60.0)
    (line,) = warnings(caplog)
    assert line.startswith("worker_0 has grown by 1.2 GiB") and "data.recycle_steps" in line and "\n" not in line
    world.pids["worker_0"], world.table[21] = 21, FakeProcess(21)
    world.after(1.0)
    world.after(301.0)
    world.table[21].private = 3 * GIB
    world.after(60.0)
    assert len(warnings(caplog)) == 2


def test_a_learner_that_grows_is_not_cured_by_recycling(world, caplog):
    world.after(301.0)
    world.table[os.getpid()].private = 3 * GIB
    world.after(60.0)
    (line,) = warnings(caplog)
    assert line.startswith("learner has grown by 2.0 GiB") and "recycle" not in line


def test_little_free_memory_is_told_once(world, caplog):
    world.room = Room(GIB, 20 * GIB, "/x/memory.max")  # just enough
    world.after(10.0)
    assert warnings(caplog) == []
    world.room = Room(GIB, 21 * GIB, "/x/memory.max")
    world.after(10.0)
    world.after(10.0)
    (line,) = warnings(caplog)
    assert "1.00 GiB of 21.0 GiB" in line and "/x/memory.max" in line and "data.capacity" in line


def test_supervises_between_updates_but_not_at_each(world):
    for _ in range(10):
        world.now += 0.05
        world.health.on_update_end(world.trainer, world.module)
    assert 2 <= world.supervised <= 3


def test_what_the_supervision_finds_ends_the_run(world):
    def supervise():
        raise RuntimeError("worker 0 has died")

    world.trainer.datamodule.supervise = supervise
    with pytest.raises(RuntimeError, match="worker 0"):
        world.health.on_update_end(world.trainer, world.module)


def test_memory_and_load_of_a_gpu(world, monkeypatch):
    calls = []

    def utilization(device):
        calls.append(device)
        if len(calls) > 1:
            raise ModuleNotFoundError("pynvml")
        return 40

    world.module.device = torch.device("cuda", 1)
    monkeypatch.setattr(worker_health.torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(worker_health.torch.cuda, "utilization", utilization)
    world.health.on_train_start(world.trainer, world.module)
    found = [{k: v for k, v in world.after(10.0).items() if k.startswith("gpu")} for _ in range(3)]
    memory = {"gpu/memory_gb": 3.0}
    assert found == [{**memory, "gpu/utilization": 0.4}, memory, memory]
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_measured():
    health = WorkerHealth()
    held = torch.zeros(GIB // 4, device="cuda")
    health.on_train_start(SimpleNamespace(), SimpleNamespace(device=held.device))
    assert health.metrics()["gpu/memory_gb"] >= 1.0


def test_a_real_child_is_measured_until_it_is_gone():
    code = "data = bytearray(64 << 20); print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "up\n"
        health = WorkerHealth(every_seconds=0.0)
        data = SimpleNamespace(processes=lambda: {"worker_0": child.pid})
        health.setup(SimpleNamespace(datamodule=data), None, "fit")
        health.metrics()
        time.sleep(0.05)
        values = health.metrics()
        assert 64 / 1024 < values["memory/worker_0_gb"] < 0.5
        assert 0.0 <= values["cpu/worker_0"] < 1.0 and values["threads/worker_0"] == 1.0
        assert values["memory/learner_gb"] > 0.0 and values["threads/learner"] >= 1.0
        assert values["memory/free_gb"] > 0.0
    finally:
        child.kill()
        child.communicate()
    assert "memory/worker_0_gb" not in health.metrics()


class SupervisedData(FakeData):
    supervised = 0

    def supervise(self):
        self.supervised += 1

    def processes(self):
        return {}


def test_in_a_run_its_figures_are_logged_and_the_workers_looked_after():
    module, batches = make_module(), [make_batch(2), make_batch(2)]
    logged = []
    module._to_loggers = logged.append
    _, data = fit_fake(module, batches, [WorkerHealth(every_seconds=0.0)], data=SupervisedData(batches))
    assert data.supervised >= 1
    assert all("memory/learner_gb" in metrics and "cpu/learner" in metrics for metrics in logged)


@pytest.mark.parametrize("name", ["growth_limit_gb", "warmup_minutes", "every_seconds"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_wrong_settings_are_named(name, value):
    with pytest.raises(ConfigError, match=rf"WorkerHealth\.{name}"):
        WorkerHealth(**{name: value})


def test_a_limit_of_no_growth_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"WorkerHealth\.growth_limit_gb"):
        WorkerHealth(growth_limit_gb=0.0)


def test_what_happens_to_workers_is_a_line_each(tmp_path):
    data = SimpleNamespace(worker_listeners=[], env_steps=7, run_folder=tmp_path, ranks=SimpleNamespace(rank=0))
    trainer, health = SimpleNamespace(datamodule=data, fast_dev_run=False), WorkerHealth()
    health.setup(trainer, None, "fit")
    health.on_fit_start(trainer, None)
    [listener] = data.worker_listeners
    listener("death", "worker_0", "worker 0 ended\nwith a comma, and two lines")
    data.env_steps = 9
    listener("restart", "worker_0", "pid 5")
    with (tmp_path / "worker_events.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["env_steps"], row["worker"], row["event"], row["detail"]) for row in rows] == [
        ("7", "worker_0", "death", "worker 0 ended with a comma, and two lines"),
        ("9", "worker_0", "restart", "pid 5"),
    ]
    assert 0 <= float(rows[0]["seconds"]) < 60
    health.teardown(trainer, None, "fit")
    assert data.worker_listeners == []


def test_a_folder_that_cannot_be_written_ends_the_lines_alone(tmp_path, caplog):
    data = SimpleNamespace(
        worker_listeners=[], env_steps=7, run_folder=tmp_path / "gone", ranks=SimpleNamespace(rank=1)
    )
    trainer, health = SimpleNamespace(datamodule=data, fast_dev_run=False), WorkerHealth()
    health.setup(trainer, None, "fit")
    health.on_fit_start(trainer, None)
    for _ in range(2):
        data.worker_listeners[0]("start", "worker_0", "")
    assert caplog.text.count("rank_1_worker_events.csv cannot be written") == 1
