"""Free memory under control groups of all kinds, the estimate of a run's needs, and the refusal."""

import resource
from types import SimpleNamespace

import psutil
import pytest

from claw_lightning import limits
from claw_lightning.errors import ConfigError
from claw_lightning.limits import GIB, MemoryEstimate, Room

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """10 GiB free of 16, and no limits of the process."""
    memory = SimpleNamespace(available=10 * GIB, total=16 * GIB)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return memory


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(root, folder, limit, used, inactive=0, mount="sys/fs/cgroup"):
    write(root, f"{mount}/{folder}/memory.max", f"{limit}\n")
    write(root, f"{mount}/{folder}/memory.current", f"{used}\n")
    write(root, f"{mount}/{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def group_v1(root, folder, limit, used, inactive=0):
    mount = f"sys/fs/cgroup/memory/{folder}"
    write(root, f"{mount}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{mount}/memory.usage_in_bytes", f"{used}\n")
    write(root, f"{mount}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_control_groups_the_machine_counts(tmp_path):
    assert limits.tightest_room(tmp_path) == Room(10 * GIB, 16 * GIB, "this machine")
    assert limits.available_memory(tmp_path) == 10 * GIB


@pytest.mark.parametrize("mountinfo", [True, False])
@pytest.mark.parametrize("level", ["slice", "slice/job", "slice/job/step"])
def test_the_tightest_of_nested_groups_counts(level, mountinfo, tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/slice/job/step\n")
    if mountinfo:
        line = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        write(tmp_path, "proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + line)
    for folder in ("slice", "slice/job", "slice/job/step"):
        group_v2(tmp_path, folder, "max", 3 * GIB)
    group_v2(tmp_path, level, 4 * GIB, 3 * GIB)
    found = limits.tightest_room(tmp_path)
    assert found == Room(GIB, 4 * GIB, str(tmp_path / "sys/fs/cgroup" / level / "memory.max"))


def test_a_limit_beside_the_own_group_does_not_count(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/slice/mine\n")
    group_v2(tmp_path, "slice/mine", "max", GIB)
    group_v2(tmp_path, "slice/other", GIB, GIB)
    assert limits.available_memory(tmp_path) == 10 * GIB


def test_page_cache_that_would_give_way_is_free(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    group_v2(tmp_path, "job", 4 * GIB, 3 * GIB, inactive=2 * GIB)
    assert limits.available_memory(tmp_path) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    group_v2(tmp_path, "job", 4 * GIB, 5 * GIB)
    assert limits.available_memory(tmp_path) == 0


@pytest.mark.parametrize(
    "path, mounted",
    [
        ("/", "/"),  # own namespace: the container is the topmost group
        ("/docker/abc", "/docker/abc"),  # the host's path, the container's group mounted
        ("/docker/abc", "/"),  # the host's path, which means nothing here
        ("/../../docker/abc", "/"),  # a path outside the namespace
    ],
)
def test_a_container_sees_its_group_at_the_mount_itself(path, mounted, tmp_path):
    write(tmp_path, "proc/self/cgroup", f"0::{path}\n")
    write(tmp_path, "proc/self/mountinfo", f"31 23 0:28 {mounted} /sys/fs/cgroup ro - cgroup2 cgroup ro\n")
    group_v2(tmp_path, ".", 2 * GIB, GIB)
    assert limits.tightest_room(tmp_path)[:2] == (GIB, 2 * GIB)


def test_version_one_nested_beside_an_empty_version_two(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:cpu,memory:/batch/job\n1:cpu:/other\n0::/\n")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    unlimited = 9223372036854771712
    group_v1(tmp_path, ".", unlimited, 8 * GIB)
    group_v1(tmp_path, "batch", 5 * GIB, 4 * GIB, inactive=GIB // 2)
    group_v1(tmp_path, "batch/job", unlimited, GIB)
    found = limits.tightest_room(tmp_path)
    assert found[:2] == (GIB + GIB // 2, 5 * GIB)
    assert found.where.endswith("sys/fs/cgroup/memory/batch/memory.limit_in_bytes")


def test_limits_of_the_process_count(tmp_path, monkeypatch):
    write(tmp_path, "proc/self/status", f"Name:\tpython\nVmSize:\t{GIB // 1024} kB\nVmData:\t{GIB // 2048} kB\n")
    soft = {resource.RLIMIT_AS: 4 * GIB, resource.RLIMIT_DATA: 2 * GIB}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (soft[which], soft[which]))
    assert limits.tightest_room(tmp_path) == Room(3 * GIB // 2, 2 * GIB, "RLIMIT_DATA (ulimit -d)")
    assert 3 * GIB in [room.free for room in limits.memory_rooms(tmp_path)]


def test_this_machine_leaves_something(monkeypatch):
    monkeypatch.undo()
    assert 0 < limits.available_memory() <= psutil.virtual_memory().total


# -- what a run will need -------------------------------------------------------------------------------------------


def test_parts_add_up_and_are_told_on_one_line():
    estimate = MemoryEstimate(32 * GIB // 10, 100, 4 * GIB // 10, 2, 4 * GIB // 10, 3 * GIB // 10)
    assert estimate.total == 32 * GIB // 10 + 100 + 3 * (4 * GIB // 10) + 3 * GIB // 10
    assert estimate.describe() == (
        "replay 3.2 GiB, mailboxes 0 KiB, 2 workers 0.8 GiB, evaluator 0.4 GiB, learner 0.3 GiB"
    )


def test_parts_that_are_not_there_are_not_told():
    assert MemoryEstimate(5 * MIB).describe() == "replay 5 MiB"


def test_processes_and_learner():
    assert limits.process_bytes(300, 1, 7) == 300
    assert limits.process_bytes(300, 16, 7) == 300 + 15 * 7
    assert limits.process_bytes(300, 16) == 300
    # Weights, gradients, two moments, a target copy in float32; three batches.
    assert limits.learner_bytes(10, 100) == 10 * 4 * 5 + 300


def refusal(*arguments, **names):
    with pytest.raises(ConfigError) as error:
        limits.refuse_oversized(*arguments, **names)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_fits_passes_up_to_nine_tenths_of_what_is_free():
    limits.refuse_oversized(MemoryEstimate(80, 0, 5, 2), 100, 80, 1)
    assert "would fit" in refusal(MemoryEstimate(81, 0, 5, 2), 100, 81, 1)


def test_a_refusal_names_settings_need_free_limit_and_cure():
    text = refusal(MemoryEstimate(4 * GIB, 0, GIB // 2, 2, GIB // 2), 4 * GIB, 10_000_000, 400, "/x/memory.max")
    assert text == (
        "data.capacity (10,000,000 steps of 400 bytes) and data.num_workers (2) need 5.5 GiB (replay 4.0 GiB, 2 "
        "workers 1.0 GiB, evaluator 0.5 GiB), but only 4.0 GiB are free (limit: /x/memory.max); 4,250,000 would fit as "
        "data.capacity, more with fewer workers"
    )


@pytest.mark.parametrize("num_workers", [0, 1, 8])
def test_the_capacity_that_is_proposed_passes(num_workers):
    free, row = 10_000_000, 100
    estimate = MemoryEstimate(200_000 * row, 1_000, 500_000, num_workers, 500_000, 200_000)
    text = refusal(estimate, free, 200_000, row, "here")
    fits = int(text.split("; ")[1].split(" ")[0].replace(",", ""))
    assert 0 < fits < 200_000
    limits.refuse_oversized(estimate._replace(replay=fits * row), free, fits, row)


@pytest.mark.parametrize(
    "num_workers, cure", [(8, "lower data.num_workers"), (1, "raise the limit"), (0, "lower data.batch_size")]
)
def test_processes_that_do_not_fit_are_told_apart(num_workers, cure):
    text = refusal(MemoryEstimate(10 * MIB, 0, GIB, num_workers, GIB, GIB), GIB, 1_000, 100, "here")
    assert cure in text and "would fit" not in text


def test_where_the_limit_is_set_is_looked_up():
    assert "(limit: " in refusal(MemoryEstimate(10 * GIB), GIB, 1_000, 100)


# -- the processor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("flags : fpu avx2 fma\n", False),
        ("Features : fp asimd bf16\n", True),
        ("Features : fp asimd\n", False),
        ("nothing of the kind\n", True),
        (None, True),
    ],
)
def test_units_for_bfloat16(tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert limits.computes_bfloat16(path) is expected


# -- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quota, expected", [("150000", 1.5), ("max", 4.0), ("-1", 4.0), ("900000", 4.0)])
def test_cores_by_affinity_and_quota(version, quota, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: range(4))
    assert limits.usable_cores(tmp_path / "bare") == 4.0
    if version == 1:
        write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{quota}\n")
        write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    else:
        write(tmp_path, "proc/self/cgroup", "0::/slice/job\n")
        write(tmp_path, "sys/fs/cgroup/slice/job/cpu.max", "max 100000\n")
        write(tmp_path, "sys/fs/cgroup/slice/cpu.max", f"{'max' if quota == '-1' else quota} 100000\n")
    assert limits.usable_cores(tmp_path) == expected
