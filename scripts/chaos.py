"""Break the workers of a real run at random moments, and say what was lost and how soon it was whole again.

    python scripts/chaos.py --coded --minutes 2 --kills 5 --stops 2 --corruptions 5
    python scripts/chaos.py --config conf/hand_reach_dense.yaml --minutes 5 --every 20 --json chaos.json

Starts one ``lightning fit``, waits until it learns, and then kills (SIGKILL) and stops (SIGSTOP) worker processes from
outside and orders nonsense, exceptions, exits and hangs from simulators (``FaultyEnv`` around the configured one).
With ``--coded`` the simulator is ``CodedEnv``, and every batch that is learned from is checked: no row may be torn or
reach over the end of an episode. In the end the run is stopped by SIGINT.

Exit status 1 where something promised was broken: a death found late, a hang found later than its deadline, a worker
not ready again in time, the collection not back at its rate in time (judged where nothing else broke meanwhile), rows
that are not whole, an end other than asked for, processes or shared memory left behind.
Arguments after ``--`` go to ``lightning fit`` and win over all else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import psutil

from claw_lightning.hooks import UpdateCallback
from claw_lightning.rollout.envs.diagnostic import check_rows

ROOT = Path(__file__).resolve().parents[1]
#: What FaultyEnv is ordered to do, in turns. Wrong shapes and dtypes are left out: an adapter that returns them once
#: returns them always.
CORRUPTIONS = ("nan_obs", "nan_reward", "inf_obs", "raise", "exit", "quit", "hang", "hang_gil", "print", "slow")
#: After these the process is gone, or as good as gone.
DEATHS = ("kill", "raise", "exit", "quit")
HANGS = ("stop", "hang", "hang_gil")
QUARANTINE = ("nan_obs", "nan_reward", "inf_obs")
#: Counts of check_rows that must be zero.
BROKEN_ROWS = ("torn", "cross_episode", "wrong_step", "wrong_reward", "wrong_action", "wrong_end")
START_LIMIT, END_LIMIT = 180.0, 60.0  # seconds
WHOLE_AGAIN = 0.95  # of the run's median rate

Event = dict[str, Any]


@dataclass
class Fault:
    """One injected fault: what, when (monotonic seconds), and which process."""

    kind: str
    time: float
    pid: int


# -- what happened: pure functions of events and faults ---------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a fault; None where it did not come to that.

    Attributes:
        worker: its number; None where no start of such a process is known.
        detected: seconds until the run noticed.
        ready: seconds until a successor was ready.
        rate_before, rate_after: environment steps per second in the windows before and after.
        whole: seconds until the rate of a window was back at 95 % of the run's median.
        judged_until: seconds that the run went on after it.
        alone_until: seconds until the next death or hang.
    """

    kind: str
    time: float
    pid: int
    worker: int | None = None
    detected: float | None = None
    what: str = ""
    ready: float | None = None
    rate_before: float | None = None
    rate_after: float | None = None
    whole: float | None = None
    judged_until: float = 0.0
    alone_until: float = float("inf")


class Collected:
    """Environment steps over time, from the ``draw`` events of a run."""

    def __init__(self, events: Sequence[Event]) -> None:
        lanes = next((e["settings"]["data.envs_per_worker"] for e in events if e["event"] == "run"), 1)
        draws = [e for e in events if e["event"] == "draw"]
        self.times = [float(e["time"]) for e in draws]
        self.steps = [float(sum(e["heads"]) * lanes) for e in draws]

    def at(self, moment: float) -> float:
        """Steps at a moment, linear between two draws."""
        after = bisect_right(self.times, moment)
        if after == 0 or after == len(self.times):
            return self.steps[min(after, len(self.times) - 1)]
        before = after - 1
        share = (moment - self.times[before]) / (self.times[after] - self.times[before])
        return self.steps[before] + share * (self.steps[after] - self.steps[before])

    def rate(self, start: float, stop: float) -> float | None:
        """Steps per second between two moments; None where the run was not drawing at both."""
        if not self.times or stop <= start or start < self.times[0] or stop > self.times[-1]:
            return None
        return (self.at(stop) - self.at(start)) / (stop - start)

    def median_rate(self, window: float) -> float | None:
        """Median over successive windows of the whole run."""
        if not self.times:
            return None
        count = int((self.times[-1] - self.times[0]) / window)
        starts = [self.times[0] + i * window for i in range(count)]
        rates = [rate for start in starts if (rate := self.rate(start, start + window)) is not None]
        return median(rates) if rates else None

    def whole_after(self, moment: float, window: float, rate: float) -> float | None:
        """Seconds from a moment to the first window in which the rate is reached again; None: never."""
        first = bisect_left(self.times, moment)
        for start in [moment, *self.times[first:]]:
            found = self.rate(start, start + window)
            if found is None:
                return None
            if found >= rate:
                return start - moment
        return None


