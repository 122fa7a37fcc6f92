"""Worker: what the pool starts, watches and ends; LocalWorker: one background process of this machine, with its pipes.

:mod:`claw_lightning.remote.worker` has the other kind, a process on a machine of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from claw_lightning.configs import IMPORT_FOLDERS
from claw_lightning.errors import WorkerError
from claw_lightning.interpreter import extension_folder, library_folders
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.packages import ASKED_DEVICE
from claw_lightning.rollout.ring import LaneRing

log = logging.getLogger(__name__)

#: Variables that would lead another interpreter to this one's libraries, or tie it to a rank of the learner.
CLEARED = ("PYTHONHOME", "VIRTUAL_ENV", "LOCAL_RANK", "RANK", "WORLD_SIZE", "PYTHONSTARTUP")
BOOTSTRAP = str(Path(__file__).resolve().parent / "rollout" / "bootstrap.py")
#: Seeds of successive processes of one worker lie this far apart: no episode is played twice with the same noise.
SEED_STRIDE = 100_003
#: Lines of a worker's log that an error quotes, and bytes of its end that are searched for them.
LAST_LINES, TAIL = 3, 4096
#: A simulator that prints at every step fills a disk in two days: a log of this size is cut (bytes), and this is kept.
MAX_LOG, KEPT_LOG = 64 << 20, 1 << 20
#: Seconds that a killed process may take to vanish (a GPU driver can hold it), after which it is left to the kernel.
KILL_PATIENCE = 5.0


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
        # The user's working directory and configurations, so that own simulators are found; the learner's path only for
        # its own Python.
        paths = [os.getcwd(), *IMPORT_FOLDERS]
        if self.python == sys.executable and env.get("PYTHONPATH"):
            paths.append(env["PYTHONPATH"])
        env["PYTHONPATH"] = os.pathsep.join(paths)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env[ASKED_DEVICE] = self.device  # adapters refuse to do on the CPU what was asked of a GPU
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif self.device.startswith("cuda:"):
            env["CUDA_VISIBLE_DEVICES"] = self.device.split(":", 1)[1]
        if self.python != sys.executable:
            self._add_libraries(env)
        return env

    def _add_libraries(self, env: dict[str, str]) -> None:
        """What simulators of another interpreter load and compile; the learner's own is left as it is."""
        folders = library_folders(self.python)
        if folders:
            given = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, *([given] if given else [])])
        env["TORCH_EXTENSIONS_DIR"] = extension_folder(self.python)
        env.setdefault("MAX_JOBS", env["OMP_NUM_THREADS"])  # processes that compile


