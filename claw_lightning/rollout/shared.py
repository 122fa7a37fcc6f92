"""Anonymous shared memory that two interpreters of different versions can map.

``memfd_create`` gives a block without a name: nothing appears in /dev/shm, its size is not limited by that mount, and
the kernel frees it when the last process that holds it has gone, also after SIGKILL.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Tuple

import numpy as np

PAGE = 4096


class SharedBlock:
    """A block of zeroed shared memory, known by its file descriptor.

    Args:
        size: bytes.
        fd: descriptor of an existing block (in a worker), or None to create one (in the learner).
        name: appears in /proc/<pid>/maps, for debugging only.
    """

    def __init__(self, size: int, fd: int = -1, name: str = "claw") -> None:
        self.size = size
        if fd < 0:
            fd = os.memfd_create(name)
            os.ftruncate(fd, size)
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
