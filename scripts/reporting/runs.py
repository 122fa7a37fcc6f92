"""Reading what runs have left in their folders, and grouping runs of one configuration."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

#: Seconds since the last record within which a run is taken for one that still goes on.
GOING_SECONDS = 180.0
#: Probabilities of ending are shown in so many bins of [0, 1].
PROBABILITY_BINS = 30
#: Callbacks that only look: runs with and without them are of one configuration.
LOOKING_CALLBACKS = frozenset(
    {
        "EpisodeLog",
        "EpisodeVideo",
        "OptionDiagnostics",
        "PipelineThroughput",
        "QRange",
        "RolloutWriter",
        "StalenessMonitor",
        "WorkerHealth",
    }
)
#: Settings that do not make another configuration: the seed, where things lie, what is printed.
INCIDENTAL = (
    "seed_everything", "ckpt_path", "trainer.logger", "trainer.default_root_dir", "trainer.enable_progress_bar",
    "data.seed", "data.env.init_args.seed",
)  # fmt: skip


class ReportError(Exception):
    """What the user has to mend; one line that names the folder or file and the cure."""


@dataclass(frozen=True)
class Curve:
    """A logged scalar.

    Attributes:
        steps: [P] float64, environment steps, ascending.
        minutes: [P] float64, wall time since the run's first event file was opened.
        values: [P] float64.
    """

    steps: np.ndarray
    minutes: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The last finite value; NaN where there is none."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if len(finite) else float("nan")


@dataclass(frozen=True)
class Heat:
    """A logged histogram of probabilities over training.

    Attributes:
        steps: [P] float64, environment steps, ascending.
        shares: [P, PROBABILITY_BINS] float64; each row sums to 1.
    """

    steps: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True)
class WorkerEvent:
    """A line of ``worker_events.csv``."""

    seconds: float
    env_steps: float
    worker: str
    event: str
    detail: str


@dataclass
class Run:
    """A run folder, read.

    Attributes:
        folder: as it was given.
        config: of ``config.yaml``; empty where that is missing.
        curves: per logged name.
        heats: per option k, of ``termination/option_<k>``.
        events: of ``worker_events.csv``; None where there is none.
        recordings: files of EpisodeVideo, ascending in environment steps.
        age: seconds since the last record.
        notes: what could not be read, one line each.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    heats: dict[int, Heat] = field(default_factory=dict)
    events: list[WorkerEvent] | None = None
    recordings: list[Path] = field(default_factory=list)
    age: float = float("inf")
    notes: list[str] = field(default_factory=list)

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def task(self) -> str:
        """The simulator's name of the task."""
        return str(self.setting("data.env.init_args.task") or self.setting("data.env.class_path") or "unknown task")

    @property
    def num_options(self) -> int:
        """K; from the logged shares where the configuration is missing."""
        logged = 1 + max((int(name.rsplit("_", 1)[1]) for name in self.names("option/share_")), default=0)
        return int(self.setting("model.num_options") or logged)

    @property
    def seed(self) -> str:
        """As in the configuration."""
        return str(self.setting("seed_everything", "unknown"))

    @property
    def env_steps(self) -> float:
        """Of the last record."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0.0)

    @property
    def minutes(self) -> float:
        """From the opening of the first event file to the last record."""
        return max((curve.minutes[-1] for curve in self.curves.values()), default=0.0)

    @property
    def is_going(self) -> bool:
        """Whether it seems to go on still: the last record is young, and not all processes have been stopped."""
        last = {event.worker: event.event for event in self.events or []}
        return self.age < GOING_SECONDS and not (last and set(last.values()) <= {"stop", "give_up"})

    def names(self, prefix: str) -> list[str]:
        """Logged names that begin so, option numbers in their order."""
        found = [name for name in self.curves if name.startswith(prefix)]
        tails = {name: name.rsplit("_", 1)[-1] for name in found}
        return sorted(found, key=lambda name: (int(tails[name]) if tails[name].isdigit() else -1, name))


@dataclass
class Group:
    """Runs of one configuration but for the seed.

    Attributes:
        letter: A, B, ...
        runs: at least one.
        label: in what it differs from the others, in a few words.
    """

    letter: str
    runs: list[Run]
    label: str = ""

    @property
    def name(self) -> str:
        """For legends."""
        return f"{self.letter}: {self.label}" if self.label else self.letter

    @property
    def example(self) -> Run:
        """The run that is shown in detail: the first one with recorded episodes, or the first one."""
        return next((run for run in self.runs if run.recordings), self.runs[0])


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ReportError: it is no run's, or nothing has been logged in it.
    """
    if not folder.is_dir():
        raise ReportError(
            f"{folder} is {'no folder' if folder.exists() else 'not there'}; give a run's, such as runs/version_0"
        )
    files = sorted(folder.glob("events.out.tfevents.*"))
    config_file = folder / "config.yaml"
    if not files and not config_file.is_file():
        inside = next((each.parent for each in sorted(folder.glob("*/events.out.tfevents.*"))), None)
        hint = (
            f"; give what is in it, such as {inside}"
            if inside
            else "; give one that holds TensorBoard events, such as runs/version_0"
        )
        raise ReportError(f"{folder} is no run's folder{hint}")
    run = Run(folder)
    if not files:
        raise ReportError(
            f"{folder} has no TensorBoard events: reports are made of what trainer.logger=RunLogger or "
            f"TensorBoardLogger writes"
        )
    run.config = _read_config(config_file, run.notes)
    _read_logged(folder, files, run)
    if not run.curves:
        raise ReportError(
            f"{folder} has no logged values that can be read yet; if the run has just begun, wait for its first ones"
        )
    run.events = _read_events(folder / "worker_events.csv", run.notes)
    run.recordings = sorted((folder / "episodes").glob("[0-9]*.npz"))
    return run


