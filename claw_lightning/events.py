"""Event log of a run with background workers, and the same run again in one process.

What makes an overlapped run unrepeatable is time: which steps were there when a batch was drawn, and with which policy
each step was taken. Both are few numbers. :class:`EventLog` writes them down, one JSON object per line;
:class:`Playback` takes the steps of such a log in the learner's process, in its order, so that a run can be stopped
anywhere in a debugger and comes out bit-identical: networks, batches, rows.

Every event has ``event`` and ``time`` (s, CLOCK_MONOTONIC). ``worker`` is an index, steps are vector steps of its ring.

* ``run``: ``settings`` that must be equal in a playback.
* The life of a worker's processes: ``start`` (pid, generation, restarts, head, configure: what the simulator begins
  with), ``ready`` (pid), ``failure`` (pid, what, head, delay in s, cause: death or hang), ``recycle`` (pid, head),
  ``lost`` (pid, what, cause, reason). A process of generation g has the worker's seed plus g times
  :data:`claw_lightning.process.SEED_STRIDE` and opens its episodes at ``head``.
* ``configured`` (worker, step, settings): the simulator was changed before this step.
* ``draw``: one batch; ``updates`` made before, ``heads`` (steps published per worker), ``draw`` (see
  :class:`claw_lightning.replay.memory.Draw`) and ``versions``: [worker, step, version] of each step that became visible
  since the last draw and was taken with another policy, or by another process, than the step before it.
* ``end``: the workers were stopped orderly.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from claw_lightning.errors import ConfigError
from claw_lightning.replay.memory import Draw
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Collector
from claw_lightning.rollout.ring import LaneRing

log = logging.getLogger(__name__)

FILE_NAME = "events.jsonl"


class EventLog:
    """Appends events to a file, each flushed to the system: a run that is killed leaves a log up to that moment.

    So does one whose disk is full: the log then ends, with an error message, and the run goes on.

    Args:
        path: file; made anew.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w")
        self._seen: list[int] = []
        self._versions: list[int | None] = []
        self._starts: set[tuple[int, int]] = set()

    def write(self, event: str, **content: Any) -> None:
        """Append one event."""
        if event == "start":  # a new process has no policy yet: it adopts one, be it that of its predecessor
            self._starts.add((content["worker"], content["head"]))
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"event": event, "time": round(time.monotonic(), 4), **content}) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("%s: no further events are recorded (%s)", self.path, error.strerror)
            self.close()

    def begin(self, rings: list[LaneRing]) -> None:
        """Steps that the rings hold already are no part of the recorded run. To be called before workers start."""
        self._seen, self._versions = [ring.head for ring in rings], [None] * len(rings)

    def draw(self, rings: list[LaneRing], draw: Draw, updates: int) -> None:
        """Append what was visible at a draw."""
        heads = [int(head) for head in draw.heads]
        if self._file.closed:
            return
        if not self._seen:
            self._seen, self._versions = [0] * len(rings), [None] * len(rings)
        changes = []
        for index, (ring, head) in enumerate(zip(rings, heads, strict=True)):
            column = ring.layout.view(ring.rows[:, 0], "version")
            for step in range(self._seen[index], head):
                version = int(column[step % ring.num_steps])
                if version != self._versions[index] or (index, step) in self._starts:
                    self._versions[index] = version
                    changes.append([index, step, version])
            if ring.head - self._seen[index] > ring.num_steps:
                log.error(
                    "%s: no further events are recorded: worker %d has overwritten steps before they were noted; "
                    "raise data.capacity or lower data.rate_band", self.path, index,
                )  # fmt: skip
                self.close()
                return
            self._seen[index] = head
        self.write("draw", updates=updates, heads=heads, draw=draw.to_json(), versions=changes)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with contextlib.suppress(OSError):  # what a full disk has not taken
            self._file.close()


