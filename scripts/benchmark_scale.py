"""Suite ``scale`` of benchmark.py: what a sample, an update and an inserted step cost when there is more of everything.

Rows are ratios of costs, the larger over the smaller: 1 is growth for nothing. Sampling and inserting are measured in
this process on one thread, updates in the product's ``fit`` (see benchmark_learner.py). Workers are measured by the
seconds that they compute per inserted step, so that it matters less how many cores there are; where there are fewer
cores than workers that is noted, and caches and memory are then shared by more than they would be.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmark_collect import Idle, Repeating, collect_arm
from benchmark_learner import fit_arm
from benchmark_replay import NARROW_ACTION, NARROW_OBS, make_ring, sample_arm
from measuring import Arms, Bench, Row, Target
from served import ALL_CORES, Arm, measure_served, rates

from claw_lightning.limits import available_memory, format_bytes
from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.ring import RowLayout

LANES = 64
WORKERS = (1, 2, 4, 8)
MOST = Target(1.2, False)


def measure_rows(bench: Bench) -> None:
    """Samples from small and large memories, and steps inserted into them."""
    args, layout = bench.args, RowLayout(NARROW_OBS, NARROW_ACTION)
    sizes = {"small": args.small_rows, "large": args.large_rows}
    needed, free = 2 * sum(sizes.values()) * layout.row_bytes, available_memory()
    if needed > 0.8 * free:
        reason = f"{format_bytes(needed)} of memory needed, {format_bytes(free)} free: lower --large-rows"
        for group in ("rows", "inserts"):
            bench.leave_out(group, reason)
        return
    samples: Arms = {}
    inserts: Arms = {}
    for size, rows in sizes.items():
        samples[size] = sample_arm(ReplayMemory([make_ring(rows, layout)], 0), args.updates, args.batch)
        env = Repeating(16, NARROW_OBS, NARROW_ACTION)
        inserts[size] = collect_arm(env, Idle(16, NARROW_ACTION), rows // 16)
    bench.run("rows", samples)
    bench.run("inserts", inserts)


def measure_lanes(bench: Bench) -> None:
    """Steps inserted by one lane and by many at once."""
    arms: Arms = {
        name: collect_arm(Repeating(lanes, NARROW_OBS, NARROW_ACTION), Idle(lanes, NARROW_ACTION))
        for name, lanes in (("one", 1), ("many", LANES))
    }
    bench.run("lanes", arms)


def measure_updates(bench: Bench) -> None:
    """Updates of ``fit`` with small and large memories."""
    args = bench.args
    arms = {
        name: fit_arm(bench, args.batch, rows=rows, data={"capacity": rows})
        for name, rows in (("small", args.small_rows), ("large", args.update_rows))
    }
    bench.add_group("updates", rates(measure_served(bench, "updates", arms, "updates/s")))


def measure_workers(bench: Bench) -> None:
    """Seconds of computing per step of one and of several workers."""
    arms = {
        f"workers_{count}": Arm("claw", "collect", {"task": bench.args.task, "data": {"num_workers": count}}, ALL_CORES)
        for count in bench.args.workers
    }
    figures = measure_served(bench, "workers", arms, "steps/s")
    for name in figures:
        if (count := int(name.removeprefix("workers_"))) > len(ALL_CORES):
            bench.note(f"scale: {count} workers had {len(ALL_CORES)} cores")
    bench.add_group("workers", {name: [f.done / f.cpu for f in found] for name, found in figures.items()})


SCALE_ROWS: Mapping[str, Row] = {
    "10.sample": Row("rows", ("small", "large"), "time per uniform sample, 1e7 rows over 1e5", MOST),
    "10.insert": Row("inserts", ("small", "large"), "time per inserted step, 1e7 rows over 1e5", MOST),
    "10.lanes": Row("lanes", ("one", "many"), f"time per inserted step, {LANES} lanes over one", MOST),
    "10.update": Row("updates", ("small", "large"), "time per update in fit, 1e6 rows over 1e5", MOST),
    **{
        f"10.workers.{count}": Row(
            "workers", ("workers_1", f"workers_{count}"), f"computing per step, {count} workers over one", MOST
        )
        for count in WORKERS[1:]
    },
}
GROUPS = {
    "rows": measure_rows,
    "lanes": measure_lanes,
    "updates": measure_updates,
    "workers": measure_workers,
}
SCALE_GROUPS = tuple(GROUPS)
SCALE_QUICK = {
    "small_rows": 2048, "large_rows": 4096, "update_rows": 4096, "batch": 64, "updates": 2, "seconds": 0.05,
    "task": "Pendulum-v1", "workers": (1, 2), "groups": ("rows", "lanes"),
}  # fmt: skip


def run_scale(bench: Bench) -> None:
    """The chosen groups, one after the other."""
    for name in bench.args.groups:
        GROUPS[name](bench)


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``scale``."""
    parser.add_argument("--small-rows", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--large-rows", type=int, default=10_000_000, help="sampled, inserted (default: 10000000)")
    parser.add_argument("--update-rows", type=int, default=1_000_000, help="updates (default: 1000000)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch (default: 256)")
    parser.add_argument("--updates", type=int, default=8, help="batches per sample (default: 8)")
    parser.add_argument("--task", default="HandReachDense-v3", help="of the workers (default: HandReachDense-v3)")
    parser.set_defaults(accelerator="cpu", replay_device="cpu", rows=0, workers=WORKERS)


def check_scale_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them."""
    for name in ("batch", "updates"):
        if getattr(args, name) < 1:
            return f"--{name} must be at least 1"
    if args.small_rows < 2048:
        return "--small-rows must be at least 2048"
    for name in ("large_rows", "update_rows"):
        if getattr(args, name) <= args.small_rows:
            return f"--{name.replace('_', '-')} must exceed --small-rows"
    return None