def _read_config(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        notes.append("config.yaml is missing: task, K and seed are unknown or guessed.")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"config.yaml cannot be read ({type(error).__name__}): task, K and seed are unknown or guessed.")
        return {}
    return content if isinstance(content, dict) else {}


def _read_logged(folder: Path, files: Sequence[Path], run: Run) -> None:
    """Scalars and histograms of all event files; a record that was written in part ends its file."""
    for file in files:
        try:
            with file.open("rb"):
                run.age = min(run.age, max(0.0, time.time() - file.stat().st_mtime))
        except OSError as error:
            raise ReportError(f"{file} cannot be read: {error.strerror}") from error
    # 0: keep all of them.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 1, "images": 1})
    try:
        events.Reload()
    except Exception as error:  # TensorBoard raises whatever its parsers do
        run.notes.append(
            f"The event files are damaged ({type(error).__name__}); what lies behind the damage is missing."
        )
    tags: Mapping[str, Any] = events.Tags()
    scalars = {name: events.Scalars(name) for name in tags["scalars"]}
    start = min((points[0].wall_time for points in scalars.values() if points), default=0.0)
    if scalars and 0 < events.FirstEventTimestamp() < start:  # the file is opened when the run begins
        start = events.FirstEventTimestamp()
    for name, points in scalars.items():
        table = np.array([(p.step, (p.wall_time - start) / 60.0, p.value) for p in points], float).reshape(-1, 3)
        table = table[np.argsort(table[:, 0], kind="stable")]
        if len(table) and not name.startswith("hp_metric"):
            run.curves[name] = Curve(table[:, 0], table[:, 1], table[:, 2])
    for name in tags["histograms"]:
        option = name.removeprefix("termination/option_")
        if option.isdigit():
            logged = sorted(events.Histograms(name), key=lambda each: each.step)
            shares = [rebin(each.histogram_value, PROBABILITY_BINS) for each in logged]
            run.heats[int(option)] = Heat(np.array([each.step for each in logged], float), np.array(shares))


