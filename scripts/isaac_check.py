"""Train the stand-in's hand through a Python 3.8, as Isaac Gym's would be, and hold the return against the best one.

    python scripts/isaac_check.py --seeds 0 1 2

The stand-in (tests/fakes/isaac) has the sizes of IsaacGymEnvs' ShadowHand with asymmetric states, and a task whose best
return is known in closed form. What is run is `lightning fit` with conf/isaacgym_shadow_hand.yaml and, after it, the
stand-in's own settings, with the workers' interpreter from scripts/setup_py38.sh; then 100 noise-free episodes of the
last checkpoint. Exit status: 0 all seeds reach the bar, 1 a run failed or there is no Python 3.8, 2 a seed is below.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from compare_sb3 import lightning_command, write_json

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "fakes" / "isaac"
SETTINGS = STAND_IN / "shadow_hand.yaml"
EPISODES = 100


def python_38() -> str | None:
    """The interpreter that scripts/setup_py38.sh gives; None where there is no Python 3.8."""
    built = subprocess.run(["bash", str(ROOT / "scripts" / "setup_py38.sh")], capture_output=True, text=True)
    lines = built.stdout.split()
    return lines[-1] if built.returncode == 0 and lines else None


def best_return() -> float:
    """Of an episode of the stand-in's task, as the settings have it."""
    sys.path.insert(0, str(STAND_IN))
    try:
        optimal_return = importlib.import_module("isaac_closed_form").optimal_return
    finally:
        sys.path.remove(str(STAND_IN))
    task = yaml.safe_load((STAND_IN / "isaacgymenvs" / "cfg" / "task" / "ShadowHand.yaml").read_text())
    overrides = yaml.safe_load(SETTINGS.read_text())["data"]["env"]["init_args"]["overrides"]
    for key, value in overrides.items():
        group, name = key.split(".")
        task[group][name] = value
    return float(optimal_return(task))


def command(name: str, python: str, seed: int) -> list[str]:
    """`lightning fit` or `validate` on the stand-in."""
    return [
        str(lightning_command()), name,
        "--config", str(ROOT / "conf" / "isaacgym_shadow_hand.yaml"),
        "--config", str(SETTINGS),
        "--data.worker_python", python,
        "--seed_everything", str(seed),
    ]  # fmt: skip


def run(words: list[str], folder: Path) -> str:
    """Output of a command that must succeed."""
    # A clean path: the package of this checkout, nothing else of the caller's.
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{words[1]} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


def train(python: str, seed: int, best: float) -> dict[str, Any]:
    """One seed: wall time of the whole command in seconds, noise-free return and its share of the best one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        run(command("fit", python, seed), folder)
        seconds = time.monotonic() - started
        last = folder / "runs" / "version_0" / "checkpoints" / "last.ckpt"
        words = ["--ckpt_path", str(last), "--trainer.logger", "false", "--data.eval_episodes", str(EPISODES)]
        out = run([*command("validate", python, seed), *words], folder)
    shown = [line for line in out.splitlines() if "val/return " in line][-1].split()
    value = float(shown[shown.index("val/return") + 1])
    return {"seed": seed, "seconds": seconds, "return": value, "share": value / best}


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one line where an argument cannot be used, before hours are spent."""
    if min(args.seeds) < 0:
        parser.error(f"--seeds {min(args.seeds)}: give 0 or more")
    if not math.isfinite(args.least):
        parser.error(f"--least {args.least}: give a share of the best return, such as 0.9")
    if args.json is not None:
        place = args.json if args.json.exists() else args.json.parent
        if args.json.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            parser.error(f"--json {args.json}: cannot be written; name a file in a folder that is there")


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="isaac_check", description="Train the stand-in's hand through a Python 3.8.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--least", type=float, default=0.9, help="share of the best return (default: 0.9)")
    parser.add_argument("--python", help="interpreter of the workers (default: that of scripts/setup_py38.sh)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    check_arguments(parser, args)
    python = args.python or python_38()
    if python is None:
        print("isaac_check: no Python 3.8 was found; name one by --python", file=sys.stderr)
        return 1
    best, found = best_return(), []
    for seed in args.seeds:
        try:
            found.append(train(python, seed, best))
        except (RuntimeError, IndexError, ValueError) as error:
            print(f"isaac_check: seed {seed}: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        print(json.dumps(found[-1]), flush=True)
    if args.json is not None:
        try:
            write_json(args.json, {"best": best, "runs": found})
        except OSError as error:
            print(f"isaac_check: --json {args.json}: {error.strerror}", file=sys.stderr)
            return 1
    shares = [each["share"] for each in found]
    print(f"best {best:.1f}; shares {', '.join(f'{share:.3f}' for share in shares)}")
    return 0 if min(shares) >= args.least else 2


if __name__ == "__main__":
    sys.exit(main())