def outcomes(events: Sequence[Event], faults: Sequence[Fault], window: float = 2.0) -> list[Outcome]:
    """What became of each fault, in order of time."""
    collected = Collected(events)
    usual = collected.median_rate(window)
    last = max((float(e["time"]) for e in events), default=0.0)
    found = []
    for fault in sorted(faults, key=lambda fault: fault.time):
        outcome = Outcome(**asdict(fault), judged_until=max(0.0, last - fault.time))
        starts = [e for e in events if e["event"] == "start" and e.get("pid") == fault.pid and e["time"] <= fault.time]
        outcome.worker = starts[-1]["worker"] if starts else None
        outcome.rate_before = collected.rate(fault.time - window, fault.time)
        outcome.rate_after = collected.rate(fault.time, fault.time + window)
        if usual is not None:
            outcome.whole = collected.whole_after(fault.time, window, WHOLE_AGAIN * usual)
        later = [e for e in events if e["time"] >= fault.time]
        noticed = next((e for e in later if e["event"] in ("failure", "lost") and e.get("pid") == fault.pid), None)
        if fault.kind in DEATHS + HANGS and noticed is not None:
            outcome.detected, outcome.what = noticed["time"] - fault.time, str(noticed.get("what", ""))
            successor = next(
                (e for e in later if e["event"] == "ready" and e["worker"] == noticed["worker"]
                 and e["time"] >= noticed["time"] and e.get("pid") != fault.pid), None,
            )  # fmt: skip
            outcome.ready = None if successor is None else successor["time"] - fault.time
        found.append(outcome)
    losses = sorted(outcome.time for outcome in found if outcome.kind in DEATHS + HANGS)
    for outcome in found:
        outcome.alone_until = next((time for time in losses if time > outcome.time), float("inf")) - outcome.time
    return found


@dataclass
class Limits:
    """What is promised, in seconds."""

    death: float = 1.0
    hang_slack: float = 1.0
    recovery: float = 10.0
    deadline: float = 5.0

    def detection(self, kind: str) -> float:
        """Within which a fault of this kind must be noticed."""
        return self.death if kind in DEATHS else self.deadline + self.hang_slack


def broken_promises(found: Iterable[Outcome], limits: Limits, checks: dict[str, Any] | None, coded: bool) -> list[str]:
    """One line for each promise that was broken; ``checks`` is what :class:`RowCheck` wrote.

    A fault whose time had not run out when the run ended is not judged.
    """
    lines, sick = [], 0
    for outcome in found:
        sick += outcome.kind in QUARANTINE
        if outcome.kind not in DEATHS + HANGS:
            continue
        name, limit = f"{outcome.kind} of process {outcome.pid}", limits.detection(outcome.kind)
        if outcome.detected is None:
            if outcome.judged_until > limit:
                lines.append(f"{name}: not noticed within {outcome.judged_until:.1f} s")
            continue
        if outcome.detected > limit:
            lines.append(f"{name}: noticed after {outcome.detected:.2f} s, promised {limit:g} s")
        since = outcome.judged_until - outcome.detected if outcome.ready is None else outcome.ready - outcome.detected
        if since > limits.recovery:
            text = "not ready again" if outcome.ready is None else "ready again"
            lines.append(f"{name}: {text} {since:.1f} s after it was noticed, promised {limits.recovery:g} s")
        # The rate can be judged where nothing else broke in the meantime.
        whole, until = outcome.whole, outcome.detected + limits.recovery
        if (whole is None or whole > until) and min(outcome.judged_until, outcome.alone_until) > until:
            text = "never" if whole is None else f"after {whole - outcome.detected:.1f} s"
            lines.append(f"{name}: back at 95 % of the rate {text}, promised {limits.recovery:g} s from notice")
    if checks is None:
        lines.append("the run wrote no summary of its rows")
        return lines
    if checks["quarantined"] < sick:
        lines.append(f"{checks['quarantined']} rows quarantined after {sick} numbers that were not finite")
    if checks["not_finite"]:
        lines.append(f"{checks['not_finite']} sampled rows hold numbers that are not finite")
    if coded:
        lines += [f"{checks[name]} of {checks['rows']} sampled rows: {name}" for name in BROKEN_ROWS if checks[name]]
        if not checks["rows"]:
            lines.append("no row was checked")
    return lines


