"""The part of `edgespec export` that goes through optimum (`--via optimum`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgespec.cli.console import format_bytes, print_json, progress

__all__ = ["optimum_options", "write_via_optimum"]

Command = TypeVar("Command", bound=Callable[..., Any])


def optimum_options(command: Command) -> Command:
    """Add the options of `--via optimum`."""
    for option in reversed(
        (
            click.option(
                "--via",
                type=click.Choice(["optimum"]),
                default=None,
                help="Let optimum write the graph, for families that edgespec's exporter does not know.",
            ),
            click.option(
                "--optimum-python",
                metavar="PYTHON",
                default=None,
                help="The Python that has optimum-onnx (--via optimum); default: the one that runs this.",
            ),
        )
    ):
        command = option(command)
    return command


def write_via_optimum(
    source: Path,
    out: Path,
    python: str | None,
    check: Any,
    table: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
) -> None:
    """An optimum folder; `table` makes text of the comparison's figures."""
    from edgespec_export.via_optimum import export_with_optimum

    with progress(plain=as_json) as report:
        parity = export_with_optimum(source, out, python=python, check=check, progress=report)
    size = sum(item.stat().st_size for item in out.iterdir())
    facts = None if parity is None else parity.to_json()
    if as_json:
        print_json({"path": str(out), "bytes": size, "parity": facts})
        return
    click.echo(f"optimum folder in float32, {format_bytes(size)}: {out}")
    if facts is not None:
        click.echo(table(facts))
