"""Host: what it does on a node, without Ray; its process speaks the protocol and nothing else."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import claw_lightning.process
from claw_lightning.remote import host as host_module
from claw_lightning.remote.blocks import Block, append_block, unsent_limit
from claw_lightning.remote.host import Host
from claw_lightning.rollout.control import PHASES
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import FAKES, PATIENCE, write_step

NAMES = ("head", "rows", "first_final", "finals", "first_image", "images")


@pytest.fixture
def host_of(monkeypatch):
    """Builds hosts of the fake worker; they are ended at the end."""
    monkeypatch.setattr(claw_lightning.process, "BOOTSTRAP", str(FAKES / "fake_worker.py"))
    made = []

    def build(script="", head=0, python=None, device="cpu", **options):
        order = {
            "name": "worker 0",
            "settings": {"num_threads": 1, "script": script, "version": 5},
            "python": python,
            "device": device,
            "generation": 3,
            "folders": ["/nonexistent"],
            "layout": RowLayout(1, 1).settings(),
            "num_lanes": 1,
            "head": head,
            "finals": 0,
            "images": 0,
            "mailbox_size": 4,
        }
        made.append(Host(order, fetch=lambda reference: reference, **options))
        return made[-1]

    yield build
    for host in made:
        host.end()


def collect_until(host, condition):
    """Replies until one makes the condition true."""
    replies, until = [], time.monotonic() + PATIENCE
    while not replies or not condition(replies[-1]):
        assert time.monotonic() < until
        replies.append(host.collect(0.0))
    return replies


def test_the_process_starts_with_the_first_parameters_and_writes_as_far_as_it_may(host_of):
    host = host_of(head=7)
    assert host.collect(0.0)["control"] is None  # nobody acts with random parameters
    host.steer(1, 12, False, [{"request": 5}], [np.ones(4, np.float32)], 9)
    ring = LaneRing(RowLayout(1, 1), 32, 1)
    ring.begin_at(7, 0)
    messages = []

    def arrived(reply):
        append_block(ring, Block(*(reply[name] for name in NAMES)))
        messages.extend(reply["messages"])
        return ring.head == 12

    last = collect_until(host, arrived)[-1]
    assert last["steered"] == 1 and last["ended"] is None
    assert last["control"]["version"] == 5 and PHASES[int(last["control"]["phase"])] == "wait"
    assert [message["kind"] for message in messages][:2] == ["ready", "episodes"]
    assert host._mailbox.read()[1] == 9
    host.steer(2, 12, False, [{"request": 6}], [], 9)
    echo = collect_until(host, lambda reply: reply["messages"])[-1]
    assert echo["messages"][-1] == {"kind": "echo", "line": {"request": 6}} and echo["steered"] == 2


def test_seeds_follow_the_learners_count_of_processes(host_of):
    host = host_of()
    host.steer(1, 0, False, [], [np.ones(4, np.float32)], 1)
    collect_until(host, lambda reply: reply["messages"])
    assert host._worker.generation == 3


def test_no_more_is_written_than_the_ring_keeps_until_it_is_fetched(host_of):
    host = host_of()
    host.steer(1, 10**6, False, [], [np.ones(4, np.float32)], 1)
    collect_until(host, lambda reply: reply["control"] is not None)
    limit, until = unsent_limit(host.ring), time.monotonic() + PATIENCE
    while host.ring.head < host._sent.head + limit:
        assert time.monotonic() < until
        time.sleep(0.005)
    time.sleep(0.05)
    assert host.ring.head == host._sent.head + limit
    host.collect(0.0)  # makes room
    assert host._worker.control.steps_allowed == host._sent.head + limit


def test_rows_come_before_the_end_and_the_log_with_it(host_of):
    host = host_of("work and die")
    host.steer(1, 5, False, [], [np.ones(4, np.float32)], 1)
    replies = collect_until(host, lambda reply: reply["ended"] is not None)
    assert sum(len(reply["rows"]) for reply in replies) == 1
    assert replies[-1]["ended"] == "exited with status 3" and not replies[-1]["killed"]
    assert b"log line of" in b"".join(reply["log"] for reply in replies)


def test_a_killed_process_is_told_from_one_that_failed(host_of):
    host = host_of()
    host.steer(1, 0, False, [], [np.ones(4, np.float32)], 1)
    collect_until(host, lambda reply: reply["messages"])
    host._worker.send_kill()
    last = collect_until(host, lambda reply: reply["ended"] is not None)[-1]
    assert last["ended"] == "was killed by signal 9" and last["killed"]


def test_an_interpreter_that_is_not_there_is_the_users_matter_lost_parameters_are_not(host_of):
    host = host_of(python="/no/such/python")
    host.steer(1, 0, False, [], [np.ones(4, np.float32)], 1)
    last = collect_until(host, lambda reply: reply["ended"] is not None)[-1]
    assert "data.worker_python: cannot start /no/such/python" in last["messages"][0]["message"]
    assert last["messages"][0]["user"] and not last["killed"]
    host = host_of()
    host.steer(1, 0, False, [], ["not an array"], 1)
    last = collect_until(host, lambda reply: reply["ended"] is not None)[-1]
    assert not last["messages"][0]["user"] and last["killed"]


def test_the_process_sees_the_gpu_that_was_given(host_of):
    host = host_of(device="cuda:0", gpus=lambda: ["3"])
    host.steer(1, 0, False, [], [np.ones(4, np.float32)], 1)
    collect_until(host, lambda reply: reply["messages"])
    assert host._worker.command.environment()["CUDA_VISIBLE_DEVICES"] == "3"
    assert host._worker.command.python == sys.executable


class Clock:
    """Time that passes by sleeping alone, in place of the module ``time``."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Idle:
    """A worker that has said something and may write ``steps_allowed`` vector steps."""

    def __init__(self, steps_allowed, kind):
        self.control = SimpleNamespace(steps_allowed=steps_allowed, state=dict)
        self._unsaid = [{"kind": kind}]

    def messages(self):
        said, self._unsaid = self._unsaid, []
        return said, False


@pytest.mark.parametrize(
    "steps_allowed, kind, intervals",
    [(100, "episodes", 8), (1, "episodes", 1), (100, "echo", 0)],
    ids=["can go on", "waits for the learner", "has something to say"],
)
def test_few_rows_wait_for_company_unless_somebody_waits_for_them(host_of, monkeypatch, steps_allowed, kind, intervals):
    host, clock, interval = host_of(), Clock(), 0.02
    monkeypatch.setattr(host_module, "time", clock)
    monkeypatch.setattr(host, "_allow", lambda: None)
    host._worker, host._last_reply = Idle(steps_allowed, kind), clock.now
    write_step(host.ring, [[1.0]], [0])
    reply = host.collect(interval)
    waited = clock.now - 100.0
    host._worker = None
    assert len(reply["rows"]) == 1 and len(reply["messages"]) == 1
    assert interval * intervals - 1e-9 <= waited <= interval * intervals + host_module.LOOK_SECONDS
