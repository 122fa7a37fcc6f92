"""Stand-in for hydra: enough to compose one task's configuration from the files beside the caller."""

from __future__ import annotations

import os
import sys
from typing import Any, List

from hydra.core import global_hydra, hydra_config

__all__ = ["compose", "global_hydra", "hydra_config", "initialize"]


class initialize:
    """Names the folder of the configuration, relative to the caller's file.

    Raises:
        ValueError: hydra is in use in this process already.
    """

    def __init__(self, config_path: str) -> None:
        state = global_hydra.GlobalHydra.instance()
        if state.folder:
            raise ValueError("GlobalHydra is already initialized, call clear() before")
        here = os.path.dirname(os.path.abspath(sys._getframe(1).f_code.co_filename))
        state.folder = os.path.join(here, config_path)

    def __enter__(self) -> None:
        """Already in place."""

    def __exit__(self, *args: Any) -> None:
        """Forgets the folder."""
        global_hydra.GlobalHydra.instance().clear()


def compose(config_name: str, overrides: List[str]) -> Any:
    """The configuration with the task of ``task=NAME``; needs the real omegaconf and yaml."""
    from omegaconf import OmegaConf

    folder = global_hydra.GlobalHydra.instance().folder
    config = OmegaConf.load(os.path.join(folder, config_name + ".yaml"))
    config.pop("defaults")
    names = dict(item.partition("=")[::2] for item in overrides)
    task = OmegaConf.load(os.path.join(folder, "task", names["task"] + ".yaml"))
    for default in task.pop("defaults", []):
        for group, name in default.items() if default != "_self_" else ():
            task[group].merge_with(OmegaConf.load(os.path.join(folder, "task", group, name + ".yaml")))
    config.task = task
    return config
