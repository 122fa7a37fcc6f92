"""The state of hydra in this process."""

from __future__ import annotations


class GlobalHydra:
    """One object for the process."""

    _instance = None

    def __init__(self) -> None:
        self.folder = ""

    @classmethod
    def instance(cls) -> GlobalHydra:
        """The one object."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def clear(self) -> None:
        """Hydra may be initialised again."""
        self.folder = ""