class Worker(ABC):
    """A worker as the pool sees it, wherever its process runs: blocks, counters and log on the learner's side.

    Args:
        name: in messages, such as ``worker 0``.
        command: how to start it.
        fds: descriptors of shared blocks that a process of this machine inherits.
        log_path: file that takes the process's standard output and error.
        ring: what it writes, or None (an evaluator).
    """

    #: Whether there is a place for its process; on a cluster it may have to wait for one.
    is_placed = True

    def __init__(
        self, name: str, command: WorkerCommand, fds: tuple[int, ...], log_path: Path, ring: LaneRing | None = None
    ) -> None:
        self.name, self.command, self.log_path, self.ring = name, command, log_path, ring
        self._shared_fds = fds
        self.control = Control()
        self.ready = False
        self.error: dict[str, Any] | None = None
        #: Times (monotonic seconds) of the restarts within the budget's window.
        self.restarts: deque[float] = deque()
        self.total_restarts = 0
        #: Processes started before this one, for whatever reason.
        self.generation = -1
        #: Vector steps in the ring when this process was started.
        self.first_head = 0
        #: Whether an evaluator's present process has answered a request.
        self.has_answered = False

    @property
    def head(self) -> int:
        """Vector steps published by all processes of this worker."""
        return self.ring.head if self.ring is not None else 0

    @property
    def has_worked(self) -> bool:
        """Whether the present process has published a step or answered a request."""
        return self.has_answered or self.head > self.first_head

    @property
    def pid(self) -> int | None:
        """Of the present process; None where there is none on this machine."""
        return None

    def _begin(self) -> None:
        """Count a new process; nothing of the one before it is to be taken for its own."""
        self.ready, self.error, self.has_answered = False, None, False
        self.generation += 1
        self.first_head = self.head
        self.control.stop = False
        self.control.version = 0
        self.control.beat(phases.START)

    def _take(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Note what messages of the process say of itself; returns them."""
        for message in messages:
            if message["kind"] == "ready":
                self.ready = True
            elif message["kind"] == "error":
                self.error = message
        return messages

    def open_log(self) -> BinaryIO:
        """The log, to append to: the reason of an earlier end stays readable.

        Raises:
            WorkerError: it cannot be written.
        """
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            return self.log_path.open("ab")
        except OSError as error:
            raise WorkerError(
                f"{self.log_path}: the worker's log cannot be written ({error.strerror}); "
                "free the disk, or set trainer.default_root_dir or the logger's save_dir"
            ) from error

    # -- what the kinds of workers do in ways of their own --------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Start a process, the successor of the one before.

        Raises:
            WorkerError: it cannot be started.
        """

    @abstractmethod
    def send(self, message: dict[str, Any]) -> None:
        """Send one JSON line to the process. Never waits; a dead worker is noticed elsewhere."""

    @abstractmethod
    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the process has ended. Never waits."""

    @abstractmethod
    def has_exited(self) -> bool:
        """Whether the process has ended."""

    @property
    @abstractmethod
    def was_killed(self) -> bool:
        """Whether the process was ended from outside: that says nothing about its simulator. After :meth:`kill`."""

    @abstractmethod
    def exit_text(self) -> str:
        """How the process ended, in words; call it after :meth:`kill`."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within so many seconds."""

    @abstractmethod
    def send_kill(self) -> None:
        """End the process and all that it has started. Waits for nothing: safe in a signal handler."""

    @abstractmethod
    def kill(self) -> None:
        """End the process, and all that it has started, now; release what leads to it."""

    def release(self) -> None:
        """Free the control block; the worker cannot be started again."""
        self.kill()
        self.control.block.close()

    @property
    @abstractmethod
    def pipe(self) -> int:
        """Descriptor that can be read when there are messages; -1: none."""

    # -- its log --------------------------------------------------------------------------------------------------

    def failure(self, what: str) -> WorkerError:
        """One line that says what happened to this worker, with the end of its log and where that is."""
        lines = self.last_lines()
        reason = self.error["message"] if self.error else f"its log ends: {lines}" if lines else "its log is empty"
        return WorkerError(f"{self.name} {what}: {' '.join(reason.split())} (log: {self.log_path})")

    def last_lines(self) -> str:
        """The last lines of the log, as one."""
        try:
            with self.log_path.open("rb") as file:  # only the end: a simulator may print a lot
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            lines = []
        return " | ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])

    def cut_log(self) -> None:
        """Keep a log that has become too large from filling the disk; its end goes to ``<log>.old``."""
        try:
            if self.log_path.stat().st_size <= MAX_LOG:
                return
            with self.log_path.open("rb") as file:
                file.seek(-KEPT_LOG, os.SEEK_END)
                self.log_path.with_name(self.log_path.name + ".old").write_bytes(file.read())
            os.truncate(self.log_path, 0)  # the process appends: its next line is the new first one
        except FileNotFoundError:
            pass  # somebody has removed it
        except OSError as error:
            log.warning("%s: the log has grown too large and could not be cut (%s)", self.log_path, error.strerror)


class LocalWorker(Worker):
    """A worker process of this machine and the learner's ends of its pipes; arguments as of :class:`Worker`."""

    def __init__(
        self, name: str, command: WorkerCommand, fds: tuple[int, ...], log_path: Path, ring: LaneRing | None = None
    ) -> None:
        super().__init__(name, command, fds, log_path, ring)
        self.process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._outbox = b""
        self._pipe = -1

    @property
    def pid(self) -> int | None:
        """Of the present process; None where there is none."""
        return self.process.pid if self.process is not None else None

    def start(self) -> None:
        """Launch the process.

        Raises:
            WorkerError: the log cannot be written, or the interpreter cannot be started.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._buffer, self._outbox, self._pipe = b"", b"", read_end
        self._begin()
        settings = dict(self.command.settings, message_fd=write_end, control_fd=self.control.block.fd, name=self.name)
        settings["seed"] = settings.get("seed", 0) + SEED_STRIDE * self.generation
        try:
            log_file = self.open_log()
        except WorkerError:
            os.close(read_end)
            os.close(write_end)
            self._pipe = -1
            raise
        try:
            with log_file:
                self.process = subprocess.Popen(
                    [self.command.python, BOOTSTRAP],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    env=self.command.environment(),
                    pass_fds=(write_end, self.control.block.fd, *self._shared_fds),
                    # A session of its own: signals of the terminal and of job schedulers reach the learner alone, which
                    # decides; and what a simulator has started can be ended together with it.
                    start_new_session=True,
                )
        except OSError as error:
            os.close(read_end)
            self._pipe = -1  # else kill() would close this number again, which may be another file's by then
            raise WorkerError(
                f"data.worker_python: cannot start {self.command.python} ({error.strerror or error})"
            ) from error
        finally:
            os.close(write_end)
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.send(settings)

    def send(self, message: dict[str, Any]) -> None:
        """Send one JSON line to the worker's standard input. Never waits; a dead worker is noticed elsewhere."""
        self._outbox += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Send what a process that does not read (stopped, or still starting) has left in the pipe's way."""
        if self._outbox and self.process is not None and self.process.stdin is not None:
            try:
                self._outbox = self._outbox[os.write(self.process.stdin.fileno(), self._outbox) :]
            except BlockingIOError:
                pass
            except (BrokenPipeError, ValueError):
                self._outbox = b""

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the process has ended. Never waits."""
        self._flush()
        ended = self._pipe < 0
        # Asked before the pipe is read: what it said last is then in the pipe. Something that the simulator has started
        # may hold the pipe open longer than the worker lives, hence both signs.
        exited = self.has_exited()
        while not ended:
            try:
                chunk = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return self._take(self._parse(lines)), ended or exited

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        found = []
        for line in lines:
            try:
                message = json.loads(line)
                message["kind"]
            except (ValueError, TypeError, KeyError):
                log.warning("%s sent a line that is no message: %.80r", self.name, line)
                continue
            found.append(message)
        return found

    def has_exited(self) -> bool:
        """Whether the process has ended. It stays in the process table, so that its number is nobody else's."""
        if self.process is None or self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended by SIGKILL (out of memory, a scheduler, ourselves)."""
        return self.process is not None and self.process.returncode == -signal.SIGKILL

    def exit_text(self) -> str:
        """How the process ended, in words; call it after :meth:`kill`."""
        code = self.process.returncode if self.process else None
        if code is None:
            return "closed its pipe"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within so many seconds."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=max(0.0, seconds))
        return self.process is None or self.process.returncode is not None

    def send_kill(self) -> None:
        """Send SIGKILL to the process and all that it has started. Waits for nothing: safe in a signal handler."""
        if self.process is not None and self.process.returncode is None:  # not reaped: the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, and all that it has started, now; release its pipes."""
        self.send_kill()
        process = self.process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if not self.wait(KILL_PATIENCE):
                log.error("%s (process %d) does not end although it was killed; going on without it", self.name,
                          process.pid)  # fmt: skip
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def release(self) -> None:
        """Free the control block; the worker cannot be started again."""
        super().release()
        self.process = None

    @property
    def pipe(self) -> int:
        """Descriptor on which messages arrive; -1: none."""
        return self._pipe
