"""Configurations of the stand-in for Isaac Gym, resolved as a learner would send them to a worker.

Nothing here imports the stand-in: that is for another process, where torch is not loaded yet.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
#: On the import path of a worker: isaacgym, isaacgymenvs, gym and what tests share with them.
ISAAC = ROOT / "tests" / "fakes" / "isaac"
#: At the end of it where a test goes through ``isaacgymenvs.make``: hydra, rl_games and the like, where missing.
NEEDS = ROOT / "tests" / "fakes" / "isaac_needs"
CONFIGS = ISAAC / "isaacgymenvs" / "cfg"

RESOLVERS = {
    "eq": lambda x, y: x.lower() == y.lower(),
    "contains": lambda x, y: x.lower() in y.lower(),
    "if": lambda condition, a, b: a if condition else b,
    "resolve_default": lambda default, given: default if given == "" else given,
}


def task_config(task: str, subtask: str = "", env: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The task's settings as plain containers, for the CPU.

    Args:
        task: name of a file in ``cfg/task``, such as ``ShadowHand``.
        subtask: of AllegroKuka; empty: the default.
        env: overrides below ``env``.
        settings: overrides of ``config.yaml``, such as ``num_envs``.
    """
    config = OmegaConf.load(CONFIGS / "config.yaml")
    chosen = OmegaConf.load(CONFIGS / "task" / f"{task}.yaml")
    for default in chosen.pop("defaults", []):
        for group, name in default.items() if default != "_self_" else ():
            chosen[group].merge_with(OmegaConf.load(CONFIGS / "task" / group / f"{subtask or name}.yaml"))
    config.pop("defaults")
    config.task = chosen
    config.merge_with({"pipeline": "cpu", "sim_device": "cpu:0", "rl_device": "cpu", "headless": True, **settings})
    config.task.env.merge_with(env or {})
    with resolvers():
        return OmegaConf.to_container(config.task, resolve=True)


def bidex_config(task: str, num_envs: int, **env: Any) -> dict[str, Any]:
    """Settings of a task of Bi-DexHands, whose files refer to nothing."""
    config = OmegaConf.to_container(OmegaConf.load(ISAAC / "bidexhands" / "cfg" / f"{task}.yaml"))
    config["env"].update(env, numEnvs=num_envs)
    return config


@contextlib.contextmanager
def resolvers() -> Iterator[None]:
    """The four resolvers of the package, for as long as they are needed: code under test may bring its own."""
    missing = [name for name in RESOLVERS if not OmegaConf.has_resolver(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newest omegaconf has another name for it, which older ones lack
        for name in missing:
            OmegaConf.register_new_resolver(name, RESOLVERS[name])
    yield
    for name in missing:
        OmegaConf.clear_resolver(name)


def worker_environment(**more: str) -> dict[str, str]:
    """Environment variables of a process that finds the stand-in and this checkout, under any Python."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment.update(PYTHONPATH=os.pathsep.join([str(ISAAC), str(ROOT)]), PYTHONDONTWRITEBYTECODE="1")
    environment.update(OMP_NUM_THREADS="1", CLAW_FAKE_ISAAC_ANY_PYTHON="1")
    environment.update(more)
    return environment
