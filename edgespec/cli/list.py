"""`edgespec list`: the known pairs and whether they are here. Only shows what `pairs.list_pairs` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgespec.cli.console import format_bytes, print_json
from edgespec.draft.table import read_facts
from edgespec.pairs import PairStatus, list_pairs

__all__ = ["command"]


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def command(as_json: bool) -> None:
    """List the known models, their drafts and licences, and which have been pulled."""
    pairs = list_pairs()
    if as_json:
        print_json([_to_json(pair) for pair in pairs])
        return
    width = max((len(pair.name) for pair in pairs), default=0)
    for pair in pairs:
        size = format_bytes(pair.size_bytes) if pair.size_bytes else "size unknown"
        here = "pulled" if pair.is_pulled else "not pulled"
        click.echo(f"{pair.name:<{width}}  {here}, {size}, {pair.license}, drafts: {', '.join(_drafts(pair))}")
        click.echo(f"{'':<{width}}  {pair.description}")
        for draft in pair.trained:
            click.echo(f"{'':<{width}}  {draft.kind}: {format_bytes(draft.size_bytes)}{_acceptance(draft.acceptance)}")
        if pair.table is not None:
            n_bytes = sum(path.stat().st_size for path in pair.table.glob("*.npy"))
            click.echo(f"{'':<{width}}  table: {format_bytes(n_bytes)}{_acceptance(_measured(pair.table))}")


def _drafts(pair: PairStatus) -> list[str]:
    """Every draft that goes with the pair, the default first."""
    every = ("ngram", *(["table"] if pair.table else []), *(draft.kind for draft in pair.trained), *pair.drafts)
    return [pair.default_draft, *(draft for draft in every if draft != pair.default_draft)]


def _acceptance(found: Mapping[str, Any]) -> str:
    """What was measured on held-out text when it was trained, as far as it is recorded."""
    length = found.get("mean_acceptance_length")
    if not isinstance(length, (int, float)):
        return ""
    how = [f"k = {found['k']}" if "k" in found else "", str(found.get("setting", ""))]
    return f", {length:.2f} tokens a round on held-out text ({', '.join(part for part in how if part) or 'as trained'})"


def _measured(table: Path) -> Mapping[str, Any]:
    found = read_facts(table).get("acceptance")
    return found if isinstance(found, dict) else {}


def _to_json(pair: PairStatus) -> dict[str, object]:
    return {
        "name": pair.name,
        "description": pair.description,
        "license": pair.license,
        "bytes": pair.size_bytes,
        "pulled": pair.is_pulled,
        "path": str(pair.path) if pair.path else None,
        "drafts": _drafts(pair),
        "trained": [
            {"kind": draft.kind, "bytes": draft.size_bytes, "acceptance": dict(draft.acceptance)}
            for draft in pair.trained
        ],
        "table": None if pair.table is None else {"acceptance": dict(_measured(pair.table))},
        "default_draft": pair.default_draft,
    }
