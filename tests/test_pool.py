"""WorkerPool: supervision, tested on processes that speak the protocol and nothing else."""

import gc
import os
import signal
import sys
import threading
import time

import psutil
import pytest

import claw_lightning.pool
import claw_lightning.process
from claw_lightning.errors import WorkerError
from claw_lightning.pool import FailurePolicy, LocalWorker, WorkerCommand, WorkerPool
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.envs.packages import ASKED_DEVICE
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import FAKES, PATIENCE, poll_until


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """Builds pools of fake workers, one for each script; they are closed at the end."""
    monkeypatch.setattr(claw_lightning.process, "BOOTSTRAP", str(FAKES / "fake_worker.py"))
    monkeypatch.setattr(claw_lightning.pool, "BACK_OFF", (0.01,))
    made = []

    def build(*scripts, python=sys.executable, policy=None, writing=False, **options):
        workers = []
        for index, script in enumerate(scripts):
            settings = {"num_threads": 1, "script": script}
            ring, fds = None, ()
            if writing:
                ring = LaneRing(RowLayout(1, 1), 64, 1)
                settings |= {"ring_fd": ring.block.fd, "num_steps": 64, "version": 5}
                fds = (ring.block.fd,)
            path = tmp_path / "logs" / f"worker_{index}.log"
            workers.append(LocalWorker(f"worker {index}", WorkerCommand(python, settings), fds, path, ring))
        pool = WorkerPool(workers, policy=FailurePolicy(**policy or {}), **options)
        made.append(pool)
        return pool

    yield build
    for pool in made:
        pool.close(grace=0.0)


def test_start_waits_until_all_are_ready(pool_of):
    pool = pool_of("", "")
    assert pool.alive == 0
    pool.start()
    assert pool.alive == 2 and all(worker.ready for worker in pool.workers)


def test_messages_other_than_ready_and_error_are_handed_on(pool_of):
    found = []
    pool = pool_of("", on_message=lambda worker, message: found.append((worker.name, message)))
    pool.start()
    pool.workers[0].send({"request": 5})
    poll_until(pool, lambda: len(found) == 2)
    assert found[0] == ("worker 0", {"kind": "episodes", "episodes": []})
    assert found[1] == ("worker 0", {"kind": "echo", "line": {"request": 5}})


def test_a_killed_worker_is_restarted(pool_of):
    pool = pool_of("", "")
    pool.start()
    old, other = (worker.process.pid for worker in pool.workers)
    os.kill(old, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 2)
    assert pool.workers[0].process.pid != old and pool.workers[1].process.pid == other
    assert pool.workers[0].log_path.read_text().count("log line") == 2  # the earlier log stays readable


def test_a_silent_worker_is_killed_and_restarted(pool_of):
    pool = pool_of("")
    pool.start()
    stopped = pool.workers[0].process
    poll_until(pool, lambda: pool.workers[0].control.phase == phases.WAIT)
    os.kill(stopped.pid, signal.SIGSTOP)
    pool.deadlines["wait"] = 0.1
    poll_until(pool, lambda: pool.restarts == 1)
    assert stopped.returncode == -signal.SIGKILL
    pool.deadlines["wait"] = 60.0
    poll_until(pool, lambda: pool.alive == 1)


def test_each_phase_has_its_own_deadline(pool_of):
    pool = pool_of("", policy={"deadlines": {"wait": 7.0}})
    assert pool.deadlines["wait"] == 7.0
    assert pool.deadlines["start"] > pool.deadlines["step"] > 0
    assert set(phases.PHASES) < set(pool.deadlines)


def test_the_budget_ends(pool_of):
    pool = pool_of("die", policy={"budget": 2})
    pool.start(wait=False)
    with pytest.raises(
        WorkerError, match=r"status 3.*log: .*worker_0\.log.*restarted 2 times within 600 s already, giving up"
    ):
        poll_until(pool, lambda: False)
    assert pool.restarts == 2


