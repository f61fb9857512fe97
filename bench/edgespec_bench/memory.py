"""Peak memory of one `edgespec run` in a process of its own, beside what it cannot do without: weights and KV cache."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import child_environment
from edgespec.errors import BackendError

__all__ = ["PeakMemory", "peak_memory"]

_PROMPT = "Write a short story about a fox who learns to swim."


@dataclass(frozen=True)
class PeakMemory:
    """Bytes. `excess` is what the process held beyond weights and KV cache: interpreter, runtime, scratch."""

    peak: int
    weights: int
    kv: int

    @property
    def excess(self) -> int:
        return self.peak - self.weights - self.kv

    def to_dict(self) -> dict[str, float]:
        """In MB of 2^20 bytes."""
        parts = {"peak": self.peak, "weights": self.weights, "kv": self.kv, "excess": self.excess}
        return {f"{name}_mb": round(value / 2**20, 1) for name, value in parts.items()}


def peak_memory(model: Path, weight_bytes: int, kv_bytes: int, n_tokens: int) -> PeakMemory | None:
    """Largest resident set of `edgespec run` with its default drafter; None where the system does not tell.

    Raises BackendError where the command fails.
    """
    run = ["run", "-m", str(model), "-n", str(n_tokens), "--temp", "0", _PROMPT]
    command = [sys.executable, "-m", "edgespec_bench.memory_child", *run]
    environment = child_environment(**_python_path())
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, env=environment)
    if done.returncode:
        raise BackendError(f"`edgespec run` ended with code {done.returncode}: {done.stderr.strip()[-400:]}")
    peak = int(done.stdout.splitlines()[-1])
    return PeakMemory(peak, weight_bytes, kv_bytes) if peak else None


def _python_path() -> dict[str, str]:
    """The child finds the same packages, also when they were put on the path and not installed."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
