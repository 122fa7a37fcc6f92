"""Does a run go on where it was broken off? Interrupts a short training, resumes it and compares both sides.

    python scripts/resume_check.py --task pendulum --steps 12000

A training in the background (overlapped mode) is ended by SIGTERM when about half of its steps are taken, resumed with
``--ckpt_path last`` and run to its end. The table shows the last values before the break, the first ones behind it, and
how far apart they are, in standard deviations of the values before. ``--no-replay`` resumes without the stored replay,
which then fills up to its warm-up size before anything is learned. Exit status 1: a value jumped, or the commands
failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TASKS = {"pendulum": "pendulum", "four_rooms": "four_rooms"}
NAMES = ("val/return", "rollout/return", "loss/critic", "samples per insert")
PATIENCE = 1800.0  # seconds for one of the two runs
WINDOW = 8  # logged values on either side
JUMP = 4.0  # standard deviations


def command(arguments: argparse.Namespace, steps: int, *more: str) -> list[str]:
    """The command of a run up to so many steps."""
    return [
        sys.executable, "-m", "claw_lightning", "fit", "--config", TASKS[arguments.task],
        "--seed_everything", str(arguments.seed), "--data.max_env_steps", str(steps), "--trainer.max_time", "null",
        "--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir", "runs",
        "--trainer.logger.name", "", "--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "20",
        "--trainer.limit_train_batches", "50", "--trainer.check_val_every_n_epoch", "1", *arguments.extra, *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Of the commands."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return dict(os.environ, PYTHONPATH=path)


def saved_steps(run: Path) -> int:
    """Environment steps of the last checkpoint of a run; 0 before there is one."""
    try:
        return int(json.loads((run / "checkpoints/last.ckpt.done").read_text())["env_steps"])
    except (OSError, ValueError, KeyError):
        return 0


def break_off(arguments: argparse.Namespace, folder: Path) -> int:
    """Begin a run, and end it by SIGTERM when half of its steps are stored; returns its exit status."""
    with (folder / "before.txt").open("w") as out:
        process = subprocess.Popen(
            command(arguments, arguments.steps), cwd=folder, env=environment(), stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and saved_steps(folder / "runs/version_0") < arguments.steps // 2:
            if time.monotonic() > deadline:
                raise TimeoutError("the first run did not get to half of its steps in time")
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()


def go_on(arguments: argparse.Namespace, folder: Path) -> int:
    """Resume the run and let it come to its end; returns its exit status."""
    with (folder / "after.txt").open("w") as out:
        done = subprocess.run(
            command(arguments, arguments.steps, "--ckpt_path", "last"), cwd=folder, env=environment(), stdout=out,
            stderr=out, timeout=PATIENCE, check=False,
        )  # fmt: skip
    return done.returncode


def curves(run: Path, batch_size: int) -> dict[str, list[float]]:
    """What a run logged, in order, and its samples per insert between logging steps."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    before: tuple[float, float] | None = None
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name in NAMES:
                if row.get(name):
                    found[name].append(float(row[name]))
            if row.get("loss/critic") and row.get("time/env_steps"):
                steps, updates = float(row["time/env_steps"]), float(row["time/updates"])
                if before is not None and steps > before[0]:
                    found["samples per insert"].append(batch_size * (updates - before[1]) / (steps - before[0]))
                before = steps, updates
    return found


def compare(before: list[float], after: list[float]) -> tuple[float, float, float, float]:
    """Means of the last values before and of the first behind a break, the first one, and the jump in deviations."""
    last, first = before[-WINDOW:], after[:WINDOW]
    mean, now = statistics.fmean(last), statistics.fmean(first)
    # A rate that is kept exactly does not spread, and is off by a step of the workers in so short a window.
    spread = max(statistics.pstdev(last), 0.05 * abs(mean), 1e-9)
    return mean, first[0], now, (now - mean) / spread


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="pendulum")
    parser.add_argument("--steps", type=int, default=12_000, help="environment steps in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-replay", action="store_true", help="resume without the stored replay")
    parser.add_argument("--folder", type=Path, help="keep the runs there (default: a temporary folder)")
    parser.add_argument("extra", nargs="*", help="further options of the command, behind --")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="resume_check_"))
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / "runs").glob("version_*")):
        print(f"resume_check: {folder} holds runs already; give an empty folder", file=sys.stderr)
        return 1
    try:
        status = break_off(arguments, folder)
        broken_at = saved_steps(folder / "runs/version_0")
        if arguments.no_replay:
            shutil.rmtree(folder / "runs/version_0/checkpoints/replay")
        statuses = (status, go_on(arguments, folder))
        if statuses != (128 + signal.SIGTERM, 0):
            print(f"resume_check: exit statuses {statuses}, expected (143, 0); see {folder}/*.txt", file=sys.stderr)
            return 1
        import torch

        data = torch.load(folder / "runs/version_1/checkpoints/last.ckpt", map_location="meta", weights_only=True)
        counters, updates = data["ReplayDataModule"]["limiter"], data["claw"]["updates"]
        before, after = (curves(folder / f"runs/version_{i}", counters["sampled"] // updates) for i in (0, 1))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    ended = data["claw"]["env_steps"]
    print(f"{arguments.task}: broken off at {broken_at} steps, ended at {ended} ({updates} updates)")
    print(f"\n| {'':<20} | before | first after | after | jump (deviations) |\n|---|---:|---:|---:|---:|")
    worst = 0.0
    for name in NAMES:
        if before[name] and after[name]:
            mean, first, now, jump = compare(before[name], after[name])
            # Returns may rise: learning goes on. What must not happen is that they fall.
            worst = max(worst, -jump if "return" in name else abs(jump))
            print(f"| {name:<20} | {mean:.4g} | {first:.4g} | {now:.4g} | {jump:+.1f} |")
    print(f"\nlargest jump: {worst:.1f} standard deviations (limit {JUMP:g})")
    return 0 if math.isfinite(worst) and worst <= JUMP else 1


if __name__ == "__main__":
    sys.exit(main())