def test_restarts_of_long_ago_do_not_count(pool_of):
    pool = pool_of("", policy={"budget": 1})
    pool.start()
    worker = pool.workers[0]
    worker.restarts.append(time.monotonic() - pool.policy.window - 1)
    os.kill(worker.process.pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by signal 9.*giving up"):
        poll_until(pool, lambda: False)


def test_an_end_before_ready_is_an_error_whatever_the_status(pool_of):
    pool = pool_of("end")
    said = r"worker 0 exited with status 0: its log ends: log line of \d+ \(log: .*worker_0\.log\)"
    with pytest.raises(WorkerError, match=said):
        pool.start()
    assert pool.restarts == 0


def test_the_workers_own_reason_comes_first(pool_of):
    pool = pool_of("error")
    with pytest.raises(WorkerError, match="no such task") as caught:
        pool.start()
    assert "\n" not in str(caught.value)


def test_an_interpreter_that_does_not_exist(pool_of):
    pool = pool_of("", python="/no/such/python")
    with pytest.raises(WorkerError, match="data.worker_python.*No such file"):
        pool.start()
    free = os.open(os.devnull, os.O_RDONLY)  # takes the number that the failed start has given back
    pool.close()
    os.fstat(free)  # and is not closed in its place
    os.close(free)


def test_start_can_be_interrupted(pool_of):
    pool = pool_of("")
    pool.start(interrupted=lambda: True)
    assert pool.alive == 0


def test_close_asks_first_then_kills_and_is_idempotent(pool_of):
    pool = pool_of("", "deaf")
    pool.start()
    polite, deaf = (worker.process for worker in pool.workers)
    pool.close(grace=1.0)
    assert deaf.returncode == -signal.SIGKILL
    assert polite.returncode == 0
    pool.close()
    assert pool.alive == 0


def test_no_descriptor_is_left_behind(pool_of):
    def descriptors():
        gc.collect()  # blocks of earlier tests give theirs back when they are collected
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    pool = pool_of("", "")
    pool.start()
    os.kill(pool.workers[0].process.pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 2)
    pool.close()
    assert descriptors() == before


def test_sending_to_a_dead_worker_is_no_error(pool_of):
    pool = pool_of("")
    pool.start()
    pool.workers[0].process.kill()
    pool.workers[0].process.wait()
    pool.workers[0].send({"request": 1})


# -- workers that live and do not work ------------------------------------------------------------------------------


def test_a_worker_that_may_write_and_does_not_is_replaced(pool_of):
    pool = pool_of("idle", "", writing=True, policy={"deadlines": {"write": 0.2}})
    pool.start()
    poll_until(pool, lambda: all(worker.control.phase == phases.WAIT for worker in pool.workers))
    time.sleep(0.5)
    pool.poll()
    assert pool.restarts == 0  # neither was allowed to write
    for worker in pool.workers:
        worker.control.steps_allowed = 10
    poll_until(pool, lambda: pool.workers[0].total_restarts == 1)
    assert pool.workers[1].total_restarts == 0 and pool.workers[1].head == 10


def test_time_in_which_nobody_looked_is_not_held_against_a_worker(pool_of):
    pool = pool_of("", writing=True, policy={"deadlines": {"write": 0.2}})
    pool.start()
    pool.workers[0].control.steps_allowed = 5
    poll_until(pool, lambda: pool.workers[0].head == 5)
    pool.poll()
    time.sleep(0.5)  # a long validation
    pool.workers[0].control.steps_allowed = 6
    pool.poll()
    assert pool.restarts == 0


def test_when_all_have_stood_still_nobody_owes_a_step(pool_of):
    pool = pool_of("idle", writing=True, policy={"deadlines": {"write": 0.2}})
    pool.start()
    pool.workers[0].control.steps_allowed = 5
    pool.poll()
    time.sleep(0.3)
    pool._last_poll -= 10.0
    pool.poll()
    assert pool.restarts == 0
    poll_until(pool, lambda: pool.restarts == 1)


def test_a_worker_that_keeps_an_old_policy_is_replaced(pool_of):
    newest = [5]
    pool = pool_of("", writing=True, policy={"deadlines": {"adopt": 0.2}}, published=lambda: newest[0])
    pool.start()
    worker = pool.workers[0]
    worker.control.steps_allowed = 5
    poll_until(pool, lambda: worker.head == 5)
    newest[0] = 6
    pool.poll()
    time.sleep(0.5)
    pool.poll()
    assert pool.restarts == 0  # it has had no step in which to adopt it
    worker.control.steps_allowed = 10
    poll_until(pool, lambda: pool.restarts == 1)


def test_a_stopped_machine_is_no_hang(pool_of, monkeypatch):
    """All stand still, the learner too: whoever lives afterwards goes on."""
    pool = pool_of("", policy={"deadlines": {"wait": 0.3}})
    pool.start()
    worker = pool.workers[0]
    poll_until(pool, lambda: worker.control.phase == phases.WAIT)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.5)
    pool._last_poll -= 10.0  # the learner has not looked for a while either
    monkeypatch.setattr(claw_lightning.pool, "SECOND_CHANCE", 20.0)
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGCONT)).start()
    pool.poll()
    assert pool.restarts == 0 and worker.control.silence < 20.0


