"""How many nodes and learners a rate of environment steps needs by Ray, and what saturates first: a model on paper.

    python scripts/scale_model.py --costs docs/scale.json --update-ms 5

Costs of rows come from a file of ``ray_check.py --json``; updates, simulators and links are the user's to name. See
docs/scale.md for the formulas and for what the model leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from claw_lightning.remote.cluster import PARAMETER_SECONDS

#: What a file of costs holds, and with what unit.
COSTS = {
    "row_bytes": "bytes of a row on the link",
    "policy_bytes": "bytes of parameters that are published at a time",
    "learner_us_per_row": "us of the learner's process per row",
    "ray_us_per_row": "us of Ray's own processes per row",
    "host_us_per_row": "us of the actor beside a worker per row",
    "worker_us_per_row": "us of a worker with a simulator that costs nothing, per row",
}


class Demand(NamedTuple):
    """What a rate of environment steps takes.

    Attributes:
        nodes: that simulate.
        learners: ranks, each on a machine and a link of its own, with its share of the workers.
        shares: per part of a single learner, how many times over it would be in use; above 1 it is too slow.
    """

    nodes: int
    learners: int
    shares: dict[str, float]

    @property
    def first(self) -> str:
        """The part that saturates first."""
        return max(self.shares, key=lambda name: self.shares[name])


def model(
    rate: float,
    costs: dict[str, float],
    update_seconds: float,
    batch: float,
    samples_per_insert: float,
    simulator_us: float,
    cores: float,
    link_gbit: float,
) -> Demand:
    """Nodes, learners and shares at a rate.

    Args:
        rate: environment steps per second of all workers.
        costs: see :data:`COSTS`.
        update_seconds: of one update of a batch.
        batch: samples of an update.
        samples_per_insert: samples of an inserted step.
        simulator_us: us of a core per environment step.
        cores: of a node that simulate.
        link_gbit: Gbit/s of a machine, each way.
    """
    node_us = simulator_us + costs["worker_us_per_row"] + costs["host_us_per_row"] + costs["ray_us_per_row"]
    nodes = math.ceil(1e-6 * rate * node_us / cores)
    updates = rate * samples_per_insert / batch
    versions = min(updates, 1.0 / PARAMETER_SECONDS)
    link = 1e9 * link_gbit / 8.0
    shares = {
        "updates": updates * update_seconds,
        "receiving thread": 1e-6 * rate * costs["learner_us_per_row"],
        "link, rows in": rate * costs["row_bytes"] / link,
        "link, parameters out": nodes * versions * costs["policy_bytes"] / link,
    }
    return Demand(nodes, max(1, math.ceil(max(shares.values()))), shares)


def build_table(demands: dict[float, Demand]) -> str:
    """Markdown: a row for each rate."""
    names = list(next(iter(demands.values())).shares)
    lines = [
        "| env steps/s | nodes | " + " | ".join(names) + " | saturates first | learners |",
        "|---:|---:|" + "---:|" * len(names) + "---|---:|",
    ]
    for rate, demand in demands.items():
        shares = " | ".join(f"{demand.shares[name]:.2f}" for name in names)
        lines.append(f"| {rate:,.0f} | {demand.nodes} | {shares} | {demand.first} | {demand.learners} |")
    return "\n".join(lines)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"{Path(self.prog).stem}: error: {' '.join(message.split())}\n")


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def read_costs(path: Path, parser: argparse.ArgumentParser) -> dict[str, float]:
    """Costs of a file of ``ray_check.py --json``; leaves with status 2 where there are none."""
    try:
        costs = json.loads(path.read_text())["costs"]
        found = {name: float(costs[name]) for name in COSTS}
    except KeyError as error:
        parser.error(f"--costs {path}: {error} is missing; write it with ray_check.py --json")
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"--costs {path}: cannot be read ({error}); write it with ray_check.py --json")
    for name, value in found.items():
        if not 0.0 <= value < math.inf:
            parser.error(f"--costs {path}: {name} is {value}; it must be a number of {COSTS[name]}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="file of ray_check.py --json")
    parser.add_argument("--update-ms", type=positive, required=True, help="milliseconds of one update, as you measured")
    parser.add_argument("--batch", type=positive, default=8192, help="samples of an update")
    parser.add_argument("--samples-per-insert", type=positive, default=4.0, help="data.samples_per_insert")
    parser.add_argument("--simulator-us", type=positive, default=700.0, help="us of a core per environment step")
    parser.add_argument("--cores", type=positive, default=32, help="cores of a node that simulate")
    parser.add_argument("--link-gbit", type=positive, default=10.0, help="Gbit/s of a machine, each way")
    parser.add_argument("--rates", type=positive, nargs="+", default=[1e5, 1e6], help="environment steps per second")
    args = parser.parse_args(arguments)
    costs = read_costs(args.costs, parser)
    demands = {
        rate: model(
            rate, costs, 1e-3 * args.update_ms, args.batch, args.samples_per_insert, args.simulator_us, args.cores,
            args.link_gbit,
        )
        for rate in args.rates
    }  # fmt: skip
    print(build_table(demands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
