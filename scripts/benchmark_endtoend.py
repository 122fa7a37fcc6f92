"""Suite ``endtoend`` of benchmark.py: whole runs, simulator and learner together.

Group ``spi_<n>`` (rows 7 and 8): TD3 on HandReachDense-v3 in float32, without normalisation, batch 256, at n samples
learned per environment step. Ours: learner on core 0, worker on core 1, one thread each. stable-baselines3 has both
cores in all of its settings: two processes of Gymnasium's simulator, and EnvPool's simulator in 16 lanes with one
thread and with two (torch likewise); the fastest of them counts. Each arm takes ``--steps`` environment steps and
learns what belongs to them; imports, building and warm-up are over before the clock runs. Beside these, our workers
alone and our learner alone, one core each: were the two perfectly overlapped, a run would last as long as the slower
of them.

Group ``returns`` (row 11): wall time until noise-free episodes reach a return, with the recipe of compare_sb3.py.
Evaluations are not timed. A run that does not reach it in ``--budget`` seconds counts with those. The floor for four
options is a bare loop with one policy, that steps and learns in turn on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmark_learner import has_bfloat16
from measuring import Bench, Row, Target
from served import Arm, ServedError, Server, measure_served, rates, serving

TASK = "HandReachDense-v3"
SB3 = "stable-baselines3"
SAMPLES = {32: 2.0, 256: 1.15}
#: Settings of stable-baselines3 that may be its best: its environments, and threads of torch.
SB3_SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "processes": ({"kind": "processes", "processes": 2}, 2),
    "envpool_1": ({"kind": "envpool", "env_threads": 1}, 1),
    "envpool_2": ({"kind": "envpool", "env_threads": 2}, 2),
}


class Goal:
    """A return that is to be reached.

    Args:
        task: EnvPool's.
        target: return.
        chunk: environment steps between evaluations.
        recipe: of all arms: gamma, tau, learning rate, noise, samples per insert.
        model: beyond that, of ours.
    """

    def __init__(self, task: str, target: float, chunk: int, recipe: Mapping[str, Any], model: Mapping[str, Any]):
        self.task, self.target, self.chunk, self.recipe, self.model = task, target, chunk, recipe, model


HAND = {"gamma": 0.95, "tau": 0.02, "lr": 1e-3, "noise": 0.3, "samples_per_insert": 64, "normalize": True}
FOUR = {
    "num_options": 4, "arrival": "sampled", "all_options": 0.5, "option_batch_size": 256, "option_delay": 4,
    "target_decision_rate": 0.1, "deliberation_form": "regularizer", "deliberation_cost_lr": 0.01, "tau": 0.05,
    "critic_lr": 2e-3, "actor_lr": 2e-3, "action_penalty": 0.01,
}  # fmt: skip
GOALS = {
    "pendulum": Goal("Pendulum-v1", -200.0, 800, {**HAND, "gamma": 0.98, "tau": 0.01, "noise": 0.1}, {}),
    "hand": Goal(TASK, -1.5, 1600, HAND, {}),
    "four_options": Goal(TASK, -1.0, 1600, {**HAND, "batch": 1024}, FOUR),
}


def fit_arm(bench: Bench, samples: float, **more: Any) -> Arm:
    """Our run, learner on core 0 and worker on core 1."""
    args = bench.args
    data = {"samples_per_insert": samples, "updates_per_step": 4, "replay_device": args.replay_device}
    common = {"task": args.task, "count": "env_steps", "learner_cores": [0], "worker_cores": [1], "data": data}
    return Arm("claw", "fit", common | {"accelerator": args.accelerator, "batch": args.batch} | more, (0, 1))


def measure_samples(bench: Bench, samples: int) -> None:
    """Rows 7 and 8 at one number of samples per insert."""
    args, group = bench.args, f"spi_{samples}"
    task, cores = args.task, (0, 1)
    alone = {"task": task, "worker_cores": [1]}
    arms = {
        "fit": fit_arm(bench, samples, precision=args.precision or "32-true"),
        "workers": Arm("claw", "collect", alone, cores),
        # So many samples per step that the learner never waits and the worker hardly works.
        "learner": fit_arm(bench, 1e7, count="samples", precision=args.precision or "32-true"),
    }
    for name, (settings, threads) in SB3_SETTINGS.items():
        device = {"samples_per_insert": samples, "batch": args.batch, "device": args.device}
        arms[f"sb3_{name}"] = Arm(SB3, "fit", {"task": task, **device, **settings}, cores, threads)
    counts = {name: args.steps * (samples if name == "learner" else 1) for name in arms}
    found = rates(measure_served(bench, group, arms, "steps/s", count=counts, rounds=args.pairs))
    theirs = {name: values for name, values in found.items() if name.startswith("sb3_")}
    if theirs:
        best = max(theirs, key=lambda name: median(theirs[name]))
        found["sb3"] = theirs[best]
        bench.note(f"{group}: the fastest of stable-baselines3 is {best.removeprefix('sb3_')}")
    elif reason := bench.reason("sb3_processes"):
        bench.absent("sb3", reason)
    if "workers" in found and "learner" in found:
        pairs = zip(found["workers"], found["learner"], strict=True)
        found["slower"] = [min(steps, learned / samples) for steps, learned in pairs]
    bench.add_group(group, found)


def learning_arms(goal: Goal, name: str, seed: int) -> dict[str, Arm]:
    """Who is to reach a goal."""
    recipe = {**goal.recipe, "seed": seed, "task": goal.task}
    batch, four = recipe.get("batch", 256), name == "four_options"
    model = {
        "gamma": recipe["gamma"], "tau": recipe["tau"], "critic_lr": recipe["lr"], "actor_lr": recipe["lr"],
        "normalize_observations": True, "exploration": recipe["noise"], **goal.model,
    }  # fmt: skip
    data = {"samples_per_insert": recipe["samples_per_insert"], "updates_per_step": 4 if batch > 256 else 8}
    ours = {"task": goal.task, "count": "env_steps", "learner_cores": [0], "worker_cores": [1], "seed": seed}
    ours |= {"model": model, "data": data, "batch": batch, "precision": "bf16-mixed" if has_bfloat16() else "32-true"}
    arms = {"fit": Arm("claw", "fit", ours, (0, 1))}
    if four:
        bare = {**recipe, "bf16": has_bfloat16()}
        return {**arms, "alternating": Arm("bare", "alternating", bare)}
    for threads in (1, 2):
        settings = {**recipe, "kind": "envpool", "env_threads": threads}
        arms[f"sb3_{threads}"] = Arm(SB3, "fit", settings, (0, 1), threads)
    return arms


def seconds_to(server: Server, goal: Goal, args: argparse.Namespace) -> float:
    """Of work, until an evaluation reaches the goal; the budget where none does."""
    spent = 0.0
    while spent < args.budget:
        spent += server.run(count=goal.chunk, deadline=args.budget + 600.0).seconds
        if server.ask(600.0, do="evaluate", episodes=args.episodes)["return"] >= goal.target:
            return spent
    return float(args.budget)


def measure_returns(bench: Bench) -> None:
    """Row 11, a run of each arm and seed after the other."""
    for name, goal in GOALS.items():
        found: dict[str, list[float]] = {}
        for seed in range(bench.args.seeds):
            for arm_name, arm in learning_arms(goal, name, seed).items():
                with serving(bench, {arm_name: arm}) as servers:
                    for server in servers.values():
                        try:
                            found.setdefault(arm_name, []).append(seconds_to(server, goal, bench.args))
                        except ServedError as error:
                            bench.absent(arm_name, str(error))
        found = {arm: values for arm, values in found.items() if len(values) == bench.args.seeds}
        for arm_name, values in found.items():
            bench.keep_rate(name, arm_name, values, "s")
            if max(values) >= bench.args.budget:
                bench.note(f"returns: {arm_name} did not reach {goal.target:g} on {goal.task} within --budget")
        theirs = {arm: values for arm, values in found.items() if arm.startswith("sb3_")}
        if theirs:
            found["sb3"] = min(theirs.values(), key=median)
        elif reason := bench.reason("sb3_1"):
            bench.absent("sb3", reason)
        bench.add_group(name, found)


def _goal_row(name: str, other: str, text: str, most: float) -> Row:
    return Row(name, ("fit", other), text, Target(most, False))


ENDTOEND_ROWS: Mapping[str, Row] = {
    **{
        f"7.{samples}": Row(
            f"spi_{samples}", ("fit", "sb3"),
            f"wall time of stable-baselines3's best setting over ours, {samples} samples per step", Target(least, True),
        )
        for samples, least in SAMPLES.items()
    },
    **{
        f"8.{samples}": Row(
            f"spi_{samples}", ("slower", "fit"),
            f"wall time over the longer of workers alone and learner alone, {samples} samples per step",
            Target(1.15, False),
        )
        for samples in SAMPLES
    },
    "11.pendulum": _goal_row("pendulum", "sb3", "wall time to -200 on Pendulum-v1 over stable-baselines3", 0.6),
    "11.hand": _goal_row("hand", "sb3", f"wall time to -1.5 on {TASK} over stable-baselines3", 0.6),
    "11.four_options": _goal_row(
        "four_options", "alternating", f"wall time of four options to -1.0 on {TASK} over a bare loop of one", 0.8
    ),
}  # fmt: skip
ENDTOEND_GROUPS = (*(f"spi_{samples}" for samples in SAMPLES), "returns")
ENDTOEND_QUICK = {
    "task": "Pendulum-v1", "steps": 64, "pairs": 1, "seeds": 1, "budget": 0.01, "episodes": 2,
    "groups": ("spi_32",),
}  # fmt: skip


def run_endtoend(bench: Bench) -> None:
    """The chosen groups, one after the other."""
    for group in bench.args.groups:
        if group == "returns":
            measure_returns(bench)
        else:
            measure_samples(bench, int(group.removeprefix("spi_")))


def add_endtoend_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``endtoend``."""
    parser.add_argument("--task", default=TASK, help=f"of EnvPool and Gymnasium, rows 7 and 8 (default: {TASK})")
    parser.add_argument("--batch", type=int, default=256, help="default: 256")
    parser.add_argument("--steps", type=int, default=3000, help="environment steps of a run (default: 3000)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each arm (default: 5)")
    parser.add_argument("--seeds", type=int, default=3, help="of row 11 (default: 3)")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds of a run of row 11 (default: 900)")
    parser.add_argument("--episodes", type=int, default=20, help="of an evaluation of row 11 (default: 20)")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"], help="of the learners (default: cpu)")
    parser.add_argument("--replay-device", default="cpu", help="data.replay_device of ours (default: cpu)")
    parser.add_argument("--precision", help="of ours in rows 7 and 8 (default: 32-true)")


def check_endtoend_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them; also gives ``args.device``."""
    import torch

    args.device = "cuda" if args.accelerator == "gpu" else "cpu"
    for name in ("batch", "steps", "pairs", "seeds", "episodes"):
        if getattr(args, name) < 1:
            return f"--{name} must be at least 1"
    if not args.budget > 0:
        return "--budget must be positive"
    if args.accelerator == "gpu" and not torch.cuda.is_available():
        return "--accelerator gpu: torch finds no GPU here"
    return None
