"""The worker as a process of its own: start, pace, restart, and every way to end."""

import json
import os
import queue
import signal

import numpy as np
import pytest

from claw_lightning.errors import WorkerError
from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout import control as phases
from claw_lightning.rollout import worker as worker_module
from claw_lightning.rollout.ring import FIRST
from claw_lightning.rollout.worker import MAX_PENDING, MessagePipe
from tests.builders import FAKES, PATIENCE, Rig
from tests.pythons import python_38

COUNTING = "fake_envs.CountingEnv"


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """Builds rigs whose worker finds the fakes, as it would find a user's simulator in the working directory."""
    monkeypatch.chdir(FAKES)
    made = []

    def build(class_path=COUNTING, mode="collect", **options):
        made.append(Rig(tmp_path, class_path, mode, **options))
        return made[-1]

    yield build
    for one in made:
        one.pool.close(grace=5.0)


def test_compressed_images_reach_the_reader(rig):
    images = {"image_shape": [3, 4, 5], "image_codec": "zlib", "image_bytes": 40}
    rig = rig("fake_envs.PicturesEnv", layout=images, policy={"image_shape": [3, 4, 5]})
    rig.pool.start()
    rig.worker.control.steps_allowed = 30
    rig.until(lambda: rig.ring.head == 30)
    batch = ReplayMemory([rig.ring], 0).sample(1, 100)
    for image, obs in ((batch.image, batch.obs), (batch.next_image, batch.next_obs)):
        assert (image == obs[..., None, None].to(image.dtype)).all()


def firsts(rig, step):
    return (rig.field("flags", step) & FIRST) != 0


def test_a_life_with_a_kill_and_a_hang(rig):
    rig = rig()
    worker, control = rig.worker, rig.worker.control
    rig.pool.start()
    rig.until(lambda: control.phase == phases.WAIT)
    assert rig.ring.head == 0  # nothing was allowed yet

    for number in (signal.SIGUSR1, signal.SIGTERM):  # which SLURM sends to all processes of a job
        os.kill(worker.process.pid, number)
    control.steps_allowed = 10
    rig.until(lambda: rig.ring.head == 10 and control.phase == phases.WAIT)
    assert rig.pool.restarts == 0
    assert (rig.field("obs", 0) == [[0, 0, 0], [1, 0, 0]]).all()
    assert (rig.field("version", 9) == 1).all() and control.version == 1
    rig.until(lambda: rig.messages)
    assert rig.messages[0]["kind"] == "episodes" and rig.messages[0]["episodes"][0] == [6.0, 3, 1.0]
    lines = rig.log_path.read_text().splitlines()
    assert "collect worker 0, 2 lanes of Counting" in lines[0]
    assert all(name in lines[1] for name in ("python ", "numpy ", "torch ", "counting 1"))

    rig.mailbox.publish(rig.policy.flatten(), 77)
    os.kill(worker.process.pid, signal.SIGKILL)
    control.steps_allowed = 20
    rig.until(lambda: rig.ring.head == 20 and rig.pool.restarts == 1)
    assert firsts(rig, 10).all() and not firsts(rig, 9).any()  # rows go on where they ended, with new episodes
    assert (rig.field("obs", 10) == [[0, 0, 0], [1, 0, 0]]).all()
    assert (rig.field("version", 19) == 77).all()

    stopped = worker.process
    os.kill(stopped.pid, signal.SIGSTOP)
    rig.pool.deadlines.update({"wait": 0.2, "step": 0.2})
    rig.until(lambda: rig.pool.restarts == 2)
    assert stopped.returncode == -signal.SIGKILL
    rig.pool.deadlines.update({"wait": PATIENCE, "step": PATIENCE})
    control.steps_allowed = 25
    rig.until(lambda: rig.ring.head == 25)
    assert firsts(rig, 20).all()

    last = worker.process
    rig.pool.close(grace=PATIENCE)
    assert last.returncode == 0 and rig.ring.head == 25


