"""Does a run go on as if it had not been broken off? Runs broken off and resumed, against runs that were not.

    python scripts/resume_check.py --seeds 8

Curves move while a policy learns, and most where they are looked at: a step between the values before and behind a
break says nothing alone. So every seed is run three times in the background (overlapped mode): unbroken; ended by
SIGTERM when about half of its steps are stored and resumed with its replay; and resumed from the same checkpoint
without the replay, which is then filled up to ``data.warmup_steps`` before anything is learned.

For each quantity the step is the mean over ``--window`` updates behind the break minus the mean over as many before it;
in the unbroken run, of the values around the same update. Whether the steps of resumed runs are drawn from those
of unbroken ones is judged by a permutation test over the seeds. Exit status 1: they are not, or a run failed.
An interrupt ends the check with the table of the seeds so far. With ``--json`` it may be done in several goes: the same
command goes on with the first seed that is missing.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before libraries are loaded: no thread may be in a process that will be forked
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import argparse
import contextlib
import csv
import itertools
import json
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare_sb3 import write_json
from exit_check import fork_command, import_command

#: Settings with which a run is short, by configuration: small networks and batches, few episodes.
SHORT = {
    "pendulum": [
        "--model.num_options", "2", "--model.hidden_sizes", "[64,64]", "--model.option_batch_size", "32",
        "--data.batch_size", "64", "--data.samples_per_insert", "32", "--data.warmup_steps", "400",
        "--data.eval_episodes", "5", "--data.eval_envs", "5",
    ],
}  # fmt: skip
NAMES = ("val/return", "loss/critic", "rate/samples_per_insert", "updates per step")
ARMS = ("unbroken", "resumed", "without replay")
LEAST_SEEDS = 5  # with fewer no outcome of the test is below LIMIT
LIMIT = 0.01  # probability below which resumed runs are other ones
SMALL = 0.05  # of a quantity's level: a difference that no learning would notice, however surely it is there
SHUFFLES = 20_000  # where the ways to deal the seeds are more than can be counted out
PATIENCE = 1800.0  # seconds for one run; never part of what is judged
Curves = dict[str, list[tuple[int, float]]]  # per quantity: (updates, value), in order
Seed = dict[str, dict[str, tuple[float, float]]]  # per arm and quantity: means before and behind the break


class CheckError(Exception):
    """A run did not do what it must before anything can be compared."""


# -- running ----------------------------------------------------------------------------------------------------------


class Run:
    """A training in a process of its own, forked from this one. Its folder gets ``out.txt`` and ``runs/version_0``."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        (folder / "tmp").mkdir(parents=True)
        self.folder = folder
        self.status: int | None = None
        output = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT)
        self.pid = fork_command(folder, arguments, (output, output), f"resume-check-{os.getpid()}")
        os.close(output)

    @property
    def checkpoints(self) -> Path:
        """Where it stores them."""
        return self.folder / "runs/version_0/checkpoints"

    def is_over(self) -> bool:
        """Whether it has ended; ``status`` then says how."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def stored(self) -> dict[str, int]:
        """Counts of its last checkpoint; zeros before there is one."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, int] = json.loads((self.checkpoints / "last.ckpt.done").read_text())
            return found
        return {"env_steps": 0, "updates": 0}

    def send(self, number: int) -> None:
        """A signal, if it still runs."""
        if not self.is_over():
            os.kill(self.pid, number)

    def expect(self, status: int) -> None:
        """Raises CheckError: it ended otherwise."""
        if self.status != status:
            said = (self.folder / "out.txt").read_text().strip().splitlines()[-1:]
            raise CheckError(f"{self.folder.name}: exit status {self.status}, expected {status}: {''.join(said)}")


def wait_for(runs: Sequence[Run], look: Callable[[], None] = lambda: None) -> None:
    """Until all have ended; ``look`` is called again and again meanwhile."""
    deadline = time.monotonic() + PATIENCE
    try:
        while not all(run.is_over() for run in runs):
            look()
            if time.monotonic() > deadline:
                raise CheckError(f"{runs[0].folder.name}: not over after {PATIENCE:g} seconds")
            time.sleep(0.1)
    finally:
        for run in runs:
            run.send(signal.SIGKILL)


def command(arguments: argparse.Namespace, seed: int, *more: str) -> list[str]:
    """Arguments of ``lightning``; what the user gave comes last and wins."""
    return [
        "fit", "--config", arguments.config, "--seed_everything", str(seed), "--data.mode", "overlapped",
        "--data.max_env_steps", str(arguments.steps), "--trainer.max_time", "null",
        "--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir", "runs",
        "--trainer.logger.name", "", "--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "2",
        "--trainer.limit_train_batches", "12", "--trainer.check_val_every_n_epoch", "1",
        *SHORT.get(arguments.config, []), *arguments.extra, *more,
    ]  # fmt: skip


