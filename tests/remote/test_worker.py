"""RemoteWorker: what supervision, limits and logs see of a worker elsewhere; hosts are called in this process."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import claw_lightning.pool
import claw_lightning.process
from claw_lightning.errors import ConfigError, WorkerError
from claw_lightning.pool import FailurePolicy, WorkerCommand, WorkerPool
from claw_lightning.remote import cluster as cluster_module
from claw_lightning.remote.cluster import RayCluster, keeping_handlers
from claw_lightning.remote.config import RayConfig
from claw_lightning.remote.host import Host
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import FAKES, poll_until


class Call:
    """A method of an actor: called in the thread of its concurrency group, in turn."""

    def __init__(self, actor, name, group=None):
        self.actor, self.name, self.group = actor, name, group

    def options(self, concurrency_group, num_returns=1):
        return Call(self.actor, self.name, concurrency_group)

    def remote(self, *args):
        return Answer(self.actor.node, self.actor.groups[self.group].submit(self.actor.call, self.name, args))


class Answer:
    """A reference: ready when the call has returned, or its node has died."""

    def __init__(self, node, future):
        self.node, self.future = node, future

    @property
    def is_ready(self):
        return self.node.is_dead or self.future.done()


class Actor:
    """A host in this process, on a node that can die or have no room."""

    def __init__(self, node, order):
        self.node, self.order, self.host, self.making = node, order, None, threading.Lock()
        self.groups = {name: ThreadPoolExecutor(1) for name in ("collect", "steer")}

    def __getattr__(self, name):
        return Call(self, name)

    def call(self, name, args):
        with self.making:
            while not self.node.has_room and not self.node.is_dead:
                time.sleep(0.005)
            if self.host is None:
                self.host = Host(self.order, fetch=lambda reference: reference)
                self.node.hosts.append(self.host)
        return getattr(self.host, name)(*args)


class Node:
    def __init__(self):
        self.hosts, self.has_room, self.is_dead, self.puts = [], True, False, 0


class FakeRay:
    """As much of Ray as a cluster's threads call."""

    def __init__(self):
        self.node = Node()

    def put(self, value):
        self.node.puts += 1
        return value

    def wait(self, references, num_returns=1, timeout=None):
        until = time.monotonic() + (timeout or 0.0)
        while not any(each.is_ready for each in references) and time.monotonic() < until:
            time.sleep(0.001)
        return [each for each in references if each.is_ready][:num_returns], []

    def get(self, reference):
        if reference.node.is_dead:
            raise RuntimeError("The actor died because its node has died.\nNode: n")
        return reference.future.result()

    def kill(self, actor, no_restart):
        for group in actor.groups.values():
            group.shutdown(wait=False, cancel_futures=True)
        if actor.host is not None:
            actor.host.end()

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 8.0}}]

    def available_resources(self):
        return {"CPU": 0.5}


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """Builds pools of remote workers whose hosts run the fake worker here; ended at the end."""
    monkeypatch.setattr(claw_lightning.process, "BOOTSTRAP", str(FAKES / "fake_worker.py"))
    monkeypatch.setattr(claw_lightning.pool, "BACK_OFF", (0.01,))
    made = []

    def build(count=1, script="", policy=None, has_room=True):
        ray, mailbox = FakeRay(), Mailbox(4)
        ray.node.has_room = has_room
        mailbox.publish(np.ones(4, np.float32), 1)
        cluster = RayCluster(RayConfig(), mailbox)
        cluster._ray = ray
        cluster._host_class = type("Class", (), {"options": lambda self, **_: self})()
        cluster._host_class.remote = lambda order: Actor(ray.node, order)
        workers = []
        for index in range(count):
            settings = {"num_threads": 1, "script": script, "version": 5}
            path = tmp_path / "logs" / f"worker_{index}.log"
            ring = LaneRing(RowLayout(1, 1), 64, 1)
            workers.append(cluster.worker(f"worker {index}", WorkerCommand(sys.executable, settings), (), path, ring))
        for target in (cluster._receive, cluster._steer):
            cluster._threads.append(threading.Thread(target=target, daemon=True))
            cluster._threads[-1].start()
        pool = WorkerPool(list(workers), policy=FailurePolicy(**policy or {}))
        made.append((pool, cluster))
        return pool, cluster, ray, mailbox

    yield build
    for pool, cluster in made:
        pool.close(grace=0.0)
        cluster.close()


def allow(pool, steps):
    for worker in pool.workers:
        worker.control.steps_allowed = steps


def test_rows_messages_log_and_control_arrive_as_from_a_process_of_this_machine(rig):
    pool, cluster, ray, mailbox = rig(2)
    seen = []
    pool.on_message = lambda worker, message: seen.append(message)
    pool.start()
    allow(pool, 30)
    poll_until(pool, lambda: all(worker.head == 30 for worker in pool.workers))
    assert pool.alive == 2 and all(worker.control.version == 5 for worker in pool.workers)
    pool.workers[0].send({"request": 1})
    poll_until(pool, lambda: {"kind": "echo", "line": {"request": 1}} in seen)
    assert "log line of" in pool.workers[1].log_path.read_text()
    assert pool.workers[0].control.silence < 60.0 and pool.workers[0].pid is None
    for version in (2, 3):  # twice for everybody, not for each
        mailbox.publish(np.full(4, version, np.float32), version)
        poll_until(pool, lambda: all(host._mailbox.read()[1] == version for host in ray.node.hosts))  # noqa: B023
    assert ray.node.puts == 3


