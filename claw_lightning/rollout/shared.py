"""Shared memory that two interpreters of different versions can map: anonymous, or a file for what memory cannot hold.

``memfd_create`` gives a block without a name: nothing appears in /dev/shm, its size is not limited by that mount, and
the kernel frees it when the last process that holds it has gone, also after SIGKILL. A file that is unlinked as soon as
it is open has the same life, but its pages can go to the disk when memory gets short.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from typing import Any, Optional, Tuple

import numpy as np

log = logging.getLogger(__name__)

PAGE = 4096


class SharedBlock:
    """A block of zeroed shared memory, known by its file descriptor.

    Args:
        size: bytes.
        fd: descriptor of an existing block (in a worker), or -1 to create one (in the learner).
        name: appears in /proc/<pid>/maps, for debugging only.
        path: of a new file that holds the block instead of anonymous memory. A worker needs the descriptor only.
        keep: leave the file where it is. By default it is unlinked as soon as it is open: no other process can find
            it, and its space is free again when the last process that holds it has gone, also after SIGKILL.

    Raises:
        OSError: the file exists, cannot be made, or there is no room for it; one line with the path.
    """

    def __init__(
        self, size: int, fd: int = -1, name: str = "claw", path: Optional[str] = None, keep: bool = False
    ) -> None:
        self.size = size
        if fd < 0 and path is None:
            fd = os.memfd_create(name)
            os.ftruncate(fd, size)
        elif fd < 0:
            assert path is not None
            fd = _create_file(os.fspath(path), size, keep)
        self.fd = fd
        self._map = mmap.mmap(fd, size)

    def array(self, dtype: Any, shape: Tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Writable numpy view of the block at a byte offset."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def close(self) -> None:
        """Drop the descriptor. The mapping itself lives as long as views of it do."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """A descriptor left open would keep the memory of a finished run until the process ends."""
        if getattr(self, "fd", -1) >= 0 and os is not None:
            self.close()


def _create_file(path: str, size: int, keep: bool) -> int:
    """Descriptor of a new file of zeros whose space is reserved; see :class:`SharedBlock`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        # Two runs that write the same rows would train on each other's half steps.
        text = "this replay file is there already; it may be another run's: remove it, or name another one"
        raise FileExistsError(errno.EEXIST, text, path) from error
    try:
        if not keep:
            os.unlink(path)
        if not reserve(fd, size, path):
            log.warning("%s: its file system cannot reserve space; if it fills up, the run dies by SIGBUS", path)
    except BaseException:
        os.close(fd)
        if keep:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    return fd


def reserve(fd: int, size: int, path: str) -> bool:
    """Make a file ``size`` bytes long and take the space that it lacks; what it holds stays.

    A mapped page that finds no room when it is first touched ends the process by SIGBUS, hours later and without a
    word. So a file system that is too small is told at the beginning.

    Returns:
        False where the file system cannot reserve: the file is as long as asked, but may run out of space.

    Raises:
        OSError: no room, or a limit of this process; one line with the path and the bytes that are needed.
    """
    missing = size - min(size, 512 * os.fstat(fd).st_blocks)
    system = os.fstatvfs(fd)
    free = system.f_bavail * system.f_frsize
    try:
        if missing > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, max(1, size))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        text = "the file needs %d bytes, %d of them new, and %d are free (%s)" % (
            size,
            missing,
            free,
            os.strerror(error.errno or errno.EIO),
        )
        raise OSError(error.errno, text, path) from error
    return True
