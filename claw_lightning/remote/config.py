"""Settings of collection by Ray: ``data.ray``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from claw_lightning.checks import check_fields, check_numbers
from claw_lightning.errors import ConfigError


@dataclass
class RayConfig:
    """Where and on what the workers run with ``data.collector ray``.

    Attributes:
        address: of a cluster that runs already, ``host:port`` or ``auto``; None: one is started on this machine, and
            stopped with the run.
        num_cpus: that each worker takes of its node; of use for placing alone.
        num_gpus: likewise; 0.25 puts four workers on one GPU. The worker then sees that GPU, and data.worker_device
            must be cuda:0.
        resources: further resources of a node that each worker takes, by name, such as ``{simulator: 1}``.
        runtime_env: Ray's description of what is to be sent to the nodes, such as ``{working_dir: .}``; None: they have
            what they need.
    """

    address: str | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    runtime_env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        group = "data.ray"
        check_fields(group, self)
        check_numbers(group, {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}, least=0.0)
        for name, value in (("resources", self.resources), ("runtime_env", self.runtime_env or {})):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{group}.{name} is {value!r}; give names with values, such as {{name: 1}}")
        check_numbers(f"{group}.resources", self.resources, above=0.0)
        for name in ("CPU", "GPU"):
            if name in self.resources:
                raise ConfigError(f"{group}.resources names {name}; use {group}.num_{name.lower()}s")
        for name, number in (("num_gpus", self.num_gpus), *self.resources.items()):
            if number > 1 and number != int(number):
                raise ConfigError(f"{group}.{name} is {number}; above 1, Ray takes whole numbers")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"{group}.address is '{self.address}', that of a Ray client: rows would go through its proxy; start "
                "the learner on a node of the cluster and give auto, or host:port of its head"
            )

    def demand(self) -> dict[str, float]:
        """What a worker takes of its node, by the names that Ray has for it."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
