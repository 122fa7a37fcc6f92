"""Workers on a Ray of this machine against processes of it: whole rows, flat memory, speed.

    python scripts/ray_check.py --rows 1000000 --lanes 256 --json ray.json

Both kinds of workers write coded rows (:class:`claw_lightning.rollout.envs.diagnostic.CodedEnv`, every number of which
says where it comes from) as fast as they may, in turns. What is judged: every row is whole, none is missing or there
twice; the object store holds no more at the end than at the beginning. Told are rows per second and processor time.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from claw_lightning.pool import FailurePolicy, LocalWorker, WorkerCommand, WorkerPool
from claw_lightning.remote.cluster import RayCluster
from claw_lightning.remote.config import RayConfig
from claw_lightning.rollout.envs.diagnostic import EPISODE, LANE, PROCESS, STEP, check_rows
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, TRUNCATED, LaneRing, RowLayout

OBS, ACTIONS = 211, 20  # of a Shadow Hand
RING_STEPS = 64
AHEAD = 24  # vector steps that a worker may be ahead of what was judged: all are judged before they are overwritten


def command(index: int, lanes: int, policy: dict[str, Any]) -> WorkerCommand:
    """A worker of coded rows."""
    env = {"class_path": "claw_lightning.rollout.envs.diagnostic.CodedEnv",
           "init_args": {"obs_size": OBS, "action_size": ACTIONS, "max_length": 50}}  # fmt: skip
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


def drive(pool: WorkerPool, steps: int, store: Any = lambda: 0.0) -> dict[str, float]:
    """Let all workers write so many steps more; returns what it took."""
    judges = [Judge(worker.ring) for worker in pool.workers if worker.ring is not None]
    for judge in judges:
        judge.seen = max(0, judge.ring.head - 1)
    targets = [judge.ring.head + steps for judge in judges]
    family = psutil.Process().children(recursive=True)
    cpu = sum(sum(process.cpu_times()[:2]) for process in family) + time.process_time()
    started, used = time.monotonic(), [store()]
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
    cpu = sum(sum(process.cpu_times()[:2]) for process in family) + time.process_time() - cpu
    rows = steps * sum(judge.ring.num_lanes for judge in judges)
    return {"rows": rows, "seconds": seconds, "cpu_seconds": cpu, "faults": sum(judge.faults for judge in judges),
            "store_first": used[0], "store_most": max(used), "store_last": store()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="environment steps of each kind")
    parser.add_argument("--lanes", type=int, default=256, help="environments of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each kind")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    policy: dict[str, Any] = {
        "obs_size": OBS,
        "action_size": ACTIONS,
        "hidden_sizes": (256, 256),
        "option_hidden_sizes": (64,),
    }
    values = Policy(**policy).flatten()
    mailbox = Mailbox(len(values))
    mailbox.publish(values, 1)
    layout = RowLayout(OBS, ACTIONS)
    cluster = RayCluster(RayConfig(), mailbox)
    cluster.connect(args.workers)
    pools: dict[str, WorkerPool] = {}
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, make in (("local", LocalWorker), ("ray", cluster.worker)):
                workers = []
                for index in range(args.workers):
                    ring = LaneRing(layout, RING_STEPS, args.lanes)
                    order = command(index, args.lanes, policy)
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
            steps = args.rows // (args.rounds * args.lanes * args.workers)
            for _ in range(args.rounds):
                for kind, pool in pools.items():
                    found[kind].append(drive(pool, steps, cluster.store_used))
                    print(kind, {name: round(value, 2) for name, value in found[kind][-1].items()}, flush=True)
    finally:
        for pool in pools.values():
            pool.close()
        cluster.close()
    return report(found, args.json)


def report(found: dict[str, list[dict[str, float]]], path: Path | None) -> int:
    """Print the figures and judge them; returns the exit status."""
    speeds = {kind: [each["rows"] / each["seconds"] for each in turns] for kind, turns in found.items()}
    rate = {kind: float(np.median(each)) for kind, each in speeds.items()}
    cost = {kind: sum(e["cpu_seconds"] for e in turns) / sum(e["rows"] for e in turns) for kind, turns in found.items()}
    faults = int(sum(each["faults"] for turns in found.values() for each in turns))
    first, last = found["ray"][0]["store_last"], found["ray"][-1]["store_last"]
    figures = {
        "rows_per_s": rate, "ratio": rate["ray"] / rate["local"],
        "cpu_us_per_row": {kind: 1e6 * each for kind, each in cost.items()},
        "faults": faults, "store_mb": {"after_first_turn": first / 1e6, "after_last_turn": last / 1e6},
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if path is not None:
        path.write_text(json.dumps({**figures, "turns": found}, indent=1))
    return int(faults > 0 or last > first + 32e6)


if __name__ == "__main__":
    sys.exit(main())
