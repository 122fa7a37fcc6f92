"""Draw learning curves of runs over wall time: the training return, and noise-free evaluations as dots.

    python scripts/plot_curve.py runs/compare/k4/*/runs/* --results k4.json --out docs/hand_reach_dense.png

Reads TensorBoard events; ``--results`` is what scripts/compare_sb3.py wrote with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read_curve(run: Path, name: str) -> tuple[list[float], list[float]]:
    """Minutes since the first event, and values, of a logged name. Raises SystemExit where the run has none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    if name not in events.Tags()["scalars"]:
        raise SystemExit(f"plot_curve: error: {run} logged no {name}")
    points = events.Scalars(name)
    start = events.FirstEventTimestamp()
    return [(p.wall_time - start) / 60.0 for p in points], [p.value for p in points]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The list of evaluations in a results file of compare_sb3."""
    content = json.loads(path.read_text())
    records: list[dict[str, Any]] = content["records"] if isinstance(content, dict) else content
    return records


def main() -> int:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders (with TensorBoard events)")
    parser.add_argument("--name", default="rollout/return")
    parser.add_argument("--results", type=Path, help="evaluations to draw as dots")
    parser.add_argument("--evaluated", default="", help="logged name to draw as dots, such as val/return")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in args.runs:
        minutes, values = read_curve(run, args.name)
        axes.plot(minutes, values, linewidth=1, label=f"{args.name}, {run.parts[-3] if len(run.parts) > 2 else run}")
        if args.evaluated:
            axes.plot(*read_curve(run, args.evaluated), "o", label=args.evaluated)
    if args.results is not None:
        records = read_records(args.results)
        axes.plot(
            [r["minutes"] for r in records], [r["return"] for r in records], "ko", label="noise-free, 50 episodes"
        )
    axes.set(xlabel="minutes of wall time", ylabel="return of an episode", title=args.title)
    axes.grid(alpha=0.3)
    axes.legend()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
