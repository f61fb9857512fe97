"""A record of who did what when, in the trace event format that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Lanes are threads of one process: the target's device, the draft's device, and the rounds. Times are microseconds since
the trace began. Knows no schedule: those call `span` and `mark`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["LANES", "Trace", "check_trace_path"]

LANES = {"target": 1, "draft": 2, "rounds": 3}
PROCESS = 1


class Trace:
    """Spans and marks of any number of requests. clock: seconds, of which the spans' times are. path: of the JSON."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, path: str | Path = "trace.json") -> None:
        self.clock, self.path = clock, Path(path)
        self._start_s = clock()
        self._events: list[dict[str, Any]] = []

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Something took from `start_s` to `end_s`."""
        self._add(lane, name, "X", start_s, {"dur": round(1e6 * (end_s - start_s), 3)}, args)

    def mark(self, lane: str, name: str, at_s: float, **args: Any) -> None:
        """Something happened."""
        self._add(lane, name, "i", at_s, {"s": "t"}, args)

    def _add(self, lane: str, name: str, kind: str, at_s: float, more: dict[str, Any], args: dict[str, Any]) -> None:
        event = {"name": name, "cat": lane, "ph": kind, "ts": round(1e6 * (at_s - self._start_s), 3), **more}
        self._events.append({**event, "pid": PROCESS, "tid": LANES[lane], "args": args})

    def to_dict(self) -> dict[str, Any]:
        """The JSON object form of the format, lanes named first."""
        names = [("process_name", 0, "edgespec"), *(("thread_name", number, lane) for lane, number in LANES.items())]
        meta = [
            {"name": name, "ph": "M", "pid": PROCESS, "tid": number, "args": {"name": text}}
            for name, number, text in names
        ]
        return {"traceEvents": [*meta, *self._events], "displayTimeUnit": "ms"}

    def save(self) -> None:
        """Write the file, over what it held; raises OSError."""
        self.path.write_text(json.dumps(self.to_dict(), allow_nan=False), encoding="utf-8")


def check_trace_path(path: str) -> None:
    """Raises ConfigError where a trace could not be written, before anything is run for it."""
    target = Path(path)
    if not path or target.is_dir():
        raise ConfigError(f"trace={path!r} names no file: give one, as trace.json")
    if not target.parent.is_dir():
        raise ConfigError(f"trace={path!r}: the folder {target.parent} does not exist: make it, or name another")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"trace={path!r} may not be written: name another file")
