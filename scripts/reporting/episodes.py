"""What recorded episodes say of the options: when they run, what follows them, what they do and are worth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reporting.runs import ReportError

#: Parts of an episode for "when in the episode".
PHASE_BINS = 10
NEEDED = (
    "action", "option", "switched", "reward", "terminated", "truncated", "success", "episode", "step", "termination",
    "option_probs", "q", "gamma", "num_options", "frames", "frame_episode", "frame_step", "env_steps", "greedy",
)  # fmt: skip


@dataclass(frozen=True)
class Spell:
    """An option from the step at which it was chosen to its end.

    Attributes:
        option: which.
        first: index of its first step among all steps of the recording.
        length: in steps.
        is_complete: another option (or the same again) was chosen in the same episode; else the episode ended it.
    """

    option: int
    first: int
    length: int
    is_complete: bool


class Recording:
    """One file of EpisodeVideo: the arrays of its steps as attributes, see docs/report.md.

    Raises:
        ReportError: it cannot be read, or lacks arrays.
    """

    action: np.ndarray
    option: np.ndarray
    switched: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    episode: np.ndarray
    step: np.ndarray
    termination: np.ndarray
    option_probs: np.ndarray
    q: np.ndarray
    frames: np.ndarray
    frame_episode: np.ndarray
    frame_step: np.ndarray

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                missing = [name for name in NEEDED if name not in arrays]
                if missing:
                    raise ReportError(f"{file.name} lacks {', '.join(missing)}")
                found = {name: arrays[name] for name in NEEDED}
        except ReportError:
            raise
        except Exception as error:  # damage raises what its reader does: of zip, zlib, or of Python's own parser
            raise ReportError(f"{file.name} cannot be read ({type(error).__name__})") from error
        if not len(found["step"]):
            raise ReportError(f"{file.name} holds no steps")
        for name, array in found.items():
            if array.ndim:
                setattr(self, name, array)
        self.file = file
        self.gamma, self.num_options = float(found["gamma"]), int(found["num_options"])
        self.env_steps = int(found["env_steps"])
        #: Options ended at one half, and the likeliest one followed; else both were drawn.
        self.is_greedy = bool(found["greedy"])
        # For discrete actions: each one as a component that is taken or not.
        self.is_discrete = self.action.ndim == 1 or np.issubdtype(self.action.dtype, np.integer)
        if self.is_discrete:
            taken = self.action.reshape(-1).astype(int)
            self.action = np.eye(int(taken.max()) + 1)[taken]

    @property
    def arriving(self) -> np.ndarray:
        """[S], the option that came to a step, at which another may have been chosen: ``termination`` is its."""
        before = np.concatenate([self.option[:1], self.option[:-1]])
        return np.where(self.step == 0, self.option, before)

    @property
    def episodes(self) -> list[int]:
        """Numbers of the episodes."""
        return [int(each) for each in np.unique(self.episode)]

    def of(self, episode: int) -> np.ndarray:
        """Indices of an episode's steps, in order."""
        return np.flatnonzero(self.episode == episode)

    def spells(self) -> list[Spell]:
        """All spells, in order."""
        starts = self.switched.astype(bool) | (self.step == 0)
        starts[0] = True
        starts[1:] |= self.option[1:] != self.option[:-1]
        first = np.flatnonzero(starts)
        ends = np.append(first[1:], len(self.step))
        return [
            Spell(int(self.option[a]), int(a), int(b - a), b < len(self.step) and self.episode[b] == self.episode[a])
            for a, b in zip(first, ends, strict=True)
        ]

    def returns(self) -> dict[int, float]:
        """Undiscounted return of each episode."""
        return {each: float(self.reward[self.of(each)].sum()) for each in self.episodes}


@dataclass(frozen=True)
class OptionFigures:
    """Of one option, over all episodes of a recording.

    Attributes:
        share: of the steps.
        duration: mean steps of its spells, those that the end of an episode cut short among them; NaN without a spell.
        spells: how many.
        cut: how many of them an episode's end has ended.
        phases: [PHASE_BINS], share of the steps in that part of the episodes at which it runs.
        follows: [K], share of its ends after which option j was chosen; all 0 where it never ended.
        ends: mean probability of ending at the steps at which it might; NaN where unknown.
        reward: mean per step while it runs; NaN without a step.
        components: of the actions, those in which it differs most from all steps, largest difference first.
        differences: of those, its mean less that of all steps, in standard deviations over all steps.
    """

    share: float
    duration: float
    spells: int
    cut: int
    phases: np.ndarray
    follows: np.ndarray
    ends: float
    reward: float
    components: list[int]
    differences: list[float]


