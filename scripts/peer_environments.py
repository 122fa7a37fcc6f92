"""Environments of the packages that benchmark.py measures beside this product, one virtual environment each.

What a package asks for may contradict what another one (or this product) does: none of them shares an interpreter. All
have the torch of constraints.txt, and as many of its other versions as the package allows.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
DEFAULT_FOLDER = ROOT / ".peers"
#: The hand, in the simulator of Gymnasium and in the one that this product uses.
SIMULATORS = ("gymnasium-robotics==1.4.2", "mujoco<3.12", "envpool==1.2.5")
#: In each environment, beside its package; kept whatever the package asks for.
ALWAYS = ("torch", "gymnasium-robotics", "mujoco", "envpool", "gymnasium")
STAMP = "benchmark-peer.json"
#: Seconds for one call of pip.
DEADLINE = 1800.0


class Recipe(NamedTuple):
    """How a package is installed.

    Attributes:
        version: of the package.
        module: what is imported to see that it works.
        bare: installed without what they ask for.
        beside: requirements put in by hand.
        free: names of constraints.txt that do not hold here; None: all but those of :data:`ALWAYS`.
    """

    version: str
    module: str
    bare: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    free: tuple[str, ...] | None = ()


RECIPES = {
    "stable-baselines3": Recipe("2.9.2", "stable_baselines3"),
    "skrl": Recipe("2.1.1", "skrl"),
    # Asks for versions that do not go together with gymnasium-robotics; these do.
    "tianshou": Recipe(
        "2.0.1",
        "tianshou",
        bare=("tianshou==2.0.1",),
        beside=(
            "deepdiff<8", "pandas<3", "ordered-set<4.2", "pettingzoo", "overrides", "sensai-utils", "h5py", "tqdm",
            "numba", "psutil", "tensorboard", "matplotlib",
        ),
        free=None,
    ),
    "torchrl": Recipe("0.14.1", "torchrl"),
    "sheeprl": Recipe("0.8.4", "sheeprl", free=None),
}  # fmt: skip


class BuildError(Exception):
    """An environment could not be made; one line."""


Run = Callable[[Sequence[str], Path], None]


def python_of(folder: Path, name: str) -> Path:
    """Interpreter of a package's environment."""
    return folder / name / "bin" / "python"


def missing(folder: Path, name: str) -> str | None:
    """Why there is no environment of a package that can be used; None: there is."""
    if not python_of(folder, name).exists():
        return f"no environment of {name} in {folder}: scripts/benchmark.py peers --against {name}"
    if _read_stamp(folder / name) != fingerprint(name, _installed(folder / name)):
        return f"{folder / name} is unfinished or of other versions: scripts/benchmark.py peers --against {name}"
    return None


def fingerprint(name: str, installed: Container[str]) -> str:
    """Of all that decides what an environment holds: pins of what is not installed there (PEP 503 names) do not."""
    pins = [line for line in constraints_of(name) if _normal(line.partition("==")[0]) in installed]
    content = json.dumps([RECIPES[name], SIMULATORS, pins, sys.version_info[:2]])
    return hashlib.sha256(content.encode()).hexdigest()


def constraints_of(name: str) -> list[str]:
    """Lines of constraints.txt that hold in a package's environment."""
    free = RECIPES[name].free
    kept = []
    for line in CONSTRAINTS.read_text().splitlines():
        pinned = _normal(line.partition("==")[0])
        if "==" not in line or line.startswith("#") or pinned == _normal(name):
            continue
        if pinned in ALWAYS or (free is not None and pinned not in free):
            kept.append(line)
    return kept


def build(folder: Path, name: str, run: Run | None = None) -> Path:
    """Make a package's environment where it is not there yet; returns its interpreter.

    Raises:
        BuildError: a step failed, or the torch that came is another one; one line that names the log.
    """
    if missing(folder, name) is None:
        return python_of(folder, name)
    run = run or call
    recipe, target = RECIPES[name], folder / name
    python, log = str(python_of(folder, name)), folder / f"{name}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (target / STAMP).unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        constraints = folder / f"{name}.constraints.txt"
        constraints.write_text("\n".join(constraints_of(name)) + "\n")
    except OSError as error:
        raise BuildError(f"--peers-folder {folder}: {error.strerror or error}") from error
    torch = next(line for line in constraints_of(name) if line.startswith("torch=="))
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-c", str(constraints)]
    named = [] if recipe.bare else [f"{name}=={recipe.version}"]
    started = time.monotonic()
    run([sys.executable, "-m", "venv", "--clear", str(target)], log)
    run([*install, torch], log)
    if recipe.bare:
        run([*install, "--no-deps", *recipe.bare], log)
    run([*install, torch, *named, *recipe.beside, *SIMULATORS], log)
    check = f"import torch, {recipe.module}; assert torch.__version__.split('+')[0] == {torch[7:]!r}, torch.__version__"
    run([python, "-c", check], log)
    stamp = {"fingerprint": fingerprint(name, _installed(target)), "seconds": round(time.monotonic() - started, 1)}
    (target / STAMP).write_text(json.dumps(stamp) + "\n")
    return Path(python)


def call(command: Sequence[str], log: Path) -> None:
    """Run a command, its output at the end of a log.

    Raises:
        BuildError: it failed, or took longer than :data:`DEADLINE`.
    """
    # What this process was started with is not for others' interpreters.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("ab") as file:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, timeout=DEADLINE
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{_told(command)} took longer than {DEADLINE:g} s (log: {log})") from None
        except OSError as error:
            raise BuildError(f"{_told(command)}: {error.strerror or error}") from error
    if done.returncode != 0:
        raise BuildError(f"{_told(command)} failed: {_last_line(log)} (log: {log})")


def _told(command: Sequence[str]) -> str:
    words = list(command[1:])
    return " ".join(words[1:3] if words[:1] == ["-m"] else ["python", *words[:1]])


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "Error:" in line]
    return (errors or lines or ["no output"])[-1]


def _read_stamp(target: Path) -> str | None:
    try:
        found: str = json.loads((target / STAMP).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _installed(target: Path) -> set[str]:
    """Names of what an environment holds."""
    packages = [str(path) for path in target.glob("lib/python*/site-packages")]
    return {_normal(each.name) for each in importlib.metadata.distributions(path=packages)}


def _normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
