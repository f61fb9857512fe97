"""What a figure was measured on: machine, versions, commit. A figure without its card says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import edgespec
from edgespec.cpu import read_topology

__all__ = ["commit", "machine_card", "versions"]

_HERE = Path(__file__).resolve().parent
_PACKAGES = ("onnxruntime", "numpy", "tokenizers")


def machine_card() -> dict[str, Any]:
    """CPU, cores in use, memory, governor of the clock, load of the machine at this moment (1 minute), system."""
    topology = read_topology()
    return {
        "cpu": topology.model,
        "cores": len(topology.allowed),
        "fast_cores": len(topology.fast),
        "features": sorted(topology.features),
        "memory_mb": _memory_mb(),
        "governor": _governor(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Of Python and the packages that decide a speed; None for one that is not installed."""
    own = {"python": platform.python_version(), "edgespec": edgespec.__version__}
    return {**own, **{name: _version(name) for name in _PACKAGES}}


def commit(folder: Path = _HERE) -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")  # a run writes there
    return head + ("+" if changed else "")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _governor(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) -> str | None:
    """How the system chooses the first core's clock; None where it does not tell."""
    try:
        return cpu.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _memory_mb() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (AttributeError, ValueError, OSError):
        return None
