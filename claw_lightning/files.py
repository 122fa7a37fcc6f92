"""Files that must be on the disk before something else happens."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
