"""Chooses by measurement how a model's weights are laid out: `edgespec export --optimize-for rows=N --max-kld X`.

Owns the layouts that are tried, the order of the work and the choice. Each layout is exported as any other bundle and
judged by the exporter's own check; its calls are timed in turns through production sessions, with each kind of kernels
that this machine has. It knows neither rounding nor graphs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.backends import load_model
from edgespec.downloads import Progress
from edgespec.errors import ConfigError, EdgeSpecError, ExportRefusedError

if TYPE_CHECKING:
    from edgespec_export import CheckOptions, ExportOptions

__all__ = ["LAYOUTS", "Candidate", "Choice", "Layout", "choose", "export_fastest", "parse_rows"]

MOST_ROWS = 32
TURNS, CALLS = 3, 8  # of each candidate: loaded anew, so that a slow minute or an unlucky place of the weights hits one
PAST = 100
KERNELS = ("onnxruntime", "native")
# What `export_fastest` decides, with ExportOptions' defaults, which anything else would contradict.
DECIDED = ("bits", "block_size", "symmetric", "head_bits", "head_block_size", "fallback")


@dataclass(frozen=True)
class Layout:
    """Bits and blocks of the body and the lm head; zero points and padded blocks throughout, which cost nothing."""

    bits: int
    block: int
    head_bits: int
    head_block: int

    @property
    def label(self) -> str:
        head = "" if self.head == (self.bits, self.block) else f", head {self.head_bits} bits by {self.head_block}"
        return f"{self.bits} bits by {self.block}{head}"

    @property
    def head(self) -> tuple[int, int]:
        return self.head_bits, self.head_block

    def options(self, base: ExportOptions) -> ExportOptions:
        """`base` with this layout."""
        changes = {"bits": self.bits, "block_size": self.block, "head_bits": self.head_bits}
        more = {"head_block_size": self.head_block, "symmetric": False, "fallback": "pad"}
        return dataclasses.replace(base, **changes, **more)


# Larger blocks are faster and coarser, 8 bits slower and finer (bench/LOG.md, "Block size, one row" and "Rounding").
LAYOUTS = (
    *(Layout(4, block, 4, block) for block in (32, 64, 128, 256)),
    Layout(4, 128, 8, 128),
    Layout(8, 128, 8, 128),
)


@dataclass(frozen=True)
class Candidate:
    """A layout as measured. kld in nats, top1 a share, both against the float weights on the exporter's check text.

    ms: kernels -> row count -> median milliseconds of a call.
    """

    layout: Layout
    kld: float
    top1: float
    n_bytes: int
    ms: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def fastest(self, rows: int) -> tuple[str, float]:
        """(kernels, milliseconds) of the fastest call of `rows` rows."""
        return min(((name, times[rows]) for name, times in self.ms.items()), key=lambda item: item[1])

    def to_json(self) -> dict[str, Any]:
        ms = {name: {str(n): round(value, 4) for n, value in times.items()} for name, times in self.ms.items()}
        return {
            "layout": self.layout.label,
            **dataclasses.asdict(self.layout),
            "kld": self.kld,
            "top1": self.top1,
            "bytes": self.n_bytes,
            "ms": ms,
        }


@dataclass(frozen=True)
class Choice:
    """What was chosen, the kernels that were fastest with it, and everything that was measured."""

    path: Path
    rows: int
    max_kld: float
    chosen: Candidate
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        kernels, ms = self.chosen.fastest(self.rows)
        return {
            "rows": self.rows,
            "max_kld": self.max_kld,
            "chosen": self.chosen.layout.label,
            "kernels": kernels,
            "ms": round(ms, 4),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


def parse_rows(text: str) -> int:
    """N of `rows=N`; raises ConfigError for anything else."""
    found = re.fullmatch(r"rows=(\d{1,4})", text.strip())
    if found is None or not 1 <= int(found[1]) <= MOST_ROWS:
        raise ConfigError(
            f"optimize_for is {text!r} (--optimize-for): give rows=N, the rows of a verify pass (drafted tokens + 1), "
            f"1 to {MOST_ROWS}"
        )
    return int(found[1])


def export_fastest(
    source: str | Path,
    out: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    *,
    optimize_for: str,
    max_kld: float | None,
    min_top1: float | None = None,
    check_tokens: int = 256,
    threads: int | None = None,
    force: bool = False,
    layouts: Sequence[Layout] = LAYOUTS,
) -> Choice:
    """Export `source` to the bundle `out` in the layout whose calls of N rows are fastest here, of those that are good
    enough.

    optimize_for: `rows=N`. max_kld, min_top1: against the float weights. options: the rest of the export; the layout's
    own fields must be left alone. Raises ConfigError for settings, ExportRefusedError where no layout is good enough.
    """
    from edgespec_export import CheckOptions, ExportOptions
    from edgespec_export.writer import new_folder

    rows, base = parse_rows(optimize_for), options or ExportOptions()
    report = progress or (lambda stage, done, total: None)
    if max_kld is None:
        raise ConfigError(
            "--optimize-for needs --max-kld (max_kld), the largest mean KL divergence that is good enough"
        )
    check = CheckOptions(min_top1=0.0, max_kld=math.inf, n_tokens=check_tokens)
    CheckOptions(min_top1=min_top1, max_kld=max_kld)  # their ranges
    _refuse_decided(base)
    out = Path(out)
    with (
        new_folder(out, force=force) as folder,
        tempfile.TemporaryDirectory(prefix=".layouts-", dir=out.parent) as work,
    ):
        places = {layout: Path(work) / str(index) for index, layout in enumerate(layouts)}
        made = [_export(Path(source), place, layout, base, check, report) for layout, place in places.items()]
        times = _timed(places, sorted({1, rows}), threads, report)
        candidates = tuple(dataclasses.replace(found, ms=times[found.layout]) for found in made)
        chosen = choose(candidates, rows, max_kld, min_top1)
        for item in places[chosen.layout].iterdir():
            os.replace(item, folder / item.name)
    return Choice(out, rows, max_kld, chosen, candidates)


def _refuse_decided(base: ExportOptions) -> None:
    defaults = type(base)()
    for name in DECIDED:
        if getattr(base, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {getattr(base, name)} and --optimize-for decides it by measurement: drop one of the two"
            )


def choose(candidates: Sequence[Candidate], rows: int, max_kld: float, min_top1: float | None = None) -> Candidate:
    """The fastest at `rows` rows, with any kernels, of those within the limits.

    Raises ExportRefusedError, which names the best KLD that was found, where there is none.
    """
    good = [item for item in candidates if item.kld <= max_kld and item.top1 >= (min_top1 or 0.0)]
    if not good:
        best = min(candidates, key=lambda item: item.kld)
        wanted = f"a mean KLD of {max_kld:.4g}" + ("" if min_top1 is None else f" and {min_top1:.1%} equal top tokens")
        raise ExportRefusedError(
            f"no layout reaches {wanted}: the best found is {best.kld:.4g} ({best.top1:.1%}), {best.layout.label}, "
            f"{best.fastest(rows)[1]:.2f} ms at {rows} rows: raise --max-kld, or try --quantizer gptq"
        )
    return min(good, key=lambda item: item.fastest(rows)[1])


def _export(
    source: Path, place: Path, layout: Layout, base: ExportOptions, check: CheckOptions, report: Progress
) -> Candidate:
    from edgespec_export import export_model

    from edgespec.bundle import Bundle

    def step(stage: str, done: float, total: float | None) -> None:
        report(f"{layout.label}: {stage}", done, total)

    bundle = Bundle.open(export_model(source, place, layout.options(base), step, check=check))
    parity = bundle.info.parity
    assert parity is not None
    n_bytes = sum(entry["bytes"] for entry in bundle.files.values())
    return Candidate(layout, parity["kld_mean"], parity["top1_agreement"], n_bytes)


def _timed(
    places: Mapping[Layout, Path], counts: Sequence[int], threads: int | None, report: Progress
) -> dict[Layout, dict[str, dict[int, float]]]:
    """Layout -> kernels -> rows -> median milliseconds, in turns over all of them."""
    seconds: dict[Layout, dict[str, dict[int, list[float]]]] = {layout: {} for layout in places}
    total, done = TURNS * len(places), 0
    for _turn in range(TURNS):
        for layout, place in places.items():
            report("measuring", done, total)
            for kernels in KERNELS:
                for n, values in _calls(place, kernels, counts, threads).items():
                    seconds[layout].setdefault(kernels, {}).setdefault(n, []).extend(values)
            done += 1
    report("measuring", total, total)
    return {
        layout: {name: {n: 1e3 * float(np.median(x)) for n, x in times.items()} for name, times in by_kernels.items()}
        for layout, by_kernels in seconds.items()
    }


def _calls(place: Path, kernels: str, counts: Sequence[int], threads: int | None) -> dict[int, list[float]]:
    """Seconds of calls of each row count; nothing where this machine or layout cannot have those kernels."""
    try:
        model = load_model(place, threads=threads, device_options={"kernels": kernels})
    except EdgeSpecError:
        if kernels == KERNELS[0]:
            raise
        return {}  # no compiler, or no product with 4-bit weights
    try:
        session, info = model.open_session(), model.info
        past = min(PAST, info.n_ctx - max(counts))
        if past < 1:
            raise ConfigError(f"the model's context of {info.n_ctx} tokens is too short for {max(counts)} rows")
        tokens = np.random.default_rng(0).integers(0, info.n_vocab, past + max(counts)).tolist()
        session.forward(tokens[:past], logits_rows=[past - 1])
        found: dict[int, list[float]] = {n: [] for n in counts}
        for n in counts:
            for _call in range(CALLS + 1):
                rows = session.forward(tokens[past : past + n], logits_rows=list(range(n)))
                session.keep(past)
                found[n].append(rows.run_s)
            del found[n][0]  # it fills the caches
        session.close()
        return found
    finally:
        model.close()
