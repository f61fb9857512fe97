"""What the machine and the target cost by themselves: bandwidth, bytes of weights a step, V(n), a call by parts.

V(n) is the runtime's time of a call of n rows on a session of its own, row counts taking turns; the parts are those of
`edgespec_bench.kernels`. Writes rows; knows nothing of sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from edgespec_bench.kernels import TOTAL, profile_round
from edgespec_bench.spread import spread
from edgespec_bench.suite.rows import RowFile

__all__ = ["ROWS", "measure_bandwidth", "measure_costs"]

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
N_PAST = 128
_ELEMENTS = 2**24  # float64, 128 MB for each thread: far beyond the caches


def measure_bandwidth(threads: int, repeats: int = 5) -> dict[str, Any]:
    """GB/s with so many threads, medians. Weights are only read, so `gb_s` is that of numpy's sum; a copy, whose bytes
    are read and written, is for comparison.
    """
    sources = [np.ones(_ELEMENTS) for _ in range(threads)]
    sinks = [np.ones(_ELEMENTS) for _ in range(threads)]
    methods: dict[str, tuple[Callable[[int], Any], int]] = {
        "sum": (lambda i: sources[i].sum(), 8),
        "copy": (lambda i: np.copyto(sinks[i], sources[i]), 16),
    }
    found = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, (work, bytes_each) in methods.items():
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                list(pool.map(work, range(threads)))
                seconds.append(time.perf_counter() - began)
            found[name] = round(threads * _ELEMENTS * bytes_each / spread(seconds).median / 1e9, 2)
    return {"threads": threads, "gb_s": found["sum"], "by_method": found}


def measure_costs(
    model: str, threads: int, repeats: int, out: RowFile, progress: Callable[..., None], part: str
) -> None:
    """The rows `weights`, `cost` (one for each row count) and `profile` (1 and 5 rows) of a bundle.

    Raises ConfigError or BundleError for a model that is not here or has graphs of fixed shapes.
    """
    from edgespec.backends import load_model
    from edgespec.pairs import ensure

    progress(f"{part}: V(n) of {model}", 0, 1)
    target = load_model(ensure(model), threads=threads)
    try:
        past = max(1, min(N_PAST, target.info.n_ctx - ROWS[-1] - 1))
        times = _row_times(target, past, repeats)
        for n, seconds in times.items():
            out.write(
                "cost", part=part, model=model, rows=n, past=past, ms=spread([1e3 * s for s in seconds]).to_dict()
            )
    finally:
        target.close()
    _write_profile(model, threads, repeats, past, out, part)


def _row_times(target: Any, past: int, repeats: int) -> dict[int, list[float]]:
    """Rows -> seconds in the runtime; row counts take turns, and the first turn warms up."""
    most = target.info.max_rows or ROWS[-1]
    widths = [n for n in ROWS if n <= most]
    session = target.open_session()
    seconds: dict[int, list[float]] = {n: [] for n in widths}
    try:
        session.forward(_tokens(past, target.info.n_vocab), logits_rows=())
        for turn in range(-1, repeats):
            for n in widths:
                rows = session.forward(_tokens(n, target.info.n_vocab))
                session.keep(past)
                if turn >= 0:
                    seconds[n].append(rows.run_s)
    finally:
        session.close()
    return seconds


def _tokens(n: int, n_vocab: int) -> list[int]:
    return [(11 * i + n) % n_vocab for i in range(n)]


def _write_profile(model: str, threads: int, repeats: int, past: int, out: RowFile, part: str) -> None:
    """Milliseconds by part of calls of 1 and 5 rows; the weights that a step reads are those of its products."""
    found = profile_round(model, (1, 5), threads, repeats, past)
    for n in (1, 5):
        own = [entry for entry in found if entry["rows"] == n and entry["part"] != TOTAL]
        products = [entry for entry in own if "weight_mb" in entry]
        busy_ms = sum(entry["ms"] for entry in products)
        out.write(
            "profile",
            part=part,
            model=model,
            rows=n,
            past=past,
            ms={entry["part"]: entry["ms"] for entry in own},
            products=[entry["part"] for entry in products],
            gops=round(sum(entry["gops"] * entry["ms"] for entry in products) / busy_ms, 1) if busy_ms else None,
        )
        if n == 1 and products:
            read = sum(entry["weight_mb"] for entry in products)
            out.write("weights", part=part, model=model, read_bytes=round(1e6 * read))
