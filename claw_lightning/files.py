"""Paths as users write them, and files that must be on the disk before something else happens."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def expand(path: str | os.PathLike[str] | None) -> str | None:
    """A path of the user's with ``~`` read as the home folder; an empty one, and None, are None.

    Shells leave it as it is behind ``=`` and in quotes, and nobody else reads it in a YAML file.
    """
    return os.path.expanduser(os.fspath(path)) if path else None


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it, for folders
            raise
    finally:
        os.close(number)
