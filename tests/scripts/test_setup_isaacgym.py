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


# -- where the environment goes -----------------------------------------------------------------------------------


def building_python(tmp_path, log):
    """As :func:`fake_python`, and one that writes down where it was told to build an environment."""
    path = fake_python(tmp_path, "3.8", shared=True)
    lines = path.read_text().splitlines()
    lines.insert(1, f'if [ "$1" = -m ]; then echo "$3" >>"{log}"; exit 9; fi')
    path.write_text("\n".join(lines) + "\n")
    return path


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in [folder, *folder.rglob("*")]}


PY38 = SCRIPT.with_name("setup_py38.sh")


@pytest.mark.parametrize("name", ["pyvenv.cfg", "notes.txt", ".hidden"])
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_folder_that_the_script_has_not_built_is_left_as_it_is(tmp_path, download, name, check):
    venv, log = tmp_path / "venv", tmp_path / "built"
    venv.mkdir()
    (venv / name).write_text("home = /elsewhere\n")
    before = snapshot(venv)
    python = building_python(tmp_path, log)
    done = run(tmp_path, *check, download, venv, python=python, CXX="sh")
    assert done.returncode == 1 and f"{venv} holds something that this script has not built" in done.stderr
    small = dict(os.environ, CLAW_PYTHON38=str(python), CLAW_PYTHON38_VENV=str(venv))
    other = subprocess.run(["bash", str(PY38)], env=small, capture_output=True, text=True, timeout=60)
    assert other.returncode == 1 and "CLAW_PYTHON38_VENV" in other.stderr and other.stdout == ""
    assert snapshot(venv) == before and not log.exists()


def test_a_file_in_the_environments_place_is_left_as_it_is(tmp_path, download):
    (tmp_path / "venv").write_text("mine")
    done = run(tmp_path, download, tmp_path / "venv", python=fake_python(tmp_path, "3.8", True), CXX="sh")
    assert done.returncode == 1 and "is no folder; give another VENV" in done.stderr
    assert (tmp_path / "venv").read_text() == "mine"


def test_its_own_environment_is_built_on(tmp_path, download):
    venv, log = tmp_path / "new" / "venv", tmp_path / "built"
    for _ in range(2):  # the second time it is there, and not empty
        done = run(tmp_path, download, venv, python=building_python(tmp_path, log), CXX="sh")
        assert done.returncode == 9, done.stderr  # the interpreter's own
    assert log.read_text().split() == [str(venv)] * 2 and list(venv.iterdir())


def test_what_lies_in_the_scripts_own_place_is_its_own(tmp_path, download):
    """Also where an earlier version built it, which left no mark."""
    venv, log = tmp_path / ".cache/claw-lightning/isaacgym", tmp_path / "built"
    venv.mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    done = run(tmp_path, download, python=building_python(tmp_path, log), CXX="sh")
    assert done.returncode == 9 and log.read_text() == f"{venv}\n", done.stderr


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, download):
    log = tmp_path / "built"
    building_python(tmp_path, log)
    (tmp_path / "envs/isaacgymenvs/cfg/task").mkdir(parents=True)
    (tmp_path / "envs/isaacgymenvs/cfg/task/ShadowHand.yaml").touch()
    more = {"CXX": "sh", "CLAW_ISAACGYMENVS": "~/envs"}
    done = run(tmp_path, "~/isaacgym/", "~/venv", python="~/python3.8", **more)
    assert done.returncode == 9 and log.read_text() == f"{tmp_path}/venv\n", done.stderr
