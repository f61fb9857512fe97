"""`edgespec list`: the known pairs and whether they are here. Only shows what `pairs.list_pairs` says."""

from __future__ import annotations

import click

from edgespec.cli.console import format_bytes, print_json
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


def _drafts(pair: PairStatus) -> list[str]:
    """Every draft that goes with the pair, the default first."""
    return [pair.default_draft, *(draft for draft in ("ngram", *pair.drafts) if draft != pair.default_draft)]


def _to_json(pair: PairStatus) -> dict[str, object]:
    return {
        "name": pair.name,
        "description": pair.description,
        "license": pair.license,
        "bytes": pair.size_bytes,
        "pulled": pair.is_pulled,
        "path": str(pair.path) if pair.path else None,
        "drafts": _drafts(pair),
        "default_draft": pair.default_draft,
    }
