"""Which CPU cores this process may use, which of them are fast, and what they can do.

Reads /sys and /proc (from a root that tests may replace) and nothing else; knows no model and no runtime.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuTopology", "allowed_cpus", "cpu_identity", "default_threads", "missing_features", "read_topology"]

# A core counts as slow below these shares of the fastest core: capacities of little cores are 0.2-0.5 of a big one's,
# while clock rates (read where no capacity is given) differ less, 0.56-0.7.
SLOW_CAPACITY = 0.6
SLOW_CLOCK = 0.75

# Names in /proc/cpuinfo -> the names that kernels are talked about with.
FEATURES = {
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "asimdhp": "fp16",
    "fphp": "fp16",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "fp16",
    "amx_int8": "amx_int8",
}


# What current builds take for granted or slow down without, in the names above.
EXPECTED = {"x86_64": ("avx2", "fma"), "aarch64": ("dotprod",)}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class CpuTopology:
    """Cores by number. `fast` are physical cores, one of each pair of hyper-threads; `quota` is in cores.

    lists_features: whether the system tells features at all, so that one that is not among them is missing.
    """

    allowed: tuple[int, ...]
    fast: tuple[int, ...]
    speeds: dict[int, int]  # capacity, or kHz where no capacity is given
    features: frozenset[str]
    model: str
    quota: float | None = None
    lists_features: bool = True

    @property
    def threads(self) -> int:
        """Threads to run with: the fast cores that may be used, within the quota of the control group."""
        if self.quota is None:
            return len(self.fast)
        return max(1, min(len(self.fast), int(self.quota + 0.5)))


def default_threads() -> int:
    """Threads for a model on this machine, now (an affinity mask set later on is not seen)."""
    return read_topology().threads


def allowed_cpus() -> tuple[int, ...]:
    """The cores that this process may run on; all of them where the system has no affinity masks."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def read_topology(root: Path = Path("/"), allowed: Collection[int] | None = None) -> CpuTopology:
    """The topology under `root` (its sys/ and proc/); `allowed` None asks the system.

    What a system does not tell is taken as equal cores and no features.
    """
    cpus = tuple(sorted(allowed)) if allowed is not None else allowed_cpus()
    cpu_root = root / "sys/devices/system/cpu"
    speeds, slow_share = _speeds(cpu_root, cpus)
    top = max(speeds.values(), default=0)
    fast = [cpu for cpu in cpus if speeds.get(cpu, top) >= slow_share * top]
    model, features = _cpuinfo(root / "proc/cpuinfo")
    known = features or frozenset()
    return CpuTopology(
        cpus, _one_per_core(cpu_root, fast), speeds, known, model, _quota(root), lists_features=features is not None
    )


def cpu_identity(topology: CpuTopology | None = None) -> str:
    """A short text that changes when kernels may choose differently: architecture, model and features, hashed."""
    topology = topology or read_topology()
    parts = [platform.system(), platform.machine(), topology.model, *sorted(topology.features)]
    return f"{platform.machine()}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def missing_features(topology: CpuTopology, machine: str | None = None) -> list[str]:
    """Features that this kind of processor mostly has and this one lacks; none where the system does not tell.

    machine: as `platform.machine()` calls it, None for this one.
    """
    machine = machine or platform.machine()
    wanted = EXPECTED.get(MACHINES.get(machine, machine), ())
    return [name for name in wanted if topology.lists_features and name not in topology.features]


def _speeds(root: Path, cpus: Collection[int]) -> tuple[dict[int, int], float]:
    """Capacity of each core, or its top clock rate; and the share below which a core is slow."""
    for name, share in (("cpu_capacity", SLOW_CAPACITY), ("cpufreq/cpuinfo_max_freq", SLOW_CLOCK)):
        speeds = {cpu: value for cpu in cpus if (value := _read_int(root / f"cpu{cpu}" / name)) is not None}
        if len(speeds) == len(cpus):
            return speeds, share
    return {}, SLOW_CLOCK


def _one_per_core(root: Path, cpus: Collection[int]) -> tuple[int, ...]:
    """The first of each group of hyper-threads."""
    groups: dict[str, int] = {}
    for cpu in cpus:
        siblings = _read(root / f"cpu{cpu}" / "topology/thread_siblings_list") or str(cpu)
        groups.setdefault(siblings, cpu)
    return tuple(sorted(groups.values()))


def _cpuinfo(path: Path) -> tuple[str, frozenset[str] | None]:
    """The model, and its features; None where the system does not list any."""
    text = _read(path) or ""
    models = re.findall(r"^(?:model name|Hardware)\s*:\s*(.*)$", text, re.MULTILINE)
    if not models:
        models = sorted(set(re.findall(r"^CPU part\s*:\s*(.*)$", text, re.MULTILINE)))
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    known = None if flags is None else frozenset(FEATURES[flag] for flag in flags[1].split() if flag in FEATURES)
    return (" ".join(dict.fromkeys(models)) or platform.processor()).strip(), known


def _quota(root: Path) -> float | None:
    """Cores that the control group grants, None where it sets no limit (version 2, then version 1)."""
    fields = (_read(root / "sys/fs/cgroup/cpu.max") or "").split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    quota = _read_int(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read_int(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None
