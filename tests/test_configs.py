"""Names by which a shipped configuration is found, and what a wrong name answers."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from claw_lightning import configs


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A source tree with two configurations; the working directory is elsewhere."""
    root = tmp_path / "tree"
    (root / "claw_lightning").mkdir(parents=True)
    (root / "conf" / "debug").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / "conf" / "pendulum.yaml").touch()
    (root / "conf" / "debug" / "fast.yaml").touch()
    (root / "conf" / "notes.txt").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(configs, "_PACKAGE", root / "claw_lightning")
    return root / "conf"


@pytest.mark.parametrize("name", ["conf/pendulum.yaml", "pendulum.yaml", "pendulum", "conf/pendulum"])
def test_each_spelling_names_the_shipped_file(shipped, name):
    assert configs.find_config(name) == shipped / "pendulum.yaml"


def test_nested_file_is_named_with_its_folder(shipped):
    assert configs.find_config("debug/fast") == shipped / "debug" / "fast.yaml"
    assert configs.find_config("conf/debug/fast.yaml") == shipped / "debug" / "fast.yaml"


def test_an_existing_file_as_given_wins(shipped):
    own = Path("conf/pendulum.yaml")
    own.parent.mkdir()
    own.touch()
    assert configs.find_config("conf/pendulum.yaml") == own
    # Only the exact spelling is the user's file; the short name still means the shipped one.
    assert configs.find_config("pendulum") == shipped / "pendulum.yaml"


def test_a_folder_of_that_name_is_no_configuration(shipped):
    Path("pendulum").mkdir()
    assert configs.find_config("pendulum") == shipped / "pendulum.yaml"


def test_wrong_name_answers_with_one_line(shipped):
    with pytest.raises(FileNotFoundError) as error:
        configs.find_config("conf/pendulm.yaml")
    message = str(error.value)
    assert "\n" not in message
    assert "'conf/pendulm.yaml'" in message
    assert "Did you mean pendulum.yaml?" in message
    assert "debug/fast.yaml" in message


def test_wrong_name_without_a_near_one(shipped):
    with pytest.raises(FileNotFoundError, match="Shipped: debug/fast.yaml, pendulum.yaml") as error:
        configs.find_config("zzz")
    assert "Did you mean" not in str(error.value)


def test_a_name_cannot_leave_the_shipped_folder(shipped):
    (shipped.parent / "secret.yaml").touch()
    with pytest.raises(FileNotFoundError):
        configs.find_config("conf/../secret.yaml")


def test_list_is_sorted_and_holds_configurations_only(shipped):
    assert configs.list_configs() == ["debug/fast.yaml", "pendulum.yaml"]


def test_folder_inside_an_installed_package_is_used(shipped):
    installed = configs._PACKAGE / "conf"
    installed.mkdir()
    (installed / "other.yaml").touch()
    assert configs.list_configs() == ["other.yaml"]


def test_foreign_conf_beside_site_packages_is_not_ours(shipped):
    (shipped.parent / "pyproject.toml").unlink()
    assert configs.config_dir() is None
    with pytest.raises(FileNotFoundError, match="Shipped: none"):
        configs.find_config("pendulum")


def test_every_configuration_of_this_tree_is_found():
    for name in configs.list_configs():
        assert configs.find_config(name).is_file()


def test_nothing_heavy_is_imported():
    code = (
        "import sys, claw_lightning.configs\n"
        "heavy = {'torch', 'lightning', 'numpy', 'jsonargparse', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = Path(configs.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


def test_a_runs_configuration_keeps_from_where_modules_came(tmp_path, monkeypatch, caplog):
    """Those beside the files it was started with, and those of its working directory; folders without are left out."""
    monkeypatch.setattr(configs, "IMPORT_FOLDERS", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    beside, desk, empty = (tmp_path / name for name in ('beside "it"', "desk", "empty"))
    for folder in (beside, desk, empty):
        folder.mkdir()
        (folder / "own.yaml").write_text("model: {}\n")
    (beside / "plugin.py").touch()
    (desk / "package").mkdir()
    (desk / "package" / "__init__.py").touch()
    monkeypatch.chdir(desk)
    for folder in (beside, empty):
        configs.add_import_folder(folder / "own.yaml")
    saved = empty / "config.yaml"
    saved.write_text("# mine\n" + configs.import_lines() + "model: {}\n")

    configs.IMPORT_FOLDERS.clear()
    monkeypatch.chdir(tmp_path)
    configs.add_import_folder(saved)
    assert list(configs.IMPORT_FOLDERS) == [str(folder) for folder in (empty, beside, desk)]
    assert {str(beside), str(desk)} <= set(sys.path)

    configs.IMPORT_FOLDERS.clear()
    (beside / "plugin.py").unlink()
    (beside / "own.yaml").unlink()
    beside.rmdir()
    with caplog.at_level(logging.WARNING):
        configs.add_import_folder(saved)
    assert str(beside) not in configs.IMPORT_FOLDERS
    (message,) = caplog.messages
    assert str(saved) in message and str(beside) in message and "PYTHONPATH" in message and "\n" not in message
