"""Suite ``learner`` of benchmark.py: updates, inside the product's ``fit`` and of other packages.

Every arm is a process of its own on core 0 with one thread (peers/<name>.py). Ours is the real ``fit``: Lightning's
loop, callbacks, publications, and a live worker on core 1 that writes rows of HandReach's sizes (observation 93, action
20, float32) at one environment step per update (samples per insert: the batch size). All arms learn with layers
[256, 256], a delayed actor and delayed targets (TD3) or an actor at each step (SAC), from memories that hold as many
rows at the start. Others run their own update call, sampling included, and nobody writes into their memory. The floor
is a plain PyTorch loop of the same mathematics (peers/bare.py), the faster of eager and torch.compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from measuring import Bench, Row, Target
from served import Arm, ServedError, Server, measure_served, rates, serving

#: Package: least ratio of row 2, and the algorithm that is compared.
PEERS = {
    "stable-baselines3": (1.15, "td3"),
    "skrl": (1.2, "td3"),
    "tianshou": (1.5, "td3"),
    "torchrl": (1.7, "td3"),
    "sheeprl": (1.6, "sac"),
}
#: Packages whose arms know a device.
ON_DEVICE = ("stable-baselines3", "skrl")
LARGE_BATCH = 1024
#: Of conf/hand_reach_dense.yaml.
OPTIONS = {
    "tau": 0.05,
    "target_delay": None,
    "arrival": "sampled",
    "all_options": 0.5,
    "option_batch_size": 256,
    "option_delay": 4,
    "target_decision_rate": 0.1,
    "deliberation_form": "regularizer",
    "deliberation_cost_lr": 0.01,
    "critic_lr": 2e-3,
    "actor_lr": 2e-3,
    "action_penalty": 0.01,
    "normalize_observations": True,
}


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by itself."""
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(check and check())


def fast_precision(args: argparse.Namespace) -> str:
    """Of what is to be as fast as it can."""
    return args.precision or ("bf16-mixed" if has_bfloat16() else "32-true")


def fit_arm(bench: Bench, batch: int, **settings: Any) -> Arm:
    """Our ``fit``: learner on core 0, worker on core 1."""
    args = bench.args
    data = {"samples_per_insert": batch, "replay_device": args.replay_device, **settings.pop("data", {})}
    common = {"rows": args.rows, "batch": batch, "learner_cores": [0], "worker_cores": [1], "data": data}
    common |= {"accelerator": args.accelerator, **settings}
    return Arm("claw", "fit", common, cores=(0, 1))


def bare_arms(bench: Bench, batch: int) -> dict[str, Arm]:
    """The floor, eager and compiled."""
    settings = {"rows": bench.args.rows, "batch": batch, "device": bench.args.device}
    arms = {"bare_eager": Arm("bare", "td3", settings)}
    if not bench.args.no_compile:
        arms["bare_compiled"] = Arm("bare", "td3", {**settings, "is_compiled": True})
    return arms


def peer_arms(bench: Bench, algorithm: str) -> dict[str, Arm]:
    """Other packages' update calls."""
    settings = {"rows": bench.args.rows, "batch": bench.args.batch, "device": bench.args.device}
    arms = {}
    for name, (_, kind) in PEERS.items():
        if kind != algorithm:
            continue
        if bench.args.device != "cpu" and name not in ON_DEVICE:
            bench.absent(name, f"{name} is measured on the CPU only")
            continue
        arms[name] = Arm(name, kind, settings)
    return arms


