"""Checks of the algorithm by whole runs: several seeds of the real command, judged by bars that stand in a table.

    python scripts/algorithm_check.py pendulum --parallel 2 --json pendulum.json
    python scripts/algorithm_check.py half_cheetah --arms td3 options --seeds 0 1
    python scripts/algorithm_check.py four_rooms --out /tmp/rooms

Each run has a folder of its own, ``<out>/<suite>/<arm>-seed<k>``. A run that has finished left a ``result.json`` there
and is not repeated, so that an interrupted check goes on where it stopped; a run that was interrupted or failed begins
anew. Results that were made with other settings than those in the table are refused, not mixed in.

Exit status: 0 all bars met (or nothing to judge), 1 a run failed or the check could not begin, 2 a bar was missed.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import inspect
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal, NoReturn

from compare_sb3 import (
    MISSING_SB3,
    OBS_CLIP,
    CompareError,
    Sb3Agent,
    child,
    evaluate_claw,
    lightning_command,
    make_vec_env,
    play,
    stop_on_signal,
    write_json,
)

ROOT = Path(__file__).resolve().parents[1]

# -- what is checked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """What a figure of an arm must reach: a number, or another figure up to some slack.

    Attributes:
        figure: which figure of the arm is judged.
        side: ``at least`` or ``at most``.
        limit: the number; or
        beside: (arm, figure) that takes its place.
        slack: share of the other figure's size by which this one may be worse than it.
        over: judged is the ``mean`` or ``median`` over seeds, or ``each`` seed.
    """

    figure: str
    side: Literal["at least", "at most"]
    limit: float | None = None
    beside: tuple[str, str] | None = None
    slack: float = 0.0
    over: Literal["mean", "median", "each"] = "mean"

    def __str__(self) -> str:
        """As the table shows it."""
        other = f"{self.limit:g}" if self.beside is None else f"`{self.beside[1]}` of {self.beside[0]}"
        slack = f" (slack {self.slack:.0%})" if self.slack else ""
        return f"{self.over} {self.side} {other}{slack}"


@dataclass(frozen=True)
class Arm:
    """One way to run the suite's task.

    Attributes:
        overrides: words of the command line behind the configuration file.
        bars: what its figures must reach.
        options: whether K > 1, hence whether the use of the options is reported.
        student: also evaluate the policy that was distilled from the options.
        config: configuration file, in place of the suite's.
        kind: ``claw`` is the product's command, ``sb3`` stable-baselines3 TD3 with the recipe of the configuration.
    """

    name: str
    overrides: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    options: bool = True
    student: bool = False
    config: str | None = None
    kind: Literal["claw", "sb3"] = "claw"


@dataclass(frozen=True)
class Suite:
    """A task, its arms and how they are measured.

    Attributes:
        steps: environment steps of a run; None: as the configuration says.
        episodes: noise-free episodes of the last checkpoint; 0: figures come from the run's ``episodes.csv``.
        seconds: after which a run counts as hung.
        digits: of the figures in the table.
        note: what a reader of the figures must know.
    """

    name: str
    config: str
    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int | None
    episodes: int
    seconds: float
    digits: int = 1
    note: str = ""
    #: Windows of finished episodes (first, behind the last) whose mean length is a figure.
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)


PENDULUM = Suite(
    name="pendulum",
    config="conf/pendulum.yaml",
    task="Pendulum-v1",
    seeds=(0, 1, 2, 3, 4),
    steps=20_000,
    episodes=100,
    seconds=3600.0,
    note=(
        "Returns of single episodes spread by about 80 with their start states: the mean of 100 has a standard error "
        "of about 8. All runs play the same 100 start states, so that differences between runs are finer than that."
    ),
    arms=(
        Arm("td3", ("--model.num_options", "1"), (Bar("return", "at least", -170.0, over="each"),), options=False),
        Arm(
            "sac",
            ("--model.num_options", "1", "--model.actor", "gaussian", "--model.exploration.kind", "none"),
            (Bar("return", "at least", -170.0, over="each"),),
            options=False,
        ),
        Arm(
            "options",
            ("--model.num_options", "4"),
            (Bar("return", "at least", -200.0, over="each"),),
        ),
        Arm(
            "student",
            ("--model.num_options", "4", "--model.distillation.kind", "student"),
            (Bar("student return", "at least", beside=("student", "return"), slack=0.05, over="each"),),
            student=True,
        ),
    ),
)

HALF_CHEETAH = Suite(
    name="half_cheetah",
    config="conf/half_cheetah.yaml",
    task="HalfCheetah-v5",
    seeds=(0, 1, 2),
    steps=100_000,
    episodes=20,
    seconds=6 * 3600.0,
    digits=0,
    note="Three seeds of 100,000 steps: spreads between seeds of a third of the mean are usual at this stage.",
    arms=(
        Arm(
            "td3",
            ("--model.num_options", "1"),
            (Bar("return", "at least", 4900.0),),
            options=False,
        ),
        Arm(
            "options",
            ("--model.num_options", "4"),
            (Bar("return", "at least", beside=("td3", "return"), slack=0.15),),
        ),
        Arm("sb3", options=False, kind="sb3"),
    ),
)

#: The goal of four_rooms moves after this many episodes.
GOAL_MOVES = 1000

FOUR_ROOMS = Suite(
    name="four_rooms",
    config="conf/four_rooms.yaml",
    task="four rooms",
    seeds=tuple(range(10)),
    steps=None,
    episodes=0,
    seconds=2 * 3600.0,
    note=(
        f"Mean length of training episodes, exploration included. The goal moves after episode {GOAL_MOVES}; "
        "`after N` is the mean length of the N episodes that follow (recovery; times N it is the area under the curve)."
    ),
    windows={
        "length 900-1000": (GOAL_MOVES - 100, GOAL_MOVES),
        "length 1900-2000": (GOAL_MOVES + 900, GOAL_MOVES + 1000),
        "after 100": (GOAL_MOVES, GOAL_MOVES + 100),
        "after 300": (GOAL_MOVES, GOAL_MOVES + 300),
        "after 500": (GOAL_MOVES, GOAL_MOVES + 500),
    },
    arms=(
        Arm(
            "all_options",
            bars=(
                Bar("length 900-1000", "at most", 18.0),
                Bar("length 1900-2000", "at most", 28.0, over="median"),
                Bar("after 100", "at most", beside=("executed", "after 100")),
            ),
        ),
        Arm("executed", ("--model.all_options", "0.0")),
    ),
)


def _precision(task: str, config: str, steps: int, seeds: int, slack: float, digits: int, note: str) -> Suite:
    """What half-width matrix products do to the returns of a task, everything else alike."""
    full = Arm("fp32", ("--trainer.precision", "32-true"))
    bars = (Bar("return", "at least", beside=("fp32", "return"), slack=slack),)
    half = Arm("bf16", ("--trainer.precision", "bf16-mixed"), bars)
    name = "precision_" + task.split("-")[0].lower()
    return Suite(name, config, task, (full, half), tuple(range(seeds)), steps, 100, 3600.0, digits, note)


PRECISION = (
    _precision("Pendulum-v1", "conf/pendulum.yaml", 20_000, 5, 0.05, 1, PENDULUM.note),
    _precision(
        "HandReachDense-v3", "conf/hand_reach_dense.yaml", 100_000, 3, 0.05, 2,
        "Both arms take the same number of steps and updates: the returns show what the precision does to learning, "
        "not what its speed is worth.",
    ),
)  # fmt: skip

SUITES = {suite.name: suite for suite in (PENDULUM, HALF_CHEETAH, FOUR_ROOMS, *PRECISION)}

#: How the use of the options is reported: column, and what is read from the run's log (a prefix for shares).
HEALTH = {
    "usage entropy": "option/usage_entropy",
    "largest share": "option/share_",
    "decision rate": "option/decision_rate",
    "beta outside [0.01, 0.99]": "option/beta_extreme",
}
#: Least and greatest value that a run with options may show.
HEALTHY = {
    "usage entropy": (0.5, 1.0),
    "largest share": (0.0, 0.8),
    "decision rate": (0.01, 0.5),
    "beta outside [0.01, 0.99]": (0.0, 0.2),
}
#: Logging steps at the end of a run that are averaged for it.
HEALTH_POINTS = 10


# -- runs and their folders -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and where it lives."""

    suite: Suite
    arm: Arm
    seed: int
    folder: Path

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.suite.name} {self.arm.name}, seed {self.seed}"

    @property
    def config(self) -> Path:
        """Configuration file, from the source tree."""
        return ROOT / (self.arm.config or self.suite.config)

    def settings(self) -> dict[str, Any]:
        """Everything in the table that shapes the figures; results with another one are not comparable."""
        return {
            "kind": self.arm.kind,
            "config": hashlib.sha256(self.config.read_bytes()).hexdigest(),
            "overrides": list(self.arm.overrides),
            "steps": self.suite.steps,
            "episodes": self.suite.episodes,
            "windows": {name: list(window) for name, window in self.suite.windows.items()},
        }