def summary(events: Sequence[Event], found: Sequence[Outcome], window: float = 2.0) -> dict[str, Any]:
    """The figures of a run: faults and their latencies by kind, rates, restarts."""
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        mine = [outcome for outcome in found if outcome.kind == kind]
        kinds[kind] = {"injected": len(mine)}
        for name in ("detected", "ready", "whole", "rate_before", "rate_after"):
            values = [value for outcome in mine if (value := getattr(outcome, name)) is not None]
            if values:
                kinds[kind][name] = {"count": len(values), "median": median(values), "max": max(values)}
    collected = Collected(events)
    counts = {name: sum(e["event"] == name for e in events) for name in ("start", "failure", "recycle", "lost")}
    return {
        "faults": kinds,
        "median_rate": collected.median_rate(window),
        "env_steps": collected.steps[-1] if collected.steps else 0.0,
        "seconds": collected.times[-1] - collected.times[0] if collected.times else 0.0,
        "events": counts,
    }


# -- a run that is watched --------------------------------------------------------------------------------------------


class EventTail:
    """Reads ``events.jsonl`` (:mod:`claw_lightning.events`) while a run writes it.

    Attributes:
        events: so far, as of the last :meth:`read`; of draws only what is needed here.
        is_learning: whether a batch has been drawn.
        started: all worker processes ever.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.is_learning = False
        self.started: list[int] = []
        self._ready: dict[int, int] = {}
        self._heads: dict[int, int] = {}  # vector steps at the start of each worker's process
        self._working: set[int] = set()
        self._path: Path | None = None
        self._offset = 0

    def read(self) -> EventTail:
        """Take in what was written since the last call."""
        if self._path is None:
            self._path = next(self.folder.rglob("events.jsonl"), None)
        if self._path is None:
            return self
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1  # the last line may be in the writing
        self._offset += whole
        for line in data[:whole].splitlines():
            self._take(json.loads(line))
        return self

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "draw":
            self.is_learning = True
            self._working |= {i for i, head in enumerate(event["heads"]) if head > self._heads.get(i, head)}
            event = {name: event[name] for name in ("event", "time", "heads")}
        elif kind == "ready":
            self._ready[event["worker"]] = event["pid"]
        elif kind in ("start", "failure", "lost", "recycle"):
            self._ready.pop(event["worker"], None)
            self._working.discard(event["worker"])
            if kind == "start":
                self.started.append(event["pid"])
                self._heads[event["worker"]] = event["head"]
        self.events.append(event)

    def ready(self) -> list[int]:
        """Processes of the workers that are ready and have taken a step since."""
        self.read()
        return [pid for worker, pid in self._ready.items() if worker in self._working]


class Chaos:
    """Injects faults into a running fit by a schedule.

    Args:
        ready: processes of the workers that are ready; one of them is hit.
        schedule: (seconds after :meth:`run` began, kind); ``kill``, ``stop``, or what the simulator is ordered to do.
        orders: folder of the simulators' orders.
    """

    def __init__(
        self,
        ready: Callable[[], list[int]],
        schedule: Sequence[tuple[float, str]],
        seed: int = 0,
        orders: Path | None = None,
    ) -> None:
        self.ready, self.schedule, self.orders = ready, sorted(schedule), orders
        self.faults: list[Fault] = []  # kills and stops; what simulators do they record themselves
        self.skipped = 0
        self._hit: set[int] = set()
        self._random = random.Random(seed)
        self._end = threading.Event()

    def run(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Inject all faults at their times; returns early once ``goes_on`` says no or after :meth:`stop`."""
        began = time.monotonic()
        for number, (moment, kind) in enumerate(self.schedule):
            while (left := began + moment - time.monotonic()) > 0 and not self._end.is_set():
                self._end.wait(min(left, 0.2))
                if not goes_on():
                    return
            if self._end.is_set():
                return
            self._inject(kind, number, goes_on)

    def stop(self) -> None:
        """Inject nothing more (from another thread)."""
        self._end.set()

    def _inject(self, kind: str, number: int, goes_on: Callable[[], bool]) -> None:
        if kind not in ("kill", "stop"):
            assert self.orders is not None
            (self.orders / f"{kind}.{number}").touch()
            return
        signal_number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        while goes_on() and not self._end.is_set():
            pids = [pid for pid in self.ready() if pid not in self._hit]
            if pids:
                pid = self._random.choice(pids)
                self._hit.add(pid)
                fault = Fault(kind, time.monotonic(), pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
                    self.faults.append(fault)
                    return
            time.sleep(0.02)
        self.skipped += 1


def plan(kinds: Sequence[str], seconds: float, margin: float, seed: int) -> list[tuple[float, str]]:
    """Random moments for the kinds, in random order: one in each of as many equal parts of the time.

    The first ``0.1 x seconds`` (at most 4 s) and the last ``margin`` seconds (at most a third) stay quiet, so that the
    run can be seen before and after each fault.
    """
    chooser = random.Random(seed)
    shuffled = list(kinds)
    chooser.shuffle(shuffled)
    first, last = min(4.0, 0.1 * seconds), seconds - min(margin, seconds / 3)
    part = (last - first) / max(1, len(shuffled))
    return [(first + (i + chooser.random()) * part, kind) for i, kind in enumerate(shuffled)]


class RowCheck(UpdateCallback):
    """Checks every batch that is learned from, and writes the counts to a file when the run ends.

    Args:
        path: JSON: ``rows`` and the counts of ``check_rows`` (of coded rows only), ``batches``, ``not_finite``,
            ``quarantined``.
        coded: whether the simulator is a CodedEnv.
    """

    def __init__(self, path: str, coded: bool = False) -> None:
        self.path, self.coded = path, coded
        self.counts: dict[str, int] = {"batches": 0, "rows": 0, "not_finite": 0, **dict.fromkeys(BROKEN_ROWS, 0)}
        self.quarantined = 0

    def on_batch_sampled(self, trainer: Any, module: Any, batch: Any) -> None:
        """Count."""
        sick = ~(batch.obs.isfinite().all(-1) & batch.next_obs.isfinite().all(-1) & batch.reward.isfinite())
        found = {"batches": 1, "not_finite": int(sick.sum())}
        if self.coded:
            tensors = (batch.obs, batch.next_obs, batch.reward, batch.terminated, batch.truncated, batch.action)
            obs, next_obs, reward, terminated, truncated, action = (tensor.cpu().numpy() for tensor in tensors)
            valid = None if batch.valid is None else batch.valid.cpu().numpy()
            found |= check_rows(obs, next_obs, reward, terminated, truncated, action, valid)
        for name, count in found.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.quarantined = trainer.datamodule.quarantined

    def write(self) -> None:
        """Write the file."""
        Path(self.path).write_text(json.dumps({**self.counts, "quarantined": int(self.quarantined)}))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Write what was counted."""
        self.write()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Write what was counted; a run that is stopped by a signal may end here."""
        self.write()


# -- the command line -------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"chaos: error: {' '.join(message.split())}\n")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check; ``kinds`` holds all faults to inject, ``extra`` what goes to the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    extra: list[str] = []
    if "--" in given:
        place = given.index("--")
        given, extra = given[:place], given[place + 1 :]
    parser = OneLineParser(prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="of learning under faults (default: 2)")
    parser.add_argument("--every", type=float, help="seconds between two faults of all kinds in turn, on average")
    parser.add_argument("--kills", type=int, help="number of SIGKILLs (default: 3, or 0 with --every)")
    parser.add_argument("--stops", type=int, help="number of SIGSTOPs (default: 1, or 0 with --every)")
    parser.add_argument("--corruptions", type=int, help="number of faults of the simulators (default: 4, or 0)")
    parser.add_argument("--kinds", nargs="+", choices=CORRUPTIONS, default=list(CORRUPTIONS), help="of corruptions")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--config", type=Path, help="of the run (default: conf/hand_reach_dense.yaml)")
    what.add_argument("--coded", action="store_true", help="CodedEnv, with a check of every sampled row")
    parser.add_argument("--obs-size", type=int, default=256, help="of --coded (default: 256)")
    parser.add_argument("--autoreset", choices=("next_step", "same_step"), default="next_step", help="of --coded")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=float, default=2.0, help="seconds over which rates are taken (default: 2)")
    parser.add_argument("--deadline", type=float, default=5.0, help="data.deadlines of a running worker (default: 5)")
    parser.add_argument("--death-limit", type=float, default=1.0, help="seconds to notice a death (default: 1)")
    parser.add_argument("--hang-slack", type=float, default=1.0, help="the same for a hang, after its deadline")
    parser.add_argument("--recovery-limit", type=float, default=10.0, help="seconds from notice to ready (default: 10)")
    parser.add_argument("--folder", type=Path, help="keep the run here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    args = parser.parse_args(given)
    for name in ("minutes", "window", "deadline", "death_limit", "hang_slack", "recovery_limit", "every"):
        if (value := getattr(args, name)) is not None and not 0 < value < 1e6:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    numbers = [args.kills, args.stops, args.corruptions]
    if min([number or 0 for number in numbers]) < 0 or args.num_workers < 1 or args.seed < 0:
        parser.error("--kills, --stops, --corruptions and --seed cannot be negative; one worker is the least")
    if not args.coded and args.config is None:
        args.config = ROOT / "conf" / "hand_reach_dense.yaml"
    if args.config is not None and not args.config.is_file():
        parser.error(f"--config {args.config}: no such file")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")
    if args.folder is not None and args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.error(f"--folder {args.folder}: give one that is new or empty")
    is_default = args.every is None and numbers == [None] * 3
    kills, stops, corruptions = (3, 1, 4) if is_default else (number or 0 for number in numbers)
    args.kinds_planned = ["kill"] * kills + ["stop"] * stops
    args.kinds_planned += [args.kinds[i % len(args.kinds)] for i in range(corruptions)]
    if args.every is not None:
        turn = ("kill", "stop", *args.kinds)
        args.kinds_planned += [turn[i % len(turn)] for i in range(int(60.0 * args.minutes / args.every))]
    args.extra = extra
    return args


def coded_config(args: argparse.Namespace) -> dict[str, Any]:
    """A small run on CodedEnv: what matters is that rings go round and batches are drawn all the time."""
    init_args = {"task": "coded", "obs_size": args.obs_size, "autoreset": args.autoreset}
    return {
        "trainer": {"accelerator": "cpu", "max_epochs": -1, "limit_train_batches": 200, "log_every_n_steps": 50,
                    "enable_model_summary": False},
        "model": {"num_options": 2, "hidden_sizes": [16, 16], "option_hidden_sizes": [8]},
        "data": {"env": {"class_path": "CodedEnv", "init_args": init_args}, "envs_per_worker": 8, "capacity": 4_000,
                 "batch_size": 256, "updates_per_step": 2, "samples_per_insert": 8, "warmup_steps": 1_000,
                 "learner_threads": 1},
    }  # fmt: skip


def chaos_config(args: argparse.Namespace, env: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is laid over the run's own configuration."""
    init_args = {
        "adapter": env["class_path"], "adapter_args": env.get("init_args", {}), "orders": str(folder / "orders"),
        "record": str(folder / "faults.jsonl"),
    }  # fmt: skip
    deadlines = dict.fromkeys(("step", "pull", "wait"), args.deadline)
    return {
        "seed_everything": args.seed,
        # Evaluations have a process of their own, which would take orders too.
        "trainer": {"enable_progress_bar": False, "limit_val_batches": 0},
        "data": {
            "env": {"class_path": "FaultyEnv", "init_args": init_args}, "num_workers": args.num_workers,
            "mode": "overlapped", "max_env_steps": 0, "record_events": True, "on_worker_failure": "restart",
            "restart_budget": len(args.kinds_planned) + 5, "deadlines": deadlines,
        },
    }  # fmt: skip


def prepare(args: argparse.Namespace, folder: Path) -> list[str]:
    """Write the run's configuration into the folder; returns the command."""
    import yaml
    from compare_sb3 import lightning_command

    if args.coded:
        config = folder / "coded.yaml"
        config.write_text(yaml.safe_dump(coded_config(args)))
    else:
        config = args.config.resolve()
    env = yaml.safe_load(config.read_text())["data"]["env"]
    (folder / "orders").mkdir()
    over = folder / "chaos.yaml"
    over.write_text(yaml.safe_dump(chaos_config(args, env, folder)))
    return [
        str(lightning_command()), "fit", "--config", str(config), "--config", str(over),
        "--trainer.max_time", "null", "--trainer.callbacks+=chaos.RowCheck",
        f"--trainer.callbacks.path={folder / 'rows.json'}", f"--trainer.callbacks.coded={str(args.coded).lower()}",
        *args.extra,
    ]  # fmt: skip


# -- one run ----------------------------------------------------------------------------------------------------------


def recorded(path: Path) -> list[Fault]:
    """Faults that simulators have done on order."""
    if not path.is_file():
        return []
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [Fault(entry["kind"], entry["time"], entry["pid"]) for entry in entries]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start, break, stop, judge."""
    command = prepare(args, folder)
    shared_before = set(os.listdir("/dev/shm"))
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in paths if path))
    log = EventTail(folder / "runs")
    family: dict[int, psutil.Process] = {}
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_LIMIT
        while not log.read().is_learning:
            if process.poll() is not None or time.monotonic() > deadline:
                lines = (folder / "output.log").read_text(errors="replace").strip().splitlines() or ["no output"]
                return {"broken": [f"the run did not begin to learn: {lines[-1]}"]}
            time.sleep(0.1)
        limits = Limits(args.death_limit, args.hang_slack, args.recovery_limit, args.deadline)
        margin = args.deadline + args.hang_slack + args.recovery_limit
        schedule = plan(args.kinds_planned, 60.0 * args.minutes, margin, args.seed)
        chaos = Chaos(log.ready, schedule, args.seed, folder / "orders")

        def goes_on() -> bool:
            for pid in set(log.read().started) - set(family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    family[pid] = psutil.Process(pid)  # with its time of birth: numbers are used again
            return process.poll() is None

        end = time.monotonic() + 60.0 * args.minutes
        chaos.run(goes_on)
        while goes_on() and time.monotonic() < end:
            time.sleep(0.1)
        ended_by_itself = process.poll() is not None
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        status: int | None
        try:
            status = process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        exit_seconds = time.monotonic() - started
        _, left = psutil.wait_procs(list(family.values()), timeout=2.0)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for survivor in family.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
    names = sorted(set(os.listdir("/dev/shm")) - shared_before)
    checks = json.loads((folder / "rows.json").read_text()) if (folder / "rows.json").is_file() else None
    faults = chaos.faults + recorded(folder / "faults.jsonl")
    found = outcomes(log.read().events, faults, args.window)
    broken = broken_promises(found, limits, checks, args.coded)
    if ended_by_itself:
        lines = (folder / "output.log").read_text(errors="replace").strip().splitlines() or ["no output"]
        broken.append(f"the run ended before it was asked to, with exit status {status}: {lines[-1]}")
    elif status != 128 + signal.SIGINT:
        broken.append(f"exit status {status} after SIGINT, expected {128 + signal.SIGINT}")
    broken += [f"process {survivor.pid} was left behind" for survivor in left]
    broken += [f"/dev/shm/{name} was left behind" for name in names]
    orders = sorted(path.name for path in (folder / "orders").iterdir())
    return {
        **summary(log.events, found, args.window), "checks": checks, "exit_status": status,
        "exit_seconds": exit_seconds, "orders_not_taken": orders, "skipped": chaos.skipped,
        "outcomes": [asdict(outcome) for outcome in found], "broken": broken,
    }  # fmt: skip


def report(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = []
    if "faults" in result:
        lines.append(f"{'fault':>12} {'number':>6} {'noticed s':>15} {'ready s':>15} {'full rate s':>15}")
        for kind, figures in result["faults"].items():
            cells = []
            for name in ("detected", "ready", "whole"):
                known = figures.get(name)
                cells.append(f"{known['median']:6.2f} ({known['max']:6.2f})" if known else "-")
            lines.append(f"{kind:>12} {figures['injected']:6d} " + " ".join(f"{cell:>15}" for cell in cells))
        lines.append("median (largest); times from the fault on")
        rate, events = result["median_rate"], result["events"]
        lines.append(
            f"{result['env_steps']:,.0f} environment steps in {result['seconds']:.0f} s, median rate "
            f"{rate or 0.0:,.0f}/s; {events['failure']} failures, {events['start']} starts"
        )
        lines.append(f"rows: {json.dumps(result['checks'])}")
        lines.append(f"exit status {result['exit_status']} after {result['exit_seconds']:.1f} s")
        if result["orders_not_taken"] or result["skipped"]:
            lines.append(f"not injected: {result['orders_not_taken']}, and {result['skipped']} without a ready worker")
    lines += [f"BROKEN: {line}" for line in result["broken"]] or ["nothing promised was broken"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    args = parse_args(arguments)
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        result = run(args, folder.resolve())
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    print(report(result))
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
