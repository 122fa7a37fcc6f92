"""What is found out about another interpreter by looking at its files alone."""

import os
import sys

import pytest

from claw_lightning.interpreter import extension_folder, find_package, library_folders, prefix
from claw_lightning.process import WorkerCommand


@pytest.fixture
def interpreter(tmp_path):
    """A shared build of Python 3.8 and a virtual environment of it; the environment's python."""
    base = tmp_path / "base"
    for folder in ("bin", "lib/python3.8/site-packages"):
        (base / folder).mkdir(parents=True)
    (base / "lib/libpython3.8.so.1.0").touch()
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.8/site-packages").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = {base}/bin\nversion = 3.8.18\n")
    for path in (base / "bin/python3.8", venv / "bin/python"):
        path.write_text("#!/bin/sh\nexit 9\n")  # to be looked at, not to be started
        path.chmod(0o755)
    return venv / "bin/python"


def isaacgym_in(folder):
    bindings = folder / "isaacgym/_bindings/linux-x86_64"
    bindings.mkdir(parents=True)
    (folder / "isaacgym/__init__.py").touch()
    return str(bindings)


def test_a_virtual_environment_leads_to_the_library_of_its_base(interpreter, tmp_path):
    assert prefix(str(interpreter)) == tmp_path / "base"
    assert library_folders(str(interpreter)) == [str(tmp_path / "base/lib")]


def test_a_static_build_has_no_library(interpreter, tmp_path):
    (tmp_path / "base/lib/libpython3.8.so.1.0").unlink()
    assert library_folders(str(interpreter)) == []


def test_no_interpreter_has_nothing():
    assert prefix("/no/python") is None and library_folders("/no/python") == []


def write_pth(site, place):
    (site / "easy-install.pth").write_text(f"import sys\n{place}\n")


def write_egg_link(site, place):
    (site / "isaacgym.egg-link").write_text(f"{place}\n.\n")


def write_finder(site, place):
    (site / "__editable___isaacgym_1_0rc4_finder.py").write_text(f"MAPPING = {{'isaacgym': '{place}/isaacgym'}}\n")


@pytest.mark.parametrize("write", [None, write_pth, write_egg_link, write_finder])
def test_bindings_of_isaac_gym_however_it_was_installed(interpreter, tmp_path, write):
    site = tmp_path / "venv/lib/python3.8/site-packages"
    place = site if write is None else tmp_path / "download/python"
    bindings = isaacgym_in(place)
    if write is not None:
        write(site, place)
    assert library_folders(str(interpreter)) == [str(tmp_path / "base/lib"), bindings]
    assert find_package(str(interpreter), "isaacgymenvs") is None


def test_environment_of_a_worker_there(interpreter, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    env = WorkerCommand(str(interpreter), {"num_threads": 2}, "cuda:1").environment()
    assert env["LD_LIBRARY_PATH"].split(os.pathsep) == [str(tmp_path / "base/lib"), "/mine"]
    assert env["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path / "cache/claw-lightning/torch_extensions"))
    assert env["MAX_JOBS"] == "2" and env["CUDA_VISIBLE_DEVICES"] == "1" and env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_worker_of_the_learners_own_interpreter_has_its_libraries_already(monkeypatch):
    for name in ("LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    env = WorkerCommand(sys.executable, {"num_threads": 2}).environment()
    assert not {"LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "MAX_JOBS"} & set(env)


def test_every_interpreter_compiles_into_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    assert extension_folder("/a/python").startswith("/mine/")
    assert extension_folder("/a/python") != extension_folder("/b/python")