def with_floor(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Figures, and as ``bare`` those of the faster floor."""
    floors = [found[name] for name in ("bare_eager", "bare_compiled") if found.get(name)]
    return {**found, "bare": max(floors, key=median)} if floors else found


def measure_td3(bench: Bench) -> None:
    """Rows 1, 2 and 3."""
    batch = bench.args.batch
    fast = fit_arm(bench, LARGE_BATCH, precision=fast_precision(bench.args))
    arms = {"fit": fit_arm(bench, batch), **bare_arms(bench, batch), "fit_fast": fast, **peer_arms(bench, "td3")}
    found = with_floor(rates(measure_served(bench, "td3", arms, "updates/s")))
    samples = {"fit_fast": LARGE_BATCH, "stable-baselines3": batch}
    for name, size in samples.items():
        if name in found:
            found[f"{name}_samples"] = [value * size for value in found[name]]
        elif reason := bench.reason(name):
            bench.absent(f"{name}_samples", reason)
    bench.add_group("td3", found)


def measure_large(bench: Bench) -> None:
    """Row 1 with large batches."""
    arms = {"fit": fit_arm(bench, LARGE_BATCH), **bare_arms(bench, LARGE_BATCH)}
    bench.add_group("td3_large", with_floor(rates(measure_served(bench, "td3_large", arms, "updates/s"))))


def measure_sac(bench: Bench) -> None:
    """Row 2: SAC."""
    arms = {"fit": fit_arm(bench, bench.args.batch, sac=True), **peer_arms(bench, "sac")}
    bench.add_group("sac", rates(measure_served(bench, "sac", arms, "updates/s")))


def measure_options(bench: Bench) -> None:
    """Row 4: what four options cost."""
    precision = fast_precision(bench.args)
    data = {"samples_per_insert": 64, "updates_per_step": 4}
    arms = {
        f"k{count}": fit_arm(
            bench, LARGE_BATCH, precision=precision, model={**OPTIONS, "num_options": count}, data=data,
            pause=1e-4,  # 16 steps per update: the worker must not be what is measured
        )
        for count in (1, 4)
    }  # fmt: skip
    bench.add_group("options", rates(measure_served(bench, "options", arms, "updates/s")))


def measure_publish(bench: Bench) -> None:
    """Row 9: publishing a policy beside copying its parameters."""
    arms = {"publish": fit_arm(bench, bench.args.batch)}
    found: dict[str, list[float]] = {}
    with serving(bench, arms) as servers:
        for server in servers.values():
            for _ in range(bench.args.rounds):
                answer = server.ask(do="publish", seconds=bench.args.seconds)
                for name, value in answer.items():
                    found.setdefault(name, []).append(value)
    if not found and (reason := bench.reason("publish")):
        for name in ("publisher", "mailbox", "memcpy"):
            bench.absent(name, reason)
    for name, values in found.items():
        bench.keep_rate("publish", name, [1.0 / value for value in values], "calls/s")
    bench.add_group("publish", found)


def pss(pids: list[int]) -> int:
    """Bytes of processes, what they share counted once."""
    import psutil

    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


def peak(server: Server, seconds: float) -> int:
    """The most memory that an arm's processes had in a number of looks between windows of work."""
    most, until = 0, time.monotonic() + seconds
    while True:
        server.run(min(0.2, seconds))
        pids = server.ask(do="pids")
        most = max(most, pss([pids["learner"], *pids["workers"]]))
        if time.monotonic() >= until:
            return most


def measure_memory(bench: Bench) -> None:
    """Row 12: learner and one worker beside the one process of stable-baselines3, the memories of both filled."""
    rows = bench.args.memory_rows
    settings = {"rows": rows, "batch": bench.args.batch, "device": bench.args.device}
    ours = fit_arm(bench, bench.args.batch, rows=rows)
    ours.settings["data"]["capacity"] = rows  # type: ignore[index]
    arms = {"memory": ours, "stable-baselines3": Arm("stable-baselines3", "td3", settings)}
    found: dict[str, list[float]] = {}
    with serving(bench, arms) as servers:
        for name, server in servers.items():
            try:
                found[name] = [float(peak(server, bench.args.seconds)) for _ in range(bench.args.rounds)]
            except ServedError as error:
                bench.absent(name, str(error))
    for name, values in found.items():
        bench.keep_rate("memory", name, [value / 2**20 for value in values], "MiB")
    bench.add_group("memory", found)


LEARNER_ROWS: Mapping[str, Row] = {
    "1.256": Row("td3", ("fit", "bare"), "updates/s in fit over a bare loop, batch 256", Target(0.9, True)),
    "1.1024": Row("td3_large", ("fit", "bare"), "updates/s in fit over a bare loop, batch 1,024", Target(0.95, True)),
    **{
        f"2.{name}": Row(
            algorithm, ("fit", name), f"{algorithm.upper()} updates/s in fit over {name}", Target(least, True)
        )
        for name, (least, algorithm) in PEERS.items()
    },
    "3": Row(
        "td3",
        ("fit_fast_samples", "stable-baselines3_samples"),
        "learned samples/s, batch 1,024 (bfloat16 where the CPU has it), over stable-baselines3, batch 256",
        Target(2.5, True),
    ),
    "4": Row("options", ("k1", "k4"), "time per update, four options over one", Target(1.6, False)),
    "9": Row("publish", ("publisher", "memcpy"), "publishing over copying the parameters", Target(2.0, False)),
    "9.mailbox": Row("publish", ("mailbox", "memcpy"), "the mailbox's part of it"),
    "12": Row(
        "memory", ("memory", "stable-baselines3"), "memory of learner and worker over stable-baselines3's process",
        Target(0.6, False),
    ),
}  # fmt: skip
GROUPS = {
    "td3": measure_td3,
    "td3_large": measure_large,
    "sac": measure_sac,
    "options": measure_options,
    "publish": measure_publish,
    "memory": measure_memory,
}
LEARNER_GROUPS = tuple(GROUPS)
#: The other groups have the same arms in other sizes.
LEARNER_QUICK = {"rows": 2048, "memory_rows": 4096, "no_compile": True, "groups": ("publish",)}


def run_learner(bench: Bench) -> None:
    """The chosen groups, one after the other."""
    for name in bench.args.groups:
        GROUPS[name](bench)


def add_learner_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``learner``."""
    parser.add_argument("--rows", type=int, default=100_000, help="stored at the start (default: 100000)")
    parser.add_argument("--batch", type=int, default=256, help="of rows 1.256, 2 and 9 (default: 256)")
    parser.add_argument("--memory-rows", type=int, default=500_000, help="stored for row 12 (default: 500000)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled floor out: it takes minutes")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"], help="of the learners (default: cpu)")
    parser.add_argument("--replay-device", default="cpu", help="data.replay_device of ours (default: cpu)")
    parser.add_argument("--precision", help="of rows 3 and 4 (default: bf16-mixed where the CPU has the units)")


def check_learner_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them; also gives ``args.device``."""
    args.device = "cuda" if args.accelerator == "gpu" else "cpu"
    for name in ("rows", "memory_rows"):
        if getattr(args, name) < LARGE_BATCH:
            return f"--{name.replace('_', '-')} must be at least {LARGE_BATCH}"
    if not 1 <= args.batch <= args.rows:
        return "--batch must lie between 1 and --rows"
    if args.accelerator == "gpu" and not torch.cuda.is_available():
        return "--accelerator gpu: torch finds no GPU here"
    return None
