"""Finds the configurations that ship with the project, from a source tree and from an installed wheel alike."""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = (".yaml", ".yml")

#: Folders of the user's configurations, from which workers too can import plug-ins.
IMPORT_FOLDERS: list[str] = []

#: Begins a line at the top of a run's config.yaml that keeps such a folder, as a JSON string.
_FOLDER_LINE = "# modules from: "


def add_import_folder(config: Path) -> None:
    """Make modules beside a user's configuration importable, after all that is installed.

    Of a run's own config.yaml also those that lay beside the files, and in the working directory, it was started with.
    """
    folder, shipped = config.resolve().parent, config_dir()
    if shipped is not None and (folder == shipped.resolve() or shipped.resolve() in folder.parents):
        return
    for each in (str(folder), *_kept_folders(config)):
        if each not in IMPORT_FOLDERS:
            IMPORT_FOLDERS.append(each)
        if each not in sys.path:
            sys.path.append(each)


def import_lines() -> str:
    """Comment lines for the top of a run's config.yaml: from where modules may be imported that are not installed."""
    folders = [folder for folder in dict.fromkeys([*IMPORT_FOLDERS, os.getcwd()]) if _holds_modules(Path(folder))]
    return "".join(f"{_FOLDER_LINE}{json.dumps(folder)}\n" for folder in folders)


def _holds_modules(folder: Path) -> bool:
    return any(True for pattern in ("*.py", "*/*.py") for _ in folder.glob(pattern))


def _kept_folders(config: Path) -> list[str]:
    """What :func:`import_lines` wrote into a file; a folder that is gone is named, and left out."""
    folders = []
    for line in config.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(_FOLDER_LINE):
            continue
        try:
            folder = str(json.loads(line.removeprefix(_FOLDER_LINE)))
        except ValueError:  # somebody's own comment
            continue
        if os.path.isdir(folder):
            folders.append(folder)
        else:
            log.warning("%s: the run's modules lay in %s, which is not there; put its path into PYTHONPATH if it has "
                        "moved, or correct that line", config, folder)  # fmt: skip
    return folders


def config_dir() -> Path | None:
    """Folder of the shipped configurations, or None where none was installed.

    The wheel carries them as ``claw_lightning/conf``; in a source tree (and an editable install) they are ``conf/``
    beside the package. A ``pyproject.toml`` tells a source tree from a site-packages folder with a foreign ``conf``.
    """
    installed = _PACKAGE / "conf"
    if installed.is_dir():
        return installed
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "conf").is_dir():
        return root / "conf"
    return None


def list_configs() -> list[str]:
    """Shipped configurations, sorted, as paths relative to ``conf/`` (``pendulum.yaml``, ``debug/fast.yaml``)."""
    return sorted(_shipped())


def find_config(name: str) -> Path:
    """Path of the configuration called ``name``.

    An existing file as given wins, so that a user's own ``conf/pendulum.yaml`` is never replaced by ours. Otherwise
    ``conf/pendulum.yaml``, ``pendulum.yaml`` and ``pendulum`` all name the shipped file.

    Raises:
        FileNotFoundError: With one line that names the file, close matches and what is shipped.
    """
    if not name:
        raise FileNotFoundError("--config is empty; name a file, or leave it out")
    given = Path(name).expanduser()
    if given.is_file():
        return given
    shipped = _shipped()
    key = given.as_posix().removeprefix("conf/")
    for candidate in (key, *(key + suffix for suffix in _SUFFIXES)):
        if candidate in shipped:
            return shipped[candidate]
    if given.is_dir():
        raise FileNotFoundError(f"--config {name}: this is a folder; name a file in it")
    raise FileNotFoundError(_not_found(name, key, sorted(shipped)))


def _shipped() -> dict[str, Path]:
    """Shipped configurations by their path relative to ``conf/``."""
    root = config_dir()
    if root is None:
        return {}
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in _SUFFIXES}


def _not_found(name: str, key: str, shipped: list[str]) -> str:
    """The one line that a user reads after a wrong name."""
    # Compared without folder and suffix, so that `pendulm` is near `pendulum.yaml` and `fast` near `debug/fast.yaml`.
    stems = [Path(path).stem for path in shipped]
    near = set(difflib.get_close_matches(Path(key).stem, stems, n=3))
    close = [path for path, stem in zip(shipped, stems, strict=True) if stem in near]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"no configuration file {name!r}.{hint} Shipped: {', '.join(shipped) or 'none'}."
