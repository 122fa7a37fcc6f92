"""Statistics of finished episodes and moving averages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from claw_lightning.rollout.collector import Episode


class EpisodeStatistics:
    """Moving averages over the last ``window`` finished training episodes, and their total number.

    Attributes:
        recent: the episodes in the averages, oldest first.
        total: episodes counted, those before a resume included.
        listeners: called at the end of each :meth:`add` with its episodes, all of them; no part of the state.
    """

    def __init__(self, window: int = 100) -> None:
        self.recent: deque[Episode] = deque(maxlen=window)
        self.total = 0
        self.listeners: list[Callable[[Sequence[Episode]], None]] = []

    def add(self, episodes: Iterable[Episode]) -> None:
        """Count finished episodes; one whose return is not finite (a quarantined reward) stays out of the averages."""
        added = list(episodes)
        for episode in added:
            self.total += 1
            if math.isfinite(episode.ret):
                self.recent.append(episode)
        if added:
            for listener in self.listeners:
                listener(added)

    def compute(self) -> dict[str, float]:
        """``rollout/return``, ``rollout/length`` and, where the task knows it, ``rollout/success``."""
        if not self.recent:
            return {}
        count = len(self.recent)
        values = {
            "rollout/return": sum(e.ret for e in self.recent) / count,
            "rollout/length": sum(e.length for e in self.recent) / count,
            "rollout/episodes": float(self.total),
        }
        solved = [e.success for e in self.recent if not math.isnan(e.success)]
        if solved:
            values["rollout/success"] = sum(solved) / len(solved)
        return values

    def state_dict(self) -> dict[str, object]:
        """Plain values, for a checkpoint."""
        return {"recent": [list(e) for e in self.recent], "total": self.total}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore :meth:`state_dict`."""
        self.recent.clear()
        self.recent.extend(Episode(*e) for e in state["recent"])  # type: ignore[attr-defined]
        self.total = int(state["total"])  # type: ignore[call-overload]
