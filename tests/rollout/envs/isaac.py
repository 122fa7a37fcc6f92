"""How tests meet the stand-in for Isaac Gym: in this process, where torch is loaded already, or in a worker's."""

import sys
from contextlib import contextmanager
from pathlib import Path

import yaml

from claw_lightning.rollout.envs.isaacgym import IsaacGymEnv
from tests.builders import FAKES

STAND_IN = FAKES / "isaac"
PACKAGE = STAND_IN / "isaacgymenvs"
ANY_PYTHON = "CLAW_FAKE_ISAAC_ANY_PYTHON"
#: The stand-in's own names, and those of Isaac Gym's surroundings.
NAMES = ("isaacgym", "isaacgymenvs", "bidexhands", "gym")


def is_ours(name):
    return name.split(".")[0] in NAMES


@contextmanager
def without_torch():
    """As if torch had not been imported yet; a second import of it would not survive."""
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def stand_in(monkeypatch, *folders):
    """The stand-in importable in this process, as if in a fresh one; all of it is gone afterwards."""
    before = {name: module for name, module in sys.modules.items() if is_ours(name)}
    for name in before:
        del sys.modules[name]
    monkeypatch.setenv(ANY_PYTHON, "1")
    monkeypatch.setattr(IsaacGymEnv, "_is_taken", False)
    for folder in (STAND_IN, *folders):
        monkeypatch.syspath_prepend(str(folder))
    try:
        with without_torch():
            import isaacgym  # noqa: F401
        yield
    finally:
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def yaml_folder(tmp_path: Path) -> str:
    """A folder with PyYAML alone, for an interpreter that has none: it is pure Python where it must be."""
    folder = tmp_path / "pyyaml"
    folder.mkdir(exist_ok=True)
    link = folder / "yaml"
    if not link.exists():
        link.symlink_to(Path(yaml.__file__).parent)
    return str(folder)
