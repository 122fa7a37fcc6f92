"""Workers on a Ray of this machine against processes of it: whole rows, flat memory, speed.

    python scripts/ray_check.py --rows 1000000 --lanes 256 --json ray.json
    python scripts/ray_check.py --rows 1000000 --lanes 512 --obs 16 --actions 2      # small rows: is the store flat?
    python scripts/ray_check.py --rows 24000 --lanes 16 --simulator-us 700           # a simulator that computes

Both kinds of workers write coded rows (:class:`claw_lightning.rollout.envs.diagnostic.CodedEnv`, every number of which
says where it comes from) as fast as they may, in turns. What is judged: every row is whole, none is missing or there
twice; the object store holds no more at the end than at the beginning. Told are rows per second and processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scale_model import OneLineParser

from claw_lightning.errors import ConfigError
from claw_lightning.pool import FailurePolicy, LocalWorker, WorkerCommand, WorkerPool
from claw_lightning.remote.cluster import RayCluster
from claw_lightning.remote.config import RayConfig
from claw_lightning.rollout.envs.diagnostic import EPISODE, LANE, MIN_OBS_SIZE, PROCESS, STEP, check_rows
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, TRUNCATED, LaneRing, RowLayout

RING_STEPS = 64
AHEAD = 24  # vector steps that a worker may be ahead of what was judged: all are judged before they are overwritten


def command(index: int, lanes: int, policy: dict[str, Any], compute_seconds: float) -> WorkerCommand:
    """A worker of coded rows, each of which takes so many seconds of processor time."""
    env = {"class_path": "claw_lightning.rollout.envs.diagnostic.CodedEnv",
           "init_args": {"obs_size": policy["obs_size"], "action_size": policy["action_size"], "max_length": 50,
                         "compute_seconds": compute_seconds}}  # fmt: skip
    settings = {
        "mode": "collect", "worker": index, "env": env, "num_envs": lanes, "num_threads": 1, "seed": 10_007 * index,
        "pull_every": 1, "agent": {"policy": policy}, "configure": {},
    }  # fmt: skip
    return WorkerCommand(sys.executable, settings)


class Judge:
    """Looks at every row of a ring once."""

    def __init__(self, ring: LaneRing) -> None:
        self.ring, self.seen, self.faults = ring, 0, 0

    def look(self) -> None:
        """Judge the steps that have a successor and were not judged."""
        ring, view = self.ring, self.ring.layout.view
        last = ring.head - 1
        if last <= self.seen:
            return
        rows = ring.rows[np.arange(self.seen, last + 1) % ring.num_steps]
        flags, obs = view(rows, "flags"), view(rows, "obs")
        ended = (flags[:-1] & (TERMINATED | TRUNCATED)) != 0
        inside = ((flags[:-1] & BORDER) == 0) & (((flags[1:] & FIRST) == 0) | ended)
        found = check_rows(
            obs[:-1], obs[1:], view(rows, "reward")[:-1], (flags[:-1] & TERMINATED) != 0,
            (flags[:-1] & TRUNCATED) != 0, view(rows, "action")[:-1], inside,
        )  # fmt: skip
        self.faults += sum(found.values()) - found["rows"]
        # Across borders too: nothing lost, nothing twice. The next row is the next step or opens the next episode.
        here, there = obs[:-1], obs[1:]
        same = (here[..., [LANE, PROCESS]] == there[..., [LANE, PROCESS]]).all(-1)
        step_on = (here[..., EPISODE] == there[..., EPISODE]) & (here[..., STEP] + 1 == there[..., STEP])
        episode_on = (here[..., EPISODE] + 1 == there[..., EPISODE]) & (there[..., STEP] == 0)
        self.faults += int((~(same & (step_on | episode_on))).sum())
        self.seen = last


def part_of(command_line: list[str]) -> str:
    """What a process below this one is: ``worker``, ``host`` or ``ray`` (the cluster's own)."""
    if any(part.endswith("bootstrap.py") for part in command_line):
        return "worker"
    return "host" if command_line and command_line[0].startswith("ray::Host") else "ray"


def processor_seconds(kind: str, local_pids: set[int]) -> dict[str, float]:
    """Seconds that this process and those of one kind of workers have computed so far, by part.

    Args:
        kind: ``local`` or ``ray``.
        local_pids: of the local workers.
    """
    seconds = {"learner": time.process_time(), "worker": 0.0, "host": 0.0, "ray": 0.0}
    for process in psutil.Process().children(recursive=True):
        if (process.pid in local_pids) == (kind == "local"):
            with contextlib.suppress(psutil.Error):
                seconds[part_of(process.cmdline())] += sum(process.cpu_times()[:2])
    return seconds if kind == "ray" else {"learner": seconds["learner"], "worker": seconds["worker"]}


def drive(pool: WorkerPool, steps: int, store: Any, meter: Any) -> dict[str, Any]:
    """Let all workers write so many steps more; returns what it took.

    Args:
        pool: of workers that run.
        steps: vector steps of each.
        store: asked now and then for the bytes in the object store.
        meter: asked before and after for processor seconds by part.
    """
    judges = [Judge(worker.ring) for worker in pool.workers if worker.ring is not None]
    for judge in judges:
        judge.seen = max(0, judge.ring.head - 1)
    targets = [judge.ring.head + steps for judge in judges]
    before, started, used = meter(), time.monotonic(), [store()]
    while any(judge.ring.head < target for judge, target in zip(judges, targets, strict=True)):
        pool.poll()
        for worker, judge, target in zip(pool.workers, judges, targets, strict=True):
            judge.look()
            worker.control.steps_allowed = min(target, judge.seen + AHEAD)
        if time.monotonic() - started > 2.0 * len(used):
            used.append(store())
        time.sleep(0.001)
    for judge in judges:
        judge.look()
    seconds = time.monotonic() - started
    parts = {part: value - before[part] for part, value in meter().items()}
    rows = steps * sum(judge.ring.num_lanes for judge in judges)
    return {"rows": rows, "seconds": seconds, "cpu_seconds": sum(parts.values()), "parts": parts,
            "faults": sum(judge.faults for judge in judges),
            "store_first": used[0], "store_most": max(used), "store_last": store()}  # fmt: skip


def count(text: str) -> int:
    """A whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count, default=1_000_000, help="environment steps of each kind")
    parser.add_argument("--lanes", type=count, default=256, help="environments of each worker")
    parser.add_argument("--workers", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=4, help="turns of each kind")
    parser.add_argument("--obs", type=int, default=211, help="observations of a row; 211 are a Shadow Hand's")
    parser.add_argument("--actions", type=count, default=20, help="actions of a row")
    parser.add_argument("--simulator-us", type=float, default=0.0, help="processor time of an environment step")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    if args.obs < MIN_OBS_SIZE:
        parser.error(f"--obs must be at least {MIN_OBS_SIZE}, not {args.obs}")
    if args.simulator_us < 0:
        parser.error(f"--simulator-us must be at least 0, not {args.simulator_us:g}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    logging.basicConfig(level=logging.WARNING)
    policy: dict[str, Any] = {
        "obs_size": args.obs,
        "action_size": args.actions,
        "hidden_sizes": (256, 256),
        "option_hidden_sizes": (64,),
    }
    values = Policy(**policy).flatten()
    mailbox = Mailbox(len(values))
    mailbox.publish(values, 1)
    layout = RowLayout(args.obs, args.actions)
    cluster = RayCluster(RayConfig(), mailbox)
    try:
        cluster.connect(args.workers)
    except ConfigError as error:
        parser.error(str(error))
    pools: dict[str, WorkerPool] = {}
    found: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, make in (("local", LocalWorker), ("ray", cluster.worker)):
                workers = []
                for index in range(args.workers):
                    ring = LaneRing(layout, RING_STEPS, args.lanes)
                    order = command(index, args.lanes, policy, 1e-6 * args.simulator_us)
                    if kind == "local":
                        order.settings.update(
                            layout=layout.settings(), num_steps=RING_STEPS, ring_fd=ring.block.fd,
                            mailbox_fd=mailbox.block.fd,
                        )  # fmt: skip
                    fds = (ring.block.fd, mailbox.block.fd)
                    path = Path(folder) / f"{kind}_{index}.log"
                    workers.append(make(f"{kind} worker {index}", order, fds, path, ring))
                pools[kind] = WorkerPool(list(workers), policy=FailurePolicy("stop"))
                pools[kind].start()
            steps = max(1, args.rows // (args.rounds * args.lanes * args.workers))
            local_pids = {worker.pid for worker in pools["local"].workers if worker.pid is not None}
            received = cluster.received_bytes
            for _ in range(args.rounds):
                for kind, pool in pools.items():
                    meter = functools.partial(processor_seconds, kind, local_pids)
                    turn = drive(pool, steps, cluster.store_used, meter)
                    found[kind].append(turn)
                    shown = {name: round(value, 2) for name, value in turn.items() if name != "parts"}
                    print(kind, shown, flush=True)
            received = cluster.received_bytes - received
    finally:
        for pool in pools.values():
            pool.close()
        cluster.close()
    return report(found, received, 4 * len(values), args.json)


def part_costs(found: dict[str, list[dict[str, Any]]], received: int, policy_bytes: int) -> dict[str, float]:
    """What scale_model.py asks for.

    The learner's cost of a row is what it spends more than with a local worker, whose rows are judged as well.
    """
    rows = {kind: sum(turn["rows"] for turn in turns) for kind, turns in found.items()}
    cost = {
        kind: {part: 1e6 * sum(turn["parts"][part] for turn in turns) / rows[kind] for part in turns[0]["parts"]}
        for kind, turns in found.items()
    }
    return {
        "row_bytes": received / rows["ray"],
        "policy_bytes": policy_bytes,
        "learner_us_per_row": max(0.0, cost["ray"]["learner"] - cost["local"]["learner"]),
        "ray_us_per_row": cost["ray"]["ray"],
        "host_us_per_row": cost["ray"]["host"],
        "worker_us_per_row": cost["ray"]["worker"],
    }


def report(found: dict[str, list[dict[str, Any]]], received: int, policy_bytes: int, path: Path | None) -> int:
    """Print the figures and judge them; returns the exit status.

    Args:
        found: turns by kind, as of :func:`drive`.
        received: bytes of rows that came through Ray.
        policy_bytes: of parameters that are published at a time.
        path: file for the figures, and for the turns they are made of.
    """
    speeds = {kind: [each["rows"] / each["seconds"] for each in turns] for kind, turns in found.items()}
    rate = {kind: float(np.median(each)) for kind, each in speeds.items()}
    cost = {kind: sum(e["cpu_seconds"] for e in turns) / sum(e["rows"] for e in turns) for kind, turns in found.items()}
    faults = int(sum(each["faults"] for turns in found.values() for each in turns))
    first, last = found["ray"][0]["store_last"], found["ray"][-1]["store_last"]
    by_wall = [ray / local for ray, local in zip(speeds["ray"], speeds["local"], strict=True)]
    by_cpu = [
        local["cpu_seconds"] / ray["cpu_seconds"] for ray, local in zip(found["ray"], found["local"], strict=True)
    ]
    figures = {
        "rows_per_s": rate,
        "ratio": {"wall": float(np.median(by_wall)), "cpu": float(np.median(by_cpu))},
        "costs": part_costs(found, received, policy_bytes),
        "cpu_us_per_row": {kind: 1e6 * each for kind, each in cost.items()},
        "faults": faults, "store_mb": {"after_first_turn": first / 1e6, "after_last_turn": last / 1e6},
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if path is not None:
        path.write_text(json.dumps({**figures, "turns": found}, indent=1))
    return int(faults > 0 or last > first + 32e6)


if __name__ == "__main__":
    sys.exit(main())
