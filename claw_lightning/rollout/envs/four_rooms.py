"""Four Rooms: the small grid on which options are compared, with exact figures to compare against."""

from __future__ import annotations

from typing import Any, List, Optional

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.envs.gymnasium_env import unknown_task
from claw_lightning.rollout.envs.packages import one_line

TASK = "FourRooms"
DYNAMICS = ("moc", "jeanharb")
INIT_ARGS = "data.env.init_args"

#: Rows from north to south. Cells (dots) are numbered along the rows; the east doorway, between the two rooms on the
#: right, is row 7, column 9 and thereby number 62.
MAP = (
    "#############",
    "#.....#.....#",
    "#.....#.....#",
    "#...........#",
    "#.....#.....#",
    "#.....#.....#",
    "##.####.....#",
    "#.....###.###",
    "#.....#.....#",
    "#.....#.....#",
    "#...........#",
    "#.....#.....#",
    "#############",
)
#: What actions 0 to 3 do to row and column.
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))

#: What the channels of an image show.
WALLS, WALKER, GOAL = range(3)

CELLS = [(row, column) for row, line in enumerate(MAP) for column, sign in enumerate(line) if sign == "."]
NUM_CELLS = len(CELLS)
EAST_DOORWAY = CELLS.index((7, 9))
#: Where the goal moves to in the published protocol: the lower right room and the doorway on its west side.
LOWER_RIGHT = [
    index for index, (row, column) in enumerate(CELLS) if (row >= 8 and column >= 7) or (row, column) == (10, 6)
]

_NUMBER = {cell: index for index, cell in enumerate(CELLS)}
#: [104, 4]: cell after an action that does not slip; walls leave one where one is.
_NEXT = np.array([[_NUMBER.get((r + dr, c + dc), _NUMBER[r, c]) for dr, dc in MOVES] for r, c in CELLS], np.int64)
_IS_FREE = np.not_equal(_NEXT, np.arange(NUM_CELLS)[:, None])
#: [104] and [104, 4]: number of free neighbours, and the neighbours themselves in the first places of each row.
_DEGREE = _IS_FREE.sum(axis=1)
_AROUND = np.take_along_axis(_NEXT, np.argsort(~_IS_FREE, axis=1, kind="stable"), axis=1)


#: [13, 13] uint8, and [104, 2] int64: where the walls are, and row and column of each cell.
_WALLS = np.array([[255 * (sign == "#") for sign in line] for line in MAP], np.uint8)
_PLACE = np.array(CELLS, np.int64)


def transition_matrix(dynamics: str = "moc", slip: float = 1 / 3) -> np.ndarray:
    """[4, 104, 104] float64: probability of the cell after action a (first axis) in a cell (second axis).

    The goal is not singled out: what happens there is the caller's matter. See :class:`FourRoomsEnv` for the dynamics.
    """
    wander = np.zeros((NUM_CELLS, NUM_CELLS))
    for cell in range(NUM_CELLS):
        wander[cell, _AROUND[cell, : _DEGREE[cell]]] = 1.0 / _DEGREE[cell]
    matrix = np.zeros((len(MOVES), NUM_CELLS, NUM_CELLS))
    for action in range(len(MOVES)):
        move = np.eye(NUM_CELLS)[_NEXT[:, action]]
        if dynamics == "moc":
            matrix[action] = (1.0 - slip) * move + slip * wander
        else:
            slips = slip * _IS_FREE[:, action, None]  # only what has moved can slip
            matrix[action] = (1.0 - slips) * move + slips * (move @ wander)
    return matrix


def optimal_steps(matrix: np.ndarray, goal: int = EAST_DOORWAY) -> np.ndarray:
    """[104] float64: least expected steps from each cell to the goal (0 at the goal), by value iteration.

    No time limit and no discount. ``matrix`` is that of :func:`transition_matrix` with a slip below 1. The mean over
    all cells but the goal is what a perfect policy needs per episode.
    """
    steps = np.zeros(NUM_CELLS)
    while True:
        better = 1.0 + (matrix @ steps).min(axis=0)
        better[goal] = 0.0
        if np.abs(better - steps).max() < 1e-10:
            return better
        steps = better