# -- what follows a failure -----------------------------------------------------------------------------------------


def test_a_worker_that_worked_comes_back_at_once_and_one_that_did_not_waits_longer_each_time(pool_of, monkeypatch):
    monkeypatch.setattr(claw_lightning.pool, "BACK_OFF", (0.01, 0.02, 0.03))
    events = []
    pool = pool_of(
        "work and die", "die", writing=True, policy={"budget": 5, "on_failure": "degrade"},
        on_event=lambda kind, worker, **details: events.append((kind, worker.name, details)),
    )  # fmt: skip
    pool.start(wait=False)
    for worker in pool.workers:
        worker.control.steps_allowed = 100
    with pytest.raises(WorkerError, match="giving up"):
        poll_until(pool, lambda: False)

    def delays(name):
        return [details["delay"] for kind, who, details in events if kind == "failure" and who == name]

    assert delays("worker 0") == [0.0] * 5
    assert delays("worker 1") == [0.01, 0.02, 0.03, 0.03, 0.03]
    assert [kind for kind, who, _ in events if who == "worker 1"][:3] == ["start", "ready", "failure"]
    assert sorted(who for kind, who, _ in events if kind == "lost") == ["worker 0", "worker 1"]


def test_degrade_goes_on_with_those_that_are_left(pool_of):
    pool = pool_of("", "end", policy={"on_failure": "degrade", "budget": 1})
    pool.start(wait=False)
    poll_until(pool, lambda: pool.is_lost(pool.workers[1]) and pool.alive == 1)
    assert not pool.is_lost(pool.workers[0]) and pool.restarts == 0
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 0 was killed by signal 9"):  # the last one
        poll_until(pool, lambda: False)


def test_degrade_does_not_hide_a_wrong_setting(pool_of):
    pool = pool_of("", "error", policy={"on_failure": "degrade"})
    with pytest.raises(WorkerError, match="no such task"):
        pool.start()


def test_stop_ends_with_the_first_failure(pool_of):
    pool = pool_of("", policy={"on_failure": "stop"})
    pool.start()
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by signal 9.*on_worker_failure is stop"):
        poll_until(pool, lambda: False)
    assert pool.restarts == 0


def test_processes_are_renewed_one_at_a_time_and_at_no_cost(pool_of):
    events = []
    pool = pool_of(
        "", "", writing=True, policy={"recycle_after": 10, "budget": 0},
        on_event=lambda kind, worker, **details: events.append((kind, worker.name, details.get("head"))),
    )  # fmt: skip
    pool.start()
    first = [worker.pid for worker in pool.workers]
    for round_ in (1, 2):
        for worker in pool.workers:
            worker.control.steps_allowed = 12 * round_
        poll_until(pool, lambda count=2 * round_: pool.recycled == count and pool.alive == 2)
    assert pool.restarts == 0 and not set(first) & {worker.pid for worker in pool.workers}
    lives = [(kind, name) for kind, name, _ in events if kind in ("recycle", "start")][2:]
    assert lives[::2] == [("recycle", name) for _, name in lives[1::2]]  # nobody else went meanwhile
    assert all(worker.generation == 2 and worker.first_head >= 20 for worker in pool.workers)


def test_nobody_makes_room_while_a_successor_is_not_ready_yet(pool_of):
    pool = pool_of("", "", writing=True, policy={"recycle_after": 10})
    for worker in pool.workers:
        worker.command.settings["start_seconds"] = 0.3
    pool.start()
    for worker in pool.workers:
        worker.control.steps_allowed = 12
    least = []
    poll_until(pool, lambda: least.append(pool.alive) or pool.recycled == 2 and pool.alive == 2)
    assert min(least) == 1


def test_a_simulator_that_does_not_end_is_replaced_at_no_cost_too(pool_of, monkeypatch):
    monkeypatch.setattr(claw_lightning.pool, "FAREWELL", 0.2)
    pool = pool_of("deaf", writing=True, policy={"recycle_after": 10, "budget": 0})
    pool.start()
    pool.workers[0].control.steps_allowed = 12
    poll_until(pool, lambda: pool.recycled == 1 and pool.alive == 1)
    assert pool.restarts == 0


def test_an_evaluator_that_has_worked_is_restarted_after_an_error(pool_of):
    pool = pool_of("")
    pool.start()
    worker = pool.workers[0]
    worker.has_answered = True
    worker.error = {"kind": "error", "message": "the hand fell off", "user": False}
    os.kill(worker.pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)
    assert not worker.has_answered


