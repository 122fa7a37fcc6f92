"""What a user gets from the wheel."""

import configparser
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this tree by the installed backend: no isolated environment, no network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (extra `dev`)")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    run = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_configurations_lie_inside_the_package(wheel):
    here = {f"claw_lightning/conf/{p.relative_to(ROOT / 'conf').as_posix()}" for p in (ROOT / "conf").rglob("*.yaml")}
    assert here, "conf/ holds no configuration"
    assert here <= set(wheel.namelist())


def test_both_packages_are_complete(wheel):
    here = {
        p.relative_to(ROOT).as_posix() for name in ("claw_lightning", "callbacks") for p in (ROOT / name).rglob("*.py")
    }
    assert here <= set(wheel.namelist())
    assert any(name.startswith("callbacks/") for name in here), "callbacks/ is empty"


def test_nothing_else_is_installed(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"claw_lightning", "callbacks"}
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith((".ckpt", ".log"))]


def test_both_commands_lead_to_the_same_function(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(entry_points).decode())
    assert dict(parser["console_scripts"]) == {
        "lightning": "claw_lightning.cli:main",
        "claw-lightning": "claw_lightning.cli:main",
    }


def test_the_malicious_releases_are_excluded(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requires = [
        line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: lightning")
    ]
    assert requires == ["Requires-Dist: lightning<2.7,>=2.6.4"]


def test_installed_package_finds_its_configurations(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = "import claw_lightning.configs as c; print(c.__file__); print(*c.list_configs())"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    where, names = run.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert set(names.split()) == {p.relative_to(ROOT / "conf").as_posix() for p in (ROOT / "conf").rglob("*.yaml")}
