"""The commands `article` and `scaled`: rows as JSON lines, a Markdown table, and one line of JSON at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from edgespec.errors import ConfigError
from edgespec_bench.article.cases import Case, article_cases, chosen, scaled_cases
from edgespec_bench.article.measure import Run, measure_cases
from edgespec_bench.article.phone import phone_rows
from edgespec_bench.article.table import article_table, phone_table, scaled_table
from edgespec_bench.console import errors, say

__all__ = ["article", "scaled"]

_RUN = Run()
Command = Callable[..., None]


def _options(command: Command) -> Command:
    """What both commands take."""
    for option in reversed(
        [
            click.option("-m", "--model", default=_RUN.model, show_default=True, help="What the target is made from."),
            click.option("--factor", type=click.IntRange(2, 3), default=_RUN.factor, show_default=True),
            click.option("--kind", "kinds", multiple=True, default=_RUN.kinds, show_default=True),
            click.option("--prompts", "n_prompts", type=click.IntRange(1), default=_RUN.n_prompts, show_default=True),
            click.option("-n", "--n-tokens", type=click.IntRange(8), default=_RUN.n_tokens, show_default=True),
            click.option("--temperature", "--temp", type=click.FloatRange(0), default=0.0, show_default=True),
            click.option("-t", "--threads", type=click.IntRange(1), default=_RUN.threads, show_default=True),
            click.option("--device-option", "device_options", multiple=True, help="Of target and draft, as in run."),
            click.option("--case", "keys", multiple=True, help="Only these.  [default: all]"),
            click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="JSONL; rows are added."),
            click.option("--report", is_flag=True, help="Measure nothing: tables of the rows in --out."),
            click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout."),
        ]
    ):
        command = option(command)
    return command


@click.command("article")
@_options
def article(**values: Any) -> None:
    """The tutorial's configurations on a synthetic 1 B target, beside its own figures; its phone figure, simulated."""
    with errors():
        run, cases, rows = _rows(article_cases, values)
        phone = phone_rows(_shape(rows))
    if not values["as_json"]:
        click.echo(article_table(article_cases(run.model), rows))
        click.echo(phone_table(phone))
    click.echo(json.dumps({"target": run.target, "cases": [case.key for case in cases], "rows": rows, "phone": phone}))


@click.command("scaled")
@_options
def scaled(**values: Any) -> None:
    """A synthetic 1 B target with the original as its draft, at an acceptance fixed beforehand, against plain."""
    with errors():
        run, _cases, rows = _rows(scaled_cases, values)
    if not values["as_json"]:
        click.echo(scaled_table(rows))
    best = max(rows, key=lambda row: row["speedup"]["median"], default=None)
    headline = {} if best is None else {"best": best["label"], "speedup": best["speedup"]["median"]}
    click.echo(json.dumps({"target": run.target, **headline, "rows": rows}))


def _rows(
    cases_of: Callable[[str], list[Case]], values: dict[str, Any]
) -> tuple[Run, list[Case], list[dict[str, Any]]]:
    """Measure the chosen cases one by one, adding each to the file as soon as it is there; or read the file."""
    keys, out = values["keys"], values["out"]
    names = ("model", "factor", "kinds", "n_prompts", "n_tokens", "temperature", "threads", "device_options")
    run = Run(**{name: values[name] for name in names})
    cases = chosen(cases_of(run.model), keys)
    if values["report"]:
        if out is None or not out.is_file():
            raise ConfigError(f"--report reads rows from a file, and --out is {out}: give one that was measured before")
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]
        wanted = {case.key for case in cases}
        return run, cases, [row for row in rows if row["case"] in wanted]
    rows = []
    for case in cases:
        found = measure_cases(run, [case], say)
        rows += found
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    return run, cases, rows


def _shape(rows: list[dict[str, Any]]) -> dict[int, float] | None:
    """Calls of the target over its own one-row call of the same run, by rows; None where the rows lack some counts.

    An early exit runs the target in halves, which is another graph.
    """
    found: dict[int, list[float]] = {}
    for row in rows:
        for n, ms in row["verify_ms"].items() if row["draft"] != "early-exit" else ():
            found.setdefault(int(n), []).append(ms / row["v1_ms"])
    if len(found) < 3 or max(found) < 9:
        return None
    return {1: 1.0, **{n: max(1.0, median(values)) for n, values in found.items()}}
