"""The machine: what memory and the control groups leave, what a run needs, what the C library does with freed blocks.

Control groups are Linux's, version 1 and 2, nested ones and those of containers; elsewhere only the machine counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from claw_lightning.errors import ConfigError

GIB = 2**30
#: Share of the free memory that a run may plan with, and the one that a proposed capacity leaves it at.
USABLE, PROPOSED = 0.9, 0.8
#: Version 1 writes "no limit" as the largest multiple of a page.
NO_LIMIT = 1 << 60


class Room(NamedTuple):
    """One limit of memory: bytes still free below it, the limit itself, and where it is set."""

    free: int
    total: int
    where: str


def memory_rooms(root: Path = Path("/")) -> list[Room]:
    """All limits that hold for this process: the machine's, its control groups', its own.

    Args:
        root: folder in which ``proc`` and the mounts of control groups are looked for.
    """
    machine = psutil.virtual_memory()
    rooms = [Room(int(machine.available), int(machine.total), "this machine")]
    return rooms + list(_group_rooms(root)) + list(_process_rooms(root))


def tightest_room(root: Path = Path("/")) -> Room:
    """The limit below which the least is free."""
    return min(memory_rooms(root), key=lambda room: room.free)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be had: the least of what all limits leave."""
    return tightest_room(root).free


def _group_rooms(root: Path) -> Iterator[Room]:
    """Limits of the process's control group and of every group around it that can be seen."""
    names = {2: ("memory.max", "memory.current", "inactive_file")}
    names[1] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for version, mount, group in _groups(root):
        limit_name, usage_name, cache_name = names[version]
        for folder in (group, *group.parents):
            # Not there (the topmost group of version 2 has none), or "max".
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / limit_name).read_text())
                if limit < NO_LIMIT:
                    used = int((folder / usage_name).read_text())
                    # Pages of files that nobody has used lately count as used, but give way before anything fails.
                    used -= min(used, _entry(folder / "memory.stat", cache_name))
                    yield Room(max(0, limit - used), limit, str(folder / limit_name))
            if folder == mount:
                break


