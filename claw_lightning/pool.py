"""WorkerPool: starts, watches, restarts and stops the worker processes."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from claw_lightning.errors import WorkerError
from claw_lightning.process import LocalWorker, Worker, WorkerCommand
from claw_lightning.rollout import control as phases

__all__ = ["DEADLINES", "FailurePolicy", "LocalWorker", "Worker", "WorkerCommand", "WorkerPool"]

log = logging.getLogger(__name__)

#: Seconds after which a worker counts as hung: without a heartbeat, by the phase that it is in; and, beating or not,
#: without a step although it may write (``write``), or with an old policy although it steps on (``adopt``).
DEADLINES = {
    "start": 300.0,
    "reset": 120.0,
    "step": 60.0,
    "pull": 30.0,
    "wait": 30.0,
    "evaluate": 60.0,
    "write": 240.0,
    "adopt": 120.0,
}
#: Seconds before the n-th restart in a row of processes that took no step; one that worked comes back at once.
BACK_OFF = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
#: Seconds between two looks after which the learner itself, or the whole machine, may have stood still.
PAUSE = 2.0
#: Seconds that a silent worker gets after such a pause to show that it lives.
SECOND_CHANCE = 0.5
#: Seconds from the end of the message pipe to that of the process.
LAST_BREATH = 1.0
#: Seconds that a process may take to end when it makes room for its successor.
FAREWELL = 5.0
#: Seconds between looks at the size of the logs.
LOG_INTERVAL = 10.0


@dataclass(frozen=True)
class FailurePolicy:
    """What follows the failure of a worker.

    Attributes:
        on_failure: ``restart``: begin anew within the budget, then end the run with an error. ``degrade``: begin anew
            within the budget, then go on without it; the failure of the last one ends the run. ``stop``: end the run.
        budget: restarts of one worker within ``window``.
        window: seconds.
        deadlines: changes of :data:`DEADLINES`.
        recycle_after: vector steps of one process after which a fresh one takes its place (simulators leak); 0: never.
    """

    on_failure: str = "restart"
    budget: int = 5
    window: float = 600.0
    deadlines: Mapping[str, float] = field(default_factory=dict)
    recycle_after: int = 0


@dataclass
class _Watch:
    """What the pool remembers of one worker between two looks."""

    restart_at: float | None = None  # backing off until then (monotonic seconds)
    is_lost: bool = False
    recycled_at: float | None = None  # asked to make room for its successor
    idle_failures: int = 0  # in a row, without a step in between
    owes_since: float | None = None  # it may write and has not
    owes_head: int = 0
    lags_since: float | None = None  # a newer policy than its own is there
    lags_head: int = 0
    lags_version: int = 0


class WorkerPool:
    """A set of workers under supervision.

    :meth:`poll` is called often by whoever waits for experience. It drains messages, notices deaths at once (the end of
    the message pipe, or of the process), hangs by the heartbeat, workers that do not write and workers that act with an
    old policy. What follows is the :class:`FailurePolicy`'s matter.

    Args:
        workers: not yet started.
        on_message: called as ``on_message(worker, message)`` for messages other than ``ready`` and ``error``.
        policy: what follows a failure.
        published: the newest version that workers can adopt.
        adopt_steps: vector steps within which a worker looks for it.
        on_event: called as ``on_event(kind, worker, **details)`` for ``start``, ``ready``, ``failure``, ``recycle`` and
            ``lost``.
    """

    def __init__(
        self,
        workers: list[Worker],
        on_message: Callable[[Worker, dict[str, Any]], None] = lambda worker, message: None,
        policy: FailurePolicy | None = None,
        published: Callable[[], int] = lambda: 0,
        adopt_steps: int = 1,
        on_event: Callable[..., None] = lambda kind, worker, **details: None,
    ) -> None:
        self.workers = workers
        self.on_message, self.on_event = on_message, on_event
        self.policy = policy or FailurePolicy()
        self.deadlines = {**DEADLINES, **self.policy.deadlines}
        if "write" not in self.policy.deadlines:  # a step that may take long may also be waited for
            longest = max(self.deadlines["step"], self.deadlines["reset"])
            self.deadlines["write"] = max(self.deadlines["write"], 2.0 * longest)
        self.published, self.adopt_steps = published, adopt_steps
        self._watches = {id(worker): _Watch() for worker in workers}
        self._last_poll = time.monotonic()
        self._logs_seen = self._last_poll
        self.recycled = 0

    def start(self, wait: bool = True, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start all workers and, with ``wait``, return when each has built its simulator.

        Raises:
            WorkerError: a worker ended or stayed silent before it was ready.
        """
        for worker in self.workers:
            self._start(worker)
        while wait and not all(worker.ready for worker in self.workers) and not interrupted():
            self.poll()
            self.wait_for_message(0.05)

    def _start(self, worker: Worker) -> None:
        watch = self._watches[id(worker)]
        watch.restart_at = watch.owes_since = watch.lags_since = watch.recycled_at = None
        worker.start()
        self.on_event(
            "start", worker, pid=worker.pid, generation=worker.generation, restarts=worker.total_restarts,
            head=worker.first_head,
        )  # fmt: skip

    def _restart(self, worker: Worker, watch: _Watch) -> None:
        """Start a successor; what keeps it from being started (no descriptors, no disk) is a failure like others."""
        try:
            self._start(worker)
        except WorkerError as error:
            self._recover(worker, watch, f"cannot be started again: {error}")

    @property
    def alive(self) -> int:
        """Workers that run and are ready."""
        return sum(worker.ready and not worker.has_exited() for worker in self.workers)

    @property
    def restarts(self) -> int:
        """Restarts of all workers after failures so far."""
        return sum(worker.total_restarts for worker in self.workers)

    def is_lost(self, worker: Worker) -> bool:
        """Whether the run goes on without this worker."""
        return self._watches[id(worker)].is_lost

    # -- supervision --------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Supervise; see the class. Costs a few system calls per worker when nothing happened.

        Raises:
            WorkerError: a worker has failed for good and the policy ends the run.
        """
        now = time.monotonic()
        was_paused, self._last_poll = now - self._last_poll > PAUSE, now
        for worker in self.workers:
            watch = self._watches[id(worker)]
            if watch.is_lost:
                continue
            if watch.restart_at is not None:
                if now >= watch.restart_at:
                    self._restart(worker, watch)
                continue
            if was_paused:  # time in which nobody looked is not held against it
                watch.owes_since = watch.lags_since = None
            was_ready = worker.ready
            messages, ended = worker.messages()
            for message in messages:
                if message["kind"] not in ("ready", "error"):
                    self.on_message(worker, message)
            if worker.ready and not was_ready:
                self.on_event("ready", worker, pid=worker.pid)
            if ended:
                self._reap(worker, watch)
            elif what := self._hang(worker, was_paused) or self._idleness(worker, watch, now):
                self._recover(worker, watch, what, cause="hang")
            elif watch.recycled_at is not None and now - watch.recycled_at > FAREWELL:
                self._replace(worker)  # its simulator's end takes for ever
            elif worker.has_worked:
                watch.idle_failures = 0
                self._recycle_if_due(worker, watch)
        if now - self._logs_seen > LOG_INTERVAL:
            self._logs_seen = now
            for worker in self.workers:
                worker.cut_log()

    def _hang(self, worker: Worker, was_paused: bool) -> str:
        """What to say of a worker that has been silent for too long; empty for the others."""
        control = worker.control
        phase = phases.PHASES[control.phase]
        limit = self.deadlines[phase]
        if was_paused and control.silence > limit:
            # Perhaps it was not the worker that stood still (a suspended container): whoever lives beats again soon.
            until = time.monotonic() + SECOND_CHANCE
            while control.silence > limit and time.monotonic() < until:
                time.sleep(0.01)
        silence = control.silence
        what = f"gave no sign of life for {silence:.1f} s in phase '{phase}' (data.deadlines.{phase} is {limit:g})"
        return what if silence > limit else ""

    def _idleness(self, worker: Worker, watch: _Watch, now: float) -> str:
        """What to say of a worker that beats but does not do its work; empty for the others."""
        if worker.ring is None or not worker.ready:
            return ""
        head, version, newest = worker.head, worker.control.version, self.published()
        if head >= worker.control.steps_allowed or head != watch.owes_head or watch.owes_since is None:
            watch.owes_head = head
            watch.owes_since = now if head < worker.control.steps_allowed else None
        elif now - watch.owes_since > self.deadlines["write"]:
            return (
                f"has written nothing for {now - watch.owes_since:.1f} s although it may "
                f"(data.deadlines.write is {self.deadlines['write']:g})"
            )
        if version >= newest or version != watch.lags_version or watch.lags_since is None:
            watch.lags_head, watch.lags_version = head, version
            watch.lags_since = now if version < newest else None
        elif now - watch.lags_since > self.deadlines["adopt"] and head - watch.lags_head > 2 * self.adopt_steps:
            steps = head - watch.lags_head
            return (
                f"acts with version {version} of the policy {steps} vector steps after a newer one was published "
                f"(data.deadlines.adopt is {self.deadlines['adopt']:g})"
            )
        return ""

    def _recycle_if_due(self, worker: Worker, watch: _Watch) -> None:
        """Ask a process that has done its share to end; one at a time, so that the others go on collecting."""
        due = self.policy.recycle_after
        if due <= 0 or watch.recycled_at is not None or worker.head - worker.first_head < due:
            return
        others = [other for other in self.workers if other.is_placed and not self.is_lost(other)]
        if any(not other.ready or other.has_exited() for other in others):
            return
        if any(other.recycled_at is not None for other in self._watches.values()):
            return
        watch.recycled_at, worker.control.stop = time.monotonic(), True
        self.on_event("recycle", worker, pid=worker.pid, head=worker.head)

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        self.recycled += 1
        self._restart(worker, self._watches[id(worker)])

    def _reap(self, worker: Worker, watch: _Watch) -> None:
        """A process whose pipe has ended, or that has ended itself."""
        until = time.monotonic() + LAST_BREATH
        while not worker.has_exited() and time.monotonic() < until:
            time.sleep(0.001)
        if watch.recycled_at is not None and worker.error is None:
            self._replace(worker)
            return
        has_ended = worker.has_exited()
        worker.kill()  # also what its simulator has started
        # By somebody else's SIGKILL (out of memory, a scheduler): that says nothing about the simulator.
        self._recover(worker, watch, worker.exit_text(), has_ended and worker.was_killed)

    def _recover(
        self, worker: Worker, watch: _Watch, what: str, was_killed: bool = False, cause: str = "death"
    ) -> None:
        """Restart a dead or hung worker, go on without it, or give up with the reason."""
        failure, policy = worker.failure(what), self.policy
        pid, head = worker.pid, worker.head
        worker.kill()
        watch.recycled_at = None
        now = time.monotonic()
        watch.idle_failures = 0 if worker.has_worked else watch.idle_failures + 1
        while worker.restarts and now - worker.restarts[0] > policy.window:
            worker.restarts.popleft()
        reason = self._hopeless(worker, was_killed)
        if reason is None and len(worker.restarts) >= policy.budget:
            reason = f"restarted {len(worker.restarts)} times within {policy.window:g} s already"
        if reason is not None:
            self._give_up(worker, watch, failure, reason, pid, cause)
            return
        delay = 0.0 if worker.has_worked else BACK_OFF[min(watch.idle_failures, len(BACK_OFF)) - 1]
        worker.restarts.append(now)
        worker.total_restarts += 1
        self.on_event("failure", worker, pid=pid, what=what, head=head, delay=delay, cause=cause)
        log.warning("%s; restarting it%s", failure, f" in {delay:g} s" if delay else "")
        watch.restart_at = now + delay
        if delay == 0:
            self._restart(worker, watch)

    def _hopeless(self, worker: Worker, was_killed: bool) -> str | None:
        """Why a restart would not help; None where it may."""
        if self.policy.on_failure == "stop":
            return "data.on_worker_failure is stop"
        if worker.error is not None and worker.error.get("user", False):
            return ""  # a setting: it would fail again
        is_first = worker.generation == 0 and not worker.has_worked and not was_killed
        if is_first and (worker.error is not None or not worker.ready):
            return ""  # never worked (exit status 0 too: simulators call quit())
        return None

    def _give_up(
        self, worker: Worker, watch: _Watch, failure: WorkerError, reason: str, pid: int | None, cause: str
    ) -> None:
        is_setting = worker.error is not None and worker.error.get("user", False)
        others = [each for each in self.workers if each is not worker and not self.is_lost(each)]
        self.on_event("lost", worker, pid=pid, what=str(failure), reason=reason, cause=cause)
        if self.policy.on_failure != "degrade" or is_setting or not others:
            raise WorkerError(f"{failure}; {reason}, giving up") if reason else failure
        watch.is_lost = True
        log.error("%s; %sgoing on with %d workers", failure, f"{reason}, " if reason else "", len(others))

    # -- waiting and ending -------------------------------------------------------------------------------------

    def wait_for_message(self, seconds: float) -> None:
        """Sleep until a worker says something or ends, at most ``seconds``."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if worker.pipe >= 0:
                    selector.register(worker.pipe, selectors.EVENT_READ)
            selector.select(seconds)

    def kill(self) -> None:
        """Send SIGKILL to all processes; safe in a signal handler, and in the middle of :meth:`poll`."""
        for worker in self.workers:
            worker.send_kill()

    def close(self, grace: float = 2.0) -> None:
        """Ask all workers to stop, then end those that do not within ``grace`` seconds. Idempotent."""
        for worker in self.workers:
            worker.control.stop = True
        deadline = time.monotonic() + grace
        for worker in self.workers:
            while not worker.has_exited() and time.monotonic() < deadline:
                time.sleep(0.002)
            worker.release()
        self.workers = []
