"""The arithmetic of the stand-in's task, with its best return in closed form. Standard library and numpy only.

Each active joint is a double integrator with a weak spring and a brake, which keep random actions from pinning it to a
stop: with position x, velocity u (per control step) and action a in [-1, 1],

    u' = DRAG u - SPRING x + REACH a,    x' = x + u',    stopped (u' = 0) at x' = -LIMIT and LIMIT.

The goal g of a joint is uniform where GOAL_MIN <= |g| <= GOAL_MAX. Reward of a step: the mean over the active joints of
1 / (1 + (e / WIDTH)^2), with e = x' - g, plus a bonus for each success. A success is ``successSteps`` steps in a row
with all joints within ``successTolerance``; the goal is then drawn anew at the start of the next step, whose action
did not know it.

REACH is as much as is needed for the action (g - x - DRAG u + SPRING x) / REACH to be at the goal one step after the
goal was seen, from rest at any other goal: the reward of such a step is 1, the most there is. 90 % of it means errors
below a third of WIDTH. Plain TD3 learns it in about 2,000 updates of 128 with an actor's learning rate of 3e-4 (with
1e-3 its actions saturate first); the same without spring and brake, with a narrower reward, was not learnt in that.
"""

from __future__ import annotations

import math
from typing import Any, Dict

import numpy as np

DRAG = 0.3
SPRING = 0.5
REACH = 0.75
GOAL_MIN = 0.25
GOAL_MAX = 0.5
LIMIT = 1.0
WIDTH = 0.4
#: Steps within the tolerance that make a success where a configuration does not say.
SUCCESS_STEPS = 20
#: ``reachGoalBonus`` in units of the reward: 250, as the hands have it, becomes 1.
BONUS_SCALE = 1.0 / 250.0
#: ``fallDistance`` in units of the mean error: 0.24, as the hands have it, becomes 0.96.
FALL_SCALE = 4.0
ACTIVE_JOINTS = 4

#: Observation type (by size) -> (first column of positions, of velocities, of goal minus position), None where absent.
LAYOUTS: Dict[int, Any] = {
    211: (0, 24, 96),
    157: (0, 24, 72),
    88: (0, 16, 32),
    72: (0, 16, 32),
    117: (0, 23, 46),
    99: (0, 23, 46),
    196: (0, 46, 92),
    169: (0, 46, 92),
    398: (0, 24, 96),
    # Without velocities the third entry shows the push that is wanted: goal - x - DRAG u + SPRING x.
    77: (0, None, 31),
    50: (0, None, 16),
    42: (None, None, 0),
}


def episode_length(cfg: Dict[str, Any]) -> int:
    """``max_episode_length`` as the task computes it."""
    env = cfg["env"]
    seconds = env.get("resetTime", -1.0)
    if seconds > 0.0:
        return int(round(seconds / (env.get("controlFrequencyInv", 1) * cfg["sim"]["dt"])))
    return int(env["episodeLength"])


def counted_steps(cfg: Dict[str, Any]) -> int:
    """Steps of a full episode that belong to it alone.

    The flag comes when the step counter reaches length - 1, and the first step of that count is the border row.
    """
    return episode_length(cfg) - 2


def surprise_at(x: float) -> float:
    """Expected reward at position x with a goal drawn after the action was chosen."""

    def integral(low: float, high: float) -> float:
        return WIDTH * (math.atan((high - x) / WIDTH) - math.atan((low - x) / WIDTH))

    return (integral(GOAL_MIN, GOAL_MAX) + integral(-GOAL_MAX, -GOAL_MIN)) / (2.0 * (GOAL_MAX - GOAL_MIN))


def surprise() -> float:
    """The same at the best place to wait."""
    return max(surprise_at(GOAL_MAX * step / 1000.0) for step in range(1001))


def optimal_return(cfg: Dict[str, Any], steps: int = 0) -> float:
    """Expected return of the best policy over ``steps`` (0: the counted steps of an episode).

    Successes come every ``successSteps`` + 1 steps. Left out: goals that happen to be drawn within the tolerance, and
    the border's push, worth about a step. The policy of :func:`optimal_action` waits at the old goal and not at the
    best place, and so stays below by a tenth of a per cent.

    Raises:
        ValueError: the configuration has what the closed form does not cover.
    """
    env = cfg["env"]
    if env["maxConsecutiveSuccesses"] > 0 or env.get("actionsMovingAverage", 1.0) != 1.0:
        raise ValueError("no closed form with maxConsecutiveSuccesses > 0 or a moving average of actions")
    steps = steps or counted_steps(cfg)
    hold = int(env.get("successSteps", SUCCESS_STEPS))
    bonus = env["reachGoalBonus"] * BONUS_SCALE
    cycles, rest = divmod(steps, hold + 1)
    return cycles * (hold + bonus + surprise()) + rest + (bonus if rest == hold else 0.0)


def optimal_action(obs: Any, num_actions: int, active: int = ACTIVE_JOINTS) -> np.ndarray:
    """Actions [N, A] float32 that are at the goal after one step, from observations [N, O] of any layout above.

    Raises:
        KeyError: no such layout.
    """
    seen = np.asarray(obs, dtype=np.float32)
    position, velocity, error = LAYOUTS[seen.shape[1]]
    wanted = seen[:, error : error + active]
    if velocity is not None:
        wanted = wanted - DRAG * seen[:, velocity : velocity + active]
        wanted = wanted + SPRING * seen[:, position : position + active]
    action = np.zeros((len(seen), num_actions), dtype=np.float32)
    action[:, :active] = np.clip(wanted / REACH, -1.0, 1.0)
    return action
