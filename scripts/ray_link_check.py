"""Workers on a second Ray node behind a slow link: whole rows, flat memory, a lost node, and one that joins later.

    sudo .venv/bin/python scripts/ray_link_check.py --mbit 100 --rows 200000 --json link.json

The second node is on this machine, but in a network namespace of its own, with a /tmp and a /dev/shm of its own; all
that it shares with the head is a pair of virtual devices, whose speed ``tc`` limits in both directions. Needs root,
``ip`` and ``tc``. One worker writes coded rows (see ray_check.py) faster than the link takes them. Then its node is
killed while it writes, another joins, and the worker goes on there.

What is judged: every row is whole, none is missing or there twice; nothing crosses the gap that the lost node leaves;
the object stores hold no more at the end than at the beginning; no more arrives than the link can carry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from ray_check import RING_STEPS, command, count, drive
from scale_model import OneLineParser, positive

from claw_lightning.errors import ConfigError
from claw_lightning.pool import FailurePolicy, WorkerPool
from claw_lightning.remote.cluster import RayCluster
from claw_lightning.remote.config import RayConfig
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.ring import FIRST, LaneRing, RowLayout

SPACE, HERE, THERE = "claw-far", "10.77.0.1", "10.77.0.2"
PORT = 6399
#: A lost node is noticed after seconds, not half a minute.
RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # whatever token lies in ~/.ray: only this machine reaches the namespace
}
PRIVATE = 'mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && exec "$@"'
PATIENCE = 120.0


def tell(*words: str) -> None:
    """Run a command of the system.

    Raises:
        ConfigError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {' '.join(done.stderr.split())}")


@contextlib.contextmanager
def link(mbit: float) -> Iterator[None]:
    """A namespace that is joined to this one by a link of so many Mbit/s each way."""
    inside = ("ip", "netns", "exec", SPACE)
    limit = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "100ms")
    tell("ip", "netns", "add", SPACE)
    try:
        tell("ip", "link", "add", "claw-near", "type", "veth", "peer", "name", SPACE, "netns", SPACE)
        tell("ip", "addr", "add", f"{HERE}/24", "dev", "claw-near")
        tell(*inside, "ip", "addr", "add", f"{THERE}/24", "dev", SPACE)
        for before, device in (((), "claw-near"), (inside, SPACE), (inside, "lo")):
            tell(*before, "ip", "link", "set", device, "up")
        for before, device in (((), "claw-near"), (inside, SPACE)):
            tell(*before, "tc", "qdisc", "add", "dev", device, *limit)
        yield
    finally:
        end_space()
        with contextlib.suppress(ConfigError):
            tell("ip", "netns", "del", SPACE)


