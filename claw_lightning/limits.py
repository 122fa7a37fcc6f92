"""Memory: what the machine and the control group leave, and what the C library does with freed blocks."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import psutil


def available_memory() -> int:
    """Bytes that can still be had: the smaller of the machine's and the control group's."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(limit_file).read_text())
            used = int(Path(usage_file).read_text())
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
        free = min(free, max(0, limit - used))
    return free


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for the next allocation (glibc; elsewhere nothing happens).

    Activations of a few MB are allocated and freed at every operation. By default glibc returns blocks of that size to
    the kernel at once, and their pages fault in again: measured here, twice the time of a 4096 x 256 x 256 product.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 32 << 20)  # the largest value that glibc accepts
        mallopt(m_trim_threshold, 512 << 20)
        mallopt(m_top_pad, 64 << 20)
