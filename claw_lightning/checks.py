"""Checks of numbers in settings: one line that names the key, the value and what would do."""

from __future__ import annotations

import math
from collections.abc import Mapping

from claw_lightning.errors import ConfigError


def check_numbers(group: str, values: Mapping[str, float | None], *, above: float | None = None,
                  least: float | None = None) -> None:  # fmt: skip
    """Refuse numbers that are not finite, not above ``above`` or below ``least``; None passes.

    Raises:
        ConfigError: names the first offending key as ``group.key``.
    """
    for name, value in values.items():
        if value is None:
            continue
        wanted = "finite"
        if above is not None:
            wanted = f"finite and above {above:g}"
        elif least is not None:
            wanted = f"finite and at least {least:g}"
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            raise ConfigError(f"{group}.{name} is {value}; it must be {wanted}")
