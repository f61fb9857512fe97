"""`edgespec bench`: edgespec's ways to decode side by side on a model of the user's, on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from edgespec.cli import console
from edgespec.cli.options import json_option
from edgespec.errors import MissingDependencyError

__all__ = ["command"]

_ROWS = "rows.jsonl"


@click.command("bench")
@click.argument("model")
@click.option(
    "--kind", "kinds", multiple=True, default=("chat", "code", "summarise"), show_default=True, help="Of prompts."
)
@click.option("--prompts", "n_prompts", type=click.IntRange(1, 10), default=3, show_default=True, help="Of each kind.")
@click.option(
    "-n", "--n-tokens", type=click.IntRange(8), default=96, show_default=True, help="New tokens of each answer."
)
@click.option(
    "--turns", type=click.IntRange(1), default=1, show_default=True, help="How often each prompt is answered."
)
@click.option("--sampled/--greedy", default=False, show_default=True, help="T = 0.8 with top-p 0.95, or T = 0.")
@click.option("-t", "--threads", type=click.IntRange(1), default=None, help="As many as this machine has fast cores.")
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder that keeps the rows as JSONL.",
)
@json_option
def command(model: str, save: Path | None, as_json: bool, threads: int | None, sampled: bool, **values: Any) -> None:
    """Measure MODEL: plain decoding, n-gram drafts, the trained drafts that fit, and what the plan chooses.

    All answer the same prompts in turns, each for a fixed number of tokens.
    """
    from edgespec.cpu import default_threads

    try:
        from edgespec_bench.suite.own import OwnOptions, measure_own
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("edgespec_bench"):
            raise
        raise MissingDependencyError(
            "`edgespec bench` needs the package edgespec_bench, which comes in the same wheel: install edgespec again"
        ) from error
    setting = "t08" if sampled else "t0"
    options = OwnOptions(model, setting=setting, threads=threads or default_threads(), **values)
    with tempfile.TemporaryDirectory() as temporary, console.progress(plain=as_json) as report:
        folder = save or Path(temporary)
        result = measure_own(options, folder / _ROWS, report)
    if as_json:
        console.print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    out = console.out()
    out.print(f"{result['model']}, {result['threads']} threads, {result['machine']['cpu']}")
    table = Table(show_edge=False)
    kinds = list(result["sides"][0]["tok_s_by_kind"])
    table.add_column("way to decode", no_wrap=True)
    for name in ("tok/s", "x plain", *kinds, "tok/round", "TTFT, ms", "MB"):
        table.add_column(name, justify="right")
    for side in result["sides"]:
        over, length = side["over_plain"], side["tokens_a_round"]
        table.add_row(
            side["side"],
            f"{side['tok_s']['median']:.1f}",
            f"{over['median']:.2f}x" if over else "-",
            *(f"{side['tok_s_by_kind'][kind]['median']:.1f}" if side["tok_s_by_kind"][kind] else "-" for kind in kinds),
            f"{length:.2f}" if length else "-",
            f"{side['ttft_ms']:.0f}",
            f"{side['peak_rss_mb']:.0f}" if side["peak_rss_mb"] else "-",
        )
    out.print(table)
    for side, reason in result["left_out"].items():
        out.print(f"left out: {side}: {reason}")
