"""Control block: a page of counters that learner and worker read from each other without messages."""

from __future__ import annotations

import time
from typing import Dict

import numpy as np

from claw_lightning.rollout.shared import PAGE, SharedBlock

#: What a worker is doing; each phase has its own deadline in the learner.
START, RESET, STEP, PULL, WAIT, EVALUATE = range(6)
PHASES = ("start", "reset", "step", "pull", "wait", "evaluate")

#: Seconds spent per activity, accumulated by the worker.
TIMERS = ("simulate", "infer", "write", "pull", "wait")

_HEARTBEAT, _PHASE, _VERSION, _ALLOWED, _STOP, _QUARANTINED = range(6)


class Control:
    """One page of shared memory; every word has one writer.

    Written by the worker: heartbeat (ns, CLOCK_MONOTONIC), phase, version, quarantined, timers.
    Written by the learner: steps_allowed (vector steps since the beginning of the run), stop.
    """

    def __init__(self, fd: int = -1) -> None:
        self.block = SharedBlock(PAGE, fd, "claw-control")
        self._ints = self.block.array(np.int64, (64,))
        self.timers = self.block.array(np.float64, (len(TIMERS),), 64 * 8)

    def beat(self, phase: int) -> None:
        """Worker: say that the process is alive and enters a phase."""
        self._ints[_PHASE] = phase
        self._ints[_HEARTBEAT] = time.monotonic_ns()

    @property
    def phase(self) -> int:
        """Phase entered last."""
        return int(self._ints[_PHASE])

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat."""
        return (time.monotonic_ns() - int(self._ints[_HEARTBEAT])) * 1e-9

    @property
    def version(self) -> int:
        """Policy version that the worker acts with."""
        return int(self._ints[_VERSION])

    @version.setter
    def version(self, value: int) -> None:
        self._ints[_VERSION] = value

    @property
    def steps_allowed(self) -> int:
        """Vector steps up to which the worker may write."""
        return int(self._ints[_ALLOWED])

    @steps_allowed.setter
    def steps_allowed(self, value: int) -> None:
        self._ints[_ALLOWED] = value

    @property
    def stop(self) -> bool:
        """The learner asks the worker to end."""
        return bool(self._ints[_STOP])

    @stop.setter
    def stop(self, value: bool) -> None:
        self._ints[_STOP] = int(value)

    @property
    def quarantined(self) -> int:
        """Rows with numbers that are not finite, since the worker's block was made."""
        return int(self._ints[_QUARANTINED])

    def add_quarantined(self, count: int) -> None:
        """Worker: count quarantined rows."""
        self._ints[_QUARANTINED] += count

    def state(self) -> Dict[str, float]:
        """All that the worker writes, as plain numbers that another machine can take; ages in place of times."""
        timers = {"timer_" + name: float(self.timers[i]) for i, name in enumerate(TIMERS)}
        return dict(timers, phase=self.phase, silence=self.silence, version=self.version, quarantined=self.quarantined)

    def mirror(self, state: Dict[str, float], since: Dict[str, float]) -> None:
        """Take over what another block's :meth:`state` says; sums go on from those of ``since``."""
        self._ints[_PHASE] = int(state["phase"])
        self._ints[_VERSION] = int(state["version"])
        self._ints[_QUARANTINED] = int(state["quarantined"] + since["quarantined"])
        for i, name in enumerate(TIMERS):
            self.timers[i] = state["timer_" + name] + since["timer_" + name]
        self._ints[_HEARTBEAT] = time.monotonic_ns() - int(state["silence"] * 1e9)