class Playback:
    """Takes the steps of a recorded run in this process.

    Args:
        path: log of :class:`EventLog`.

    Raises:
        ConfigError: no such file, or not a whole log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = {}
        self.draws: list[Draw] = []
        # Of processes that began at the same step only the last has written anything.
        self._starts: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._configured: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        self._versions: dict[int, dict[int, int]] = defaultdict(dict)
        for number, event in enumerate(self._read(), 1):
            try:
                self._take_in(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"data.replay_events: {path}, line {number} is no event of a run") from error
        if not self.draws:
            raise ConfigError(f"data.replay_events: {path} holds no draw; the run ended before it learned")
        #: How often each version is still to be adopted; what is not is not kept.
        self._uses = Counter(version for found in self._versions.values() for version in found.values())
        self._history: dict[int, np.ndarray] = {}
        self._collectors: dict[int, Collector] = {}
        self._next = 0

    def _take_in(self, event: dict[str, Any]) -> None:
        if event["event"] == "run":
            self.settings = dict(event["settings"])
        elif event["event"] == "start":
            self._starts[event["worker"]][event["head"]] = {name: event[name] for name in ("generation", "configure")}
        elif event["event"] == "configured":
            self._configured[event["worker"]].append((event["step"], dict(event["settings"])))
        elif event["event"] == "draw":
            self.draws.append(Draw.from_json(event["draw"]))
            for worker, step, version in event["versions"]:
                self._versions[worker][step] = version

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self.path.read_bytes().decode(errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"data.replay_events: {self.path} cannot be read ({error.strerror})") from error
        events = []
        for number, line in enumerate(lines, 1):
            try:
                events.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):  # the last one may be cut: the run was killed
                    raise ConfigError(f"data.replay_events: {self.path}, line {number} is no event") from error
        if not events or not isinstance(events[0], dict) or events[0].get("event") != "run":
            raise ConfigError(f"data.replay_events: {self.path} is not the event log of a run")
        return events

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse a configuration under which the log cannot be played.

        Raises:
            ConfigError: names the first key that differs.
        """
        for key, recorded in self.settings.items():
            if key not in settings or settings[key] != recorded:
                raise ConfigError(
                    f"data.replay_events: {self.path} was recorded with {key} {recorded!r}, not {settings.get(key)!r}"
                )

    def publish(self, values: np.ndarray, version: int) -> None:
        """Keep parameters that a worker is going to adopt."""
        if self._uses[version] > 0:
            self._history[version] = values.copy()

    def advance(self, rings: list[LaneRing], make: Callable[[int, int], Collector]) -> Draw | None:
        """Take all steps that were visible at the next draw, and return that draw; None at the end of the log.

        Args:
            rings: of all workers.
            make: ``make(worker, generation)`` builds the collector of a process.
        """
        if self._next == len(self.draws):
            return None
        draw = self.draws[self._next]
        self._next += 1
        for worker, (ring, head) in enumerate(zip(rings, draw.heads, strict=True)):
            while ring.head < head:
                self._step(worker, ring.head, make)
        return draw

    def _step(self, worker: int, step: int, make: Callable[[int, int], Collector]) -> None:
        if step in self._starts[worker]:
            if worker in self._collectors:
                self._collectors[worker].env.close()
            start = self._starts[worker][step]
            self._collectors[worker] = make(worker, start["generation"])
            if start["configure"]:
                self._collectors[worker].env.configure(**start["configure"])
        collector = self._collectors[worker]
        for at, settings in self._configured[worker]:
            if at == step:
                collector.env.configure(**settings)
        collector.puller = _Script(collector.agent, self._take(worker, step))  # type: ignore[assignment]
        collector.step()

    def _take(self, worker: int, step: int) -> tuple[np.ndarray, int] | None:
        """Parameters and version that the step was taken with, where they differ from those of the step before."""
        version = self._versions[worker].get(step)
        if version is None:
            return None
        if version not in self._history:
            raise ConfigError(
                f"data.replay_events: {self.path} says that worker {worker} took step {step} with version {version} "
                "of the policy, which this run has not published: model or data settings differ from the recorded ones"
            )
        values = self._history[version]
        self._uses[version] -= 1
        if self._uses[version] == 0:
            del self._history[version]
        return values, version

    def close(self) -> None:
        """Close the simulators. Idempotent."""
        for collector in self._collectors.values():
            collector.env.close()
        self._collectors = {}


class _Script:
    """Stands in for a Puller: adopts what was adopted."""

    def __init__(self, agent: OptionAgent, letter: tuple[np.ndarray, int] | None) -> None:
        self.agent, self.letter = agent, letter

    def pull(self) -> bool:
        """Adopt the letter, if there is one."""
        if self.letter is not None:
            self.agent.load(*self.letter)
        return self.letter is not None