def test_evaluations_on_request(rig):
    rig = rig(mode="evaluate", init_args={"fault": "print"})  # what a simulator prints is no message
    rig.pool.start()
    for request, episodes in ((1, 3), (2, 2)):
        rig.worker.send({"request": request, "episodes": episodes, "seed": 5})
        rig.until(lambda count=request: len(rig.messages) == count)
        message = rig.messages[-1]
        assert (message["kind"], message["request"]) == ("evaluated", request)
        assert sorted(message["result"]["return"]) == [6.0] * (episodes - 1) + [15.0]
    assert "not json" in rig.log_path.read_text()
    process = rig.worker.process
    process.stdin.close()  # the learner has gone
    assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    "fault, words",
    [
        ("quit", r"SystemExit: 0 \(log: .*worker\.log\)"),
        ("exit", r"exited with status 0: .*\(log: .*worker\.log\)"),
        ("refuse", r"exited with status 1: data\.env\.init_args\.task: no such hand"),
    ],
)
def test_a_simulator_that_does_not_start(rig, fault, words):
    rig = rig(init_args={"fault": fault})
    with pytest.raises(WorkerError, match=words) as caught:
        rig.pool.start()
    assert "\n" not in str(caught.value)
    assert rig.pool.restarts == 0


def test_a_simulator_that_raises_while_running(rig):
    rig = rig(init_args={"fault": "raise"}, failure={"budget": 0})
    rig.worker.control.steps_allowed = 100
    rig.pool.start(wait=False)
    with pytest.raises(WorkerError, match="RuntimeError: the hand fell off") as caught:
        rig.until(lambda: False)
    assert "\n" not in str(caught.value)
    assert "Traceback" in rig.log_path.read_text()
    assert rig.ring.head == 4  # the step in which it raised was not published


def test_a_real_task(rig):
    pytest.importorskip("gymnasium")
    init_args = {"task": "Pendulum-v1"}
    rig = rig("GymnasiumEnv", sizes=(3, 1), init_args=init_args, policy={"num_options": 2})
    rig.pool.start()
    rig.worker.control.steps_allowed = 30
    rig.until(lambda: rig.ring.head == 30)
    obs = np.stack([rig.field("obs", t) for t in range(30)])
    np.testing.assert_allclose(np.square(obs[..., :2]).sum(-1), 1.0, rtol=1e-5)  # cosine and sine
    assert firsts(rig, 0).all() and not any(firsts(rig, t).any() for t in range(1, 30))
    assert "gymnasium" in rig.log_path.read_text()


@pytest.mark.slow
def test_python_38(rig):
    python, reason = python_38()
    if python is None:
        pytest.skip(reason)
    rig = rig(python=python, policy={"num_options": 2})
    found = []
    messages = rig.worker.messages
    rig.worker.messages = lambda: found.append(messages()) or found[-1]
    rig.pool.start()
    ready = next(message for batch, _ in found for message in batch if message["kind"] == "ready")
    assert ready["versions"]["python"].startswith("3.8.")
    assert ready["spec"]["obs_size"] == 3
    rig.worker.control.steps_allowed = 10
    rig.until(lambda: rig.ring.head == 10)
    assert (rig.field("version", 9) == 1).all()
    assert (rig.field("obs", 2) == [[0, 0, 2], [1, 0, 2]]).all()


# -- the message pipe ---------------------------------------------------------------------------------------------


def read_all(fd):
    """All bytes that lie in a pipe."""
    os.set_blocking(fd, False)
    data = b""
    while True:
        try:
            data += os.read(fd, 1 << 16)
        except BlockingIOError:
            return data


def test_episodes_neither_block_nor_get_lost_while_there_is_room():
    read_end, write_end = os.pipe()
    pipe = MessagePipe(write_end)
    for index in range(5000):  # more than a pipe holds
        pipe.send("episodes", episodes=[[float(index), 1, 0.0]])
    assert pipe._pending
    data = read_all(read_end)
    while pipe._pending:
        pipe.send("tick")
        data += read_all(read_end)
    data += read_all(read_end)
    found = [message for message in map(json.loads, data.splitlines()) if message["kind"] == "episodes"]
    assert [message["episodes"][0][0] for message in found] == list(range(5000))
    os.close(read_end)
    os.close(write_end)