def test_who_is_killed_from_outside_before_it_was_ready_is_restarted(pool_of):
    pool = pool_of("")
    pool.workers[0].command.settings["start_seconds"] = 60.0
    pool.start(wait=False)
    pool.workers[0].command.settings["start_seconds"] = 0.0
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)


def test_a_successor_that_cannot_be_started_is_a_failure_like_others(pool_of):
    pool = pool_of("", policy={"budget": 2})
    pool.start()
    worker = pool.workers[0]
    logs, other = worker.log_path.parent, worker.log_path.parent.with_name("moved")
    logs.rename(other)
    logs.write_text("in the way")
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="cannot be started again.*log cannot be written.*restarted 2 times"):
        poll_until(pool, lambda: False)


def test_a_step_that_may_take_long_may_also_be_waited_for(pool_of):
    assert pool_of("", policy={"deadlines": {"step": 600.0}}).deadlines["write"] == 1200.0
    assert pool_of("", policy={"deadlines": {"step": 600.0, "write": 5.0}}).deadlines["write"] == 5.0
    assert pool_of("").deadlines["write"] == 240.0


# -- what processes leave -------------------------------------------------------------------------------------------


def test_what_a_simulator_has_started_ends_with_its_worker(pool_of):
    pool = pool_of("child", policy={"budget": 0})
    pool.start(wait=False)
    with pytest.raises(WorkerError, match="status 3"):  # although the child holds the pipe open
        poll_until(pool, lambda: False)
    child = int(pool.workers[0].log_path.read_text().split("child ")[1].split()[0])
    until = time.monotonic() + PATIENCE
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_lines_that_are_no_messages_are_passed_over(pool_of, caplog):
    pool = pool_of("garbage")
    pool.start()
    pool.workers[0].send({"request": 1})
    poll_until(pool, lambda: caplog.text.count("no message") == 2)
    assert pool.alive == 1


def test_a_worker_that_does_not_read_holds_nobody_up(pool_of):
    found = []
    pool = pool_of("", on_message=lambda worker, message: found.append(message))
    pool.start()
    worker = pool.workers[0]
    os.kill(worker.pid, signal.SIGSTOP)
    for request in range(100):  # together more than a pipe holds
        worker.send({"request": request, "text": "x" * 2000})
    os.kill(worker.pid, signal.SIGCONT)
    poll_until(pool, lambda: sum(message["kind"] == "echo" for message in found) == 100)


def test_a_log_that_grows_without_end_is_cut_and_its_end_kept(pool_of, monkeypatch):
    pool = pool_of("")
    pool.start()
    path = pool.workers[0].log_path
    monkeypatch.setattr(claw_lightning.process, "MAX_LOG", 1000)
    monkeypatch.setattr(claw_lightning.process, "KEPT_LOG", 10)
    with path.open("a") as file:
        file.write("x" * 2000 + "the end\n")
    pool._logs_seen -= 60.0
    pool.poll()
    assert path.stat().st_size == 0 and (path.parent / "worker_0.log.old").read_text() == "xxthe end\n"


def test_an_error_quotes_the_last_lines_of_the_log(pool_of):
    pool = pool_of("")
    pool.start()
    with pool.workers[0].log_path.open("a") as file:
        file.write("one\ntwo\n\nthree\nfour\n")
    assert str(pool.workers[0].failure("broke")).startswith("worker 0 broke: its log ends: two | three | four (log: /")


# -- the child's environment --------------------------------------------------------------------------------------


def environment(monkeypatch, tmp_path, python=sys.executable, device="cpu"):
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/learner")
    return WorkerCommand(python, {"num_threads": 3}, device).environment()


def test_environment_of_the_learners_own_interpreter(monkeypatch, tmp_path):
    env = environment(monkeypatch, tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/learner"]
    assert not {"PYTHONHOME", "VIRTUAL_ENV", "LOCAL_RANK", "RANK"} & set(env)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env[ASKED_DEVICE] == "cpu"


def test_environment_of_another_interpreter(monkeypatch, tmp_path):
    env = environment(monkeypatch, tmp_path, "/other/python", "cuda:2")
    assert env["PYTHONPATH"] == str(tmp_path)  # the learner's libraries are not for it
    assert env["CUDA_VISIBLE_DEVICES"] == "2" and env[ASKED_DEVICE] == "cuda:2"


def test_a_log_that_cannot_be_written_is_named(pool_of, tmp_path):
    (tmp_path / "logs").write_text("in the way")
    pool = pool_of("error")
    with pytest.raises(WorkerError, match=r"logs.*the worker's log cannot be written .*default_root_dir"):
        pool.start()
