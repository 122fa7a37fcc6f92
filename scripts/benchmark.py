"""Measure this product beside a floor and beside other packages, on this machine.

    python scripts/benchmark.py peers --against all                # environments of other packages, under .peers
    python scripts/benchmark.py learner --against stable-baselines3,skrl --json learner.json
    python scripts/benchmark.py table learner.json collect.json    # for the README

What counts are ratios of one run: arms take turns (A B C A B C ...), a ratio is formed in each round, and a row gives
the median over the rounds and the least and largest. A first round does not count, the garbage collector is off while
the clock runs. Absolute figures are for scale only: a machine drifts by more than most differences.

Suites: ``learner`` (updates), ``collect`` (workers), ``replay`` (sampling), ``endtoend`` (whole runs), ``scale``
(growth of rows, lanes and workers), ``callbacks`` (what watching costs), ``faults`` (what a killed or stopped worker
does to a run); each has a file ``benchmark_<suite>.py`` that says what its arms are. Other packages run in interpreters
of their own (peer_environments.py) and are served from there (served.py): imports, building and compiling are over
before the clock runs, and while one arm works the others sleep.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # read once, when the libraries are loaded
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    )

import argparse
import json
import math
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from benchmark_callbacks import CALLBACK_ROWS, add_callback_arguments, check_callback_arguments, run_callbacks
from benchmark_collect import (
    COLLECT_GROUPS,
    COLLECT_QUICK,
    COLLECT_ROWS,
    add_collect_arguments,
    check_collect_arguments,
    run_collect,
)
from benchmark_endtoend import (
    ENDTOEND_GROUPS,
    ENDTOEND_QUICK,
    ENDTOEND_ROWS,
    add_endtoend_arguments,
    check_endtoend_arguments,
    run_endtoend,
)
from benchmark_faults import FAULTS_QUICK, add_faults_arguments, check_faults_arguments, run_faults
from benchmark_learner import (
    LEARNER_GROUPS,
    LEARNER_QUICK,
    LEARNER_ROWS,
    add_learner_arguments,
    check_learner_arguments,
    run_learner,
)
from benchmark_replay import REPLAY_QUICK, REPLAY_ROWS, add_replay_arguments, check_replay_arguments, run_replay
from benchmark_scale import (
    SCALE_GROUPS,
    SCALE_QUICK,
    SCALE_ROWS,
    add_scale_arguments,
    check_scale_arguments,
    run_scale,
)
from compare_sb3 import stop_on_signal
from measuring import CLOCKS, DISTRIBUTIONS, Bench, Results, Row, one_line, readme_table
from peer_environments import DEFAULT_FOLDER, RECIPES, BuildError, build
from peers.serve import versions


class Suite(NamedTuple):
    """What can be measured.

    Attributes:
        text: for the help.
        rows: its ratios.
        run: measures.
        add_arguments: of its own.
        check: what is wrong with them; None: nothing.
        quick: values of arguments with ``--quick``: does everything run?
        groups: that ``--groups`` chooses from.
    """

    text: str
    rows: Mapping[str, Row]
    run: Callable[[Bench], None]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], str | None]
    quick: Mapping[str, Any]
    groups: Sequence[str] = ()


SUITES = {
    "learner": Suite(
        "updates, their memory and their publication",
        LEARNER_ROWS, run_learner, add_learner_arguments, check_learner_arguments, LEARNER_QUICK, LEARNER_GROUPS,
    ),
    "collect": Suite(
        "choosing, stamping and writing of a simulator's steps, and whole workers",
        COLLECT_ROWS, run_collect, add_collect_arguments, check_collect_arguments, COLLECT_QUICK, COLLECT_GROUPS,
    ),
    "replay": Suite(
        "sampling of stored experience",
        REPLAY_ROWS, run_replay, add_replay_arguments, check_replay_arguments, REPLAY_QUICK,
    ),
    "endtoend": Suite(
        "whole runs",
        ENDTOEND_ROWS, run_endtoend, add_endtoend_arguments, check_endtoend_arguments, ENDTOEND_QUICK, ENDTOEND_GROUPS,
    ),
    "scale": Suite(
        "what more rows, lanes and workers cost",
        SCALE_ROWS, run_scale, add_scale_arguments, check_scale_arguments, SCALE_QUICK, SCALE_GROUPS,
    ),
    "callbacks": Suite(
        "what the callbacks that watch cost a run",
        CALLBACK_ROWS, run_callbacks, add_callback_arguments, check_callback_arguments, {"steps": 40},
    ),
    "faults": Suite(
        "what a killed and a stopped worker do to a run",
        {}, run_faults, add_faults_arguments, check_faults_arguments, FAULTS_QUICK,
    ),
}  # fmt: skip
QUICK = {"rounds": 1, "seconds": 0.1}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"benchmark: error: {' '.join(message.split())}\n")


def names_of(choices: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """Type of an argument: names from ``choices`` with commas between them, or ``all`` or ``none``."""

    def parse(text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return tuple(choices) if text == "all" else ()
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            if name not in choices:
                known = ", ".join(choices)
                raise argparse.ArgumentTypeError(f"there is no {what} '{name}'; known are {known}; or all, none")
        return names

    return parse


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = OneLineParser(prog="benchmark", description="Measure this product beside a floor and other packages.")
    commands = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, suite in SUITES.items():
        one = commands.add_parser(name, help=suite.text, description=f"Measure {suite.text}.")
        one.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
        one.add_argument("--rounds", type=int, default=7, help="that count (default: 7; at least 5 for a claim)")
        one.add_argument("--seconds", type=float, default=1.0, help="of each arm in each round (default: 1)")
        one.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine (default: wall)")
        one.add_argument("--skip-peers", action="store_true", help="leave other packages out")
        one.add_argument("--quick", action="store_true", help="seconds instead of minutes: does everything run?")
        one.add_argument("--strict", action="store_true", help="exit status 1 where an arm of ours failed")
        if suite.groups:
            known = ", ".join(suite.groups)
            kind = names_of(suite.groups, "group")
            one.add_argument("--groups", type=kind, default=suite.groups, help=f"of {known} (default: all)")
        _add_peers(one)
        suite.add_arguments(one)
        if "--quick" in given:
            one.set_defaults(**{**QUICK, **suite.quick})
    _add_peers(commands.add_parser("peers", help="build the environments of other packages", description="Build."))
    table = commands.add_parser("table", help="Markdown of JSON files", description="Markdown of JSON files.")
    table.add_argument("files", nargs="+", type=Path, metavar="FILE", help="that suites have written by --json")
    args = parser.parse_args(given)
    if args.suite in SUITES:
        _check(parser, args)
    return args


def _add_peers(parser: argparse.ArgumentParser) -> None:
    kind, known = names_of(list(RECIPES), "package"), ",".join(RECIPES)
    parser.add_argument("--against", type=kind, default=tuple(RECIPES), help=f"of {known}, all or none (default: all)")
    parser.add_argument(
        "--peers-folder", type=Path, default=DEFAULT_FOLDER, help=f"their environments (default: {DEFAULT_FOLDER})"
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.skip_peers:
        args.against = ()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not (math.isfinite(args.seconds) and args.seconds > 0):
        parser.error("--seconds must be positive")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    wrong = SUITES[args.suite].check(args)
    if wrong is not None:
        parser.error(wrong)


def describe_machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import psutil

    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(folder / entry).strip() for entry in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.machine(),
        "caches": caches,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def measure_suite(args: argparse.Namespace) -> Results:
    """Run a suite; its file grows with every group."""
    torch.set_num_threads(1)
    suite = SUITES[args.suite]
    settings = {name: value for name, value in vars(args).items() if name not in ("suite", "json")}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    results = Results(args.suite, settings, describe_machine(), versions(DISTRIBUTIONS))
    machine = results.machine
    print(
        f"threads: {machine['threads']}; cores: {machine['cores']}; load: {machine['load'][0]}; {machine['processor']}"
    )
    print("; ".join(f"{name} {number}" for name, number in results.versions.items()), flush=True)
    suite.run(Bench(args, results, dict(suite.rows)))
    return results


def build_peers(args: argparse.Namespace) -> int:
    """Make the environments that are missing; one that fails does not keep the others from being made."""
    failed = 0
    for name in args.against:
        print(f"{name}: {args.peers_folder / name}", flush=True)
        try:
            build(args.peers_folder, name)
        except BuildError as error:
            failed += 1
            print(f"benchmark: error: {name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def print_table(files: Sequence[Path]) -> int:
    """Markdown of what suites have found; returns the exit status."""
    found = []
    for path in files:
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or "ratios" not in content or "suite" not in content:
                raise ValueError
        except OSError as error:
            print(f"benchmark: error: {path}: {error.strerror or error}", file=sys.stderr)
            return 1
        except ValueError:
            print(f"benchmark: error: {path}: not written by benchmark.py SUITE --json", file=sys.stderr)
            return 1
        found.append(content)
    print(readme_table(found))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)  # served arms go with this process
    try:
        if args.suite == "peers":
            return build_peers(args)
        if args.suite == "table":
            return print_table(args.files)
        results = measure_suite(args)
    except KeyboardInterrupt:
        print("benchmark: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"benchmark: error: {one_line(error)}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(
            f"benchmark: error: {one_line(error)}; take smaller sizes (benchmark.py {args.suite} --help)",
            file=sys.stderr,
        )
        return 1
    print("\n" + results.tables(dict(SUITES[args.suite].rows)))
    if args.strict and results.failed:
        print(f"benchmark: error: {'; '.join(f'{arm}: {why}' for arm, why in results.failed.items())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
