"""Train Pendulum-v1 from several seeds and evaluate the final policies.

    python scripts/pendulum_check.py --num-options 1 4 --seeds 0 1 2 3 4 --json pendulum.json

Each run is the real command with conf/pendulum.yaml (20,000 environment steps); its last checkpoint then plays 20
noise-free episodes. Runs are independent of the clock, so ``--parallel`` of them may share the cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from compare_sb3 import CompareError, evaluate_claw, lightning_command, run_child

ROOT = Path(__file__).resolve().parents[1]
TASK, EPISODES, RUN_SECONDS = "Pendulum-v1", 20, 1800.0


def train(num_options: int, seed: int, folder: Path) -> Path:
    """One run; returns its last checkpoint. Raises CompareError where it failed."""
    folder.mkdir(parents=True)
    command = [
        str(lightning_command()), "fit",
        "--config", str(ROOT / "conf" / "pendulum.yaml"),
        "--model.num_options", str(num_options),
        "--seed_everything", str(seed),
        "--data.learner_threads", "1",
        "--trainer.limit_val_batches", "0",
        "--trainer.enable_progress_bar", "false",
        "--trainer.callbacks+=RunCheckpoint",
        f"--trainer.callbacks.dirpath={folder}",
    ]  # fmt: skip
    run_child(command, folder, RUN_SECONDS)
    return folder / "last.ckpt"


def main() -> int:
    """Run all; exit status 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-options", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="claw-pendulum-"))
    jobs = [(k, seed) for k in args.num_options for seed in args.seeds]

    def job(item: tuple[int, int]) -> dict[str, Any]:
        num_options, seed = item
        path = train(num_options, seed, root / f"k{num_options}-seed{seed}")
        return {"num_options": num_options, "seed": seed, "checkpoint": str(path)}

    try:
        with ThreadPoolExecutor(args.parallel) as executor:
            records = list(executor.map(job, jobs))
    except CompareError as error:
        print(f"pendulum_check: error: {error}", file=sys.stderr)
        return 1
    for record in records:
        record.update(evaluate_claw(Path(record["checkpoint"]), EPISODES, TASK))
    print("| K | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " | mean | sd |")
    print("|---" * (len(args.seeds) + 3) + "|")
    for k in args.num_options:
        returns = [record["return"] for record in records if record["num_options"] == k]
        spread = stdev(returns) if len(returns) > 1 else 0.0
        print(f"| {k} | " + " | ".join(f"{r:.1f}" for r in returns) + f" | {fmean(returns):.1f} | {spread:.1f} |")
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
