"""How the suites of benchmark.py measure: arms in turn, ratios round by round, one table and one file of them."""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from compare_sb3 import write_json

#: One call of an arm: does its work and returns how many rows that gave.
Call = Callable[[], int]
Arms = dict[str, Call]

#: What seconds are: those on the wall, or those that this process was computing, for machines that are busy otherwise.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
#: Package: how to have it. The names are those of their distributions.
PEERS = {
    "stable-baselines3": "pip install 'stable-baselines3>=2.4'",
    "tianshou": "pip install tianshou",
    "torchrl": "pip install torchrl",
}
#: Distributions whose versions belong to the figures.
DISTRIBUTIONS = ("claw-lightning", "numpy", "torch", *PEERS, "gymnasium", "tensordict", "numba")


class Target(NamedTuple):
    """What a row should reach."""

    value: float
    is_least: bool

    def text(self) -> str:
        """Such as ">= 0.8"."""
        return f"{'>=' if self.is_least else '<='} {self.value:g}"

    def verdict(self, found: float) -> str:
        """In words, for the table."""
        if self.is_least:
            return "met" if found >= self.value else "below target"
        return "met" if found <= self.value else "above target"


class Row(NamedTuple):
    """A ratio: the figure of the first arm over that of the second, both of one group."""

    group: str
    arms: tuple[str, str]
    text: str
    target: Target | None = None


# -- measuring --------------------------------------------------------------------------------------------------------


