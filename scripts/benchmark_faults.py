"""Suite ``faults`` of benchmark.py: what becomes of a run when one of its two workers is killed, or stopped.

Pendulum-v1, two workers, a run that learns (TorchRL, tianshou: that collects; TorchRL pushes weights too). A worker
gets SIGKILL, or SIGSTOP, a moment after the run has begun to work. Then it is watched for ``--patience`` seconds:

- goes on: it works for some seconds more, twice: what lay in buffers is used up by then.
- ends: the process ends, with the last line that it says.
- hangs: neither happens.

Ours is shown with its deadlines as they are, and with ``data.deadlines.step`` 5.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from typing import Any

from measuring import Bench
from served import Arm, ServedError, Server, serving

TASK = "Pendulum-v1"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
#: Seconds of work before the signal, and of work that a run must be able to do after it.
BEFORE, AFTER = 1.0, 3.0


def fault_arms() -> dict[str, Arm]:
    """Runs with two workers each."""
    cores: tuple[int, ...] = ()
    data = {"num_workers": 2, "envs_per_worker": 4, "samples_per_insert": 32}
    ours: dict[str, Any] = {"task": TASK, "batch": 64, "data": data, "model": {"hidden_sizes": [64, 64]}}
    patient = {**ours, "data": {**data, "deadlines": {"step": 5.0}}}
    two = {"task": TASK, "processes": 2, "hidden_sizes": [64, 64]}
    return {
        "claw-lightning": Arm("claw", "fit", ours, cores),
        "claw-lightning, deadlines.step 5": Arm("claw", "fit", patient, cores),
        "stable-baselines3": Arm("stable-baselines3", "fit", {**two, "samples_per_insert": 32, "batch": 64}, cores),
        "tianshou": Arm("tianshou", "collect", two, cores),
        "torchrl": Arm("torchrl", "collect", {**two, "pushes": True}, cores),
    }


def workers_of(server: Server) -> list[int]:
    """Processes of an arm that simulate: children that compute; helpers of multiprocessing do not."""
    import psutil

    told: list[int] = server.ask(do="pids")["workers"]
    if told:
        return told
    children = psutil.Process(server.pid).children(recursive=True)
    before = {child.pid: sum(child.cpu_times()[:2]) for child in children}
    server.run(0.5)
    busy = sorted(children, key=lambda child: before[child.pid] - sum(child.cpu_times()[:2]))
    return [child.pid for child in busy[:2]]


def watch(server: Server, number: int, patience: float) -> str:
    """Send a signal to one worker of a run that works, and say what becomes of the run."""
    pid = workers_of(server)[-1]
    timer = threading.Timer(BEFORE, os.kill, (pid, number))
    started = time.monotonic()
    timer.start()
    try:
        server.run(BEFORE + AFTER, deadline=BEFORE + patience)
        server.run(AFTER, deadline=patience)
    except ServedError as error:
        seconds = time.monotonic() - started - BEFORE
        text = str(error).rpartition(" (log: ")[0].partition(": ")[2]
        if text.startswith("gave no answer"):
            return f"hangs for {patience:g} s"
        return f"ends after {seconds:.1f} s: {text[:160]}".replace("|", "/")
    finally:
        timer.cancel()
    return f"goes on ({time.monotonic() - started - BEFORE - 2 * AFTER:.1f} s lost)"


FAULTS_QUICK: dict[str, Any] = {"patience": 20.0, "only": "SIGKILL", "is_quick": True}


def run_faults(bench: Bench) -> None:
    """Each arm and signal, in processes of their own."""
    arms = fault_arms()
    if bench.args.is_quick:
        arms = {"claw-lightning": arms["claw-lightning"]}
    for name, arm in arms.items():
        for kind, number in SIGNALS.items():
            if bench.args.only not in ("all", kind):
                continue
            with serving(bench, {name: arm}) as servers:
                for server in servers.values():
                    bench.keep_fault(name, kind, watch(server, number, bench.args.patience))
            if reason := bench.reason(name):
                bench.note(f"faults: {name}: {reason}")
                break


def add_faults_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``faults``."""
    parser.add_argument("--patience", type=float, default=30.0, help="seconds after which a run hangs (default: 30)")
    parser.add_argument("--only", choices=["all", *SIGNALS], default="all", help="default: all")
    parser.set_defaults(is_quick=False)


def check_faults_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them."""
    return None if args.patience > 0 else "--patience must be positive"
