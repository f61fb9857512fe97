"""Our own kernels: C source that ships, and the library that this machine's compiler makes of it once.

Owns compiling and where the result is kept. What the kernels compute is in products.c and attention.c; which nodes of a
graph they take is decided in `backends/onnx/native.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from edgespec.config import cache_dir
from edgespec.cpu import cpu_identity, read_topology
from edgespec.downloads import lock
from edgespec.errors import BackendError, EdgeSpecError, MissingDependencyError

__all__ = ["library", "obstacle", "source_hash"]

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
COMPILERS = ("cc", "gcc", "clang")
# No contraction of products and sums: it depends on how a loop was unrolled, and rows must not depend on their number.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
TIMEOUT_S = 120
NEEDED = "avx512_vnni"  # what they are made for; the loops for other CPUs are right and not known to be fast


@cache
def source_hash() -> str:
    """Names the sources: part of the key of whatever was measured with it."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]


@cache
def obstacle(*, is_trial: bool = False) -> str | None:
    """Why these kernels are not the choice here where none is named; None where they are.

    is_trial: to know it and no more; what is compiled for that is thrown away.
    """
    if NEEDED not in read_topology().features:
        return f"this CPU has no {NEEDED}"
    try:
        if not is_trial:
            library()
        elif not (path := _place().path).is_file():
            if reason := _unwritable(path.parent):
                return reason
            with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as folder:
                library(folder=Path(folder))
    except (EdgeSpecError, OSError) as error:
        return str(error)
    return None


def library(extra: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The compiled library, made at the first call on this machine (a second or two).

    extra: further compiler flags. folder: where it is kept; None for the cache. Raises MissingDependencyError where
    there is no C compiler, BackendError where it fails or the folder cannot be written.
    """
    compiler, path = _place(extra, folder)
    if not path.is_file():
        try:
            with lock(path.parent / "lock"):
                if not path.is_file():
                    _compile(compiler, [*FLAGS, *extra], path)
        except OSError as error:
            raise BackendError(_unkept(path.parent, error.strerror or str(error))) from error
    return path


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be kept in a folder that need not be there yet; None where it can."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return None if there.is_dir() and os.access(there, os.W_OK) else _unkept(folder, f"{there} is not writable")


def _unkept(folder: Path, why: str) -> str:
    return (
        f"edgespec's kernels cannot be kept in {folder} ({why}): make the cache "
        "writable (EDGESPEC_HOME), or use onnxruntime's (--device-option kernels=onnxruntime)"
    )


class _Place(NamedTuple):
    """The compiler, and the library that it makes, or has made."""

    compiler: str
    path: Path


def _place(extra: Sequence[str] = (), folder: Path | None = None) -> _Place:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise MissingDependencyError(
            f"edgespec's kernels need a C compiler once ({', '.join(COMPILERS)}) and none is on the PATH: install one, "
            "or use onnxruntime's (--device-option kernels=onnxruntime)"
        )
    stat = os.stat(compiler)
    made_by = f"{compiler} {stat.st_size} {stat.st_mtime_ns} {cpu_identity()} {[*FLAGS, *extra]}"
    name = f"operators-{source_hash()}-{hashlib.sha256(made_by.encode()).hexdigest()[:12]}.so"
    return _Place(compiler, (folder or cache_dir() / "kernels") / name)


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *flags, "-o", str(made), *(str(path) for path in SOURCES if path.suffix == ".c"), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(f"{compiler} could not compile edgespec's kernels ({error})") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise BackendError(
                f"{compiler} could not compile edgespec's kernels ({lines[0].strip()[:200]}): put another C compiler "
                "first on the PATH, or use onnxruntime's (--device-option kernels=onnxruntime)"
            )
        os.replace(made, path)