def rebin(histogram: Any, bins: int) -> np.ndarray:
    """Shares [bins] in equal parts of [0, 1] of a TensorBoard histogram, whose own buckets grow with the value.

    What is in a bucket counts as spread evenly over it.
    """
    limits = np.asarray(histogram.bucket_limit, float)
    counts = np.asarray(histogram.bucket, float)
    # The outermost buckets reach to infinity; nothing lies beyond the least and the largest value.
    right = np.clip(limits, histogram.min, histogram.max)
    left = np.concatenate([[histogram.min], right[:-1]])
    total = counts.sum()
    if total <= 0:
        return np.zeros(bins)
    shares = np.zeros(bins)
    for low, high, count in zip(left, right, counts, strict=True):
        if count <= 0:
            continue
        if high - low < 1e-9:
            shares[min(bins - 1, max(0, int(low * bins)))] += count
            continue
        edges = np.linspace(0.0, 1.0, bins + 1)
        overlap = np.clip(np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]), 0.0, None)
        shares += count * overlap / (high - low)
    return shares / total


def _read_events(file: Path, notes: list[str]) -> list[WorkerEvent] | None:
    if not file.is_file():
        return None
    events = []
    try:
        with file.open(newline="", errors="replace") as stream:
            for row in csv.DictReader(stream):
                try:
                    found = WorkerEvent(
                        float(row["seconds"]), float(row["env_steps"]), row["worker"], row["event"], row["detail"] or ""
                    )
                except (KeyError, TypeError, ValueError):  # the last line may be half written
                    continue
                events.append(found)
    except (OSError, csv.Error) as error:
        notes.append(f"worker_events.csv cannot be read: {error}")
    return events


# -- groups -----------------------------------------------------------------------------------------------------------


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys and values, as text, of a configuration; lists are values."""
    if isinstance(config, Mapping) and config:
        found: dict[str, str] = {}
        for key, value in config.items():
            found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(config, (Mapping, list)):
        return {prefix: yaml.safe_dump(config, default_flow_style=True, width=10_000).strip()}
    return {prefix: "null" if config is None else str(config)}


def essential(config: Mapping[str, Any]) -> dict[str, str]:
    """What makes a configuration: its dotted keys without those of :data:`INCIDENTAL` and callbacks that only look."""
    found = {
        key: value
        for key, value in flatten(config).items()
        if not any(key == name or key.startswith(f"{name}.") for name in INCIDENTAL)
    }
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    found.pop("trainer.callbacks", None)
    kept = [each for each in callbacks or [] if _class_name(each) not in LOOKING_CALLBACKS]
    if kept:
        found |= flatten({"trainer": {"callbacks": kept}})
    return found


def _class_name(callback: Any) -> str:
    path = callback.get("class_path", "") if isinstance(callback, Mapping) else callback
    return str(path).rsplit(".", 1)[-1]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order in which they were given; labels tell in what they differ."""
    by_config: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        by_config.setdefault(tuple(sorted(essential(run.config).items())), []).append(run)
    groups = [Group(_letter(number), members) for number, members in enumerate(by_config.values())]
    for group in groups:
        _note_equal_seeds(group)
    keys = list(differences(groups))
    # The algorithm and the task say more than sizes and times.
    keys.sort(key=lambda key: (not key.startswith(("data.env.init_args.task", "model.num_options")), key))
    for group in groups:
        values = essential(group.runs[0].config)
        group.label = ", ".join(f"{_short(key)} {values.get(key, 'unset')[:40]}" for key in keys[:2])
    return groups


def _note_equal_seeds(group: Group) -> None:
    """A run that went on with another one would count as a further seed."""
    first: dict[Any, Run] = {}
    for run in group.runs:
        seed = run.setting("seed_everything")
        before = first.setdefault(seed, run) if seed is not None else run
        if before is not run:
            run.notes.append(
                f"It has the settings and the seed of {before.folder}, and counts as a run of its own all the same; "
                "where it went on with that one (ckpt_path), report one of the two."
            )


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"{chr(ord('A') + number // 26 - 1)}{chr(ord('A') + number % 26)}"


def _short(key: str) -> str:
    return {"model.num_options": "K ="}.get(key, key.rsplit(".", 1)[-1])


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Per dotted key that is not the same in all groups, the value in each ("unset" where it has none)."""
    settings = [essential(group.runs[0].config) for group in groups]
    keys = sorted({key for each in settings for key in each})
    rows = {key: [each.get(key, "unset") for each in settings] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
