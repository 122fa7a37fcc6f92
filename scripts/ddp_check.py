"""Several ranks by the command itself: are all their networks the same, bit for bit, after so many updates?

    python scripts/ddp_check.py --devices 2 --updates 500 [any options of `lightning fit`]

Runs ``lightning fit --config debug/fast`` in lock-step (or with the options that follow) and compares what every rank
holds at its end: parameters, buffers and optimisers' moments must be equal, counters too, experience must differ.
Prints one line per kind; exit status 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "CLAW_DDP_CHECK"


class Fingerprint(pl.Callback):
    """Writes sums of the bits of all that a rank holds, and its counters, to a file of its own at the end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write ``rank_<r>.json`` into the folder that the environment names."""
        from claw_lightning.ranks import bit_sum

        held = {name: int(bit_sum(tensor)) for name, tensor in pl_module.state_dict().items()}
        for number, wrapped in enumerate(trainer.optimizers):
            for index, values in wrapped.state_dict()["state"].items():
                held |= {f"optimizer {number} {index} {key}": int(bit_sum(x)) for key, x in values.items()}
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        ring = data.memory.written[0]
        result = {
            "networks": held,
            "updates": pl_module.updates,
            "env_steps": data.env_steps,
            "own_steps": data.limiter.inserted,
            "experience": float(ring.layout.view(ring.rows, "obs").sum()),
            "samples_per_insert": pl_module.latest_metrics.get("rate/samples_per_insert"),
        }
        (Path(os.environ[VARIABLE]) / f"rank_{trainer.global_rank}.json").write_text(json.dumps(result))


def judge(found: list[dict[str, Any]], updates: int) -> list[tuple[str, bool]]:
    """What is to hold of the ranks' files, and whether it does."""
    first = found[0]
    names = [name for name, value in first["networks"].items() if any(f["networks"][name] != value for f in found)]
    return [
        (f"{len(first['networks'])} tensors equal on {len(found)} ranks" + (f", but {names[:3]}" if names else ""),
         not names),
        (f"updates {[f['updates'] for f in found]}, at least {updates}",
         all(f["updates"] == first["updates"] >= updates for f in found)),
        (f"env_steps {[f['env_steps'] for f in found]} = sum of {[f['own_steps'] for f in found]}",
         all(f["env_steps"] == sum(f["own_steps"] for f in found) for f in found)),
        ("experience differs", len({f["experience"] for f in found}) == len(found)),
        (f"samples per insert {first['samples_per_insert']}",
         len({f["samples_per_insert"] for f in found}) == 1),
    ]  # fmt: skip


def main() -> int:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--timeout", type=float, default=1800.0)
    args, options = parser.parse_known_args()
    # Of debug/fast: 16 samples per update, 8 per step; 100 steps of warm-up, and some that are left over.
    steps = 100 + 2 * args.devices * args.updates + 8 * args.devices
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, **{VARIABLE: folder}, OMP_NUM_THREADS="1")
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), env.get("PYTHONPATH", "")])
        command = [
            sys.executable, "-m", "claw_lightning", "fit", "--config", "debug/fast",
            "--trainer.enable_progress_bar=false", f"--trainer.devices={args.devices}", "--trainer.strategy=ddp",
            "--trainer.callbacks+=ddp_check.Fingerprint", f"--data.max_env_steps={steps}", *options,
        ]  # fmt: skip
        status = subprocess.run(command, cwd=folder, env=env, timeout=args.timeout, check=False).returncode
        files = sorted(Path(folder).glob("rank_*.json"))
        if status or len(files) != args.devices:
            print(f"FAILED: exit status {status}, {len(files)} of {args.devices} ranks came to their end")
            return 1
        found = judge([json.loads(file.read_text()) for file in files], args.updates)
    for text, holds in found:
        print(f"{'ok' if holds else 'FAILED'}: {text}")
    return 0 if all(holds for _, holds in found) else 1


if __name__ == "__main__":
    sys.exit(main())
