"""A whole run in a folder: the card, every part in order; what is done already is not done again.

Owns the order of the parts. A run that was stopped goes on where it was. A part that fails is a `skip` row, and the
others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, EdgeSpecError
from edgespec_bench.article.cases import chosen, scaled_cases
from edgespec_bench.machine_card import commit, machine_card, versions
from edgespec_bench.sides import Side, edgespec_side, list_sides
from edgespec_bench.suite.costs import measure_bandwidth, measure_costs
from edgespec_bench.suite.extras import measure_fidelity, measure_prediction, write_references
from edgespec_bench.suite.parts import Size, parts_of
from edgespec_bench.suite.rows import RowFile
from edgespec_bench.suite.turns import Encode, run_part

__all__ = [
    "PART_NAMES",
    "ROWS_FILE",
    "RunOptions",
    "encoder",
    "end_tokens",
    "results_folder",
    "run_suite",
    "write_card",
]

Progress = Callable[..., None]
ROWS_FILE = "rows.jsonl"
NATIVE = "edgespec/plain"
PART_NAMES = ("costs", "sides", "scaled", "prediction", "fidelity")


@dataclass(frozen=True)
class RunOptions:
    """model: a pair's name. scaled: the widened target's bundle. flat: further bundles to judge V(5)/V(1) of.

    parts: those of PART_NAMES to measure. note: how quiet the machine was, in words, for the report.
    """

    size: Size
    model: str = "smollm2-135m"
    scaled: str = "smollm2-135m-x3"
    flat: tuple[str, ...] = ()
    threads: int = 2
    parts: tuple[str, ...] = PART_NAMES
    note: str = ""


def results_folder(base: Path) -> Path:
    """A folder under `base` named by today's date and the commit."""
    name = (commit() or "no-commit").replace("+", "-changed")
    return base / f"{datetime.now(UTC).date().isoformat()}-{name}"


def run_suite(options: RunOptions, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """Measure into `folder`/rows.jsonl; parts that are complete there are left alone. Returns all rows."""
    with RowFile(folder / ROWS_FILE) as out:
        write_card(options, out)
        encode = encoder(options.model)
        for name in options.parts:
            if any(row["row"] == "done" and row["part"] == name for row in out.rows):
                continue
            out.drop(partial(_is_stale, name))
            began = time.perf_counter()
            try:
                _PARTS[name](options, encode, out, progress)
            except EdgeSpecError as error:
                out.write("skip", part=name, side=None, reason=str(error))
                continue
            progress(f"{name}: {time.perf_counter() - began:.0f} s", 1, 1)
        return out.rows


def _is_stale(part: str, row: dict[str, Any]) -> bool:
    """Of a part that is not done: everything but what its sides have answered, which `run_part` goes on from."""
    return row.get("part") == part and (row["row"] not in ("side", "run", "skip") or row.get("side") is None)


def write_card(options: RunOptions, out: RowFile) -> None:
    """The card of this machine and commit. Raises ConfigError where the folder holds rows of another one."""
    card = {
        "machine": machine_card(),
        "versions": versions(),
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": options.size.name,
        "model": options.model,
        "scaled": options.scaled,
        "threads": options.threads,
        "note": options.note,
    }
    old = next((row for row in out.rows if row["row"] == "card"), None)
    if old is None:
        out.write("card", **card)
        return
    for field in ("commit", "size", "model", "threads"):
        if old[field] != card[field]:
            raise ConfigError(
                f"{out.path} holds a run with {field} {old[field]!r}, this one has {card[field]!r}: give another folder"
            )


def encoder(model: str) -> Encode:
    """Ids of a conversation by the model's template, of its text alone where it has none.

    The scaled target shares the tokenizer. Raises ConfigError where the bundle has none.
    """
    from edgespec.pairs import ensure
    from edgespec.text import Tokenizer

    tokenizer = Tokenizer.load(Path(ensure(model)))
    if tokenizer.chat_template is not None:
        return tokenizer.encode_chat
    return lambda messages: tokenizer.encode("\n".join(message["content"] for message in messages))


def end_tokens(model: str) -> tuple[int, ...]:
    """Tokens with which the answers of `model` end."""
    from edgespec.bundle import Bundle
    from edgespec.pairs import ensure

    return Bundle.open(Path(ensure(model))).info.eos_ids


def _sides(options: RunOptions, encode: Encode, out: RowFile, progress: Progress) -> None:
    part = parts_of(options.size, options.model, options.scaled)[0]
    ends = end_tokens(options.model)
    run_part(part, list_sides(), encode, options.threads, out, progress, ends)


def scaled_sides(model: str, keys: Sequence[str]) -> tuple[Side, ...]:
    """Plain decoding of the widened target, and the model that it was made from as its draft in these ways."""
    plain = next(side for side in list_sides() if side.name == NATIVE)
    drafts = tuple(
        edgespec_side(
            case.key, "speculative", case.label, draft=case.draft, draft_model=case.draft_model, **case.options
        )
        for case in chosen(scaled_cases(model), tuple(keys))
        if case.draft != "none"
    )
    return (plain, *drafts)


def _scaled(options: RunOptions, encode: Encode, out: RowFile, progress: Progress) -> None:
    part = parts_of(options.size, options.model, options.scaled)[1]
    repeats = max(5, options.size.cost_repeats // 3)
    try:
        measure_costs(options.scaled, options.threads, repeats, out, progress, part.name)
    except ConfigError as error:
        way = f"`python -m edgespec_bench widen -m {options.model} --factor 3` makes the scaled target"
        raise ConfigError(f"{error} ({way})") from error
    sides = scaled_sides(options.model, options.size.scaled_keys)
    run_part(part, sides, encode, options.threads, out, progress, end_tokens(options.model))


def _costs(options: RunOptions, encode: Encode, out: RowFile, progress: Progress) -> None:
    progress("costs: memory bandwidth", 0, 1)
    out.write("bandwidth", part="costs", **measure_bandwidth(options.threads))
    for model in (options.model, *options.flat):
        measure_costs(model, options.threads, options.size.cost_repeats, out, progress, "costs")
    out.write("done", part="costs")


def _prediction(options: RunOptions, encode: Encode, out: RowFile, progress: Progress) -> None:
    measure_prediction(options.model, options.size, options.threads, out, progress)
    out.write("done", part="prediction")


def _fidelity(options: RunOptions, encode: Encode, out: RowFile, progress: Progress) -> None:
    passages = write_references(options.model, options.size, options.threads, encode, progress)
    plain = [side for side in list_sides() if side.what == "plain" and side.setting != "exact-plain"]
    measure_fidelity(options.model, plain, passages, options.threads, out, progress)
    native = next(side for side in plain if side.engine == "edgespec")
    for model in options.flat:
        measure_fidelity(model, [native], passages, options.threads, out, progress)
    out.write("done", part="fidelity")


_PARTS = {"costs": _costs, "sides": _sides, "scaled": _scaled, "prediction": _prediction, "fidelity": _fidelity}
