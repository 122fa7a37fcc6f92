"""WorkerPool: supervision, tested on processes that speak the protocol and nothing else."""

import gc
import os
import signal
import sys
import time

import pytest

import claw_lightning.pool
from claw_lightning.errors import WorkerError
from claw_lightning.pool import Worker, WorkerCommand, WorkerPool
from claw_lightning.rollout import control as phases
from tests.builders import FAKES, poll_until


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """Builds pools of fake workers, one for each script; they are closed at the end."""
    monkeypatch.setattr(claw_lightning.pool, "BOOTSTRAP", str(FAKES / "fake_worker.py"))
    made = []

    def build(*scripts, python=sys.executable, **options):
        workers = []
        for index, script in enumerate(scripts):
            command = WorkerCommand(python, {"num_threads": 1, "script": script})
            workers.append(Worker(f"worker {index}", command, (), tmp_path / "logs" / f"worker_{index}.log"))
        pool = WorkerPool(workers, **options)
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
    pool.deadlines[phases.WAIT] = 0.1
    poll_until(pool, lambda: pool.restarts == 1)
    assert stopped.returncode == -signal.SIGKILL
    pool.deadlines[phases.WAIT] = 60.0
    poll_until(pool, lambda: pool.alive == 1)


def test_each_phase_has_its_own_deadline(pool_of):
    pool = pool_of("", deadlines={phases.WAIT: 7.0})
    assert pool.deadlines[phases.WAIT] == 7.0
    assert pool.deadlines[phases.START] > pool.deadlines[phases.STEP] > 0
    assert set(pool.deadlines) == set(range(len(phases.PHASES)))


def test_the_budget_ends(pool_of):
    pool = pool_of("die", restart_budget=2)
    pool.start(wait=False)
    with pytest.raises(WorkerError, match=r"status 3.*log: .*worker_0\.log.*restarted 2 times already"):
        poll_until(pool, lambda: False)
    assert pool.restarts == 2


def test_restarts_of_long_ago_do_not_count(pool_of):
    pool = pool_of("", restart_budget=1)
    pool.start()
    worker = pool.workers[0]
    worker.restarts.append(time.monotonic() - pool.restart_window - 1)
    os.kill(worker.process.pid, signal.SIGKILL)
    poll_until(pool, lambda: pool.restarts == 1 and pool.alive == 1)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by signal 9.*giving up"):
        poll_until(pool, lambda: False)


def test_an_end_before_ready_is_an_error_whatever_the_status(pool_of):
    pool = pool_of("end")
    said = r"worker 0 exited with status 0: the last line of its log is 'log line of \d+' \(log: .*worker_0\.log\)"
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
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_environment_of_another_interpreter(monkeypatch, tmp_path):
    env = environment(monkeypatch, tmp_path, "/other/python", "cuda:2")
    assert env["PYTHONPATH"] == str(tmp_path)  # the learner's libraries are not for it
    assert env["CUDA_VISIBLE_DEVICES"] == "2"


def test_a_log_that_cannot_be_written_is_named(pool_of, tmp_path):
    (tmp_path / "logs").write_text("in the way")
    pool = pool_of("error")
    with pytest.raises(WorkerError, match=r"logs.*the worker's log cannot be written .*default_root_dir"):
        pool.start()
