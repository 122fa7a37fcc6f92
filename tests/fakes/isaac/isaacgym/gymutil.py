"""Stand-in: importable, as some tasks import it; nothing of it is used headless."""

from __future__ import annotations

from typing import Any, Dict

from isaacgym import gymapi


def parse_sim_config(config: Dict[str, Any], params: gymapi.SimParams) -> None:
    """Puts the settings below ``sim`` of a task's file into ``params``; names that they do not have are left out."""
    for name, value in config.items():
        if name in ("dt", "substeps", "num_client_threads", "use_gpu_pipeline"):
            setattr(params, name, value)
    for name, value in config.get("physx", {}).items():
        if name == "contact_collection":
            value = gymapi.ContactCollection(value)
        if hasattr(params.physx, name):
            setattr(params.physx, name, value)


def parse_arguments(*args: Any, **kwargs: Any) -> None:
    """Raises NotImplementedError: a worker has no command line of Isaac Gym."""
    raise NotImplementedError("isaacgym.gymutil.parse_arguments: not part of the stand-in")
