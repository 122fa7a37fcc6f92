"""WorkerPool: starts, watches, restarts and stops the worker processes. The only place that knows processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_lightning.errors import WorkerError
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.control import Control

log = logging.getLogger(__name__)

#: Seconds without a heartbeat after which a worker counts as hung, by phase.
DEADLINES = {
    phases.START: 300.0,
    phases.RESET: 120.0,
    phases.STEP: 60.0,
    phases.PULL: 30.0,
    phases.WAIT: 30.0,
    phases.EVALUATE: 60.0,
}
#: Variables that would lead another interpreter to this one's libraries, or tie it to a rank of the learner.
CLEARED = ("PYTHONHOME", "VIRTUAL_ENV", "LOCAL_RANK", "RANK", "WORLD_SIZE", "PYTHONSTARTUP")
BOOTSTRAP = str(Path(__file__).resolve().parent / "rollout" / "bootstrap.py")


@dataclass
class WorkerCommand:
    """How to start a worker: interpreter, device, settings that go to its standard input."""

    python: str
    settings: dict[str, Any]
    device: str = "cpu"

    def environment(self) -> dict[str, str]:
        """Environment of the child, complete before it starts: a running interpreter would read some of it too late."""
        env = {key: value for key, value in os.environ.items() if key not in CLEARED}
        threads = str(self.settings["num_threads"])
        env.update({f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")})
        env["PYTHONUNBUFFERED"] = "1"
        # The user's working directory, so that own simulators are found; the learner's path only for its own Python.
        paths = [os.getcwd()]
        if self.python == sys.executable and env.get("PYTHONPATH"):
            paths.append(env["PYTHONPATH"])
        env["PYTHONPATH"] = os.pathsep.join(paths)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif self.device.startswith("cuda:"):
            env["CUDA_VISIBLE_DEVICES"] = self.device.split(":", 1)[1]
        return env


class Worker:
    """One worker process and the learner's ends of its blocks and pipes."""

    def __init__(self, name: str, command: WorkerCommand, fds: tuple[int, ...], log_path: Path) -> None:
        self.name, self.command, self.log_path = name, command, log_path
        self._shared_fds = fds
        self.control = Control()
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.error: dict[str, Any] | None = None
        self.restarts: deque[float] = deque()
        self.total_restarts = 0
        self._buffer = b""
        self._pipe = -1

    def start(self) -> None:
        """Launch the process. Its log is appended to, so that the reason of an earlier end stays readable."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.ready, self.error, self._buffer, self._pipe = False, None, b"", read_end
        self.control.stop = False
        self.control.beat(phases.START)
        settings = dict(self.command.settings, message_fd=write_end, control_fd=self.control.block.fd)
        # A restarted worker must not play the same episodes with the same noise again.
        settings["seed"] = settings.get("seed", 0) + 100_003 * self.total_restarts
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            log_file = self.log_path.open("ab")
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            self._pipe = -1
            raise WorkerError(
                f"{self.log_path}: the worker's log cannot be written ({error.strerror}); "
                "free the disk, or set trainer.default_root_dir or the logger's save_dir"
            ) from error
        try:
            with log_file:
                self.process = subprocess.Popen(
                    [self.command.python, BOOTSTRAP],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    env=self.command.environment(),
                    pass_fds=(write_end, self.control.block.fd, *self._shared_fds),
                )
        except OSError as error:
            os.close(read_end)
            self._pipe = -1  # else kill() would close this number again, which may be another file's by then
            raise WorkerError(
                f"data.worker_python: cannot start {self.command.python} ({error.strerror or error})"
            ) from error
        finally:
            os.close(write_end)
        self.send(settings)

    def send(self, message: dict[str, Any]) -> None:
        """Send one JSON line to the worker's standard input; a dead worker is noticed by :meth:`messages`."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the pipe has ended (the process has died). Never waits."""
        ended = self._pipe < 0
        while not ended:
            try:
                chunk = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        found = []
        for line in lines:
            message = json.loads(line)
            if message["kind"] == "ready":
                self.ready = True
            elif message["kind"] == "error":
                self.error = message
            found.append(message)
        return found, ended

    def failure(self, what: str) -> WorkerError:
        """One line that says what happened to this worker, and where its log is."""
        reason = self.error["message"] if self.error else f"the last line of its log is '{self._last_line()}'"
        return WorkerError(f"{self.name} {what}: {' '.join(reason.split())} (log: {self.log_path})")

    def _last_line(self) -> str:
        try:
            with self.log_path.open("rb") as file:  # only the end: a simulator may print a lot
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].strip() if lines else ""

    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self.process.poll() if self.process else None
        if code is None:
            return "closed its pipe"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def kill(self) -> None:
        """End the process now and release its pipes."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            self.process.wait()
            self.process = None
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def release(self) -> None:
        """Free the control block; the worker cannot be started again."""
        self.kill()
        self.control.block.close()


class WorkerPool:
    """A set of workers under supervision.

    :meth:`poll` is called often by whoever waits for experience. It drains messages, notices deaths at once (end of the
    message pipe) and hangs by their heartbeat, restarts within the budget and raises :class:`WorkerError` beyond it.

    Args:
        workers: not yet started.
        on_message: called as ``on_message(worker, message)`` for messages other than ``ready`` and ``error``.
        restart_budget: restarts per worker within ``restart_window`` seconds.
    """

    def __init__(
        self,
        workers: list[Worker],
        on_message: Callable[[Worker, dict[str, Any]], None] = lambda worker, message: None,
        restart_budget: int = 5,
        restart_window: float = 600.0,
        deadlines: dict[int, float] | None = None,
    ) -> None:
        self.workers = workers
        self.on_message = on_message
        self.restart_budget, self.restart_window = restart_budget, restart_window
        self.deadlines = {**DEADLINES, **(deadlines or {})}

    def start(self, wait: bool = True, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start all workers and, with ``wait``, return when each has built its simulator.

        Raises:
            WorkerError: a worker ended or stayed silent before it was ready.
        """
        for worker in self.workers:
            worker.start()
        while wait and not all(worker.ready for worker in self.workers) and not interrupted():
            self.poll()
            time.sleep(0.005)

    @property
    def alive(self) -> int:
        """Workers that run and are ready."""
        return sum(w.ready and w.process is not None and w.process.poll() is None for w in self.workers)

    @property
    def restarts(self) -> int:
        """Restarts of all workers so far."""
        return sum(worker.total_restarts for worker in self.workers)

    def poll(self) -> None:
        """Supervise; see the class. Costs a system call per worker when nothing happened."""
        for worker in self.workers:
            messages, ended = worker.messages()
            for message in messages:
                if message["kind"] not in ("ready", "error"):
                    self.on_message(worker, message)
            if ended:
                self._reap(worker)
            elif worker.control.silence > self.deadlines[worker.control.phase]:
                phase = phases.PHASES[worker.control.phase]
                self._recover(worker, f"gave no sign of life for {worker.control.silence:.0f} s in phase '{phase}'")

    def _reap(self, worker: Worker) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if worker.process is not None:
                worker.process.wait(timeout=1.0)
        self._recover(worker, worker.exit_text())

    def _recover(self, worker: Worker, what: str) -> None:
        """Restart a dead or hung worker, or give up with the reason."""
        was_ready = worker.ready
        failure = worker.failure(what)
        worker.kill()
        # Never came up (exit status 0 too: simulators call quit()), or breaks the contract: it would fail again.
        is_hopeless = worker.error is not None and worker.error.get("user", False)
        if is_hopeless or (not was_ready and worker.total_restarts == 0):
            raise failure
        now = time.monotonic()
        while worker.restarts and now - worker.restarts[0] > self.restart_window:
            worker.restarts.popleft()
        if len(worker.restarts) >= self.restart_budget:
            raise WorkerError(f"{failure}; restarted {len(worker.restarts)} times already, giving up")
        worker.restarts.append(now)
        worker.total_restarts += 1
        log.warning("%s; restarting it", failure)
        worker.start()

    def wait_for_message(self, seconds: float) -> None:
        """Sleep until a worker says something or ends, at most ``seconds``."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if worker._pipe >= 0:
                    selector.register(worker._pipe, selectors.EVENT_READ)
            selector.select(seconds)

    def close(self, grace: float = 2.0) -> None:
        """Ask all workers to stop, then end those that do not within ``grace`` seconds. Idempotent."""
        for worker in self.workers:
            worker.control.stop = True
        deadline = time.monotonic() + grace
        for worker in self.workers:
            if worker.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            worker.release()
        self.workers = []
