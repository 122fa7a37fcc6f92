"""RemoteWorker: a worker on a node of a cluster, which looks from here like one of this machine.

Its ring and its control block are this machine's; a thread of :class:`claw_lightning.remote.cluster.RayCluster` fills
them with what the worker's host sends. So supervision, limits, samplers and logs need not know where it runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claw_lightning.configs import IMPORT_FOLDERS
from claw_lightning.process import Worker, WorkerCommand
from claw_lightning.remote.blocks import Block, append_block
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.ring import LaneRing

if TYPE_CHECKING:
    from claw_lightning.remote.cluster import RayCluster

log = logging.getLogger(__name__)

#: Calls that say something to a host without having been answered: more would only wait in line.
MOST_UNANSWERED = 2
#: Seconds that a host may take to end its process before it is ended with it.
KILL_PATIENCE = 1.0


class Link:
    """What leads to one process of a worker: its host, and the calls that are under way.

    Attributes:
        host: the actor.
        placing: reference that is ready once the host runs; None from then on.
        collecting: references of the calls that fetch rows, oldest first.
        since: monotonic seconds of the beginning; of the last look at why it has no place, and of the last warning:
            ``looked``, ``warned``.
    """

    def __init__(self, host: Any, placing: Any) -> None:
        self.host, self.placing = host, placing
        self.collecting: deque[Any] = deque()
        self.since = self.looked = time.monotonic()
        self.warned: float | None = None
        self.number = self.answered = 0
        self.said: tuple[int, bool] | None = None
        self.letter = 0


class RemoteWorker(Worker):
    """See the module's text; arguments as of :class:`Worker`, and the cluster that it runs in."""

    def __init__(
        self,
        name: str,
        command: WorkerCommand,
        fds: tuple[int, ...],
        log_path: Path,
        ring: LaneRing,
        cluster: RayCluster,
    ) -> None:
        super().__init__(name, command, fds, log_path, ring)
        self._cluster = cluster
        #: Held by whoever touches what follows; the ring is written under it, so never by two.
        self.lock = threading.RLock()
        self.link: Link | None = None
        self.node = ""
        self.is_placed = False
        self._arrived: list[dict[str, Any]] = []
        self._outbox: list[dict[str, Any]] = []
        self._since = self.control.state()
        self._ended: str | None = None
        self._killed = False
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # -- the pool's side ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask the cluster for a place; the process is started there.

        Raises:
            WorkerError: the log cannot be written.
        """
        self.open_log().close()
        with self.lock:
            self._begin()
            self._since = self.control.state()
            self.is_placed, self._ended, self._killed = False, None, False
            self._arrived, self._outbox = [], []
            self.link = self._cluster.launch(self)

    def order(self) -> dict[str, Any]:
        """What the host needs; plain data. See :class:`claw_lightning.remote.host.Host`."""
        assert self.ring is not None
        command = self.command
        return {
            "name": self.name,
            "settings": command.settings,
            # The learner's own interpreter has another path there.
            "python": None if command.python == sys.executable else command.python,
            "device": command.device,
            "generation": self.generation,
            "folders": [os.getcwd(), *IMPORT_FOLDERS],
            "layout": self.ring.layout.settings(),
            "num_lanes": self.ring.num_lanes,
            "head": self.ring.head,
            "finals": self.ring.finals_written,
            "images": self.ring.arena_taken,
        }

    def send(self, message: dict[str, Any]) -> None:
        """Send one JSON line to the process, with the next call."""
        with self.lock:
            if self.link is not None:
                self._outbox.append(message)

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the process has ended. Never waits."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        with self.lock:
            arrived, self._arrived = self._arrived, []
            ended = self.has_exited()
        return self._take(arrived), ended

    def has_exited(self) -> bool:
        """Whether the process has ended, or been lost."""
        return self.link is None or self._ended is not None

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended by SIGKILL, or was lost with its node."""
        return self._killed

    def exit_text(self) -> str:
        """How the process ended, in words."""
        where = f" (on {self.node})" if self.node else ""
        return f"{self._ended or 'was ended'}{where}"

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within so many seconds."""
        until = time.monotonic() + seconds
        while not self.has_exited() and time.monotonic() < until:
            time.sleep(0.005)
        return self.has_exited()

    def send_kill(self) -> None:
        """Nothing that would not wait: Ray ends a job's actors with the process that has started them."""

    def kill(self) -> None:
        """End the process and its host. What they still send is not taken any more."""
        with self.lock:
            link, self.link = self.link, None
            self.is_placed = False
        if link is not None:
            self._cluster.end(link, KILL_PATIENCE if self._ended is None else 0.0)

    def release(self) -> None:
        """Free the control block; the worker cannot be started again."""
        super().release()
        if self._signal >= 0:
            os.close(self._signal)
            self._signal = -1

    @property
    def pipe(self) -> int:
        """Descriptor that can be read when there are messages; -1: none."""
        return self._signal if self.link is not None else -1

    # -- the cluster's side: with the lock held -------------------------------------------------------------------

    def place(self, found: dict[str, Any]) -> None:
        """There is a host."""
        self.is_placed, self.node = True, found["node"]
        self.control.beat(phases.START)

    def receive(self, reply: dict[str, Any]) -> None:
        """Take what a host has sent; see :meth:`claw_lightning.remote.host.Host.collect`.

        Raises:
            ValueError: rows that do not follow those that are there.
        """
        assert self.ring is not None
        assert self.link is not None
        names = ("head", "rows", "first_final", "finals", "first_image", "images")
        append_block(self.ring, Block(*(reply[name] for name in names)))
        self.link.answered = reply["steered"]
        if reply["log"]:
            self._append_log(reply["log"])
        if reply["control"] is not None:
            self.control.mirror(reply["control"], self._since)
        else:
            self.control.beat(phases.START)  # parameters are on their way to it
        self._arrived += reply["messages"]
        if reply["ended"] is not None:
            self._ended, self._killed = reply["ended"], reply["killed"]
        if reply["messages"] or self._ended is not None:
            self._tell()

    def lose(self, how: str) -> None:
        """The host is gone, and the process with it."""
        self._ended, self._killed = how, True
        self._tell()

    def words(self, letter: int) -> tuple[int, int, bool, list[dict[str, Any]]] | None:
        """Number, allowed steps, stop and commands of the next call of ``steer``; None where nothing is new.

        Args:
            letter: number of the newest parameters.
        """
        link = self.link
        if link is None or not self.is_placed or self._ended is not None:
            return None
        said = (self.control.steps_allowed, self.control.stop)
        has_news = said != link.said or letter != link.letter or self._outbox
        if not has_news or (link.number - link.answered >= MOST_UNANSWERED and not self.control.stop):
            return None
        if link.said == said and self.control.stop and not self._outbox:
            return None  # nobody learns any more in an ending process
        commands, self._outbox = self._outbox, []
        link.number, link.said = link.number + 1, said
        return (link.number, *said, commands)

    def _append_log(self, text: bytes) -> None:
        with contextlib.suppress(OSError), self.log_path.open("ab") as file:
            file.write(text)

    def _tell(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._signal, 1)
