"""edgespec's own ways to decode on a model of the user's: plain, n-grams, the drafts that fit, and what `auto` chooses.

What `edgespec bench` runs, through the same sides, turns and figures as the whole suite. Knows no peers and no targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.draft.base import FREE_DRAFTS
from edgespec.errors import ConfigError
from edgespec_bench.prompts import KINDS
from edgespec_bench.report.figures import NATIVE, Figures, per_token, tpot_s
from edgespec_bench.sides import Side, edgespec_side, find_side
from edgespec_bench.spread import Spread
from edgespec_bench.suite.parts import FULL, Cell, Part
from edgespec_bench.suite.rows import RowFile
from edgespec_bench.suite.runner import RunOptions, encoder, end_tokens, write_card
from edgespec_bench.suite.turns import run_part

__all__ = ["OwnOptions", "measure_own", "own_sides"]

Progress = Callable[..., None]
_PART = "sides"


@dataclass(frozen=True)
class OwnOptions:
    """kinds: of prompt. setting: t0 | t08. turns: how often every side answers each prompt."""

    model: str
    kinds: tuple[str, ...] = ("chat", "code", "summarise")
    setting: str = "t0"
    n_prompts: int = 3
    n_tokens: int = 96
    turns: int = 1
    threads: int = 2

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"kind {unknown or 'is missing'}: use {', '.join(KINDS)}")


def own_sides(folder: Path) -> tuple[Side, ...]:
    """Of a model folder, plain first. What needs a trained draft is there for the drafts that fit."""
    from edgespec.auto import candidate_kinds

    kinds = candidate_kinds(folder)
    sides = [find_side(NATIVE), find_side("edgespec/exact-plain"), find_side("edgespec/ngram-3")]
    if "table" in kinds:
        sides.append(find_side("edgespec/ngram,table-3"))
    for kind in (kind for kind in kinds if kind not in FREE_DRAFTS):
        sides.append(edgespec_side(f"{kind}-2", "speculative", draft=kind, num_speculative_tokens=2))
        sides.append(edgespec_side(f"ngram,{kind}-2", "speculative", draft=f"ngram,{kind}", num_speculative_tokens=2))
    sides.append(edgespec_side("auto", "speculative", "what the plan chooses for this machine", draft="auto"))
    return tuple(sides)


def measure_own(options: OwnOptions, rows_file: Path, progress: Progress) -> dict[str, Any]:
    """Measure into `rows_file`; the result as plain data, sides in the order of their speed over all kinds.

    Raises ConfigError for a model that is not here, has no tokenizer, or cannot be run at all.
    """
    from edgespec.pairs import ensure

    folder = Path(ensure(options.model))
    cells = tuple(Cell(kind, options.setting) for kind in options.kinds)
    part = Part(_PART, options.model, "own", cells, options.n_prompts, options.n_tokens, options.turns)
    size = replace(FULL, name="own", cells=cells, n_prompts=options.n_prompts, n_tokens=options.n_tokens)
    with RowFile(rows_file) as out:
        write_card(RunOptions(size, model=options.model, threads=options.threads), out)
        ends = end_tokens(options.model)
        run_part(part, own_sides(folder), encoder(options.model), options.threads, out, progress, ends)
        return _result(options, Figures(out.rows))


def _result(options: OwnOptions, figures: Figures) -> dict[str, Any]:
    sides = [_side(figures, side, options) for side in figures.names(_PART) if figures.runs(_PART, side)]
    skipped = {row["side"]: row["reason"] for row in figures.all("skip")}
    if not sides:
        reasons = "; ".join(dict.fromkeys(skipped.values()))
        raise ConfigError(f"{options.model} ran in no way at all: {reasons}")
    sides.sort(key=lambda side: -side["tok_s"]["median"])
    card = {name: figures.card[name] for name in ("machine", "versions", "commit", "started")}
    return {"model": options.model, "setting": options.setting, "threads": options.threads, "best": sides[0]["side"],
            "sides": sides, "left_out": skipped, **card}  # fmt: skip


def _side(figures: Figures, side: str, options: OwnOptions) -> dict[str, Any]:
    runs = figures.runs(_PART, side, options.kinds, options.setting)
    over = figures.compare(_PART, side, figures.native(_PART), options.kinds, options.setting)
    speed = figures.speed(_PART, side, options.kinds, options.setting)
    assert speed is not None
    by_kind = {kind: figures.speed(_PART, side, [kind], options.setting) for kind in options.kinds}
    info = figures.sides[_PART, side]
    shares = figures.acceptance(_PART, side, options.kinds, options.setting)
    return {
        "side": side.partition("/")[2],
        "tok_s": speed.to_dict(),
        "over_plain": over.ratio.to_dict(3) if over else None,
        "tok_s_by_kind": {kind: found.to_dict() if found else None for kind, found in by_kind.items()},
        "tokens_a_round": figures.tokens_a_round(_PART, side, options.kinds, options.setting),
        "acceptance_by_position": [round(share, 3) for share in shares],
        "ttft_ms": _ms(figures.spread_of(runs, lambda row: row["ttft_s"])),
        "tpot_ms": _ms(figures.spread_of(runs, tpot_s)),
        "cpu_ms_a_token": _ms(figures.spread_of(runs, per_token("cpu_s"))),
        **{name: info[name] for name in ("load_s", "cold_ttft_s", "peak_rss_mb", "settings")},
    }


def _ms(found: Spread | None) -> float | None:
    return round(1e3 * found.median, 2) if found else None
