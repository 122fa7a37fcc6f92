"""Where the real omegaconf is missing: resolvers that can be registered once, and no files."""

from __future__ import annotations

from typing import Any, Dict


class DictConfig(dict):
    """Only its name is asked for."""


class OmegaConf:
    """Keeps the names of resolvers."""

    _resolvers: Dict[str, Any] = {}

    @classmethod
    def register_new_resolver(cls, name: str, resolver: Any) -> None:
        """Raises ValueError for a name that is taken."""
        if name in cls._resolvers:
            raise ValueError("resolver '%s' is already registered" % name)
        cls._resolvers[name] = resolver