def end_space() -> None:
    """Kill all that runs in the namespace, as the loss of a machine would."""
    found = subprocess.run(["ip", "netns", "pids", SPACE], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def ray_start(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """``ray start``, in a process group of its own, until it is killed."""
    words = [
        *before,
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        *arguments,
    ]
    return subprocess.Popen(
        words, env={**os.environ, **RAY_SETTINGS}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def end_node(node: subprocess.Popen[bytes]) -> None:
    """Kill a node with all its processes."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(node.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    node.kill()
    node.wait()


def listening(seconds: float = 60.0) -> None:
    """Wait for the head.

    Raises:
        ConfigError: nobody answers there.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((HERE, PORT), 1.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the head at {HERE}:{PORT} does not answer ({error})") from error
            time.sleep(0.2)


def far_node() -> subprocess.Popen[bytes]:
    """The node in the namespace, which alone has what the worker wants."""
    before = ("ip", "netns", "exec", SPACE, "sh", "-c", PRIVATE, "sh")
    return ray_start(
        f"--address={HERE}:{PORT}", f"--node-ip-address={THERE}", "--num-cpus=1", '--resources={"far": 1}',
        f"--object-store-memory={200 << 20}", before=before,
    )  # fmt: skip


def until(pool: WorkerPool, condition: Callable[[], bool], what: str) -> None:
    """Look after workers until it holds.

    Raises:
        ConfigError: it does not.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise ConfigError(f"after {PATIENCE:g} s {what}")
        pool.poll()
        time.sleep(0.01)


def lose_node(pool: WorkerPool, steps: int) -> dict[str, Any]:
    """Kill the far node while its worker writes; start another one; returns what was found."""
    worker = pool.workers[0]
    assert worker.ring is not None
    ring, started = worker.ring, time.monotonic()
    worker.control.steps_allowed = ring.head + steps
    until(pool, lambda: ring.head > worker.control.steps_allowed - steps, "the worker does not write")
    end_space()
    until(pool, lambda: pool.restarts >= 1, "the lost node was not noticed")
    noticed, gap = time.monotonic() - started, ring.head
    node = far_node()
    worker.control.steps_allowed = gap + 2
    until(pool, lambda: ring.head == gap + 2, "the worker does not go on at the node that has joined")
    first = ring.layout.view(ring.rows[gap % ring.num_steps], "flags")
    return {
        "node": node, "noticed_s": noticed, "back_s": time.monotonic() - started, "restarts": pool.restarts,
        "is_clean": bool(((first & FIRST) != 0).all()),
    }  # fmt: skip


def check(args: argparse.Namespace) -> dict[str, Any]:
    """All phases on a cluster that runs; returns what was found.

    Raises:
        ConfigError: something does not go on.
    """
    policy: dict[str, Any] = {
        "obs_size": 211, "action_size": 20, "hidden_sizes": (256, 256), "option_hidden_sizes": (64,),
    }  # fmt: skip
    values = Policy(**policy).flatten()
    mailbox = Mailbox(len(values))
    mailbox.publish(values, 1)
    cluster = RayCluster(RayConfig(address=f"{HERE}:{PORT}", resources={"far": 1}), mailbox)
    cluster.connect(1)
    pool: WorkerPool | None = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            ring = LaneRing(RowLayout(211, 20), RING_STEPS, args.lanes)
            order = command(0, args.lanes, policy, 0.0)
            worker = cluster.worker("worker", order, (), Path(folder) / "worker.log", ring)
            deadlines = {"wait": PATIENCE, "step": PATIENCE}
            pool = WorkerPool([worker], policy=FailurePolicy(budget=5, deadlines=deadlines))
            pool.start(wait=False)
            kept = pool
            until(pool, lambda: kept.alive == 1, "no worker runs on the far node")
            steps = max(1, args.rows // (2 * args.lanes))
            before = drive(pool, steps, cluster.store_used, dict)
            print("before", {name: round(value, 2) for name, value in before.items() if name != "parts"}, flush=True)
            lost = lose_node(pool, steps)
            node = lost.pop("node")
            print("lost", lost, flush=True)
            after = drive(pool, steps, cluster.store_used, dict)
            print("after", {name: round(value, 2) for name, value in after.items() if name != "parts"}, flush=True)
            pool.close()
            end_node(node)
    finally:
        if pool is not None:
            pool.close()
        cluster.close()
    limit = 1e6 * args.mbit / 8.0
    rates = [4 * ring.layout.words * each["rows"] / each["seconds"] for each in (before, after)]
    return {
        "faults": before["faults"] + after["faults"], **lost, "link_bytes_per_s": limit,
        "rows_per_s": [each["rows"] / each["seconds"] for each in (before, after)],
        "link_share": [rate / limit for rate in rates],
        "store_mb": [each["store_last"] / 1e6 for each in (before, after)],
    }  # fmt: skip


def main() -> int:
    """Entry point; returns the exit status."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=positive, default=100.0, help="of the link, each way (default: 100)")
    parser.add_argument("--rows", type=count, default=200_000, help="environment steps in all (default: 200000)")
    parser.add_argument("--lanes", type=count, default=256, help="environments of the worker (default: 256)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("needs root and the programs ip and tc (package iproute2) for a link between namespaces")
    logging.basicConfig(level=logging.WARNING)
    os.environ.update(RAY_SETTINGS)
    nodes = []
    try:
        with link(args.mbit):
            nodes.append(
                ray_start(
                    "--head",
                    f"--port={PORT}",
                    f"--node-ip-address={HERE}",
                    "--num-cpus=1",
                    "--include-dashboard=false",
                    f"--object-store-memory={200 << 20}",
                )  # fmt: skip
            )
            listening()
            nodes.append(far_node())
            found = check(args)
    except ConfigError as error:
        parser.error(str(error))
    finally:
        for node in nodes:
            end_node(node)
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    grown = found["store_mb"][1] - found["store_mb"][0]
    return int(found["faults"] > 0 or not found["is_clean"] or grown > 32 or max(found["link_share"]) > 1.05)


if __name__ == "__main__":
    sys.exit(main())
