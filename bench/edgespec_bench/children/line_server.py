"""The measured engine's end of the protocol: one JSON line back for each line read, until the input ends.

Runs in each engine's own interpreter and imports nothing of edgespec, which is not installed there. Owns the clock:
when the first and the last token came, processor time between them, peak memory. Knows no engine.

A child calls `serve` with a function that loads its engine. It is started with one argument, a JSON object: `threads`,
`model` (a folder or name), `settings` (name -> what the engine is to be set to; a request names one of them).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Engine", "Recorder", "serve"]


class Engine(Protocol):
    """What `load` returns. `logits` may be missing: the engine then does not tell."""

    name: str
    version: str

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        """Hand `request["n_tokens"]` tokens after `request["prompt"]` to the recorder; the counts that it knows."""


class Recorder:
    """When tokens came, and in how many arrivals: `add` is called each time that the engine hands over some."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.tokens: list[int] = []
        self.first_tokens = 0
        self.arrivals = 0
        self._started = time.perf_counter()
        self._first = self._last = 0.0
        self._first_cpu = self._last_cpu = 0.0

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.n_tokens

    def add(self, tokens: Iterable[int]) -> bool:
        """Whether more are wanted."""
        now, new = time.perf_counter(), [int(token) for token in tokens]
        if new and not self.tokens:
            self._first, self._first_cpu, self.first_tokens = now, time.process_time(), len(new)
        self.tokens += new
        self.arrivals += 1
        self._last = now
        if self.is_full:
            self._last_cpu = time.process_time()
        return not self.is_full

    def answer(self) -> dict[str, Any]:
        """The part of the answer that every engine has. Raises ValueError for a wrong number of tokens."""
        if not self.is_full:
            raise ValueError(f"gave {len(self.tokens)} tokens of {self.n_tokens}: it stopped by itself")
        return {
            "tokens": self.tokens[: self.n_tokens],
            "first_tokens": min(self.first_tokens, self.n_tokens),
            "ttft_s": self._first - self._started,
            "seconds": self._last - self._first,
            "cpu_s": self._last_cpu - self._first_cpu,
            "rounds": None,
            "drafted": None,
            "accepted": None,
            "by_position": None,
            "host_s": None,
        }


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load, say so, and answer until the input ends. What goes wrong is a line with `error`."""
    out = _own_output()
    started = time.perf_counter()
    given = json.loads(sys.argv[1])
    engine = _guarded(lambda: load(given))
    if isinstance(engine, dict):
        _write(out, engine)
        raise SystemExit(1)
    ready = {"ready": True, "engine": engine.name, "version": engine.version, "settings": given["settings"]}
    _write(out, {**ready, "threads": given["threads"], "load_s": time.perf_counter() - started})
    for line in sys.stdin:
        request = json.loads(line)
        _write(out, _guarded(lambda request=request: _answer(engine, request, given["settings"])))


def _answer(engine: Any, request: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    setting = request["setting"]
    if setting not in settings:
        raise ValueError(f"was started without the setting {setting!r}")
    if request["do"] == "decode":
        recorder = Recorder(request["n_tokens"])
        counts = engine.decode(setting, request, recorder)
        return {**recorder.answer(), **counts, "peak_rss_mb": peak_mb()}
    if request["do"] == "logits" and hasattr(engine, "logits"):
        return dict(engine.logits(setting, request["prompt"], request["continuation"], request["path"]))
    raise ValueError(f"has no answer to {request['do']!r}")


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _own_output() -> Any:
    """A channel of its own: what libraries print to stdout goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _write(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def peak_mb(status: Path = Path("/proc/self/status")) -> float | None:
    """Largest resident set of this process so far, in MB of 2^20 bytes; None where the system does not tell."""
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 1024), 1)
