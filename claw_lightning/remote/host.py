"""Host: the actor beside one worker's process on a node, which it starts, watches and empties.

The process is an ordinary worker (:class:`LocalWorker`, any interpreter, the same protocol), its ring, mailbox and
control block lie in this node's memory. Nothing here knows Ray but the two calls that fetch parameters and ask which
GPUs were given, so it can be tried without.

The learner calls :meth:`Host.collect` again and again; each call waits a moment for rows and returns what is there.
What it has to say it sends by :meth:`Host.steer`. Both run in threads of their own (concurrency groups of the actor).
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from claw_lightning.configs import IMPORT_FOLDERS
from claw_lightning.errors import WorkerError
from claw_lightning.process import LocalWorker, WorkerCommand
from claw_lightning.remote.blocks import Progress, cut_block, host_layout, host_steps, unsent_limit
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing, RowLayout

#: Seconds that a call waits for rows before it returns without: the rate of the heartbeats that the learner sees.
PATIENCE = 0.2
#: Seconds between looks at the ring while a call waits.
LOOK_SECONDS = 0.004
#: How many times as long rows wait for company while their worker can go on: each reply costs as much as many rows.
PATIENT_INTERVALS = 8
#: Messages that can wait with the rows they belong to; there is one for every step in which an episode ends.
PATIENT_KINDS = {"episodes"}
#: Bytes of rows for which a call returns at once, and that it returns at most.
EARLY_BYTES, MOST_BYTES = 1 << 20, 4 << 20
#: Bytes of the worker's log that go with one call, and that are kept on the node.
LOG_BYTES = 1 << 16


def fetch_values(reference: Any) -> np.ndarray:
    """Parameters [P] float32 behind an object reference; one copy for all actors of a node, which Ray fetches once."""
    import ray

    return ray.get(reference)


def given_gpus() -> list[str]:
    """Numbers of the GPUs that this actor was given."""
    import ray

    return [str(number) for number in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class Host:
    """See the module's text.

    Args:
        order: plain data: ``name``, ``settings`` (of the worker), ``python`` (None: this interpreter), ``device``,
            ``generation``, ``folders`` (to import from), ``layout``, ``num_lanes``, ``mailbox_size``, and where the
            learner's ring has come to: ``head``, ``finals``, ``images``.
        fetch: parameters behind a reference.
        gpus: numbers of the GPUs that may be used.
    """

    def __init__(
        self,
        order: dict[str, Any],
        fetch: Callable[[Any], np.ndarray] = fetch_values,
        gpus: Callable[[], list[str]] = given_gpus,
    ) -> None:
        self._order, self._fetch, self._gpus = order, fetch, gpus
        layout = host_layout(RowLayout(**order["layout"]))
        self.ring = LaneRing(layout, host_steps(layout, order["num_lanes"]), order["num_lanes"])
        self.ring.begin_at(order["head"], order["finals"], order["images"])
        self._sent = Progress(order["head"], order["finals"], order["images"])
        self._mailbox = Mailbox(order["mailbox_size"])
        self._log_fd = os.memfd_create("claw-log")  # without a name: nothing is left on the node
        self._log_sent = 0
        self._worker: LocalWorker | None = None
        self._failure: WorkerError | None = None
        self._is_lost = False  # for a reason that says nothing about the worker
        self._steered = 0
        self._allowed = order["head"]
        self._last_reply = 0.0
        self._closed = False
        self._wake = threading.Condition()
        self._letter: tuple[list[Any], int] | None = None
        # The kernel ends the worker with the thread that has started it (rollout/parent.py): so with one that stays.
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def where(self) -> dict[str, Any]:
        """The node: its name, the actor's process, its Python."""
        return {"node": socket.gethostname(), "pid": os.getpid(), "python": platform.python_version()}

    def steer(
        self, number: int, allowed: int, stop: bool, commands: list[dict[str, Any]], letter: list[Any], version: int
    ) -> None:
        """Take what the learner has to say. Never waits.

        Args:
            number: of this call; the next reply of :meth:`collect` tells it.
            allowed: vector steps up to which the worker may write.
            stop: ask it to end.
            commands: lines for its standard input.
            letter: empty, or one reference to new parameters (in a list, so that Ray does not fetch them before the
                call, and all behind it wait).
            version: of these.
        """
        with self._wake:
            self._allowed = allowed
            if letter:
                self._letter = (letter, version)  # the newest counts
                self._wake.notify()
            worker = self._worker
        if worker is not None:
            for command in commands:
                worker.send(command)
            worker.control.stop = stop
        self._allow()
        self._steered = number

    def collect(self, interval: float) -> dict[str, Any]:
        """Wait a moment for rows; return all that is new.

        Args:
            interval: seconds between replies with few rows while the worker can go no further, and an eighth of those
                while it can. Many rows come at once.

        Returns:
            ``rows``, ``finals``, ``images`` (uint8 arrays, as in :class:`Block`) and where they begin; ``messages``
            (list), ``log`` (bytes); ``control`` (see :meth:`Control.state`; None before the start); ``steered`` (the
            number of the last call of :meth:`steer`), ``ended`` (None, or how the process ended, in words) and
            ``killed``.
        """
        until = time.monotonic() + PATIENCE
        messages: list[dict[str, Any]] = []
        has_ended = False
        while True:
            now = time.monotonic()
            worker = self._worker
            if worker is not None and not has_ended:
                found, has_ended = worker.messages()
                messages += found
            unsent = (self.ring.head - self._sent.head) * self.ring.num_lanes * self.ring.layout.step_bytes
            # A worker that has come to its limit may wait for the learner, and the learner for these very rows.
            can_go_on = worker is not None and self.ring.head < worker.control.steps_allowed
            is_due = now - self._last_reply >= interval * (PATIENT_INTERVALS if can_go_on else 1)
            is_urgent = unsent >= EARLY_BYTES or any(each["kind"] not in PATIENT_KINDS for each in messages)
            if is_urgent or (is_due and (unsent or messages)) or has_ended or self._failure or now >= until:
                break
            time.sleep(LOOK_SECONDS)
        block = cut_block(self.ring, self._sent, MOST_BYTES)
        self._allow()
        self._last_reply = time.monotonic()
        ended, killed = None, False
        if has_ended and worker is not None and self._sent.head == self.ring.head:  # else the rest comes first
            worker.wait(1.0)
            worker.kill()
            ended, killed = worker.exit_text(), worker.was_killed
        elif self._failure is not None:
            messages.append({"kind": "error", "message": str(self._failure), "user": not self._is_lost})
            ended, killed = "could not be started", self._is_lost
        return {
            "head": block.head, "rows": block.rows,
            "first_final": block.first_final, "finals": block.finals,
            "first_image": block.first_image, "images": block.images,
            "messages": messages,
            "log": self._new_log(worker),
            "control": None if worker is None else worker.control.state(),
            "steered": self._steered,
            "ended": ended, "killed": killed,
        }  # fmt: skip

    def end(self) -> None:
        """End the process, and all that its simulator has started."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            if self._worker is not None:
                self._worker.kill()

    # -- the thread that keeps the process ------------------------------------------------------------------------

    def _keep(self) -> None:
        """Start the worker when there are parameters to act with, then hand on newer ones."""
        try:
            while True:
                with self._wake:
                    while self._letter is None and not self._closed:
                        self._wake.wait()
                    if self._closed:
                        return
                    assert self._letter is not None
                    (reference,), version = self._letter
                    self._letter = None
                self._mailbox.publish(self._fetch(reference), version)
                del reference  # else Ray keeps the object
                if self._worker is None:
                    self._start()
        except Exception as error:
            is_ours = isinstance(error, WorkerError)
            self._failure = error if isinstance(error, WorkerError) else WorkerError(f"{type(error).__name__}: {error}")
            self._is_lost = not is_ours

    def _start(self) -> None:
        order = self._order
        for folder in order["folders"]:
            if folder not in IMPORT_FOLDERS and os.path.isdir(folder):
                IMPORT_FOLDERS.append(folder)
        settings = dict(
            order["settings"],
            layout=self.ring.layout.settings(),
            num_steps=self.ring.num_steps,
            ring_fd=self.ring.block.fd,
            mailbox_fd=self._mailbox.block.fd,
        )
        command = WorkerCommand(order["python"] or sys.executable, settings, self._device(order["device"]))
        fds = (self.ring.block.fd, self._mailbox.block.fd)
        log_path = Path(f"/proc/self/fd/{self._log_fd}")
        worker = LocalWorker(order["name"], command, fds, log_path, self.ring)
        worker.generation = order["generation"] - 1
        with self._wake:
            if self._closed:
                return
            worker.start()
            self._worker = worker
        self._allow()

    def _device(self, asked: str) -> str:
        """The GPU that Ray has given, by this node's number, in place of the n-th."""
        if not asked.startswith("cuda:"):
            return asked
        gpus, index = self._gpus(), int(asked.split(":", 1)[1])
        return f"cuda:{gpus[index]}" if index < len(gpus) else asked

    def _allow(self) -> None:
        """Let the worker write as far as the learner allows and the ring has room for."""
        with self._wake:
            if self._worker is not None:
                room = self._sent.head + unsent_limit(self.ring)
                self._worker.control.steps_allowed = min(self._allowed, room)

    def _new_log(self, worker: LocalWorker | None) -> bytes:
        """What the worker has printed since the last call, a piece at a time."""
        size = os.fstat(self._log_fd).st_size
        found = os.pread(self._log_fd, LOG_BYTES, self._log_sent)
        self._log_sent += len(found)
        if self._log_sent == size and size > 16 * LOG_BYTES:
            os.ftruncate(self._log_fd, 0)  # the process appends: what it prints meanwhile begins a new log
            self._log_sent = 0
        return found