def source_digest() -> str:
    """Which state of the code runs; recorded, so that a table of two states can say so."""
    digest = hashlib.sha256()
    for name in ("claw_lightning", "callbacks"):
        for path in sorted((ROOT / name).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def finished(run: Run) -> dict[str, Any] | None:
    """The stored result of a run, or None where it has yet to be run.

    Raises:
        CompareError: the result belongs to other settings.
    """
    path = run.folder / "result.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    differing = [name for name, value in run.settings().items() if record["settings"].get(name) != value]
    if differing:
        raise CompareError(f"{path} was made with another {', '.join(differing)}: give another --out, or remove it")
    return record


def prepare(run: Run) -> None:
    """An empty folder for a run that has yet to begin, marked as this process's.

    Raises:
        CompareError: the folder is in use, or holds what this script did not put there.
    """
    import psutil

    marker = run.folder / "started.json"
    if marker.is_file():
        owner = json.loads(marker.read_text())
        try:
            alive = psutil.Process(owner["pid"]).create_time() == owner["created"] and owner["pid"] != os.getpid()
        except psutil.NoSuchProcess:
            alive = False
        if alive:
            raise CompareError(f"{run.folder} is in use by process {owner['pid']}")
        shutil.rmtree(run.folder)
    elif run.folder.is_dir() and any(run.folder.iterdir()):
        raise CompareError(f"{run.folder} holds files that are not of this check: give another --out")
    run.folder.mkdir(parents=True, exist_ok=True)
    started = {"pid": os.getpid(), "created": psutil.Process().create_time(), "source": source_digest()}
    write_json(marker, started)


def claw_command(run: Run, parallel: int) -> list[str]:
    """The product's command line."""
    command = [
        str(lightning_command()), "fit",
        "--config", str(run.config),
        *run.arm.overrides,
        "--seed_everything", str(run.seed),
        "--trainer.limit_val_batches", "0",
        "--trainer.enable_progress_bar", "false",
        "--trainer.callbacks+=RunCheckpoint",
        f"--trainer.callbacks.dirpath={run.folder}",
    ]  # fmt: skip
    if run.suite.steps is not None:
        command += ["--data.max_env_steps", str(run.suite.steps)]
    if parallel > 1:
        command += ["--data.learner_threads", "1"]
    if run.suite.windows and "EpisodeLog" not in run.config.read_text():
        command.append("--trainer.callbacks+=EpisodeLog")
    return command


def sb3_command(run: Run, parallel: int) -> list[str]:
    """This script's command line for one run of stable-baselines3."""
    threads = 1 if parallel > 1 else len(os.sched_getaffinity(0))
    return [
        sys.executable, str(Path(__file__).resolve()), run.suite.name,
        "--arms", run.arm.name,
        "--seeds", str(run.seed),
        "--train-sb3", str(run.folder / "sb3.json"),
        "--threads", str(threads),
    ]  # fmt: skip


def build_command(run: Run, parallel: int) -> list[str]:
    """Command line of a run."""
    return (sb3_command if run.arm.kind == "sb3" else claw_command)(run, parallel)


# -- what a run left --------------------------------------------------------------------------------------------------


def measure(run: Run) -> dict[str, Any]:
    """Figures and health of a run whose process has ended well.

    Raises:
        CompareError: it left less than a whole run does.
    """
    record: dict[str, Any] = {"health": read_health(run.folder) if run.arm.options else None}
    if run.suite.windows:
        return {**record, "figures": read_lengths(run.folder, run.suite.windows)}
    played = json.loads((run.folder / "sb3.json").read_text()) if run.arm.kind == "sb3" else evaluate(run)
    figures = {"return": played["return"]}
    if run.arm.student:
        figures["student return"] = evaluate(run, student=True)["return"]
    if not all(math.isfinite(value) for value in figures.values()):
        raise CompareError(f"returns are not finite: {figures}")
    if run.suite.steps is not None and played["env_steps"] < 0.99 * run.suite.steps:
        raise CompareError(f"the run ended after {played['env_steps']:,} of {run.suite.steps:,} environment steps")
    counters = {name: played[name] for name in ("return_sd", "env_steps", "updates")}
    return {**record, "figures": figures, **counters}


def evaluate(run: Run, student: bool = False) -> dict[str, Any]:
    """Noise-free episodes of the last checkpoint."""
    import torch

    path = run.folder / "last.ckpt"
    if not path.is_file():
        raise CompareError(f"the run left no {path}")
    torch.set_num_threads(1)  # other runs are learning meanwhile
    return evaluate_claw(path, run.suite.episodes, run.suite.task, student=student)


def run_folder(folder: Path, pattern: str) -> Path:
    """The file of the newest run of the product below ``folder`` that matches ``pattern``."""
    found = sorted(folder.glob(f"runs/version_*/{pattern}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CompareError(f"no {pattern} in {folder}/runs/version_*")
    return found[-1]


def read_scalars(folder: Path) -> dict[str, list[float]]:
    """Everything that a run logged for TensorBoard, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder(folder, "events.out.tfevents.*").parent), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_health(folder: Path) -> dict[str, float]:
    """Use of the options at the end of a run: means over its last logging steps.

    These are figures of replay samples: of the behaviour of the whole run as far as the replay reaches back.

    Raises:
        CompareError: the run logged none of it.
    """
    scalars = read_scalars(folder)
    health = {}
    for column, tag in HEALTH.items():
        tags = [t for t in scalars if t.startswith(tag)] if tag.endswith("_") else [tag]
        means = [fmean(scalars[t][-HEALTH_POINTS:]) for t in tags if scalars.get(t)]
        if not means:
            raise CompareError(f"the run logged no {tag}")
        # The share of the option that leads over all of these steps, not the mean of changing leaders.
        health[column] = max(means)
    return health


def read_lengths(folder: Path, windows: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Mean episode length in each window, from the run's ``episodes.csv``.

    Raises:
        CompareError: episodes are missing.
    """
    path = run_folder(folder, "episodes.csv")
    with path.open(newline="") as file:
        rows = [(int(row["episode"]), float(row["length"])) for row in csv.DictReader(file)]
    numbers, lengths = [number for number, _ in rows], [length for _, length in rows]
    # Counted by place: whether the file's first episode is called 0 or 1 does not move the windows.
    if not rows or numbers[0] not in (0, 1) or numbers != list(range(numbers[0], numbers[0] + len(rows))):
        raise CompareError(f"{path} does not number its episodes one by one from 0 or 1")
    needed = max(stop for _, stop in windows.values())
    if len(rows) < needed:
        raise CompareError(f"{path} holds {len(rows)} episodes; {needed} are needed")
    return {name: fmean(lengths[start:stop]) for name, (start, stop) in windows.items()}


# -- stable-baselines3 ------------------------------------------------------------------------------------------------


def recipe(config: Path) -> dict[str, Any]:
    """The settings that stable-baselines3 shares, from the product's configuration and its defaults.

    Raises:
        CompareError: the configuration asks for what stable-baselines3 has no counterpart of.
    """
    import yaml

    from claw_lightning.data import ReplayDataModule
    from claw_lightning.exploration import Exploration
    from claw_lightning.module import OptionCritic

    def defaults(cls: Any) -> dict[str, Any]:
        parameters = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    stored = yaml.safe_load(config.read_text())
    model = {**defaults(OptionCritic), **stored["model"]}
    data = {**defaults(ReplayDataModule), **stored["data"]}
    noise = {**defaults(Exploration), **(model["exploration"] or {})}
    update = {"tau": model["tau"] or 0.005, "every": model["target_delay"] or 1}
    lanes = data["num_workers"] * data["envs_per_worker"]
    gradient_steps = data["samples_per_insert"] * lanes / data["batch_size"]
    for unsuited, why in (
        (gradient_steps != int(gradient_steps), f"{gradient_steps:g} updates per vector step"),
        (noise["kind"] != "gaussian" or noise["uniform"] > 0, "other noise than Gaussian"),
        (model["reward_scale"] != 1.0 or model["action_penalty"] != 0.0, "scaled rewards or an action penalty"),
        (update.get("every", 1) != model["policy_delay"], "targets that move at other updates than the policy"),
        (model["critic_lr"] != model["actor_lr"], "two learning rates"),
        (not model["normalize_observations"] or model["obs_clip"] != OBS_CLIP, "another observation normalisation"),
    ):
        if unsuited:
            raise CompareError(f"{config.name} asks for {why}; the sb3 arm has no counterpart")
    return {"model": model, "data": data, "noise": noise, "tau": update["tau"], "lanes": lanes,
            "gradient_steps": int(gradient_steps)}  # fmt: skip


def train_sb3(run: Run, out: Path, threads: int) -> int:
    """One run of stable-baselines3 TD3, in the process that this script starts for it."""
    import numpy as np
    import torch
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    from claw_lightning.rollout.envs import EnvPoolEnv
    from claw_lightning.rollout.noise import lane_scales

    assert run.suite.steps is not None
    torch.set_num_threads(threads)
    shared = recipe(run.config)
    model, data, lanes = shared["model"], shared["data"], shared["lanes"]
    simulator = EnvPoolEnv(run.suite.task, num_envs=lanes, seed=1_000 * run.seed, num_threads=1)
    size = simulator.spec.action_size
    # As the product spreads it: the first lanes exploit, the last search.
    scales = lane_scales(shared["noise"]["scale_min"], shared["noise"]["scale_max"], lanes, 0, 1)
    noises = [NormalActionNoise(np.zeros(size), np.full(size, float(scale))) for scale in np.ravel(scales)]
    lane_noise = VectorizedActionNoise(noises[0], lanes)
    lane_noise.noises = noises  # type: ignore[assignment,unused-ignore]
    env = VecNormalize(make_vec_env(simulator), norm_reward=False, clip_obs=model["obs_clip"], gamma=model["gamma"])
    learner = TD3(
        "MlpPolicy",
        env,
        learning_rate=model["critic_lr"],
        buffer_size=data["capacity"],
        learning_starts=data["warmup_steps"],
        batch_size=data["batch_size"],
        tau=shared["tau"],
        gamma=model["gamma"],
        train_freq=(1, "step"),
        gradient_steps=shared["gradient_steps"],
        action_noise=lane_noise,
        policy_delay=model["policy_delay"],
        target_policy_noise=model["target_noise"],
        target_noise_clip=model["target_noise_clip"],
        policy_kwargs={"net_arch": list(model["hidden_sizes"])},
        seed=run.seed,
        device="cpu",
    )
    learner.learn(total_timesteps=run.suite.steps, log_interval=2**60)
    env.close()
    learner.actor.set_training_mode(False)
    moments: Any = env.obs_rms
    agent = Sb3Agent(learner.actor, moments.mean, moments.var, env.epsilon)
    counters = {"env_steps": int(learner.num_timesteps), "updates": int(learner._n_updates)}
    write_json(out, {**play(agent, run.suite.episodes, run.suite.task), **counters})
    return 0


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Active:
    """A run whose process lives."""

    run: Run
    process: subprocess.Popen[bytes]
    stack: ExitStack  # ends the process and all of its group when closed
    started: float


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def complete(active: Active, status: int) -> dict[str, Any]:
    """Store and return the record of a run whose process has ended; ``error`` in it says that it failed."""
    run = active.run
    record: dict[str, Any] = {"suite": run.suite.name, "arm": run.arm.name, "seed": run.seed}
    log = run.folder / "output.log"
    try:
        if status != 0:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise CompareError(f"exit status {status}: {lines[-1].strip()} (all output: {log})")
        record.update(measure(run))
    except Exception as error:  # whatever one run does wrong, the others still count
        kind = "" if isinstance(error, CompareError) else f"{type(error).__name__}: "
        record["error"] = kind + " ".join(str(error).split())
        say(f"{run.label}: failed: {record['error']}")
        return record
    record["seconds"] = round(time.monotonic() - active.started, 1)
    record["source"] = json.loads((run.folder / "started.json").read_text())["source"]
    record["settings"] = run.settings()
    write_json(run.folder / "result.json", record)
    say(f"{run.label}: " + ", ".join(f"{name} {value:.1f}" for name, value in record["figures"].items()))
    return record


def run_all(runs: Sequence[Run], parallel: int, poll_seconds: float = 0.2) -> list[dict[str, Any]]:
    """Run what has not finished, ``parallel`` at a time; records in the order of ``runs``.

    Everything that was started is gone when this returns or raises.

    Raises:
        CompareError: a folder cannot be used; found out before anything starts.
    """
    records = {run: record for run in runs if (record := finished(run)) is not None}
    waiting = [run for run in runs if run not in records]
    if records:
        say(f"{len(records)} of {len(runs)} runs had finished before")
    for run in waiting:
        prepare(run)
    active: list[Active] = []
    with ExitStack() as everything:
        while waiting or active:
            while waiting and len(active) < parallel:
                run = waiting.pop(0)
                stack = everything.enter_context(ExitStack())
                say(f"{run.label}: starts ({len(runs) - len(waiting)} of {len(runs)})")
                process = stack.enter_context(
                    child(build_command(run, parallel), run.folder, run.folder / "output.log")
                )
                active.append(Active(run, process, stack, time.monotonic()))
            time.sleep(poll_seconds)
            for item in list(active):
                status = item.process.poll()
                if status is None and time.monotonic() - item.started < item.run.suite.seconds:
                    continue
                item.stack.close()
                active.remove(item)
                if status is None:
                    say(f"{item.run.label}: no end after {item.run.suite.seconds:.0f} s, killed")
                records[item.run] = complete(item, -signal.SIGKILL if status is None else status)
    return [records[run] for run in runs]


# -- judgement and tables ---------------------------------------------------------------------------------------------

#: Figures by arm, figure and seed.
Figures = dict[tuple[str, str], dict[int, float]]


def collect(records: Sequence[dict[str, Any]]) -> Figures:
    """Figures of the runs that have some."""
    found: Figures = {}
    for record in records:
        for name, value in record.get("figures", {}).items():
            found.setdefault((record["arm"], name), {})[record["seed"]] = value
    return found


def judge(bar: Bar, arm: str, seeds: Sequence[int], figures: Figures) -> bool | None:
    """Whether the bar is met; None where runs that it needs are missing."""
    ours = figures.get((arm, bar.figure), {})
    theirs = dict.fromkeys(seeds, bar.limit) if bar.beside is None else figures.get(bar.beside, {})
    if any(seed not in ours or seed not in theirs for seed in seeds):
        return None
    sign = 1.0 if bar.side == "at least" else -1.0

    def reached(value: float, other: float) -> bool:
        return sign * (value - other) >= -bar.slack * abs(other)

    pairs = [(ours[seed], float(theirs[seed])) for seed in seeds]  # type: ignore[arg-type]
    if bar.over == "each":
        return all(reached(*pair) for pair in pairs)
    middle = fmean if bar.over == "mean" else median
    return reached(*(middle(side) for side in zip(*pairs, strict=True)))


VERDICTS = {True: "met", False: "**missed**", None: "not judged"}


def build_rows(suite: Suite, arms: Sequence[Arm], seeds: Sequence[int], figures: Figures) -> list[dict[str, Any]]:
    """A row per arm and figure, a second one where a figure has a second bar."""
    rows = []
    for arm in arms:
        names = list(suite.windows) or ["return", *(["student return"] if arm.student else [])]
        for name in names:
            values = figures.get((arm.name, name), {})
            there = [values[seed] for seed in seeds if seed in values]
            row = {
                "arm": arm.name,
                "figure": name,
                "seeds": {str(seed): values.get(seed) for seed in seeds},
                "mean": fmean(there) if there else None,
                "sd": stdev(there) if len(there) > 1 else None,
                "median": median(there) if there else None,
            }
            bars = [bar for bar in arm.bars if bar.figure == name]
            rows += [{**row, "bar": str(bar), "met": judge(bar, arm.name, seeds, figures)} for bar in bars]
            if not bars:
                rows.append({**row, "bar": None, "met": None})
    return rows


def build_table(suite: Suite, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> str:
    """Figures as markdown."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.{suite.digits}f}"

    seed_names = [f"seed {seed}" for seed in seeds]
    header = ["arm", "figure", *seed_names, "mean", "sd", "median", "bar", ""]
    lines = ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(seeds) + 3) + "---|---|"]
    for row in rows:
        cells = [number(row["seeds"][str(seed)]) if row["seeds"][str(seed)] is not None else "failed" for seed in seeds]
        verdict = "" if row["bar"] is None else VERDICTS[row["met"]]
        middle = [number(row[name]) for name in ("mean", "sd", "median")]
        lines.append("| " + " | ".join([row["arm"], row["figure"], *cells, *middle, row["bar"] or "", verdict]) + " |")
    return "\n".join(lines)


def unhealthy(record: dict[str, Any]) -> list[str]:
    """Columns of a run's health that lie outside their bounds."""
    health = record.get("health") or {}
    return [column for column, value in health.items() if not HEALTHY[column][0] <= value <= HEALTHY[column][1]]


def build_health_table(records: Sequence[dict[str, Any]]) -> str:
    """Use of the options as markdown; empty where no run had any."""
    known = [record for record in records if record.get("health")]
    if not known:
        return ""
    lines = ["| arm | seed | " + " | ".join(HEALTH) + " |", "|---|---:|" + "---:|" * len(HEALTH)]
    for record in sorted(known, key=lambda record: (record["arm"], record["seed"])):
        ill = unhealthy(record)
        cells = [f"{record['health'][column]:.3f}" + (" **missed**" if column in ill else "") for column in HEALTH]
        lines.append(f"| {record['arm']} | {record['seed']} | " + " | ".join(cells) + " |")
    note = (
        f"Means over the last {HEALTH_POINTS} logging steps, of replay samples: they describe the behaviour that filled"
        " the replay, not the last policy alone. Usage entropy 1 is balance. Bars: usage entropy at least 0.5, largest"
        " share at most 0.8, decision rate 0.01 to 0.5, at most a fifth of beta outside [0.01, 0.99]."
    )
    return "\n".join(["Use of the options:", "", *lines, "", note])


# -- the command line -------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 1, as 2 means a missed bar."""
        self.exit(1, f"algorithm_check: error: {' '.join(message.split())}\n")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check; ``suite``, ``arms`` and ``seeds`` come back as they are used."""
    parser = OneLineParser(prog="algorithm_check", description="Check the algorithm by whole runs over several seeds.")
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--arms", nargs="+", help="default: all of the suite")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as many as the suite asks for")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; above 1, one learner thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/check"), help="folder of the runs (runs/check)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    # How this script starts itself for one run of stable-baselines3.
    parser.add_argument("--train-sb3", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.suite = SUITES[args.suite]
    known = {arm.name: arm for arm in args.suite.arms}
    unknown = [name for name in args.arms or [] if name not in known]
    if unknown:
        parser.error(f"--arms {unknown[0]}: {args.suite.name} has {', '.join(known)}")
    args.arms = [known[name] for name in args.arms or known]
    args.seeds = list(args.suite.seeds) if args.seeds is None else args.seeds
    for name in ("arms", "seeds"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} holds a value twice")
    if min(args.seeds) < 0:
        parser.error("--seeds cannot be negative")
    if args.parallel < 1:
        parser.error("--parallel must be at least 1")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    return args


def check_needs(runs: Sequence[Run]) -> None:
    """Everything that the runs need is there.

    Raises:
        CompareError: something is missing.
    """
    for path in sorted({run.config for run in runs}):
        if not path.is_file():
            raise CompareError(f"{path}: no such file")
    kinds = {run.arm.kind for run in runs}
    if "claw" in kinds and not lightning_command().is_file():
        raise CompareError(f"{lightning_command()} is missing: run `make setup` and use its interpreter")
    if "sb3" in kinds:
        if importlib.util.find_spec("stable_baselines3") is None:
            raise CompareError(f"{MISSING_SB3}, or name the other arms with --arms")
        for run in runs:
            if run.arm.kind == "sb3":
                recipe(run.config)


def check(args: argparse.Namespace) -> int:
    """Run, print the tables, write the JSON file; returns the exit status."""
    suite: Suite = args.suite
    root = (args.out / suite.name).resolve()
    # Seed by seed, so that a machine that slows down, or an interruption, treats all arms alike.
    runs = [Run(suite, arm, seed, root / f"{arm.name}-seed{seed}") for seed in args.seeds for arm in args.arms]
    check_needs(runs)
    records = run_all(runs, args.parallel)
    figures = collect(records)
    rows = build_rows(suite, args.arms, args.seeds, figures)
    print(build_table(suite, rows, args.seeds))
    for text in (suite.note, build_health_table(records)):
        if text:
            print(f"\n{text}")
    failed = [record for record in records if "error" in record]
    for record in failed:
        print(f"\nfailed: {record['arm']}, seed {record['seed']}: {record['error']}")
    sources = sorted({record["source"] for record in records if "source" in record})
    if len(sources) > 1:
        print(f"\nThese runs are of {len(sources)} states of the code ({', '.join(sources)}): not one experiment.")
    missed = any(row["met"] is False for row in rows) or any(unhealthy(record) for record in records)
    status = 1 if failed else 2 if missed else 0
    if args.json is not None:
        settings = {"arms": [arm.name for arm in args.arms], "seeds": args.seeds, "parallel": args.parallel,
                    "sources": sources, "cores": len(os.sched_getaffinity(0))}  # fmt: skip
        content = {"suite": suite.name, "settings": settings, "status": status, "rows": rows, "records": records}
        write_json(args.json, content)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(arguments)
    if args.train_sb3 is not None:
        if importlib.util.find_spec("stable_baselines3") is None:
            say(f"algorithm_check: {MISSING_SB3}")
            return 1
        run = Run(args.suite, args.arms[0], args.seeds[0], args.train_sb3.parent)
        return train_sb3(run, args.train_sb3, args.threads)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)
    try:
        return check(args)
    except KeyboardInterrupt:
        say("algorithm_check: interrupted; the same command goes on from here")
        return 130
    except (CompareError, OSError) as error:
        say(f"algorithm_check: error: {' '.join(str(error).split())}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
