"""Stand-in: importable, as some tasks import it; nothing of it is used headless."""

from __future__ import annotations

from typing import Any

from isaacgym import gymapi  # noqa: F401


def parse_arguments(*args: Any, **kwargs: Any) -> None:
    """Raises NotImplementedError: a worker has no command line of Isaac Gym."""
    raise NotImplementedError("isaacgym.gymutil.parse_arguments: not part of the stand-in")