class FourRoomsEnv(VectorEnv):
    """N walkers in four rooms of 104 cells that are joined by four doorways, all stepped together.

    Reward 1 on the step that ends in the goal, which terminates the episode, and 0 before. Episodes start in any cell
    but the goal, all equally likely, and are truncated after ``max_episode_steps``; a step that reaches the goal at
    the limit is terminated, not truncated. They restart on the step after their end, which is reported as a border
    row: its action is ignored. Observation [N, 104] float32: one-hot number of the cell. Actions [N, 1]: 0 up
    (towards row 0), 1 down, 2 left, 3 right.

    With ``pixels`` there is an image [N, 3, 13, 13] uint8 instead, the map from above, one pixel for each cell: walls
    in the first channel, the walker in the second, the goal in the third, each 255 where it is and 0 elsewhere. The
    observation is then [N, 0]. Unlike the observation, the image shows where the goal has moved.

    The world is that of Sutton, Precup and Singh (1999). Bacon, Harb and Precup (2017, "The Option-Critic
    Architecture", arXiv 1609.05140) put the goal in the east doorway and later move it into the lower right room;
    Klissarov and Precup (2021, "Flexible Option Learning", MOC, arXiv 2112.03097) use another dynamics. The
    programs published with both papers document slips into "one of the other three directions" but do something else,
    which is what is implemented here:

    * ``moc``: with probability ``slip`` the action is replaced by a step to one of the cell's free neighbours, all
      equally likely; the wanted one may be among them, and a slip never ends at a wall.
    * ``jeanharb``: the action is carried out and, where it moved, followed with probability ``slip`` by a second step
      from the new cell to one of its free neighbours. A walker that goes on over the goal has not reached it.

    With ``slip=0`` the two are the same. Expected steps of an optimal policy from a uniform start (and of the worst
    start), goal in the east doorway, slip 1/3: moc 12.056 (21.14), jeanharb 8.392 (14.79); slip 0: 7.592 (14).
    A uniformly random policy needs 459, 430 and 502. :func:`optimal_steps` computes the optima for any setting.

    Where the goal moves, it moves once, for all lanes at once: a lane in the middle of its episode goes on towards the
    new goal, and one that stands there already has to end a step there. Each simulator counts its own episodes and
    draws its own goal, so this wants one worker (``data.num_workers: 1``). An evaluator starts with
    the first goal at each evaluation, and so do restarted workers and resumed runs.

    Args:
        task: ``FourRooms``; there is no other.
        num_envs: N.
        seed: of starts, slips and the new goal. The new goal depends on the seed alone, not on what the walkers do.
        dynamics: ``moc`` or ``jeanharb``.
        slip: probability of a slip, in [0, 1). At 1 double moves would keep a walker off every other cell for ever.
        goal: number of the first goal's cell, 0 to 103; 62 is the east doorway.
        move_goal_after: episodes finished in this simulator, all lanes together, after which the goal moves; 0: never.
        goals_after: cells from which the new goal is drawn, other than the first goal; None: the 20 cells of the
            lower right room and its west doorway (optimal policies there need 13.817 steps with moc, 9.542 with
            jeanharb, 8.731 without slips).
        max_episode_steps: steps after which an episode is truncated.
        pixels: images in place of observations.

    Attributes:
        goal: number of the present goal's cell.
        finished: episodes finished since the start or the last reset with a seed.

    Raises:
        EnvError: an argument cannot be used.
    """

    def __init__(
        self,
        task: str = TASK,
        num_envs: int = 1,
        seed: int = 0,
        dynamics: str = "moc",
        slip: float = 1 / 3,
        goal: int = EAST_DOORWAY,
        move_goal_after: int = 0,
        goals_after: Optional[List[int]] = None,
        max_episode_steps: int = 1000,
        pixels: bool = False,
    ) -> None:
        if task != TASK:
            raise unknown_task(str(task), [TASK], "FourRoomsEnv")
        if num_envs < 1:
            raise EnvError("data.envs_per_worker: must be at least 1, not %d" % num_envs)
        if dynamics not in DYNAMICS:
            raise EnvError(
                "data.env.init_args.dynamics: '%s' is not known; use %s" % (one_line(dynamics), " or ".join(DYNAMICS))
            )
        _check_slip(slip)
        _check_whole("goal", goal, 0, NUM_CELLS - 1)
        _check_whole("move_goal_after", move_goal_after, 0)
        _check_whole("max_episode_steps", max_episode_steps, 1)
        if not isinstance(pixels, bool):
            raise EnvError("data.env.init_args.pixels: must be true or false, not %s" % one_line(pixels))
        if goals_after is None:
            goals_after = LOWER_RIGHT
        elif not isinstance(goals_after, (list, tuple)):
            raise EnvError("data.env.init_args.goals_after: must be a list of cells, not %s" % one_line(goals_after))
        for cell in goals_after:
            _check_whole("goals_after", cell, 0, NUM_CELLS - 1)
        self._goals_after = [cell for cell in goals_after if cell != goal]
        if not self._goals_after:
            raise EnvError(
                "data.env.init_args.goals_after: must name a cell other than the goal (%d), not %s"
                % (goal, one_line(goals_after))
            )

        self.num_envs = num_envs
        self.spec = EnvSpec(
            task=task,
            obs_size=0 if pixels else NUM_CELLS,
            action_size=1,
            action_low=[0.0],
            action_high=[len(MOVES) - 1.0],
            max_episode_steps=max_episode_steps,
            num_actions=len(MOVES),
            autoreset=NEXT_STEP,
            versions={"numpy": np.__version__},  # whose generator decides starts and slips
            image_shape=(3, len(MAP), len(MAP[0])) if pixels else None,
        )
        self._dynamics, self._slip = dynamics, slip
        self._first_goal, self._move_goal_after = goal, move_goal_after
        self._cell = np.zeros(num_envs, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=bool)
        self._is_unused = True
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._rng = np.random.default_rng(int(seed) % 2**64)
        self.goal, self.finished = self._first_goal, 0
        # A generator of its own: runs that differ in their learner alone are to face the same change.
        goals = np.random.default_rng([int(seed) % 2**64, 1])
        self._next_goal = int(goals.choice(self._goals_after))

    def _starts(self, count: int) -> np.ndarray:
        cells = self._rng.integers(0, NUM_CELLS - 1, count)
        return cells + (cells >= self.goal)  # passes over the goal

    def _obs(self) -> np.ndarray:
        if self.spec.image_shape is not None:
            return np.zeros((self.num_envs, 0), dtype=np.float32)
        obs = np.zeros((self.num_envs, NUM_CELLS), dtype=np.float32)
        obs[np.arange(self.num_envs), self._cell] = 1.0
        return obs

    def image(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.image`: [N, 3, 13, 13] uint8 of the present cells and goal; None without ``pixels``."""
        if self.spec.image_shape is None:
            return None
        image = np.zeros((self.num_envs, *self.spec.image_shape), dtype=np.uint8)
        image[:, WALLS] = _WALLS
        row, column = _PLACE[self._cell].T
        image[np.arange(self.num_envs), WALKER, row, column] = 255
        row, column = _PLACE[self.goal]
        image[:, GOAL, row, column] = 255
        return image

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """Start new episodes in all lanes. Returns obs [N, 104] float32, [N, 0] with ``pixels``.

        With a seed everything begins anew, the goal and the count of episodes included; without one, they stay.
        """
        if seed is not None:
            self._begin(seed)
        self._is_unused = False
        self._cell = self._starts(self.num_envs)
        self._elapsed[:] = 0
        self._ended[:] = False
        return self._obs()

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`. ``info`` has ``success`` [N] float32: 1 where the goal was reached.

        Raises:
            RuntimeError: not reset yet.
            ValueError: wrong shape, or an action that is none of 0 to 3.
        """
        if self._is_unused:
            raise RuntimeError("step before the first reset")
        moved = self._moved(self._checked(action))
        is_border, lives = self._ended, ~self._ended
        self._cell = np.where(lives, moved, self._cell)
        self._elapsed += lives
        terminated = lives & (self._cell == self.goal)
        truncated = lives & ~terminated & (self._elapsed >= self.spec.max_episode_steps)
        self._ended = terminated | truncated
        self._elapsed[self._ended] = 0

        self.finished += int(self._ended.sum())
        if 0 < self._move_goal_after <= self.finished:
            self.goal = self._next_goal
        restarts = np.flatnonzero(is_border)  # after the goal has moved: no episode starts in it
        self._cell[restarts] = self._starts(len(restarts))
        return StepResult(
            obs=self._obs(),
            reward=terminated.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            final_obs=None,
            has_final_obs=None,
            is_border=is_border,
            info={"success": terminated.astype(np.float32)},
            image=self.image(),
        )

    def configure(self, **settings: Any) -> None:
        """See :meth:`VectorEnv.configure`: ``slip``, and ``goal`` unless ``move_goal_after`` moves it.

        A new goal is also the one that a reset with a seed returns to.
        """
        slip, goal = settings.pop("slip", self._slip), settings.pop("goal", self._first_goal)
        if settings:
            raise EnvError("FourRooms has no setting '%s' to change; use slip or goal" % "', '".join(sorted(settings)))
        _check_slip(slip, "FourRooms")
        if isinstance(goal, float) and goal.is_integer():  # whoever sends numbers may know no others
            goal = int(goal)
        _check_whole("goal", goal, 0, NUM_CELLS - 1, "FourRooms")
        if goal != self._first_goal and self._move_goal_after:
            raise EnvError("FourRooms.goal: move_goal_after moves it already; set data.env.init_args.move_goal_after 0")
        self._slip = slip
        if goal != self._first_goal:
            self.goal = self._first_goal = goal

    def _checked(self, action: np.ndarray) -> np.ndarray:
        action = np.asarray(action)
        if action.shape != (self.num_envs, 1):
            raise ValueError("actions have shape %s, expected (%d, 1)" % (action.shape, self.num_envs))
        index = np.rint(action[:, 0])
        if not ((index >= 0) & (index < len(MOVES))).all():
            raise ValueError("discrete actions must lie in [0, %d): %s" % (len(MOVES), one_line(index)))
        return index.astype(np.int64)

    def _moved(self, action: np.ndarray) -> np.ndarray:
        """[N] actions -> [N] cells after them, slips included."""
        wanted = _NEXT[self._cell, action]
        slips = self._rng.random(self.num_envs) < self._slip
        origin = self._cell
        if self._dynamics == "jeanharb":
            slips &= wanted != self._cell
            origin = wanted
        choice = (self._rng.random(self.num_envs) * _DEGREE[origin]).astype(np.int64)
        return np.where(slips, _AROUND[origin, choice], wanted)


def _check_slip(slip: Any, group: str = INIT_ARGS) -> None:
    if isinstance(slip, bool) or not isinstance(slip, (int, float)) or not 0.0 <= slip < 1.0:
        raise EnvError("%s.slip: must be a number from 0 to below 1, not %s" % (group, one_line(slip)))


def _check_whole(name: str, value: Any, least: int, most: Optional[int] = None, group: str = INIT_ARGS) -> None:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        wanted = "of at least %d" % least if most is None else "from %d to %d" % (least, most)
        raise EnvError("%s.%s: must be a whole number %s, not %s" % (group, name, wanted, one_line(value)))
