"""From omegaconf's containers to plain ones."""

from __future__ import annotations

from typing import Any, Dict

from omegaconf import DictConfig


def omegaconf_to_dict(config: Any) -> Dict[str, Any]:
    """A plain dict of a mapping, interpolations resolved; lists stay what they are."""
    return {
        key: omegaconf_to_dict(value) if isinstance(value, (DictConfig, dict)) else value
        for key, value in config.items()
    }