def option_figures(recording: Recording, most_components: int = 6) -> list[OptionFigures]:
    """Of every option of a recording."""
    spells, num_options = recording.spells(), recording.num_options
    last = {each: recording.step[recording.of(each)].max() for each in recording.episodes}
    lengths = np.array([last[int(each)] + 1 for each in recording.episode])
    phase = np.minimum(PHASE_BINS - 1, recording.step * PHASE_BINS // lengths)
    per_phase = np.maximum(1, np.bincount(phase, minlength=PHASE_BINS))
    follows = np.zeros((num_options, num_options))
    for spell, after in zip(spells, spells[1:], strict=False):
        if spell.is_complete:
            follows[spell.option, after.option] += 1
    follows /= np.maximum(1, follows.sum(1, keepdims=True))
    spread, mean = recording.action.std(0), recording.action.mean(0)
    found = []
    for option in range(num_options):
        here = recording.option == option
        own = [spell for spell in spells if spell.option == option]
        ends = recording.termination[recording.arriving == option]
        ends = ends[np.isfinite(ends)]
        components: list[int] = []
        difference = np.zeros(len(mean))
        if here.any():
            difference = np.where(spread > 1e-6, (recording.action[here].mean(0) - mean) / np.maximum(spread, 1e-6), 0)
            components = [int(each) for each in np.argsort(-np.abs(difference))[:most_components]]
        found.append(
            OptionFigures(
                share=float(here.mean()),
                duration=float(np.mean([spell.length for spell in own])) if own else float("nan"),
                spells=len(own),
                cut=sum(not spell.is_complete for spell in own),
                phases=np.bincount(phase[here], minlength=PHASE_BINS) / per_phase,
                follows=follows[option],
                ends=float(ends.mean()) if len(ends) else float("nan"),
                reward=float(recording.reward[here].mean()) if here.any() else float("nan"),
                components=components,
                differences=[float(difference[each]) for each in components],
            )
        )
    return found


def characteristic_frames(recording: Recording, option: int, most: int = 3) -> list[int]:
    """Indices of frames that show an option: from the middle of its longest spells, then from their ends and starts."""
    middles: list[int] = []
    edges: list[int] = []
    spells = [spell for spell in recording.spells() if spell.option == option]
    for spell in sorted(spells, key=lambda each: -each.length):
        episode, step = int(recording.episode[spell.first]), int(recording.step[spell.first])
        inside = np.flatnonzero(
            (recording.frame_episode == episode)
            & (recording.frame_step >= step)
            & (recording.frame_step < step + spell.length)
        )
        if len(inside):
            middle = step + (spell.length - 1) / 2
            middles.append(int(inside[np.argmin(np.abs(recording.frame_step[inside] - middle))]))
            edges += [int(inside[-1]), int(inside[0])]
    chosen = list(dict.fromkeys(middles + edges))
    return sorted(chosen[:most])


@dataclass(frozen=True)
class Values:
    """Estimates against what was obtained, at all S steps.

    Attributes:
        estimated: [S], the critics' value of the running option with the action it took.
        obtained: [S], discounted rewards from that step to the end of its episode.
        tail: [S], gamma to the power of the steps that were left; 0 where the episode ended by itself, so that nothing
            is missing.
        completed: [S], ``obtained`` and, where a time limit cut the episode, the estimate at its last step in place of
            what came after.
    """

    estimated: np.ndarray
    obtained: np.ndarray
    tail: np.ndarray
    completed: np.ndarray


def values(recording: Recording) -> Values:
    """Compare values with returns; both are in units of the task's reward."""
    column = np.minimum(recording.option, recording.q.shape[1] - 1)
    estimated = recording.q[np.arange(len(recording.step)), column].astype(float)
    obtained, completed, tail = (np.zeros(len(estimated)) for _ in range(3))
    for episode in recording.episodes:
        index = recording.of(episode)
        is_cut = not bool(recording.terminated[index[-1]])
        total, weight = 0.0, 1.0
        for at in index[::-1]:
            total, weight = float(recording.reward[at]) + recording.gamma * total, weight * recording.gamma
            obtained[at], tail[at] = total, weight if is_cut else 0.0
        if is_cut:
            # The estimate at the last step covers that step's reward too.
            left = recording.gamma ** (len(index) - 1 - np.arange(len(index)))
            completed[index] = obtained[index] + left * (estimated[index[-1]] - float(recording.reward[index[-1]]))
        else:
            completed[index] = obtained[index]
    return Values(estimated, obtained, tail, completed)