def test_a_learner_that_does_not_read_costs_bounded_memory():
    read_end, write_end = os.pipe()
    pipe = MessagePipe(write_end)
    for _ in range(300):
        pipe.send("episodes", episodes=["x" * 10_000])
    assert MAX_PENDING <= len(pipe._pending) < MAX_PENDING + 20_000
    os.close(read_end)
    os.close(write_end)


def test_a_learner_that_has_gone_ends_the_worker(monkeypatch):
    statuses = []

    def leave(status):
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(worker_module.os, "_exit", leave)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(SystemExit):
        MessagePipe(write_end).send("ready", must=True)
    os.close(write_end)
    commands = queue.Queue()
    with pytest.raises(SystemExit):
        worker_module.end_with_the_learner(commands, ['{"request": 1}\n', "\n"])
    assert commands.get_nowait() == {"request": 1} and commands.empty()
    assert statuses == [0, 0]


def test_a_simulator_that_breaks_the_contract_after_a_while_gets_another_chance(rig):
    rig = rig(init_args={"fault": "shape"}, failure={"budget": 1})
    rig.worker.control.steps_allowed = 100
    rig.pool.start(wait=False)
    with pytest.raises(WorkerError, match="observation of shape.*restarted 1 times"):
        rig.until(lambda: False)
    assert rig.pool.restarts == 1 and rig.ring.head == 8
    assert firsts(rig, 0).all() and firsts(rig, 4).all()


def test_a_simulator_that_breaks_the_contract_from_the_first_step_on_ends_the_run_at_once(rig):
    rig = rig("fake_envs.WrongOutput", init_args={"wrong": "dtype"})
    rig.worker.control.steps_allowed = 100
    rig.pool.start(wait=False)
    with pytest.raises(WorkerError, match="observation of shape .*float64, expected .*float32"):
        rig.until(lambda: False)
    assert rig.pool.restarts == 0


# -- settings of the running simulator --------------------------------------------------------------------------------


def test_configured_between_steps_and_while_waiting(rig):
    rig = rig("fake_envs.ConfigurableEnv")
    rig.pool.start()
    rig.worker.control.steps_allowed = 10
    rig.until(lambda: rig.ring.head == 10)
    rig.worker.send({"configure": {"bonus": 100.0}})
    rig.until(lambda: "configured: bonus 100.0" in rig.log_path.read_text())  # nothing was allowed meanwhile
    rig.worker.control.steps_allowed = 12
    rig.until(lambda: rig.ring.head == 12)
    assert (rig.field("reward", 9) < 100).all() and (rig.field("reward", 10) >= 100).all()
    assert not firsts(rig, 10).all()  # episodes go on
    rig.worker.send({"configure": {"mass": 1.0}})
    with pytest.raises(WorkerError, match="this hand has no.*mass") as caught:
        rig.until(lambda: False)
    assert "\n" not in str(caught.value) and rig.pool.restarts == 0


def test_the_evaluator_is_configured_in_turn_with_its_requests(rig):
    rig = rig("fake_envs.ConfigurableEnv", mode="evaluate")
    rig.pool.start()
    for message in ({"request": 1, "episodes": 2, "seed": 5}, {"configure": {"bonus": 100}},
                    {"request": 2, "episodes": 2, "seed": 5}):  # fmt: skip
        rig.worker.send(message)
    rig.until(lambda: len(rig.messages) == 2)
    assert [sorted(message["result"]["return"]) for message in rig.messages] == [[6.0, 15.0], [306.0, 515.0]]


def test_what_cannot_be_changed_names_the_task():
    from claw_lightning.rollout.envs.base import EnvError
    from tests.fakes.fake_envs import CountingEnv

    with pytest.raises(EnvError, match="mass.*task Counting cannot be changed while it runs; "):
        CountingEnv().configure(mass=1.0)
