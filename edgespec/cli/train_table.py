"""`edgespec train table`: count what a target wrote into a table that drafts without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli.console import print_json
from edgespec.cli.options import json_option
from edgespec.cli.train_common import FORCE, MODEL, THREADS, bar, check_package, commands, find_target
from edgespec.draft.table import MOST_ORDER
from edgespec.errors import ConfigError
from edgespec.zoo_config import CONFIG

__all__ = ["command"]


@click.command("table")
@MODEL
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The table's folder.")
@click.option(
    "--corpus",
    "corpora",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="From `edgespec train data`; several are joined.",
)
@click.option(
    "--order", type=click.IntRange(1, MOST_ORDER), default=4, show_default=True, help="Tokens of the longest context."
)
@click.option("--entries", type=click.IntRange(1), default=220_000, show_default=True, help="Most entries to keep.")
@THREADS
@FORCE
@json_option
def command(**values: Any) -> None:
    """Count what the target writes after its last few tokens: a draft that runs no model."""
    check_package()
    from edgespec_models.corpus import Corpus
    from edgespec_models.table import TableRequest, make_table

    out: Path = values["out"]
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: OUT is the folder of the table")
    if (out / CONFIG).exists() and not values["force"]:
        raise ConfigError(f"{out} holds a draft already: --force replaces it")
    Corpus.join([Corpus.load(path) for path in values["corpora"]])  # a mistake is said before anything is downloaded
    target = find_target(values, needs_weights=False)
    request = TableRequest(
        target=target,
        corpora=values["corpora"],
        out=out,
        order=values["order"],
        most=values["entries"],
        commands=commands("table", target, values["corpora"], values),
    )
    with bar(values) as report:
        config = make_table(request, report)
    found = config["acceptance"]
    if values["as_json"]:
        print_json({"kind": "table", "path": str(out), "acceptance": found})
        return
    length, k = found["mean_acceptance_length"], found["k"]
    click.echo(f"table: {length:.2f} tokens a round at up to {k} drafted ({found['setting']}): {out}")