def rate(call: Call, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Rows per second of one arm, called again and again for at least ``seconds``."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        rows, started = 0, clock()
        while True:
            rows += call()
            elapsed = clock() - started
            if elapsed >= seconds:
                return rows / elapsed
    finally:
        if was_enabled:
            gc.enable()


def interleave(
    arms: Arms, rounds: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Rows per second of each arm in each round; the arms take turns, and a first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        gc.collect()
        for name, call in arms.items():
            found = rate(call, seconds, clock)
            if number > 0:
                rates[name].append(found)
    return rates


@dataclass
class Results:
    """What a suite has found so far.

    Attributes:
        suite: its name.
        settings: arguments that belong to the figures.
        machine: see :func:`describe_machine`.
        versions: of :data:`DISTRIBUTIONS`, as far as they are there.
        targets: per row.
        ratios: per row, the median over the rounds.
        spread: per row, least and largest of the rounds.
        rows_per_second: per "group/arm": median, min and max.
        bytes_per_row: per arm.
        skipped: per row, why it is missing.
        notes: what else should be known of the figures.
    """

    suite: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    targets: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    rows_per_second: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_per_row: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_rows(
        self, rows: dict[str, Row], group: str, figures: dict[str, list[float]], absent: dict[str, str]
    ) -> None:
        """Form the ratios of a group, round by round.

        Args:
            rows: of the suite.
            group: whose arms were measured.
            figures: per arm, one number per round.
            absent: arms that are not there, and why.
        """
        for name, row in rows.items():
            if row.group != group:
                continue
            if row.target is not None:
                self.targets[name] = row.target.text()
            missing = [arm for arm in row.arms if arm not in figures]
            if missing:
                self.skipped[name] = absent.get(missing[0], "not measured")
                continue
            values = [top / bottom for top, bottom in zip(*(figures[arm] for arm in row.arms), strict=True)]
            self.ratios[name] = median(values)
            self.spread[name] = [min(values), max(values)]

    def add_rates(self, group: str, rates: dict[str, list[float]]) -> None:
        """Keep the absolute figures of a group."""
        for arm, values in rates.items():
            self.rows_per_second[f"{group}/{arm}"] = {"median": median(values), "min": min(values), "max": max(values)}

    def tables(self, rows: dict[str, Row]) -> str:
        """Markdown: ratios, then absolute figures, then what is missing."""
        lines = ["| row | ratio | min-max | target | | what |", "|---|---:|---:|---:|---|---|"]
        for name, value in self.ratios.items():
            row, (low, high) = rows[name], self.spread[name]
            target, verdict = (row.target.text(), row.target.verdict(value)) if row.target is not None else ("", "")
            spread = "" if low == high else f"{_digits(low)}-{_digits(high)}"
            lines.append(f"| {name} | {_digits(value)} | {spread} | {target} | {verdict} | {row.text} |")
        lines += ["", "| arm | rows/s | min-max |", "|---|---:|---:|"]
        for arm, found in self.rows_per_second.items():
            lines.append(f"| {arm} | {found['median']:,.0f} | {found['min']:,.0f}-{found['max']:,.0f} |")
        if self.bytes_per_row:
            lines += ["", "| stored by | bytes per row |", "|---|---:|"]
            lines += [f"| {name} | {size:.1f} |" for name, size in self.bytes_per_row.items()]
        notes = [f"skipped {name}: {reason}" for name, reason in self.skipped.items()] + self.notes
        return "\n".join(lines + ([""] + notes if notes else []))


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


class Bench:
    """A suite that is being measured.

    Args:
        args: of the command line.
        results: are filled.
        rows: of the suite.
    """

    def __init__(self, args: argparse.Namespace, results: Results, rows: dict[str, Row]) -> None:
        self.args, self.results, self.rows = args, results, rows
        self._absent: dict[str, str] = {}

    def add_peer(self, arms: Arms, package: str, names: Sequence[str], build: Callable[[], Sequence[Call]]) -> None:
        """Add arms of another package, or remember why they are not there. Each is called once, to see that it works.

        Args:
            arms: are added to.
            package: one of :data:`PEERS`.
            names: of the arms.
            build: gives them, in the order of their names.
        """
        try:
            if self.args.skip_peers:
                raise _LeftOut("left out by --skip-peers")
            built = dict(zip(names, build(), strict=True))
            for call in built.values():
                call()
            arms.update(built)
            return
        except _LeftOut as error:
            reason = str(error)
        except ImportError as error:
            reason = f"{package} is missing ({one_line(error)}): {PEERS[package]}"
        except Exception as error:  # whatever it is, our own rows are still wanted
            reason = f"{package} failed ({type(error).__name__}: {one_line(error)})"
        self._absent.update(dict.fromkeys(names, reason))

    def run(self, group: str, arms: Arms) -> None:
        """Measure a group's arms and form its rows."""
        print(f"{group}: {', '.join(arms)}", file=sys.stderr, flush=True)
        self.keep_rates(group, interleave(arms, self.args.rounds, self.args.seconds, CLOCKS[self.args.clock]))

    def keep_rates(self, group: str, rates: dict[str, list[float]]) -> None:
        """Form the rows of a group whose rates were measured elsewhere."""
        self.results.add_rates(group, rates)
        self.keep_figures(group, rates)

    def keep_figures(self, group: str, figures: dict[str, list[float]]) -> None:
        """Form the rows of a group of figures that are no rates: per arm one for each round."""
        self.results.add_rows(self.rows, group, figures, self._absent)
        self._finish()

    def keep_bytes(self, group: str, sizes: dict[str, float]) -> None:
        """Form the rows of a group of sizes instead of rates."""
        self.results.bytes_per_row.update(sizes)
        self.results.add_rows(self.rows, group, {name: [size] for name, size in sizes.items()}, self._absent)
        self._finish()

    def note(self, text: str) -> None:
        """Keep a remark on the figures, and tell it."""
        self.results.notes.append(text)
        print(f"benchmark: {text}", file=sys.stderr, flush=True)

    def leave_out(self, group: str, reason: str) -> None:
        """A group that cannot be measured here."""
        for row in self.rows.values():
            if row.group == group:
                self._absent.update(dict.fromkeys(row.arms, reason))
        self.results.add_rows(self.rows, group, {}, self._absent)
        self._finish()

    def _finish(self) -> None:
        """The next group has arms of its own; the file grows with every group."""
        self._absent = {}
        if self.args.json is not None:
            write_json(self.args.json, asdict(self.results))


class _LeftOut(Exception):
    """The user does not want it."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