def run_seed(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[int, Seed]:
    """All runs of a seed, two at a time.

    Returns:
        The update at which one was broken off, and what lies on both sides of it in each arm.

    Raises:
        CheckError: a run ended otherwise than it was to.
    """
    whole, first = (Run(folder / name, command(arguments, seed)) for name in ("unbroken", "broken_off"))
    signalled: list[int] = []

    def break_off() -> None:
        if not signalled and first.stored()["env_steps"] >= arguments.steps // 2:
            signalled.append(signal.SIGTERM)
            first.send(signal.SIGTERM)

    wait_for((whole, first), break_off)
    whole.expect(0)
    first.expect(128 + signal.SIGTERM)
    bare = folder / "bare"
    shutil.copytree(first.checkpoints, bare, ignore=shutil.ignore_patterns("replay"))
    resumed = [
        Run(folder / name, command(arguments, seed, "--ckpt_path", str(path / "last.ckpt")))
        for name, path in (("resumed", first.checkpoints), ("without_replay", bare))
    ]
    wait_for(resumed)
    for run in resumed:
        run.expect(0)
    update = first.stored()["updates"]
    unbroken, before = curves(whole), curves(first)
    pairs = zip(ARMS, (unbroken, before, before), (unbroken, *map(curves, resumed)), strict=True)
    return update, {arm: sides(update, arguments.window, *curve) for arm, *curve in pairs}


# -- comparing --------------------------------------------------------------------------------------------------------


def curves(run: Run) -> Curves:
    """What a run logged of each quantity, in order."""
    found: Curves = {name: [] for name in NAMES}
    earlier: tuple[float, int] | None = None
    with (run.folder / "runs/version_0/metrics.csv").open() as file:
        for row in csv.DictReader(file):
            if not row.get("time/updates"):
                continue
            steps, updates = float(row["time/env_steps"]), int(float(row["time/updates"]))
            for name in NAMES:
                if row.get(name):
                    found[name].append((updates, float(row[name])))
            # The logged rate is that of the whole run: a burst would show late and little.
            if row.get("loss/critic"):
                if earlier is not None and steps > earlier[0]:
                    found["updates per step"].append((updates, (updates - earlier[1]) / (steps - earlier[0])))
                earlier = steps, updates
    return found


def sides(update: int, window: int, before: Curves, after: Curves) -> dict[str, tuple[float, float]]:
    """Means of each quantity over the updates before and behind one.

    Raises:
        CheckError: a window has no values.
    """
    found = {}
    for name in NAMES:
        last = [value for at, value in before[name] if update - window < at <= update]
        first = [value for at, value in after[name] if update < at <= update + window]
        if not last or not first:
            raise CheckError(f"no {name} within {window} updates of update {update}; give more --steps or --window")
        found[name] = statistics.fmean(last), statistics.fmean(first)
    return found


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of the ways to deal all values into two groups whose means differ at least as much as these (two-sided).

    All ways are counted out where they are at most ``SHUFFLES``, else so many are drawn.
    """
    values, size, total = [*one, *other], len(one), sum(one) + sum(other)

    def distance(part: Sequence[float]) -> float:
        return abs(sum(part) / size - (total - sum(part)) / (len(values) - size))

    # What is equal but for the order of additions counts as equal.
    least = distance(one) * (1 - 1e-9) - 1e-12
    dealt = list(itertools.islice(itertools.combinations(values, size), SHUFFLES + 1))
    if len(dealt) > SHUFFLES:
        rng = random.Random(0)
        dealt = [tuple(one), *(tuple(rng.sample(values, size)) for _ in range(SHUFFLES))]
    return sum(distance(part) >= least for part in dealt) / len(dealt)


class Verdict(NamedTuple):
    """Of one quantity of one arm: how far its steps lie from those of unbroken runs."""

    mean: float
    spread: float
    away: float  # in standard deviations of the unbroken runs; NaN where these do not vary
    probability: float
    is_alike: bool


def judge(unbroken: Sequence[float], resumed: Sequence[float], level: float) -> Verdict:
    """Compare steps over seeds; ``level`` is the size of the quantity itself."""
    mean, spread = statistics.fmean(resumed), statistics.stdev(resumed)
    off = mean - statistics.fmean(unbroken)
    probability = permutation_test(unbroken, resumed)
    is_alike = probability >= LIMIT or abs(off) <= SMALL * level
    unit = statistics.stdev(unbroken)
    away = off / unit if unit > 1e-9 * level else float("nan")
    return Verdict(mean, spread, away, probability, is_alike)


def steps_of(seeds: Sequence[Seed], arm: str, name: str) -> list[float]:
    """Behind minus before, of every seed."""
    return [seed[arm][name][1] - seed[arm][name][0] for seed in seeds]


def table(seeds: Sequence[Seed]) -> tuple[str, bool]:
    """Markdown of all quantities, and whether every arm is like the unbroken one."""
    lines = ["| quantity | run | before | step (mean ± sd) | away (sd) | p | |", "|---|---|---:|---:|---:|---:|---|"]
    is_alike = True
    for name in NAMES:
        unbroken = steps_of(seeds, ARMS[0], name)
        level = statistics.fmean(abs(side) for seed in seeds for side in seed[ARMS[0]][name])
        for arm in ARMS:
            before = statistics.fmean(seed[arm][name][0] for seed in seeds)
            each = judge(unbroken, steps_of(seeds, arm, name), level)
            line = f"| {name} | {arm} | {before:.4g} | {each.mean:+.3g} ± {each.spread:.2g} |"
            if arm != ARMS[0]:
                is_alike &= each.is_alike
                away = "" if math.isnan(each.away) else f"{each.away:+.1f}"
                line += f" {away} | {each.probability:.3f} | {'alike' if each.is_alike else 'differs'} |"
            lines.append(line if arm != ARMS[0] else f"{line} | | |")
    return "\n".join(lines), is_alike


# -- the check --------------------------------------------------------------------------------------------------------


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="pendulum", help="a configuration's name or file")
    parser.add_argument("--steps", type=int, default=2200, help="environment steps of a run")
    parser.add_argument("--window", type=int, default=200, help="updates on either side of the break")
    parser.add_argument("--seeds", type=int, default=8, help=f"how many; at least {LEAST_SEEDS}")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")
    parser.add_argument(
        "--json", type=Path, help="write what was found of every seed there; seeds that it holds are not run again"
    )
    parser.add_argument("extra", nargs="*", help="further options of the command, behind --")
    arguments = parser.parse_args(given)
    if arguments.seeds < LEAST_SEEDS:
        parser.error(f"--seeds {arguments.seeds}: fewer than {LEAST_SEEDS} cannot show a difference")
    if arguments.folder is not None and arguments.folder.is_dir() and any(arguments.folder.iterdir()):
        parser.error(f"--folder {arguments.folder} is not empty; give a new one")
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What seeds must share to be compared."""
    names = ("config", "steps", "window", "first_seed")
    return {**{name: getattr(arguments, name) for name in names}, "command": command(arguments, 0)}


def earlier_seeds(arguments: argparse.Namespace) -> tuple[list[int], list[Seed]]:
    """Updates and seeds of a check that was ended before it was done, from its ``--json`` file.

    Raises:
        CheckError: the file is no such file, or of a check with other settings.
    """
    if arguments.json is None or not arguments.json.exists():
        return [], []
    try:
        found = json.loads(arguments.json.read_text())
        settings, updates, seeds = (found[name] for name in ("settings", "updates", "before and behind"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckError(f"--json {arguments.json} holds no seeds of this check; give another file") from error
    if settings != settings_of(arguments):
        raise CheckError(f"--json {arguments.json} holds seeds with other settings; give the same, or another file")
    return updates, seeds


def check(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the seeds and print the table; returns the exit status."""
    updates, seeds = earlier_seeds(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(arguments.first_seed + len(seeds), arguments.first_seed + arguments.seeds):
            update, seed = run_seed(arguments, number, folder / f"seed_{number}")
            updates.append(update)
            seeds.append(seed)
            print(f"seed {number}: broken off at update {update}", file=sys.stderr, flush=True)
            if arguments.json is not None:
                found = {"settings": settings_of(arguments), "updates": updates, "before and behind": seeds}
                write_json(arguments.json, found)
    if len(seeds) < LEAST_SEEDS:
        raise CheckError(f"{len(seeds)} seeds are too few; {LEAST_SEEDS} are needed")
    text, is_alike = table(seeds)
    print(f"{arguments.config}: {len(seeds)} seeds, broken off at updates {min(updates)}-{max(updates)}\n\n{text}")
    return 0 if is_alike else 1


def main(given: list[str] | None = None) -> int:
    """Entry point."""
    arguments = parse_args(given)
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="resume_check_")).absolute()
    import_command()
    try:
        return check(arguments, folder)
    except CheckError as error:
        print(f"resume_check: {error}", file=sys.stderr)
        return 1
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
