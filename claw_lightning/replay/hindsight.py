"""Hindsight: failed episodes as successful ones for the goals that they reached (HER).

Source: Andrychowicz et al., Hindsight Experience Replay, arXiv 1707.01495.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from claw_lightning.errors import ConfigError
from claw_lightning.replay.episodes import EpisodeIndex
from claw_lightning.replay.samplers import Arrivals
from claw_lightning.rollout.envs.base import GOAL_IN_NEXT_OBS, EnvSpec
from claw_lightning.rollout.goals import GoalReward
from claw_lightning.rollout.ring import FIRST, HAS_FINAL, LaneRing, usable


@dataclass
class Hindsight:
    """Replaces goals of drawn samples by goals that their own episode reached.

    Attributes:
        strategy: where the goal is taken from: ``future``: a step from the sample on, ``final``: the last step of the
            episode, ``episode``: any step of it. Of an episode that goes on, up to the present.
        share: of the samples that get another goal.
    """

    strategy: Literal["future", "final", "episode"] = "future"
    share: float = 0.8

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        if self.strategy not in ("future", "final", "episode"):
            raise ConfigError(f"data.hindsight.strategy is '{self.strategy}'; use future, final or episode")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(
                f"data.hindsight.share is {self.share}; it must lie in (0, 1] (no hindsight: data.hindsight null)"
            )


class Relabeller:
    """Gives samples other goals, and the reward that belongs to them.

    The goal of a sample is replaced in its observation and in its next one, in its states where they show it too
    (``EnvSpec.desired_goal_in_states``), and its reward by
    ``reward(achieved goal of the next observation, new goal)``. Hence it does not matter on which side the simulator
    shows a goal that changes within an episode (``EnvSpec.goal_in_reward``): a relabelled sample has one goal.
    All steps of a segment get the same one. Ends stay where they were: a task that terminates on success gives
    relabelled samples no end of their own.

    Args:
        hindsight: which goals, and how many.
        spec: of the task; must name its goals.
        reward: the task's own, goals achieved and desired [.., G] -> [..] float32.
        rings: one per worker.

    Raises:
        ConfigError: the task has no goals.
    """

    def __init__(self, hindsight: Hindsight, spec: EnvSpec, reward: GoalReward, rings: Sequence[LaneRing]) -> None:
        if spec.achieved_goal is None or spec.desired_goal is None:
            raise ConfigError(
                f"data.hindsight: task {spec.task} has no achieved_goal and desired_goal in its observation; "
                "set data.hindsight null or choose a goal-conditioned task"
            )
        self.hindsight, self.spec, self.reward, self.rings = hindsight, spec, reward, list(rings)
        self.achieved, self.desired = slice(*spec.achieved_goal), slice(*spec.desired_goal)
        #: Words of a row where its states show the goal once more, or None.
        self.desired_in_states: slice | None = None
        if spec.desired_goal_in_states is not None:
            start, stop = spec.desired_goal_in_states
            self.desired_in_states = slice(spec.obs_size + start, spec.obs_size + stop)
        self.episodes = EpisodeIndex(rings)
        #: Of each ring, [T, N] int32: what :meth:`choose` looks at. A memory that draws from mirrors puts theirs here.
        self.flags = [ring.layout.view(ring.rows, "flags") for ring in self.rings]

    def follow(self, arrivals: Arrivals) -> None:
        """Take note of new rows."""
        self.episodes.follow(arrivals)

    def check_reward(self, rings: Sequence[LaneRing], whose: str, max_steps: int = 64) -> None:
        """Hold the reward against those of the first steps that these rings store.

        Here it matters where the goal that a reward refers to is shown.

        Args:
            whose: whose rewards they are, for the message.

        Raises:
            ConfigError: more than one in fifty differs, as where the task's reward has terms besides the goal.
        """
        wrong = seen = 0
        example = ""
        for ring in rings:
            first, last = ring.readable()
            steps = np.arange(first, min(last, first + max_steps))
            rows, after = (ring.rows[t % ring.num_steps] for t in (steps, steps + 1))
            view, intact = ring.layout.view, ring.intact(steps)
            flags = view(rows, "flags")
            fine = usable(flags, view(after, "flags")) & ((flags & HAS_FINAL) == 0) & intact[:, None]
            shown = after if self.spec.goal_in_reward == GOAL_IN_NEXT_OBS else rows
            given = view(rows, "reward")[fine]
            achieved, desired = view(after, "obs")[fine][:, self.achieved], view(shown, "obs")[fine][:, self.desired]
            expected = self.reward(achieved, desired)
            differs = ~(np.abs(given - expected) <= 1e-3 * (1.0 + np.abs(given)))  # also where it is no number
            if differs.any():
                index = int(differs.argmax())
                example = f"{given[index]:.4g} where it should be {expected[index]:.4g}"
            wrong, seen = wrong + int(differs.sum()), seen + len(given)
        if wrong > seen / 50:
            raise ConfigError(
                f"data.hindsight: {wrong} of {seen} rewards of {whose} differ from the goal reward of task "
                f"{self.spec.task} (such as {example}): a reward with further terms cannot be relabelled; set "
                "data.hindsight null, or mend compute_reward or goal_reward of the adapter"
            )

    def choose(
        self, ring: int, steps: np.ndarray, lanes: np.ndarray, oldest: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which samples get a goal, as indices [m], and from which steps the goals are taken [m].

        Args:
            ring: index of the ring.
            steps: [M] where samples begin.
            lanes: [M].
            oldest: first step that may be read.
            rng: of the sampler.
        """
        begin, end, known = self.episodes.spans(ring, steps, lanes)
        wanted = rng.random(len(steps)) < self.hindsight.share
        fraction = rng.random(len(steps))
        first = np.maximum(begin, oldest) if self.hindsight.strategy == "episode" else steps
        if self.hindsight.strategy == "final":
            first = end
        index = np.flatnonzero(wanted & known & ~self._ends_unseen(ring, steps, lanes))
        first, end = first[index], end[index]
        return index, first + (fraction[index] * (end - first + 1)).astype(np.int64)

    def _ends_unseen(self, ring_index: int, steps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Which steps [M] end their episode without its last observation, as before a worker's restart.

        Nothing is known then of what they achieved.
        """
        ring, flags = self.rings[ring_index], self.flags[ring_index]
        following = flags[(steps + 1) % ring.num_steps, lanes]
        return ((following & FIRST) != 0) & ((flags[steps % ring.num_steps, lanes] & HAS_FINAL) == 0)

    def goals(self, ring_index: int, steps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Goals achieved by steps [m]: those of their true next observations, [m, G]."""
        ring, layout = self.rings[ring_index], self.rings[ring_index].layout
        obs = layout.view(ring.rows, "obs")
        goals = obs[(steps + 1) % ring.num_steps, lanes, self.achieved]
        if layout.has_finals:
            slots = steps % ring.num_steps
            final = (layout.view(ring.rows, "flags")[slots, lanes] & HAS_FINAL) != 0
            index = layout.view(ring.rows, "final_index")[slots, lanes].astype(np.int64)
            goals[final] = ring.finals[index[final] % ring.num_finals, self.achieved]
            # An entry that was overwritten is of a later episode: a goal all the same, but not one of this episode.
            goals[final & ~ring.finals_intact(index)] = np.nan
        goals[self._ends_unseen(ring_index, steps, lanes)] = np.nan  # what follows there is the next episode
        return goals

    def apply(self, ring: int, index: np.ndarray, goals: np.ndarray, rows: np.ndarray, next_obs: np.ndarray) -> None:
        """Write goals [m, G] and rewards into samples ``index`` of rows [M, L, W] and next_obs [M, L, O], in place.

        Next states may lie behind next observations, [M, L, O + S].

        Goals that are not finite (of a quarantined row) are left out.
        """
        fine = np.isfinite(goals).all(axis=1)
        index, goals = index[fine], goals[fine]
        view = self.rings[ring].layout.view
        goals = np.broadcast_to(goals[:, None], (len(goals), rows.shape[1], goals.shape[1]))
        view(rows, "obs")[index, :, self.desired] = goals
        next_obs[index, :, self.desired] = goals
        if self.desired_in_states is not None:
            rows[index, :, self.desired_in_states] = goals
            if next_obs.shape[-1] >= self.desired_in_states.stop:
                next_obs[index, :, self.desired_in_states] = goals
        view(rows, "reward")[index] = self.reward(next_obs[index, :, self.achieved], goals)
