"""Where another interpreter keeps its libraries, found by looking at its files: it is not started for that.

A process reads the search path of its shared libraries before its first line of Python, so whoever starts it must know
that path. Isaac Gym's bindings need the interpreter's own library (``libpython3.8.so.1.0``) and their own folder on it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from pathlib import Path


def prefix(python: str) -> Path | None:
    """Folder that an interpreter was installed into, seen through a virtual environment; None: no such file."""
    found = shutil.which(python)
    if found is None:
        return None
    executable = Path(found).absolute()
    settings = executable.parent.parent / "pyvenv.cfg"
    try:
        home = re.search(r"^home\s*=\s*(.+?)\s*$", settings.read_text(), re.M)
    except OSError:
        home = None
    return Path(home.group(1)).parent if home else executable.resolve().parent.parent


def site_folders(python: str) -> list[Path]:
    """The ``site-packages`` of an interpreter, its virtual environment's first."""
    found = shutil.which(python)
    if found is None:
        return []
    roots = [Path(found).absolute().parent.parent, prefix(python)]
    folders = [Path(each) for root in roots if root for each in sorted(glob.glob(f"{root}/lib/python3*/site-packages"))]
    return list(dict.fromkeys(folders))


def find_package(python: str, name: str) -> Path | None:
    """Folder of a package installed there, also where it was installed to be edited; None: not found."""
    for folder in site_folders(python):
        places = [folder]
        for link in (*sorted(folder.glob("*.pth")), *sorted(folder.glob("*.egg-link"))):
            lines = link.read_text(errors="replace").splitlines()
            places += [folder / line.strip() for line in lines if line.strip() and not line.startswith(("import", "#"))]
        for finder in sorted(folder.glob(f"__editable___{name}_*finder.py")):
            mapped = re.search(rf"['\"]{name}['\"]\s*:\s*['\"]([^'\"]+)['\"]", finder.read_text(errors="replace"))
            places += [Path(mapped.group(1)).parent] if mapped else []
        for place in places:
            if (place / name / "__init__.py").is_file():
                return (place / name).resolve()
    return None


def library_folders(python: str) -> list[str]:
    """What an interpreter must find on LD_LIBRARY_PATH: the folder of its own library, and Isaac Gym's bindings."""
    folders = []
    base = prefix(python)
    if base is not None and sorted(base.glob("lib/libpython3*.so*")):
        folders.append(str(base / "lib"))
    isaacgym = find_package(python, "isaacgym")
    if isaacgym is not None:
        folders += [str(path) for path in sorted(isaacgym.glob("_bindings/linux-*")) if path.is_dir()]
    return folders


def extension_folder(python: str) -> str:
    """Where an interpreter's compiled torch extensions are kept: one folder for each, shared by all its workers."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(given) if given else cache / "claw-lightning" / "torch_extensions"
    return str(root / hashlib.sha256(os.path.abspath(python).encode()).hexdigest()[:12])