def test_a_process_that_fails_is_replaced_and_the_rows_go_on(rig):
    pool, cluster, ray, mailbox = rig(script="work and die", policy={"budget": 100})
    pool.start(wait=False)
    allow(pool, 3)
    poll_until(pool, lambda: pool.workers[0].head == 3)
    assert pool.restarts >= 2 and pool.workers[0].log_path.read_text().count("log line") >= 3
    assert ray.node.hosts[1].ring.head > ray.node.hosts[0].ring.head - 1


def test_a_node_that_dies_costs_a_restart_even_of_a_worker_that_was_never_ready(rig):
    pool, cluster, ray, mailbox = rig()
    pool.start(wait=False)
    poll_until(pool, lambda: pool.workers[0].is_placed)
    old, ray.node = ray.node, Node()
    cluster._host_class.remote = lambda order: Actor(ray.node, order)
    old.is_dead = True
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)
    allow(pool, 10)
    poll_until(pool, lambda: pool.workers[0].head == 10)
    assert pool.workers[0].generation == 1 and old.hosts[0] is not ray.node.hosts[0]
    for host in old.hosts:
        host.end()


def test_what_a_lost_host_still_sends_is_not_taken(rig):
    pool, cluster, ray, mailbox = rig()
    pool.start()
    worker = pool.workers[0]
    link = worker.link
    worker.kill()
    late = Answer(ray.node, Future())
    late.future.set_result({"head": 0})
    cluster._take(worker, link, late)
    assert worker.head == 0 and worker.has_exited()


def test_a_silent_host_is_as_a_silent_worker(rig, monkeypatch):
    pool, cluster, ray, mailbox = rig(policy={"budget": 0})
    pool.start()
    monkeypatch.setattr(cluster, "_take", lambda *_: time.sleep(0.05))  # nothing comes through any more
    pool.deadlines.update(dict.fromkeys(pool.deadlines, 0.5))  # whichever phase was heard of last
    with pytest.raises(WorkerError, match=r"gave no sign of life .*restarted 0 times"):
        poll_until(pool, lambda: False)


def test_a_worker_without_a_place_waits_and_says_what_it_lacks(rig, monkeypatch, caplog):
    monkeypatch.setattr(cluster_module, "PLACING_PATIENCE", 0.1)
    pool, cluster, ray, mailbox = rig(2, policy={"deadlines": {"start": 0.3}}, has_room=False)
    pool.start(wait=False)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        pool.poll()
        pool.wait_for_message(0.02)
    assert pool.restarts == 0 and not any(worker.is_placed for worker in pool.workers)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("worker 0 has been")]
    assert "2 workers need 2 CPU, and there are 1; add nodes" in line
    pool.deadlines["start"] = 60.0
    ray.node.has_room = True  # a node joins
    poll_until(pool, lambda: pool.alive == 2)


def test_what_is_lacking_is_named(rig):
    pool, cluster, ray, mailbox = rig()
    assert cluster.lack() == "it needs 1 CPU, and 0.5 of 1 are free"
    assert cluster.lack(may_be_ours=True) == ""
    cluster.config = RayConfig(num_cpus=0.1, resources={"simulator": 1})
    assert cluster.lack() == "it needs 1 simulator of one node, and none of 1 has more than 0"


def test_calls_that_are_not_answered_do_not_pile_up(rig):
    pool, cluster, ray, mailbox = rig()
    pool.start()
    cluster._closing.set()
    for thread in cluster._threads:
        thread.join()
    worker = pool.workers[0]
    worker.link.answered = worker.link.number
    for steps in range(100, 110):
        worker.control.steps_allowed = steps
        worker.words(1)
    assert worker.link.number - worker.link.answered == 2
    worker.control.stop = True  # which cannot wait
    assert worker.words(1)[2] is True


def test_sums_go_on_over_the_processes(rig):
    pool, cluster, ray, mailbox = rig()
    control = pool.workers[0].control
    state = dict(control.state(), quarantined=3, phase=phases.STEP, silence=1.0, timer_wait=2.0)
    control.mirror(state, control.state())
    since = control.state()
    control.mirror(state, since)
    assert control.quarantined == 6 and control.timers[phases.TIMERS.index("wait")] == 4.0
    assert 0.9 < control.silence < 60.0


def test_signals_and_uncaught_errors_stay_with_whom_they_belong_to():
    before, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
    with keeping_handlers():
        signal.signal(signal.SIGTERM, lambda *_: None)
        sys.excepthook = lambda *_: None
    assert signal.getsignal(signal.SIGTERM) is before and sys.excepthook is hook


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"num_cpus": -1}, r"data\.ray\.num_cpus is -1"),
        ({"num_gpus": 1.5}, r"data\.ray\.num_gpus is 1\.5; above 1, Ray takes whole numbers"),
        ({"resources": {"CPU": 1}}, r"data\.ray\.resources names CPU; use data\.ray\.num_cpus"),
        ({"resources": {"x": 0}}, r"data\.ray\.resources\.x is 0"),
        ({"resources": 3}, r"data\.ray\.resources is 3"),
        ({"address": "ray://a:1"}, r"data\.ray\.address is 'ray://a:1', that of a Ray client"),
    ],
)
def test_settings_without_meaning_are_refused_in_one_line(settings, line):
    with pytest.raises(ConfigError, match=line):
        RayConfig(**settings)


def test_all_ranks_of_a_run_have_the_token_of_its_own_cluster(monkeypatch):
    class NoRayError(Exception):
        pass

    def import_ray():
        raise NoRayError

    monkeypatch.setattr(cluster_module, "import_ray", import_ray)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # put back after the test
    for config, mode in ((RayConfig(address="head:6379"), None), (RayConfig(), "token")):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        with pytest.raises(NoRayError):
            RayCluster(config, Mailbox(1)).connect(1, "10.0.0.1:6379")
        assert os.environ.get("RAY_AUTH_MODE") == mode
