"""Minari data sets as rings: recorded episodes that are learned from like a worker's.

Minari is optional (``pip install 'claw-lightning[minari]'``); nothing is downloaded here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from claw_lightning.errors import ConfigError
from claw_lightning.replay.storage import set_progress
from claw_lightning.rollout.envs.base import EnvError, EnvSpec
from claw_lightning.rollout.envs.gymnasium_env import ObservationLayout
from claw_lightning.rollout.envs.packages import one_line
from claw_lightning.rollout.ring import (
    BORDER,
    FIRST,
    QUARANTINED,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
    RowLayout,
)

log = logging.getLogger(__name__)

INSTALL = "pip install 'claw-lightning[minari]'"
GUARD = 2
#: Share of half the range by which an action may lie outside it through rounding alone.
TOLERANCE = 1e-5


class _Episode(NamedTuple):
    """Arrays of one episode of T steps: obs [T + 1, O], states [T + 1, S] or None, action [T, A], all float32.

    ``clipped``: actions of which some number lay outside the task's bounds.
    """

    obs: np.ndarray
    states: np.ndarray | None
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    clipped: int


def minari_rings(source: Any, spec: EnvSpec, layout: RowLayout, *, max_rows: int | None = None) -> list[LaneRing]:
    """A data set as one ring of one lane, whose every row can be drawn that has a true successor.

    An episode of T steps becomes T rows and a border row that holds its last observation, as a simulator with next-step
    autoreset would have written it. Rows carry option 0 since the episode's first step, log probabilities of 0 and
    version 0. An episode that the data set ends without saying why counts as truncated: its last observation is known.
    Rows with numbers that are not finite are quarantined. Actions outside the task's bounds are clipped, and how many
    is logged.

    Args:
        source: id of a data set in Minari's local folder, path of one (the folder itself or its ``data``), or an
            object with its properties and ``iterate_episodes``.
        spec: of the task; its bounds are the units of the data set's actions.
        layout: of the run's other rings.
        max_rows: stop before the episode with which the ring would get longer; None: all episodes.

    Raises:
        ConfigError: Minari is missing, there is no such data set, it is not of this task's sizes, or it is damaged;
            one line.
    """
    dataset, name = _open(source)
    reader = _Reader(dataset, name, spec, layout)
    most = int(dataset.total_steps) + int(dataset.total_episodes)
    if max_rows is not None:
        most = min(most, max_rows)
    # A row more, so that the ring has not turned over; rows that nothing is written into take no memory.
    ring = LaneRing(layout, most + 1 + GUARD + 3, 1, guard=GUARD)
    used = episodes = clipped = quarantined = 0
    for episode in reader.episodes():
        length = len(episode.reward)
        if used + length + 1 > most:
            if max_rows is None:
                raise ConfigError(f"data set {name} has more steps than its metadata says; download it anew")
            break
        rows = ring.rows[used : used + length + 1, 0]
        quarantined += _fill(rows, layout, episode)
        used, episodes, clipped = used + length + 1, episodes + 1, clipped + episode.clipped
    if not episodes:
        room = "" if max_rows is None else f", or its first episode is longer than the {max_rows} rows to be taken"
        raise ConfigError(f"data set {name} has no episodes{room}; take another one")
    set_progress(ring, used, 0)
    log.info("data set %s: %d episodes, %d steps", name, episodes, used - episodes)
    if clipped:
        log.warning(
            "data set %s: %d of %d actions lie outside the task's bounds and are clipped; is it of the same task?",
            name,
            clipped,
            used - episodes,
        )
    if quarantined:
        log.warning("data set %s: %d rows hold numbers that are not finite and are left out", name, quarantined)
    return [ring]


def _open(source: Any) -> tuple[Any, str]:
    """Data set and its name."""
    if not isinstance(source, (str, Path)):
        return source, str(getattr(getattr(source, "spec", None), "dataset_id", type(source).__name__))
    try:
        minari = importlib.import_module("minari")
    except ImportError as error:
        raise ConfigError(f"data set {source}: Minari is not installed; {INSTALL}") from error
    path = Path(source)
    found = [folder for folder in (path, path / "data") if (folder / "metadata.json").is_file()]
    try:
        return (minari.MinariDataset(found[0]) if found else minari.load_dataset(str(source))), str(source)
    except FileNotFoundError as error:
        raise ConfigError(
            f"data set {source} is not on this machine; minari download {source}, or give the path of its folder"
        ) from error
    except ImportError as error:  # of the library of the file format
        raise ConfigError(f"data set {source}: {one_line(error)}; {INSTALL}") from error
    except Exception as error:  # whatever is wrong with an id or a file, it is the user's to mend
        raise ConfigError(f"data set {source} cannot be opened ({_reason(error)}); check its id or path") from error


class _Reader:
    """Episodes of a data set in the units of the task.

    Raises:
        ConfigError: its spaces are not the task's; one line with both sizes.
    """

    def __init__(self, dataset: Any, name: str, spec: EnvSpec, layout: RowLayout) -> None:
        self.dataset, self.name, self.spec = dataset, name, spec
        try:
            self._observations = ObservationLayout(dataset.observation_space, name)
        except EnvError as error:
            text = str(error).replace("data.env.init_args.task: ", "")
            raise ConfigError(f"data set {name} cannot be learned from: {text}") from error
        if layout.image_size:
            raise ConfigError(f"data set {name}: task {spec.task} has images, which data sets are not read for")
        action_space = dataset.action_space
        num_actions = int(getattr(action_space, "n", 0))
        self._start = int(getattr(action_space, "start", 0)) if num_actions else 0
        action_size = 1 if num_actions else int(np.prod(getattr(action_space, "shape", None) or (0,), dtype=np.int64))
        for what, found, wanted in (
            ("observations", self._observations.obs_size, layout.obs_size),
            ("actions", action_size, layout.action_size),
            ("discrete actions", num_actions, spec.num_actions),
        ):
            if found != wanted:
                raise ConfigError(
                    f"data set {name} has {found} {what}, task {spec.task} has {wanted}; take one of the same task"
                )
        if layout.states_size and self._observations.states_size != layout.states_size:
            raise ConfigError(
                f"data set {name} has {self._observations.states_size} privileged states, task {spec.task} has "
                f"{layout.states_size}; take a data set that was recorded with them, or a task without"
            )
        self._check_goals()
        self._with_states = layout.states_size > 0
        low, high = np.array(spec.action_low, np.float64), np.array(spec.action_high, np.float64)
        self._centre, self._half_range = (high + low) / 2, (high - low) / 2

    def _check_goals(self) -> None:
        for part in ("achieved_goal", "desired_goal"):
            found, wanted = getattr(self._observations, part), getattr(self.spec, part)
            if wanted is not None and found != wanted:
                place = "nowhere" if found is None else f"in {found[0]}:{found[1]}"
                raise ConfigError(
                    f"data set {self.name} has its {part} {place}, task {self.spec.task} in {wanted[0]}:{wanted[1]} of "
                    "the observation; take one of the same task"
                )

    def episodes(self) -> Iterator[_Episode]:
        """All that have a step."""
        try:
            for episode in self.dataset.iterate_episodes():
                if len(episode.rewards):
                    yield self._read(episode)
        except (OSError, KeyError, ImportError) as error:  # of the file that Minari reads
            raise ConfigError(
                f"data set {self.name} cannot be read ({_reason(error)}); download it anew, or {INSTALL}"
            ) from error

    def _read(self, episode: Any) -> _Episode:
        steps = len(episode.rewards)
        try:
            # Numbers beyond float32 become infinite here, and their rows are quarantined.
            with np.errstate(over="ignore"):
                obs = self._observations.obs(episode.observations, steps + 1)
                states = self._observations.states(episode.observations, steps + 1) if self._with_states else None
                action = np.asarray(episode.actions).reshape(steps, -1)
                reward = np.asarray(episode.rewards, np.float64).astype(np.float32).reshape(steps)
            ends = [np.array(flags, bool).reshape(steps) for flags in (episode.terminations, episode.truncations)]
            if action.shape[1] != self.spec.action_size:
                raise ValueError(f"{action.shape[1]} actions, not {self.spec.action_size}")
            action, clipped = self._scale(action)
        except (ValueError, IndexError, KeyError) as error:
            raise ConfigError(
                f"data set {self.name}: episode {getattr(episode, 'id', '?')} of {steps} steps does not hold "
                f"{steps + 1} observations and {steps} actions of its spaces ({_reason(error)}); take another one"
            ) from error
        ends[1][-1] |= not ends[0][-1]
        return _Episode(obs, states, action, reward, ends[0], ends[1], clipped)

    def _scale(self, action: np.ndarray) -> tuple[np.ndarray, int]:
        """Actions [T, A] of the data set -> float32 in [-1, 1], or numbers of actions; how many were clipped."""
        if self.spec.num_actions:
            index = action.astype(np.int64) - self._start
            if not ((index >= 0) & (index < self.spec.num_actions)).all():
                raise ValueError(f"an action is not in [0, {self.spec.num_actions})")
            return index.astype(np.float32), 0
        # A joint that cannot move has no half range; whatever was recorded for it says nothing.
        moves = self._half_range > 0
        scaled = np.where(moves, (action - self._centre) / np.where(moves, self._half_range, 1.0), 0.0)
        scaled[~np.isfinite(scaled)] = np.nan  # an infinite one must be quarantined, not clipped
        outside = (np.abs(scaled) > 1.0 + TOLERANCE).any(axis=1)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32), int(outside.sum())


def _fill(rows: np.ndarray, layout: RowLayout, episode: _Episode) -> int:
    """Write an episode and its border row into rows [T + 1, W] of zeros; returns how many are quarantined."""
    view, steps = layout.view, len(episode.reward)
    view(rows, "obs")[:] = episode.obs
    if episode.states is not None:
        view(rows, "states")[:] = episode.states
    view(rows, "action")[:steps] = episode.action
    view(rows, "reward")[:steps] = episode.reward
    view(rows, "previous_option")[0] = -1
    view(rows, "option_age")[:steps] = np.arange(steps)
    if layout.has_finals:
        view(rows, "final_index")[:] = -1
    flags = view(rows, "flags")
    flags[:steps] = episode.terminated * TERMINATED | episode.truncated * TRUNCATED
    flags[0] |= FIRST | SWITCHED
    flags[steps] = BORDER
    bad = ~np.isfinite(rows[:, : layout.fields["log_prob_option"][1]]).all(axis=1)
    flags[bad] |= QUARANTINED
    return int(bad.sum())


def _reason(error: Exception) -> str:
    return one_line(error) or type(error).__name__
