"""Why a child process ended, in words: a signal number means little to the person who reads it.

Used wherever edgespec starts another program (pip, peers in benchmarks). Knows no program in particular.
"""

from __future__ import annotations

import signal

from edgespec.cpu import CpuTopology, missing_features, read_topology

__all__ = ["describe_exit"]

_HINTS = {
    "SIGKILL": "most likely by the system, for lack of memory: use a smaller model or context, or close other programs",
    "SIGILL": "an instruction that this CPU does not have{lacks}: the installed build wants features that "
    "`edgespec doctor` does not list, so install one for this machine",
    "SIGSEGV": "a crash inside native code: run it with another device, or another version of the runtime",
    "SIGBUS": "a crash inside native code, or a disk that is full under a mapped file",
    "SIGABRT": "it gave up by itself: its last lines on stderr say why",
}


def describe_exit(what: str, returncode: int, topology: CpuTopology | None = None, machine: str | None = None) -> str:
    """One clause on how `what` ended, from a `subprocess` return code (negative: killed by that signal).

    topology, machine: of the CPU that it ran on, None for this one.
    """
    number = -returncode if returncode < 0 else returncode - 128
    if returncode >= 0 and not 128 < returncode < 160:
        return f"{what} ended with status {returncode}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"{what} ended with status {returncode}"
    hint = _HINTS.get(name)
    if name == "SIGILL" and hint:
        missing = missing_features(topology or read_topology(), machine)
        hint = hint.format(lacks=f" (it lacks {', '.join(missing)})" if missing else "")
    return f"{what} was killed by signal {number} ({name}){f', {hint}' if hint else ''}"
