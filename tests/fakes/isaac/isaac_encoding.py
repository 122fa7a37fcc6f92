"""How the task ``Encoded`` writes its numbers, and what must hold of a row. Standard library and numpy only.

Observation columns 0 to 5: lane, episode, step in the episode (1 is the border row), control step of the simulation,
goals drawn in this episode, and 1 where the step is the last of its episode. The last columns are the action as it was
applied. ``states`` hold the same with 0.5 added to the six. Reward: (200 lane + episode) x 1000 + step, exact in
float32 for up to 80 lanes, 200 episodes and 999 steps.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple

import numpy as np

EPISODES = 200
STEPS = 1000
CODES = 6
#: Added to the six numbers of ``states``, to tell them from ``obs``.
STATES_MARK = 0.5


class Code(NamedTuple):
    """The six numbers of observations [N, O], each [N] int64."""

    lane: np.ndarray
    episode: np.ndarray
    step: np.ndarray
    control_step: np.ndarray
    goals: np.ndarray
    is_last: np.ndarray


def decode(obs: Any, mark: float = 0.0) -> Code:
    """The numbers in observations [N, O], or with ``STATES_MARK`` in states [N, S].

    Raises:
        ValueError: they are no whole numbers: not from this task, or observations and states were mixed up.
    """
    codes = np.asarray(obs, dtype=np.float64)[:, :CODES] - mark
    if not np.array_equal(codes, np.rint(codes)):
        raise ValueError("no codes of the task Encoded, or observations and states mixed up: %s" % codes[:1])
    return Code(*codes.astype(np.int64).T)


def reward_of(lane: Any, episode: Any, step: Any) -> Any:
    """The reward that goes with a next observation."""
    return (EPISODES * lane + episode) * STEPS + step


def fall_step(lane: Any, episode: Any, period: int) -> Any:
    """Step of the episode in which a lane falls, unless its time is up before; -1 with period 0: never."""
    if period == 0:
        return 0 * lane - 1
    return 2 + (3 * lane + episode) % period


def row_faults(
    obs: Any,
    action: Any,
    reward: Any,
    next_obs: Any,
    terminated: Any,
    truncated: Any,
    episode_length: int,
    period: int,
) -> List[str]:
    """What is wrong with transitions [B, ...] that shall be learned from; empty where nothing is.

    ``next_obs`` is the true next observation, at the end of an episode too. ``action`` as the policy gave it.
    """
    now, then = decode(obs), decode(next_obs)
    terminated, truncated = np.asarray(terminated, dtype=bool), np.asarray(truncated, dtype=bool)
    applied = np.asarray(next_obs)[:, -np.asarray(action).shape[1] :]
    late = then.step >= episode_length - 1
    falls = then.step == fall_step(then.lane, then.episode, period)
    checks = {
        "lanes differ": now.lane == then.lane,
        "the row crosses into another episode": now.episode == then.episode,
        "the steps do not follow each other": now.step + 1 == then.step,
        "the control steps do not follow each other": now.control_step + 1 == then.control_step,
        "the observation is one from after the end": now.is_last == 0,
        "the reward is of another step": np.asarray(reward) == reward_of(then.lane, then.episode, then.step),
        "the action is not the one applied": (applied == np.clip(action, -1.0, 1.0)).all(axis=-1),
        "terminated is wrong": terminated == (falls & ~late),
        "truncated is wrong": truncated == late,
    }
    return ["%s in rows %s" % (name, np.flatnonzero(~good)[:5]) for name, good in checks.items() if not good.all()]
