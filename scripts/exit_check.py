"""End real runs by signals and say what was left and how long it took.

    python scripts/exit_check.py --rounds 3

Each round starts ``lightning fit`` with the main job's configuration, waits until it learns, sends SIGINT, SIGTERM or
SIGKILL to the learner alone, and then looks for processes of the run, for new names in /dev/shm, and for
``last.ckpt``. Exit status 1 where anything was left, no checkpoint was written or the time was exceeded.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from compare_sb3 import lightning_command

CONFIG = Path(__file__).resolve().parents[1] / "conf" / "hand_reach_dense.yaml"
LIMITS = {signal.SIGINT: 10.0, signal.SIGTERM: 10.0, signal.SIGKILL: 5.0}  # seconds
START_LIMIT = 120.0


def run(number: signal.Signals) -> bool:
    """One run; prints a line and returns whether all was as promised."""
    shared_before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [str(lightning_command()), "fit", "--config", str(CONFIG), "--trainer.enable_progress_bar", "false"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        learner = psutil.Process(process.pid)
        deadline = time.monotonic() + START_LIMIT
        while not list(Path(folder).glob("runs/*/logs/worker_0.log")):
            if process.poll() is not None or time.monotonic() > deadline:
                print(f"{number.name}: the run did not start")
                return False
            time.sleep(0.2)
        time.sleep(10.0)  # learning by now
        family = learner.children(recursive=True)
        started = time.monotonic()
        process.send_signal(number)
        status = process.wait(120.0)
        exited = time.monotonic() - started
        _, left = psutil.wait_procs(family, timeout=max(0.0, LIMITS[number] - exited))
        gone = time.monotonic() - started
        names = set(os.listdir("/dev/shm")) - shared_before
        checkpoint = bool(list(Path(folder).glob("runs/*/checkpoints/last.ckpt")))
    for survivor in left:
        survivor.kill()
    fine = not left and not names and gone <= LIMITS[number] and (checkpoint or number == signal.SIGKILL)
    print(
        f"{number.name}: exit status {status} after {exited:.1f} s; {len(family)} workers, {len(left)} left after "
        f"{gone:.1f} s; {len(names)} new names in /dev/shm; last.ckpt {'written' if checkpoint else 'absent'}"
    )
    return fine


def main() -> int:
    """All signals, all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    results = [run(number) for _ in range(args.rounds) for number in LIMITS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
