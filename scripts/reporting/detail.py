"""One run in detail: its recorded episodes, its options, its values, and the course of its training."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import yaml
from PIL import Image

from reporting import option_charts, training_charts
from reporting.charts import Chart, number, percent
from reporting.episodes import OptionFigures, Recording, Values, characteristic_frames, option_figures, values
from reporting.joints import component_names
from reporting.runs import Group, ReportError, Run

ADD_VIDEO = "add `--trainer.callbacks+=EpisodeVideo` to the command of the run"
#: Recorded episodes below which figures of options are said to rest on few.
FEW_EPISODES = 5
ADD_HEALTH = "the callback `WorkerHealth` writes them"


@dataclass(frozen=True)
class Picture:
    """A frame of the film strip, or of a card."""

    source: str
    step: int
    option: int
    place: float
    facts: str
    place_name: str


@dataclass
class EpisodeView:
    """An episode with its timeline and film strip."""

    label: str
    chart: Chart
    pictures: list[Picture]
    steps: int
    facts: str


@dataclass
class Moment:
    """A recorded evaluation."""

    label: str
    episodes: list[EpisodeView]
    film: str


@dataclass
class OptionCard:
    """What is said of one option."""

    option: int
    sentence: str
    facts: list[tuple[str, str]]
    pictures: list[Picture]
    charts: list[Chart]


@dataclass
class Detail:
    """A run in detail.

    Attributes:
        group: to which it belongs.
        run: shown.
        missing: per part of the page, why there is nothing, with the cure.
    """

    group: Group
    run: Run
    moments: list[Moment] = field(default_factory=list)
    when: str = ""
    cards: list[OptionCard] = field(default_factory=list)
    transitions: Chart | None = None
    usage: list[Chart] = field(default_factory=list)
    heats: list[Chart] = field(default_factory=list)
    values: list[Chart] = field(default_factory=list)
    value_choices: list[Chart] = field(default_factory=list)
    lag: list[Chart] = field(default_factory=list)
    machine: list[Chart] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    config: str = ""


def picture_source(frame: np.ndarray, height: int) -> str:
    """A frame [H, W, 3] uint8 as a data URI, at most ``height`` px high."""
    image = Image.fromarray(np.ascontiguousarray(frame[..., :3]))
    if image.height > height:
        image = image.resize((max(1, round(image.width * height / image.height)), height), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "WEBP", quality=70)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()


def evenly(length: int, most: int) -> list[int]:
    """Indices of at most ``most`` of ``length`` things, the first and the last among them."""
    return sorted({int(each) for each in np.linspace(0, length - 1, min(most, length)).round()})


def describe(group: Group, moments: int) -> Detail:
    """Everything about the example of a group; at most ``moments`` recorded evaluations are shown."""
    run = group.example
    detail = Detail(group, run, config=yaml.safe_dump(run.config, sort_keys=False) if run.config else "")
    recordings = _read_recordings(run, moments)
    if recordings:
        detail.moments = [_moment(each, run) for each in recordings]
        _describe_values(detail, recordings)
        if recordings[-1].num_options > 1:
            _describe_options(detail, recordings[-1])
    else:
        detail.missing["episodes"] = f"No episode of this run has been recorded yet: {ADD_VIDEO}."
        detail.missing["values"] = f"Without recorded episodes values cannot be held against returns: {ADD_VIDEO}."
    if run.num_options < 2:
        detail.missing["options"] = (
            "K = 1: one policy without options, so there is nothing to choose, to end or to compare."
        )
    elif not detail.cards:
        detail.missing["options"] = f"What each option does is seen in recorded episodes: {ADD_VIDEO}."
    _describe_training(detail)
    return detail


def _read_recordings(run: Run, most: int) -> list[Recording]:
    found = []
    for index in evenly(len(run.recordings), most) if run.recordings else []:
        try:
            found.append(Recording(run.recordings[index]))
        except ReportError as error:
            run.notes.append(f"{run.folder.name}/episodes: {error}; it is left out.")
    return found


def _moment(recording: Recording, run: Run) -> Moment:
    returns = recording.returns()
    shown = recording.episodes[:3]
    film = next((f for f in (recording.file.with_suffix(s) for s in (".mp4", ".gif")) if f.is_file()), None)
    views = []
    for episode in shown:
        index = recording.of(episode)
        success = float(recording.success[index[-1]])
        outcome = "" if np.isnan(success) else ", success" if success > 0.5 else ", no success"
        views.append(
            EpisodeView(
                f"Episode {episode + 1}",
                option_charts.timeline(recording, episode),
                _strip(recording, episode),
                len(index),
                f"return {number(returns[episode])}{outcome}, {len(index)} steps",
            )
        )
    return Moment(f"{recording.env_steps:,} steps", views, str(film) if film else "")


def _strip(recording: Recording, episode: int) -> list[Picture]:
    index = recording.of(episode)
    return [
        _picture(recording, int(frame), len(index), 200)
        for frame in np.flatnonzero(recording.frame_episode == episode)
        if recording.frame_step[frame] < len(index)
    ]


def _picture(recording: Recording, frame: int, length: int, height: int) -> Picture:
    step = int(recording.frame_step[frame])
    at = int(recording.of(int(recording.frame_episode[frame]))[step])
    option, before, ends = int(recording.option[at]), int(recording.arriving[at]), float(recording.termination[at])
    facts = f"step {step}"
    if recording.num_options > 1:
        facts += f", option {option}"
        if recording.switched[at]:
            facts += " was chosen" + ("" if np.isnan(ends) else f": option {before} ended with probability {ends:.2f}")
        elif not np.isnan(ends):
            facts += f" goes on, termination probability {ends:.2f}"
    facts += f", reward {number(float(recording.reward[at]))}"
    name = f"episode {int(recording.frame_episode[frame]) + 1}, step {step}"
    return Picture(picture_source(recording.frames[frame], height), step, option, (step + 0.5) / length, facts, name)


def _describe_options(detail: Detail, recording: Recording) -> None:
    figures = option_figures(recording)
    everywhere = float(recording.reward.mean())
    names = component_names(detail.run.task, recording.action.shape[1], recording.is_discrete)
    for option, each in enumerate(figures):
        charts = []
        if each.share > 0:
            charts = [option_charts.phase_chart(each, option)]
            actions = option_charts.action_chart(each, option, names)
            charts += [actions] if actions and each.share < 1 else []
        pictures = [
            _picture(recording, frame, len(recording.of(int(recording.frame_episode[frame]))), 120)
            for frame in characteristic_frames(recording, option)
        ]
        facts = [("share of time", percent(each.share)), ("spells", str(each.spells))]
        if each.cut:
            facts.append(("cut by the episode's end", str(each.cut)))
        if each.share > 0:
            facts += [
                ("mean duration", in_steps(each.duration)),
                ("probability of ending", number(each.ends, 2)),
                ("reward per step", f"{number(each.reward)} (all: {number(everywhere)})"),
            ]
        curves = detail.run.curves
        if f"option/share_{option}" in curves:
            facts.append(("share in training", percent(curves[f"option/share_{option}"].last)))
        if f"option/duration_{option}" in curves:
            facts.append(("duration in training", in_steps(curves[f"option/duration_{option}"].last)))
        text = sentence(each, option, names, recording.is_discrete)
        detail.cards.append(OptionCard(option, text, facts, pictures, charts))
    if any(each.follows.any() for each in figures):
        detail.transitions = option_charts.transition_chart(figures)
    else:
        detail.missing["transitions"] = "No option ended before its episode did, so none followed another one."
    count = len(recording.episodes)
    detail.when = f"{count} noise-free episode{'s' * (count > 1)} after {recording.env_steps:,} environment steps."
    if count < FEW_EPISODES:
        detail.when += (
            " These are few: that options differ may also come from the goals and states of the episodes in which "
            "they ran (more: EpisodeVideo.episodes)."
        )
    if recording.is_greedy:
        detail.when += (
            " Here an option ends where its termination probability is above one half, and the likeliest one "
            "follows. In training both are drawn by chance, so that options may change often there and seldom here."
        )
    elif recording.num_options > 1:
        detail.when += " Options end and follow by chance, as in training; the actions are without noise."


def in_steps(duration: float) -> str:
    """A number of steps in words."""
    text = number(duration, 2)
    return f"{text} step{'' if text == '1' else 's'}"


def sentence(figures: OptionFigures, option: int, names: Sequence[str], is_discrete: bool) -> str:
    """An option in plain words."""
    if figures.share == 0:
        return "It never ran in these episodes."
    words = [f"It runs {percent(figures.share)} of the time, {in_steps(figures.duration)} at a time"]
    phases = figures.phases / max(1e-9, float(figures.phases.sum()))
    thirds = {"early": phases[:3].sum(), "in the middle": phases[3:7].sum(), "late": phases[7:].sum()}
    expected = {"early": 0.3, "in the middle": 0.4, "late": 0.3}
    most = max(thirds, key=lambda name: thirds[name] / expected[name])
    words.append(
        f"mostly {most} in the episode" if thirds[most] > 1.35 * expected[most] else "in all parts of the episode"
    )
    text = ", ".join(words) + "."
    if figures.follows.max() > 0:
        after = int(figures.follows.argmax())
        text += " When it ends, "
        text += "it is most often chosen again" if after == option else f"option {after} most often follows"
        text += f" ({percent(float(figures.follows[after]))})."
    else:
        text += " It was never seen to end before the episode did."
    told = [(c, d) for c, d in zip(figures.components, figures.differences, strict=True) if abs(d) >= 0.2][:2]
    if told:
        text += " Compared with all options, it " + ("" if is_discrete else "moves ")
        text += (
            " and ".join(
                (
                    f"takes {names[c]} {'more' if d > 0 else 'less'} often"
                    if is_discrete
                    else f"'{names[c]}' {'up' if d > 0 else 'down'}"
                )
                for c, d in told
            )
            + "."
        )
    elif figures.share == 1:
        text += " No other option ran with which its actions could be compared."
    else:
        text += " On average its actions hardly differ from those of the others."
    return text


def _describe_values(detail: Detail, recordings: Sequence[Recording]) -> None:
    moments: list[tuple[float, Values]] = [(each.env_steps, values(each)) for each in recordings]
    last = recordings[-1]
    if not np.isfinite(moments[-1][1].estimated).all():
        detail.missing["values"] = "The recorded values are not finite."
        return
    kinds = [True, False] if (moments[-1][1].tail > 0).any() else [True]
    detail.value_choices = [option_charts.value_scatter(last, moments[-1][1], completed) for completed in kinds]
    error = option_charts.value_error(moments)
    detail.values += [error] if error else []


def _describe_training(detail: Detail) -> None:
    run, charts = detail.run, training_charts
    if run.num_options > 1:
        found = [charts.option_usage(run), charts.option_durations(run)]
        found.append(
            charts.lines(
                run,
                {"option/usage_entropy": "balance of use", "option/decision_rate": "steps that end an option"},
                "Are the options in use?",
                "0 to 1",
                "Balance 1: all are used alike, near 0: one does everything; the other line at 1 would mean a "
                "choice at every step.",
            )
        )
        found.append(
            charts.lines(
                run,
                {"option/action_divergence": "mean over pairs", "option/action_divergence_min": "the two most alike"},
                "Do the options act differently?",
                "distance of actions",
                "How far apart two options act in the same state; at 0 they do the same.",
            )
        )
        found.append(
            charts.lines(
                run,
                {"entropy/option_policy": "choice of the option", "entropy/termination": "ending"},
                "How decided are choosing and ending?",
                "entropy [nats]",
                f"At 0 the networks are sure; a choice among {run.num_options} options by chance is at "
                f"{number(float(np.log(run.num_options)))}, an ending by chance at {number(float(np.log(2)))}.",
            )
        )
        detail.usage = [each for each in found if each]
        if not detail.usage:
            detail.missing["usage"] = "Use of the options was not logged: the callback `OptionDiagnostics` does that."
        heats = [charts.termination_heat(run, option) for option in range(run.num_options)]
        detail.heats = [each for each in heats if each]
        if not detail.heats:
            detail.missing["heats"] = (
                "Histograms of the probability of ending were not logged: the callback `OptionDiagnostics` "
                "writes them to a "
                "TensorBoard logger."
            )
    quantiles = charts.lines(
        run,
        {"q/max": "largest", "q/p95": "95 %", "q/p50": "median", "q/mean": "mean", "q/p05": "5 %", "q/min": "least"},
        "Action values over the training",
        "value",
        "Values of the batches that are learned from; they should settle near returns that are possible, and not "
        "run away.",
    )
    detail.values += [quantiles] if quantiles else []
    if "q/p50" not in run.curves:
        detail.missing["q"] = "The range of action values was not logged: the callback `QRange` does that."
    lag = [
        charts.lines(
            run,
            {"staleness/collection": "policy that collects", "staleness/mean": "mean sample"},
            "Version lag",
            "updates behind",
            "How many updates old the collecting policy is (should stay small), and the samples (grow with the "
            "replay).",
        ),
        charts.lines(
            run,
            {"rate/learner_wait": "learner waits", "rate/worker_wait": "workers wait", "rate/rank_wait": "ranks wait"},
            "Who waits for whom",
            "share of time",
            "The side that waits little is the bottleneck; both near zero is balance.",
        ),
    ]
    detail.lag = [each for each in lag if each]
    if run.curves.keys().isdisjoint({"staleness/collection", "staleness/mean"}):
        detail.missing["lag"] = "Version lag was not logged: the callback `StalenessMonitor` does that."
    machine = [
        charts.lines(
            run,
            {"time/env_steps_per_s": "environment steps"},
            "Speed of collecting",
            "steps per second",
            "Environment steps of all workers per second of wall time; level once the first steps are over.",
        ),
        charts.lines(
            run,
            {"time/updates_per_s": "updates"},
            "Speed of learning",
            "updates per second",
            "Updates of the critics per second of wall time; they keep pace with collecting (data.samples_per_insert).",
        ),
        charts.by_process(
            run,
            "phase/",
            "",
            "Where the workers' time goes",
            "share of time",
            "Of the workers' time: simulating, inferring actions, writing, fetching parameters, waiting.",
        ),
        charts.by_process(
            run,
            "learner/",
            "",
            "Where the learner's time goes",
            "share of time",
            "Of the learner's time, waiting for experience left out; a large share of anything but learning is lost.",
        ),
        charts.by_process(
            run,
            "memory/",
            "_gb",
            "Memory by process",
            "private memory [GiB]",
            "Memory that no other process shares; a line that keeps rising is a leak.",
        ),
        charts.by_process(
            run,
            "cpu/",
            "",
            "Processor by process",
            "cores in use",
            "1 is one core; a sum above the machine's cores slows everything down.",
        ),
    ]
    detail.machine = [each for each in machine if each]
    if not run.names("memory/"):
        detail.missing["machine"] = f"Memory and processor time were not logged: {ADD_HEALTH}."
    if run.events is None:
        detail.missing["events"] = f"Worker events were not recorded: {ADD_HEALTH} (`worker_events.csv`)."
    elif not run.events:
        detail.missing["events"] = "No worker event has been recorded."
