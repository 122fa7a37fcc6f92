"""Does the rate limiter keep its promise, whichever side is slow, and does a long run keep its memory?

    python scripts/rate_check.py --steps 60000 --json rate.json

One run each of ``lightning fit`` on HalfCheetah-v5 (MuJoCo in EnvPool) with a worker process of its own: ``even`` as it
is, ``slow-simulator`` with a simulator and ``slow-learner`` with updates that take five times as long. Of each it tells
samples per inserted step over the whole run and over its second half beside the setting, the private memory of learner
and worker at a fifth of the run and at its end, and the shares of time that they waited. Exit status 1 where a rate is
off by more than 1 % or a process has grown by more than 20 MB and 3 %. Where a side may run ahead by some hundred
samples (``data.rate_band``), the second half of a run of less than 30,000 steps can be off by more.

The workers import this module for :class:`SlowEnv`, the learner for :class:`Recorder`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from claw_lightning.rollout.envs.base import StepResult, VectorEnv, make_env

if TYPE_CHECKING or "lightning" in sys.modules:
    from claw_lightning.hooks import UpdateCallback
else:  # a worker: it needs the simulator only, and Lightning would take seconds and memory
    UpdateCallback = object

ROOT = Path(__file__).resolve().parents[1]
#: Arm: how many times as long a simulator step and an update take.
ARMS = {"even": (1.0, 1.0), "slow-simulator": (5.0, 1.0), "slow-learner": (1.0, 5.0)}
MAX_ERROR = 0.01
MAX_GROWTH_MB, MAX_GROWTH_SHARE = 20.0, 0.03
WARM, HALF = 0.2, 0.5  # of the run
#: Shares of the run at whose end memory is read.
MARKS = (WARM, 0.4, HALF, 0.6, 0.8)
MB = 1e6
TASK, LANES, WARMUP_STEPS, SAMPLES_PER_INSERT = "HalfCheetah-v5", 8, 1_000, 4.0
#: Seconds per environment step after which a run counts as hung, beyond the start.
PATIENCE, START_PATIENCE = 0.02, 120.0
#: Small networks and no evaluations: both sides take about as long, and a minute or two do for a long run. Small
#: requests, because the band (two requests) is what the second half can be off by.
SETTINGS = {
    "model.num_options": 4,
    "model.hidden_sizes": "[64,64]",
    "data.env.class_path": "rate_check.SlowEnv",
    "data.num_workers": 1,
    "data.envs_per_worker": LANES,
    "data.capacity": 20_000,
    "data.batch_size": 128,
    "data.updates_per_step": 2,
    "data.samples_per_insert": SAMPLES_PER_INSERT,
    "data.warmup_steps": WARMUP_STEPS,
    "data.learner_threads": 1,
    "trainer.limit_val_batches": 0,
    "trainer.enable_progress_bar": "false",
}


# -- the slow sides ---------------------------------------------------------------------------------------------------


class SlowEnv(VectorEnv):
    """Another adapter whose steps take ``factor`` times as long."""

    def __init__(
        self, adapter: str, task: str, factor: float = 1.0, num_envs: int = 1, seed: int = 0, **init_args: Any
    ) -> None:
        self.env, self.factor = make_env(adapter, dict(init_args, task=task), num_envs, seed), factor
        self.num_envs, self.spec = num_envs, self.env.spec

    def reset(self, seed: int | None = None) -> np.ndarray:
        """As the other one."""
        return self.env.reset(seed)

    def step(self, action: np.ndarray) -> StepResult:
        """As the other one, then wait."""
        started = time.perf_counter()
        result = self.env.step(action)
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.perf_counter() - started))
        return result

    def states(self) -> np.ndarray | None:
        """As the other one."""
        return self.env.states()

    def close(self) -> None:
        """As the other one."""
        self.env.close()


class Recorder(UpdateCallback):
    """Makes updates take ``factor`` times as long, and writes to ``out`` what was counted at some marks of a run.

    Args:
        out: JSON file: a list of :meth:`look`, one per mark and one at the end.
        factor: of the time between two updates' ends.
    """

    def __init__(self, out: str, factor: float = 1.0) -> None:
        self.out, self.factor = Path(out), factor
        self._started = 0.0
        self._looks: list[dict[str, Any]] = []
        self._marks = list(MARKS)

    def on_batch_sampled(self, trainer: Any, module: Any, batch: Any) -> None:
        """The first update of a ``training_step`` begins."""
        if not self._looks:
            self._looks.append(self.look(trainer))
        self._started = time.perf_counter()

    def on_update_end(self, trainer: Any, module: Any) -> None:
        """Wait; the next update begins then."""
        if self.factor > 1.0:
            time.sleep((self.factor - 1.0) * (time.perf_counter() - self._started))
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count where a mark has been passed."""
        data = trainer.datamodule
        if self._marks and data.limiter.inserted >= self._marks[0] * data.max_env_steps:
            self._looks.append(dict(self.look(trainer), mark=self._marks.pop(0)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Count while the workers are still there."""
        self._looks.append(dict(self.look(trainer), mark=1.0))
        self.out.write_text(json.dumps(self._looks))

    @staticmethod
    def look(trainer: Any) -> dict[str, Any]:
        """Counters, seconds and private bytes of this moment."""
        import psutil

        from callbacks.worker_health import private_memory

        data = trainer.datamodule
        data.regulate()  # counts what the rings hold by now
        processes = {"learner": os.getpid(), **data.processes()}
        timers = data.timers()
        return {
            "inserted": data.limiter.inserted,
            "sampled": data.limiter.sampled,
            "seconds": time.perf_counter(),
            "learner_wait": data.learner_wait,
            "worker_wait": timers["wait"],
            "worker_busy": sum(timers.values()),
            "memory": {name: private_memory(psutil.Process(pid)) for name, pid in processes.items()},
        }


# -- arithmetic -------------------------------------------------------------------------------------------------------


def summarise(looks: Sequence[dict[str, Any]], target: float, warmup: int) -> dict[str, Any]:
    """Rates, waits and growth of one run.

    Args:
        looks: of :meth:`Recorder.look`; the first before anything was learned, the others with their ``mark``.
        target: samples per inserted step that were asked for.
        warmup: inserted steps that are not owed.
    """
    first, last = looks[0], looks[-1]
    at = {look["mark"]: look for look in looks if "mark" in look}
    half, warm = at[HALF], at[WARM]
    whole = last["sampled"] / (last["inserted"] - warmup)
    second = (last["sampled"] - half["sampled"]) / (last["inserted"] - half["inserted"])
    seconds = last["seconds"] - first["seconds"]
    steps = last["inserted"] - warm["inserted"]
    memory = {}
    for name in warm["memory"].keys() & last["memory"].keys():
        before, after = warm["memory"][name] / MB, last["memory"][name] / MB
        memory[name] = {
            "warm_mb": before,
            "end_mb": after,
            "growth_mb": after - before,
            "growth_mb_per_10k_steps": (after - before) / steps * 10_000,
            "course_mb": [look["memory"][name] / MB for look in at.values() if name in look["memory"]],
        }
    return {
        "target": target,
        "whole": whole,
        "second_half": second,
        "error_whole": whole / target - 1.0,
        "error_second_half": second / target - 1.0,
        "inserted": last["inserted"],
        "sampled": last["sampled"],
        "seconds": seconds,
        "learner_wait": (last["learner_wait"] - first["learner_wait"]) / seconds,
        "worker_wait": (last["worker_wait"] - first["worker_wait"])
        / max(1e-9, last["worker_busy"] - first["worker_busy"]),
        "memory": memory,
    }


def faults(summary: dict[str, Any]) -> list[str]:
    """What is not as it should be, a line each."""
    found = []
    for name, what in (("error_whole", "the whole run"), ("error_second_half", "the second half")):
        if abs(summary[name]) > MAX_ERROR:
            found.append(f"samples per insert of {what} are off by {100 * summary[name]:+.2f} %")
    for name, figures in summary["memory"].items():
        if figures["growth_mb"] > max(MAX_GROWTH_MB, MAX_GROWTH_SHARE * figures["warm_mb"]):
            found.append(f"{name} has grown by {figures['growth_mb']:.0f} MB")
    return found


def build_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: rates and waits of each arm, then the memory of each process."""
    lines = [
        "| arm | target | whole run | second half | learner waits | worker waits | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        rates = [
            f"{record[name]:.3f} ({100 * record[error]:+.2f} %)"
            for name, error in (("whole", "error_whole"), ("second_half", "error_second_half"))
        ]
        lines.append(
            f"| {record['arm']} | {record['target']:g} | {' | '.join(rates)} | {100 * record['learner_wait']:.0f} % "
            f"| {100 * record['worker_wait']:.0f} % | {record['seconds']:.0f} |"
        )
    lines += ["", "| arm | process | MB, warm | MB, end | growth | per 10,000 steps |", "|---|---|---:|---:|---:|---:|"]
    for record in records:
        for name, figures in sorted(record["memory"].items()):
            lines.append(
                f"| {record['arm']} | {name} | {figures['warm_mb']:.1f} | {figures['end_mb']:.1f} "
                f"| {figures['growth_mb']:+.1f} | {figures['growth_mb_per_10k_steps']:+.2f} |"
            )
    return "\n".join(lines)


# -- runs -------------------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"rate_check: error: {' '.join(message.split())}\n")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check."""
    parser = OneLineParser(prog="rate_check", description="Check the rate limiter and the memory of real runs.")
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps of each run (default: 60000)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="which (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of the runs")
    args = parser.parse_args(arguments)
    if args.steps < 3 * WARMUP_STEPS:
        parser.error(f"--steps must be at least {3 * WARMUP_STEPS}")
    if any("=" not in setting for setting in args.set):
        parser.error("--set takes KEY=VALUE")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    return args


def arm_command(arm: str, steps: int, out: Path, extra: Sequence[str] = ()) -> list[str]:
    """Command line of one run; ``extra`` holds KEY=VALUE that win."""
    simulator, learner = ARMS[arm]
    settings = {
        **SETTINGS,
        "data.env.init_args.adapter": "EnvPoolEnv",
        "data.env.init_args.task": TASK,
        "data.env.init_args.factor": simulator,
        "data.max_env_steps": steps,
        "trainer.callbacks+": "rate_check.Recorder",
        "trainer.callbacks.out": out,
        "trainer.callbacks.factor": learner,
        **dict(setting.split("=", 1) for setting in extra),
    }
    command = [sys.executable, "-m", "claw_lightning", "fit", "--config", str(ROOT / "conf" / "pendulum.yaml")]
    return command + [f"--{name}={value}" for name, value in settings.items()]


def run_arm(arm: str, steps: int, extra: Sequence[str] = ()) -> dict[str, Any]:
    """One run, in a process and a folder of its own.

    Raises:
        CompareError: it failed or hung; names the last line of its output.
    """
    from compare_sb3 import run_child

    # For the run and, where it has this interpreter, for its workers: this module must be found.
    paths = [str(Path(__file__).resolve().parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="rate_check-") as name:
        folder = Path(name)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        try:
            run_child(arm_command(arm, steps, folder / "looks.json", extra), folder, START_PATIENCE + PATIENCE * steps)
        finally:
            os.environ.clear()
            os.environ.update(before)
        looks = json.loads((folder / "looks.json").read_text())
    chosen = dict(setting.split("=", 1) for setting in extra)
    target = float(chosen.get("data.samples_per_insert", SAMPLES_PER_INSERT))
    warmup = int(chosen.get("data.warmup_steps", WARMUP_STEPS))
    lanes = int(chosen.get("data.envs_per_worker", LANES))
    return {"arm": arm, **summarise(looks, target, -(-warmup // lanes) * lanes)}


def stop_on_signal(number: int, frame: Any) -> NoReturn:
    """A polite kill ends this process as Ctrl-C does, by an exception, so that children go too."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    from compare_sb3 import CompareError, write_json

    args = parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)
    records: list[dict[str, Any]] = []
    try:
        for arm in args.arms:
            print(f"{arm}: {args.steps:,} steps", file=sys.stderr, flush=True)
            records.append(run_arm(arm, args.steps, args.set))
            if args.json is not None:
                write_json(args.json, {"steps": args.steps, "settings": SETTINGS, "set": args.set, "records": records})
    except KeyboardInterrupt:
        print("rate_check: interrupted", file=sys.stderr)
        return 130
    except (CompareError, OSError) as error:
        print(f"rate_check: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(build_table(records))
    wrong = [f"{record['arm']}: {fault}" for record in records for fault in faults(record)]
    for line in wrong:
        print(f"rate_check: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
