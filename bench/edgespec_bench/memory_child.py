"""Runs the edgespec command line with the given arguments and prints this process's peak memory in bytes as last line.

The parent cannot ask the system instead: on Linux the peak that it reports for a child starts at the parent's own size.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["peak_bytes"]


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Largest resident set of this process so far; 0 where the system does not tell."""
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    from edgespec.cli import main as edgespec

    edgespec(sys.argv[1:], prog_name="edgespec", standalone_mode=False)
    print(peak_bytes())


if __name__ == "__main__":
    main()
