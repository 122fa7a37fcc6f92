"""RayCluster: the connection of a run to Ray, and the two threads that serve its workers there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claw_lightning.errors import ConfigError
from claw_lightning.process import WorkerCommand
from claw_lightning.remote.config import RayConfig
from claw_lightning.remote.host import MOST_BYTES, Host
from claw_lightning.remote.worker import Link, RemoteWorker
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing

log = logging.getLogger(__name__)

#: Calls for rows that each host has at a time: one waits there while the reply of the other is on its way.
IN_FLIGHT = 2
#: Seconds between replies with few rows, and by how much it grows with each worker: what one thread can take.
REPLY_SECONDS, REPLY_SECONDS_PER_WORKER = 0.005, 0.0005
#: Seconds between looks at what is to be said to the hosts, and between parameters that are sent out.
STEER_SECONDS, PARAMETER_SECONDS = 0.002, 0.02
#: Seconds that a call for replies waits for one.
WAIT_SECONDS = 0.05
#: Seconds without a place after which a worker's need is told: where the cluster has too little; where others have it
#: (before that, perhaps workers that are about to start). Between two such lines lies the second.
PLACING_PATIENCE, PLACING_INTERVAL = 10.0, 60.0
#: Bytes of a local cluster's object store, and those of each worker besides.
STORE_BYTES, STORE_BYTES_PER_WORKER = 192 << 20, 2 * IN_FLIGHT * MOST_BYTES
#: Seconds that the head of a cluster may take to answer a connection.
CONNECT_SECONDS = 10.0
#: Signals whose handlers Ray replaces.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: Of the environment: ``token`` or ``disabled``; unset, it depends on who asks and on what lies in ~/.ray.
AUTH_MODE = "RAY_AUTH_MODE"
MISSING = "data.collector ray needs the package ray: pip install 'claw-lightning[ray]'; or set data.collector local"


def token_hint() -> str:
    """What to add where a cluster does not answer: by an address Ray uses the token of ~/.ray only if told to."""
    has_token = (Path.home() / ".ray" / "auth_token").is_file() or "RAY_AUTH_TOKEN" in os.environ
    if AUTH_MODE in os.environ or not has_token:
        return ""
    return f"; if it was started where there was a token (ray get-auth-token), set {AUTH_MODE}=token here too"


def import_ray() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    # It reports its use unless told not to, and warns of what it does to variables that workers here get anyway.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Of a cluster that is started here: Ray's workers, and what they start, would come last for every core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        with keeping_handlers():
            import ray
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from error
    return ray


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Leave signals and uncaught errors to whom they belong to: Ray takes both.

    Its handler of SIGTERM would end this process before it has written its checkpoint, and the one below that (of its
    C++ part) aborts it three seconds later.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
    hook = sys.excepthook
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        sys.excepthook = hook


class RayCluster:
    """Places workers on the nodes of a cluster, brings their rows here and parameters there.

    Args:
        config: ``data.ray``.
        mailbox: the learner's, whose newest parameters go out: into the object store once for each version, from where
            every node fetches them once.
    """

    def __init__(self, config: RayConfig, mailbox: Mailbox) -> None:
        self.config, self._mailbox = config, mailbox
        self._ray: Any = None
        self._is_ours = False  # started by us, or at least connected to
        self._host_class: Any = None
        self._workers: list[RemoteWorker] = []
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._letter: tuple[int, int, list[Any]] = (0, 0, [])  # sequence number, version, reference
        self._posted = 0.0
        #: Replies with rows that were taken, and their bytes: what the link and this machine had to do.
        self.replies = self.received_bytes = 0

    # -- connection ---------------------------------------------------------------------------------------------

    def connect(self, num_workers: int, address: str | None = None) -> str:
        """Connect to the cluster, or start one on this machine that has room for so many workers.

        Args:
            num_workers: of all ranks.
            address: of a cluster that another rank has started.

        Returns:
            The address by which other processes find it.

        Raises:
            ConfigError: Ray is not installed, does not answer, or has other versions; one line with the cure.
        """
        if self.config.address is None:
            # As Ray itself does for a cluster that it starts; the other ranks, which join it by its address, must too.
            os.environ.setdefault(AUTH_MODE, "token")
        ray = self._ray = import_ray()
        if not ray.is_initialized():
            self._init(ray, num_workers, address or self.config.address)
            self._is_ours = True
        concurrency = {"collect": 1, "steer": 1}
        self._host_class = ray.remote(concurrency_groups=concurrency, max_restarts=0, max_task_retries=0)(Host)
        for target in (self._receive, self._steer):
            self._threads.append(threading.Thread(target=target, name=f"ray-{target.__name__}", daemon=True))
            self._threads[-1].start()
        return ray.get_runtime_context().gcs_address

    def _init(self, ray: Any, num_workers: int, address: str | None) -> None:
        # Ray's lines are its own log's matter (/tmp/ray/session_latest/logs), the workers' go to the run's folder.
        options: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "runtime_env": self.config.runtime_env,
        }
        if address is None:
            options.update(
                address="local",
                num_cpus=max(1, math.ceil(num_workers * self.config.num_cpus)),
                resources={name: num_workers * number for name, number in self.config.resources.items()},
                include_dashboard=False,
                object_store_memory=STORE_BYTES + num_workers * STORE_BYTES_PER_WORKER,
            )
        else:
            options.update(address=address)
        try:
            if address is not None and ":" in address:  # Ray itself tries for minutes where nobody listens
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            with keeping_handlers():
                ray.init(**options)
        except Exception as error:
            reason = " ".join(str(error).split())
            if address is None:
                raise ConfigError(f"data.collector ray: no cluster can be started here ({reason:.500})") from error
            raise ConfigError(
                f"data.ray.address: the cluster at {address} cannot be joined ({reason:.500}); start one with "
                f"`ray start --head`, or leave data.ray.address out for one on this machine{token_hint()}"
            ) from error
        wanted = num_workers * self.config.num_gpus
        found = ray.cluster_resources().get("GPU", 0.0) if address is None else math.inf
        if wanted > found:
            ray.shutdown()
            raise ConfigError(
                f"data.ray.num_gpus ({self.config.num_gpus:g}) for {num_workers} workers needs {wanted:g} GPUs, and "
                f"this machine has {found:g}; lower it, or give data.ray.address"
            )

    def close(self) -> None:
        """End the threads, and the connection or the cluster that was made for the run. Idempotent."""
        self._closing.set()
        for thread in self._threads:
            thread.join(5.0)
        self._threads, self._workers, self._letter = [], [], (0, 0, [])
        if self._ray is not None and self._is_ours:
            with keeping_handlers(), contextlib.suppress(Exception):
                self._ray.shutdown()
        self._ray = None

    def store_used(self) -> float:
        """Bytes of all object stores of the cluster that are taken now; as Ray last heard of them."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        return total.get("object_store_memory", 0.0) - free.get("object_store_memory", 0.0)

    # -- workers ------------------------------------------------------------------------------------------------

    def worker(
        self, name: str, command: WorkerCommand, fds: tuple[int, ...], log_path: Path, ring: LaneRing
    ) -> RemoteWorker:
        """A worker of this cluster, not yet started; arguments as of :class:`claw_lightning.process.Worker`."""
        worker = RemoteWorker(name, command, fds, log_path, ring, self)
        self._workers = [*self._workers, worker]
        return worker

    def launch(self, worker: RemoteWorker) -> Link:
        """Ask for a place for a worker's process."""
        config = self.config
        actor = self._host_class.options(
            num_cpus=config.num_cpus, num_gpus=config.num_gpus, resources=config.resources, scheduling_strategy="SPREAD"
        ).remote(dict(worker.order(), mailbox_size=self._mailbox.size))
        return Link(actor, actor.where.options(concurrency_group="steer").remote())

    def end(self, link: Link, patience: float) -> None:
        """End a host and the process that it has started; the wait for that is ``patience`` seconds at most."""
        with contextlib.suppress(Exception):  # a cluster that is gone has ended it already
            if link.placing is None and patience > 0.0:
                answer = link.host.end.options(concurrency_group="steer").remote()
                self._ray.wait([answer], timeout=patience)
            self._ray.kill(link.host, no_restart=True)

    # -- threads ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take replies in the order of each worker's calls, and keep calls under way."""
        while not self._closing.is_set():
            waiting: dict[Any, tuple[RemoteWorker, Link]] = {}
            for worker in self._workers:
                with worker.lock:
                    link = worker.link
                    if link is None or worker.has_exited():
                        continue
                    if link.placing is not None:
                        self._attend(worker, link)
                    reference = link.placing if link.placing is not None else link.collecting[0]
                waiting[reference] = worker, link
            if not waiting:
                self._closing.wait(WAIT_SECONDS)
                continue
            try:
                references = list(waiting)
                ready, _ = self._ray.wait(references, num_returns=1, timeout=WAIT_SECONDS)
                if ready and len(references) > 1:
                    ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0.0)
            except Exception as error:  # the connection itself is gone
                self._lose_all(error)
                continue
            for reference in ready:
                self._take(*waiting.pop(reference), reference)
            del references, reference, ready, waiting  # a reference that is held keeps its rows in the object store

    def _take(self, worker: RemoteWorker, link: Link, reference: Any) -> None:
        """Take one reply."""
        try:
            reply, failure = self._ray.get(reference), None
        except Exception as error:
            reply, failure = None, self._in_words(error)
        with worker.lock:
            if worker.link is not link:
                return  # of a process that was given up meanwhile
            if failure is not None:
                worker.lose(failure)
                return
            try:
                if link.placing is not None:
                    link.placing = None
                    worker.place(reply)
                    log.info("%s runs on %s (actor's process %d)", worker.name, reply["node"], reply["pid"])
                else:
                    link.collecting.popleft()
                    self.replies += 1
                    self.received_bytes += reply["rows"].nbytes + reply["finals"].nbytes + reply["images"].nbytes
                    worker.receive(reply)
            except Exception as error:
                log.exception("%s: a reply cannot be used", worker.name)
                worker.lose(f"sent what cannot be used ({error})")
                return
            interval = max(REPLY_SECONDS, REPLY_SECONDS_PER_WORKER * len(self._workers))
            while len(link.collecting) < IN_FLIGHT:
                link.collecting.append(link.host.collect.options(concurrency_group="collect").remote(interval))

    def _steer(self) -> None:
        """Tell hosts how far their workers may go, and what else there is to say; send parameters out."""
        while not self._closing.wait(STEER_SECONDS):
            try:
                self._post()
                number, version, letter = self._letter
                for worker in self._workers:
                    with worker.lock:
                        words, link = worker.words(number), worker.link
                        if words is None or link is None:
                            continue
                        is_new, link.letter = link.letter != number, number
                        steer = link.host.steer.options(concurrency_group="steer", num_returns=0)
                        steer.remote(*words, letter if is_new else [], version)
            except Exception as error:
                self._lose_all(error)

    def _post(self) -> None:
        """Put new parameters into the object store: once, for whoever is to have them."""
        now = time.monotonic()
        if self._mailbox.sequence == self._letter[0] or now - self._posted < PARAMETER_SECONDS:
            return
        letter = self._mailbox.read(self._letter[0])
        if letter is not None:
            self._posted = now
            sequence, version, values = letter
            self._letter = sequence, version, [self._ray.put(values)]

    def _lose_all(self, error: BaseException) -> None:
        if self._closing.wait(1.0):
            return
        log.error("Ray does not answer any more: %s", self._in_words(error))
        for worker in self._workers:
            with worker.lock:
                if worker.link is not None:
                    worker.lose(self._in_words(error))

    def _in_words(self, error: BaseException) -> str:
        """Ray's reasons are paragraphs; their first line says which it is."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"was lost: {type(error).__name__}: {' '.join(lines)[:300]}"

    # -- placing ------------------------------------------------------------------------------------------------

    def _attend(self, worker: RemoteWorker, link: Link) -> None:
        """A worker without a place is not silent; after a while it is told what it lacks."""
        worker.control.beat(phases.START)
        now = time.monotonic()
        if now - link.looked < PLACING_PATIENCE:
            return
        link.looked = now
        lack = self.lack(may_be_ours=now - link.since < PLACING_INTERVAL)
        if lack and (link.warned is None or now - link.warned >= PLACING_INTERVAL):
            link.warned = now
            log.warning(
                "%s has been waiting for a place for %.0f s: %s; add nodes that have it, or lower data.num_workers or "
                "data.ray's num_cpus, num_gpus, resources", worker.name, now - link.since, lack,
            )  # fmt: skip

    def lack(self, may_be_ours: bool = False) -> str:
        """Which resources another worker does not find, in words; empty where there is room.

        Args:
            may_be_ours: what is taken may be by workers that are about to start; then only what is not there at all
                counts.
        """
        with contextlib.suppress(Exception):
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            free = self._ray.available_resources()
            count, parts = len(self._workers), []
            for name, need in self.config.demand().items():
                most = max((node.get(name, 0.0) for node in nodes), default=0.0)
                total = sum(node.get(name, 0.0) for node in nodes)
                if need > most:
                    parts.append(
                        f"it needs {need:g} {name} of one node, and none of {len(nodes)} has more than {most:g}"
                    )
                elif need * count > total:
                    parts.append(f"{count} workers need {need * count:g} {name}, and there are {total:g}")
                elif need > free.get(name, 0.0) and not may_be_ours:
                    parts.append(f"it needs {need:g} {name}, and {free.get(name, 0.0):g} of {total:g} are free")
            return "; ".join(parts)
        return ""
