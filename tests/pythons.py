"""Where tests find a Python 3.8 with numpy and torch, the oldest interpreter that a worker may live in."""

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def answers(python: str, code: str) -> bool:
    try:
        return subprocess.run([python, "-c", code], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def candidates_38() -> list[str]:
    """Interpreters that may be Python 3.8, the most likely to have torch first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("CLAW_PYTHON38_VENV") or cache / "claw-lightning" / "py38")
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    if shutil.which("pyenv"):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True, timeout=30)
        root = Path(asked.stdout.strip()) if asked.returncode == 0 else root
    found = [venv / "bin" / "python", *sorted(root.glob("versions/3.8.*/bin/python3.8"))]
    on_path = shutil.which("python3.8")
    return [str(path) for path in found if path.exists()] + ([on_path] if on_path else [])


def python_or_skip(name: str) -> str:
    """The interpreter "this", or a "3.8" without which the test is skipped."""
    if name == "this":
        return sys.executable
    found, reason = python_38()
    return found or pytest.skip(reason)


@lru_cache(maxsize=1)
def python_38() -> tuple[str | None, str]:
    """A Python 3.8 with numpy and torch, or None and the reason why there is none."""
    is_38 = "import sys; assert sys.version_info[:2] == (3, 8)"
    ready = is_38 + "; import numpy, torch"
    named = os.environ.get("CLAW_PYTHON38")
    if named and answers(named, ready):
        return named, ""
    found = [python for python in candidates_38() if answers(python, is_38)]
    for python in found:
        if answers(python, ready):
            return python, ""
    if not found and not named:
        return None, "no Python 3.8 on this machine (set CLAW_PYTHON38)"
    if os.environ.get("CLAW_BUILD_PY38") != "1":
        return None, "Python 3.8 found, but without numpy and torch (CLAW_BUILD_PY38=1 builds an environment)"
    built = subprocess.run(["bash", str(ROOT / "scripts" / "setup_py38.sh")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    lines = built.stdout.split()
    return (lines[-1], "") if lines else (None, built.stderr.strip())
