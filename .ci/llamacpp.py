"""Installs llama-cpp-python into the environment that runs this script.

The package comes as source only, and compiling it takes minutes, so the wheel is kept outside of the checkout: in
$EDGESPEC_WHEELS, else $XDG_CACHE_HOME/edgespec-wheels, else ~/.cache/edgespec-wheels, in a folder that names version,
Python, platform and the processor's features (the build is for this processor). Its version is that of constraints.txt.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from edgespec.cpu import cpu_identity

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llama-cpp-python"
PIP = [sys.executable, "-m", "pip"]
# The library for pictures and sound doubles the work and is not used.
CMAKE_ARGS = "-DLLAVA_BUILD=OFF"


def main() -> int:
    version = wanted_version()
    try:
        if metadata.version(PACKAGE) == version:
            return 0
    except metadata.PackageNotFoundError:
        pass
    folder = cache_folder(version)
    wheel = next(iter(sorted(folder.glob("*.whl"))), None) or build(version, folder)
    if wheel is None:
        return 1
    print(f"{PACKAGE} {version} from {wheel}", flush=True)
    constraints = ROOT / "constraints.txt"
    return subprocess.call(
        [*PIP, "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints), str(wheel)]
    )


def wanted_version() -> str:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{PACKAGE}==(\S+)$", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"constraints.txt has no line {PACKAGE}==VERSION")
    return match[1]


def cache_folder(version: str) -> Path:
    base = os.environ.get("EDGESPEC_WHEELS") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "edgespec-wheels"
    )
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(base, f"{PACKAGE}-{version}-{python}-{platform.system().lower()}-{cpu_identity()}")


def build(version: str, folder: Path) -> Path | None:
    """Compile the source package and put the wheel into `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    print(f"building {PACKAGE} {version} from source, some minutes, once (log: {log})", flush=True)
    environment = {
        **os.environ,
        "CMAKE_ARGS": f"{CMAKE_ARGS} {os.environ.get('CMAKE_ARGS', '')}".strip(),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1),
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        with log.open("w", encoding="utf-8") as output:
            command = [*PIP, "wheel", "--no-deps", "--disable-pip-version-check", "-w", temporary]
            status = subprocess.call(
                [*command, f"{PACKAGE}=={version}"], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        wheel = next(iter(Path(temporary).glob("*.whl")), None)
        if status != 0 or wheel is None:
            print(
                f"{PACKAGE} {version} could not be built (pip ended with {status}; see {log}): it needs a C++ compiler "
                "and the package index; `make test LLAMACPP=no` leaves out what needs it",
                file=sys.stderr,
            )
            return None
        target = folder / wheel.name
        wheel.replace(target)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    return target


if __name__ == "__main__":
    sys.exit(main())
