"""Cores, speeds, quotas and features from made-up /sys and /proc trees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec import cpu
from edgespec.cpu import allowed_cpus, cpu_identity, default_threads, read_topology

ARM_INFO = """processor\t: 0
Features\t: fp asimd aes asimdhp asimddp i8mm bf16 sve
CPU implementer\t: 0x41
CPU part\t: 0xd4d

processor\t: 1
CPU part\t: 0xd4e
"""


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, speeds: Sequence[int], file: str = "cpu_capacity") -> Path:
    for number, speed in enumerate(speeds):
        write(root / f"sys/devices/system/cpu/cpu{number}/{file}", speed)
    return root


@pytest.mark.parametrize(
    ("speeds", "fast"),
    [
        ([1024, 870, 870, 870, 325, 325, 325, 325], 4),  # 1 + 3 + 4
        ([325, 325, 325, 325, 1024, 1024, 1024, 1024], 4),  # 4 + 4
        ([1024] * 8, 8),
        ([1024, 1024, 900, 900, 900, 900, 900, 900], 8),  # 2 + 6, all of them large
    ],
)
def test_threads_are_the_fast_cores(tmp_path: Path, speeds: list[int], fast: int) -> None:
    """A thread on each of eight cores, four of them slow, used to run at the pace of the slow ones."""
    topology = read_topology(machine(tmp_path, speeds), range(len(speeds)))
    assert topology.threads == fast
    assert {speeds[core] for core in topology.fast}.isdisjoint({325})


def test_clock_rates_where_no_capacity_is_told(tmp_path: Path) -> None:
    rates = [3_300_000, 3_000_000, 3_000_000, 3_000_000, 2_000_000, 2_000_000, 2_000_000, 2_000_000]
    assert read_topology(machine(tmp_path, rates, "cpufreq/cpuinfo_max_freq"), range(8)).fast == (0, 1, 2, 3)


def test_only_allowed_cores_count(tmp_path: Path) -> None:
    root = machine(tmp_path, [325, 325, 1024, 1024])
    assert read_topology(root, [0, 1, 2]).fast == (2,)
    assert read_topology(root, [0, 1]).fast == (0, 1), "among slow cores alone, the best there are"


def test_one_thread_for_each_physical_core(tmp_path: Path) -> None:
    root = machine(tmp_path, [1024] * 4)
    for number in range(4):
        write(
            root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", f"{number % 2},{number % 2 + 2}"
        )
    assert read_topology(root, range(4)).fast == (0, 1)
    assert read_topology(root, [2, 3]).fast == (2, 3)


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "nonsense"}, 8),
    ],
)
def test_quota_of_the_control_group(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    root = machine(tmp_path, [1024] * 8)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    assert read_topology(root, range(8)).threads == threads


def test_features(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", ARM_INFO)
    topology = read_topology(tmp_path, range(2))
    assert topology.features == {"dotprod", "i8mm", "fp16", "bf16", "sve"}
    assert topology.model == "0xd4d 0xd4e"
    write(tmp_path / "proc/cpuinfo", "model name : Some CPU\nflags : fpu avx2 fma avx512_vnni\n")
    topology = read_topology(tmp_path, range(2))
    assert topology.features == {"avx2", "fma", "avx512_vnni"}
    assert topology.model == "Some CPU"


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, range(3))
    assert topology.threads == 3
    assert topology.features == frozenset()


def test_identity_follows_model_and_features(tmp_path: Path) -> None:
    names = set()
    for text in (ARM_INFO, ARM_INFO.replace("i8mm ", ""), ARM_INFO.replace("0xd4d", "0xd80")):
        write(tmp_path / "proc/cpuinfo", text)
        names.add(cpu_identity(read_topology(tmp_path, range(2))))
    assert len(names) == 3
    assert cpu_identity() == cpu_identity()


def test_this_machine() -> None:
    assert 1 <= default_threads() <= len(allowed_cpus()) <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_is_followed() -> None:
    """Threads used to be counted over all cores, so that a pinned process ran several on one core."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cpus() == (min(before),)
        assert default_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_system_without_affinity_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu.os, "sched_getaffinity", raising=False)
    assert allowed_cpus() == tuple(range(os.cpu_count() or 1))
