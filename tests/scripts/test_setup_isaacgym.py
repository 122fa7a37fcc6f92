"""The script that builds Isaac Gym's interpreter: what it says of a download or a Python that will not do."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_isaacgym.sh"
FILES = (
    "python/setup.py",
    "python/isaacgym/gymapi.py",
    "python/isaacgym/_bindings/linux-x86_64/gym_38.so",
    "python/isaacgym/_bindings/src/gymtorch/gymtorch.cpp",
)


@pytest.fixture
def download(tmp_path):
    folder = tmp_path / "isaacgym"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def fake_python(tmp_path, version, shared):
    """A script that answers the two questions that are asked of an interpreter."""
    path = tmp_path / "python3.8"
    is_38 = version == "3.8"
    path.write_text(f'#!/bin/sh\ncase "$2" in *SHARED*) exit {int(not shared)};; *) exit {int(not is_38)};; esac\n')
    path.chmod(0o755)
    return path


def run(tmp_path, *arguments, python=None, **environment):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv"), **environment}
    if python is not None:
        env["CLAW_PYTHON38"] = str(python)
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_help_and_missing_arguments(tmp_path):
    shown = run(tmp_path, "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage:") and "DOWNLOAD_FOLDER" in shown.stdout
    for arguments in ((), ("a", "b", "c"), ("--chekc", "a")):
        wrong = run(tmp_path, *arguments)
        assert wrong.returncode != 0 and "usage:" in wrong.stderr and wrong.stdout == ""


def test_a_check_of_what_will_do_changes_nothing(tmp_path, download):
    python = fake_python(tmp_path, "3.8", shared=True)
    for folder in (download, download.parent):  # the archive's own folder, or the one that it was unpacked into
        done = run(tmp_path, "--check", folder, tmp_path / "venv", python=python, CXX="sh")
        assert done.returncode == 0 and "nothing was changed" in done.stderr, done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_download_that_lacks_something_is_refused(tmp_path, download, name):
    (download / name).unlink()
    done = run(tmp_path, "--check", download, python=fake_python(tmp_path, "3.8", True), CXX="sh")
    assert done.returncode == 1 and Path(name).name in done.stderr and str(download) in done.stderr


@pytest.mark.parametrize(
    "version, shared, more, message",
    [
        ("3.9", True, {}, "is no Python 3.8; Isaac Gym has bindings for 3.6 to 3.8"),
        ("3.8", False, {}, "built without a shared library, .* PYTHON_CONFIGURE_OPTS=--enable-shared"),
        ("3.8", True, {"CXX": "no-such-compiler"}, "no C\\+\\+ compiler .* apt-get install g\\+\\+"),
        ("3.8", True, {"CLAW_ISAACGYMENVS": "/nowhere"}, "CLAW_ISAACGYMENVS: /nowhere has no isaacgymenvs/cfg/task"),
    ],
)
def test_an_interpreter_that_will_not_do_is_refused(tmp_path, download, version, shared, more, message):
    python = fake_python(tmp_path, version, shared)
    done = run(tmp_path, "--check", download, python=python, **{"CXX": "sh", **more})
    assert done.returncode == 1 and re.search(message, done.stderr), done.stderr


def test_no_folder_is_refused(tmp_path):
    done = run(tmp_path, "--check", tmp_path / "nowhere")
    assert done.returncode == 1 and "is no folder; unpack IsaacGym_Preview_4_Package.tar.gz" in done.stderr