@lru_cache  # a process stays in its groups
def _groups(root: Path) -> list[tuple[int, Path, Path]]:
    """(version, mount point, folder of this process's group) of each mounted hierarchy that accounts for memory."""
    paths: dict[int, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = (rest.split() + ["", "", ""])[:3]
        version = 2 if kind == "cgroup2" else 1
        if kind not in ("cgroup", "cgroup2") or (version == 1 and "memory" not in options.split(",")):
            continue
        mounted, point = fields.split()[3:5]
        mounts.append((version, root / point.lstrip("/"), mounted))
    if not mounts:
        mounts = [(2, root / "sys/fs/cgroup", "/"), (1, root / "sys/fs/cgroup/memory", "/")]
    return [
        (version, mount, _below(mount, paths.get(version, PurePosixPath("/")), mounted))
        for version, mount, mounted in mounts
    ]


def _below(mount: Path, path: PurePosixPath, mounted: str) -> Path:
    """Folder of a group under a mount of the hierarchy's part ``mounted``; the nearest one around it that exists.

    A container may see its own group mounted as if it were the topmost, and its path as the host knows it.
    """
    with contextlib.suppress(ValueError):
        path = path.relative_to(mounted)
    parts = [part for part in path.parts if part not in ("/", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts.pop()
    return mount.joinpath(*parts)


def _process_rooms(root: Path) -> Iterator[Room]:
    """Limits of this process alone (``ulimit -v`` and ``-d``), where it has any."""
    for limit, entry, name in (
        (resource.RLIMIT_AS, "VmSize:", "RLIMIT_AS (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData:", "RLIMIT_DATA (ulimit -d)"),
    ):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            yield Room(max(0, soft - 1024 * _entry(root / "proc/self/status", entry)), soft, name)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _entry(path: Path, name: str) -> int:
    """Number behind a name in a file of lines "name number ..."; 0 where there is none."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return 0


# -- what a run will need -------------------------------------------------------------------------------------------


class MemoryEstimate(NamedTuple):
    """Bytes that a run will need beyond what the learner's process holds already.

    Attributes:
        replay: rings of all workers, exact.
        mailboxes: shared copies of the parameters.
        worker: one worker process.
        num_workers: worker processes; 0 in lock-step mode.
        evaluator: the evaluator's process.
        learner: networks, optimisers and batches.
    """

    replay: int
    mailboxes: int = 0
    worker: int = 0
    num_workers: int = 0
    evaluator: int = 0
    learner: int = 0

    @property
    def workers(self) -> int:
        """All worker processes."""
        return self.worker * self.num_workers

    @property
    def total(self) -> int:
        """All parts."""
        return self.replay + self.mailboxes + self.workers + self.evaluator + self.learner

    def describe(self) -> str:
        """The parts that are there, on one line."""
        count = f"{self.num_workers} worker{'s' if self.num_workers != 1 else ''}"
        parts = {
            "replay": self.replay, "mailboxes": self.mailboxes, count: self.workers, "evaluator": self.evaluator,
            "learner": self.learner,
        }  # fmt: skip
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size > 0)


def format_bytes(size: float) -> str:
    """Short, such as 3.2 GiB or 14 MiB."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def process_bytes(base: int, lanes: int, per_lane: int = 0) -> int:
    """A process that simulates: ``base`` measured with one lane, and what each further lane adds (0: not known)."""
    return base + max(0, lanes - 1) * per_lane


def learner_bytes(parameters: int, batch_bytes: int) -> int:
    """What learning adds: float32 weights, gradients, two moments of Adam and a target copy, and three batches.

    Three batches: the rows as sampled, their copy on the device, and what is computed from them.

    Args:
        parameters: of all networks that are trained.
        batch_bytes: one batch of all updates of a ``training_step``.
    """
    return parameters * 4 * 5 + 3 * batch_bytes


def refuse_oversized(
    estimate: MemoryEstimate, free: int, capacity: int, row_bytes: int, where: str | None = None
) -> None:
    """Stop before anything is allocated that will not fit.

    Args:
        free: bytes that can be had, of :func:`available_memory`.
        capacity: ``data.capacity``, environment steps.
        row_bytes: of one step.
        where: what limits the memory; None: it is looked up.

    Raises:
        ConfigError: the estimate is above nine tenths of ``free``; one line with a capacity that would fit.
    """
    if estimate.total <= USABLE * free:
        return
    others = estimate.total - estimate.replay
    fits = int(capacity * (PROPOSED * free - others) / estimate.replay) if estimate.replay > 0 else 0
    settings = f"data.capacity ({capacity:,} steps of {row_bytes} bytes)"
    if estimate.num_workers:
        settings += f" and data.num_workers ({estimate.num_workers})"
    if fits > 0:
        cure = f"{fits:,} would fit as data.capacity{', more with fewer workers' if estimate.num_workers > 1 else ''}"
    elif estimate.num_workers > 1:
        cure = "the processes alone do not fit: lower data.num_workers"
    elif estimate.num_workers:
        cure = "the processes alone do not fit: free memory, or raise the limit"
    else:
        cure = "networks and batches alone do not fit: lower data.batch_size or data.updates_per_step"
    raise ConfigError(
        f"{settings} need{'s' if not estimate.num_workers else ''} {format_bytes(estimate.total)} "
        f"({estimate.describe()}), but only {format_bytes(free)} are free (limit: {where or tightest_room().where}); "
        f"{cure}"
    )


# -- freed blocks ---------------------------------------------------------------------------------------------------


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


# -- the processor --------------------------------------------------------------------------------------------------


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may keep busy: its affinity, or the quota of its control groups where that is less."""
    return min([float(len(os.sched_getaffinity(0))), *_cpu_quotas(root)])


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores that each control group around the process leaves it, where one has a limit."""
    for version, mount, group in _groups(root):
        for folder in (group, *group.parents) if version == 2 else ():
            words = [word for line in _lines(folder / "cpu.max") for word in line.split()]
            if len(words) == 2 and words[0] != "max":
                yield int(words[0]) / int(words[1])
            if folder == mount:
                break
    # Version 1, whose hierarchies are mounted one by one: a container sees its own group as the topmost.
    for name in ("cpu", "cpu,cpuacct"):
        quota, period = (
            "".join(_lines(root / "sys/fs/cgroup" / name / f"cpu.cfs_{which}_us")) for which in ("quota", "period")
        )
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has units for bfloat16 products; without them they are some twenty times slower."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True  # not known: left to the user
    found = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return not found or bool(found[0] & {"avx512_bf16", "amx_bf16", "bf16"})
