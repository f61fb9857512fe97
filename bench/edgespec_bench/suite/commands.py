"""Commands of the suite: `quick`, `full`, `report`, `readme`. Progress on stderr, a line of JSON ends stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgespec.cli import console
from edgespec.errors import ConfigError, MissingDependencyError
from edgespec_bench.console import errors, say
from edgespec_bench.suite.parts import FULL, QUICK, Size
from edgespec_bench.suite.runner import PART_NAMES, ROWS_FILE, RunOptions, results_folder, run_suite

__all__ = ["COMMANDS", "measure_and_report"]

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"
INTERRUPTED = 130
_DEFAULTS = RunOptions(QUICK)


def _run_options(command: Any) -> Any:
    """What `quick` and `full` share."""
    options = (
        click.option("-m", "--model", default=_DEFAULTS.model, show_default=True, help="A known pair."),
        click.option("--scaled", default=_DEFAULTS.scaled, show_default=True, help="The widened target (see `widen`)."),
        click.option("--flat", multiple=True, help="Another bundle to judge V(5)/V(1) of; may be repeated."),
        click.option("-t", "--threads", default=_DEFAULTS.threads, show_default=True, type=click.IntRange(1)),
        click.option(
            "--part", "parts", multiple=True, type=click.Choice(PART_NAMES), help="Only this.  [default: all]"
        ),
        click.option("--note", default="", help="How quiet the machine was, for the report."),
        click.option(
            "--folder",
            type=click.Path(file_okay=False, path_type=Path),
            help="For rows and reports; a run that is there is gone on with.  [default: bench/results/DATE-COMMIT]",
        ),
        click.option("--json", "as_json", is_flag=True, default=False, help="Only the line of JSON on stdout."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("quick")
@_run_options
def quick(**values: Any) -> None:
    """Within a quarter of an hour on two cores: every target of the table, on few prompts."""
    measure_and_report(QUICK, **values)


@click.command("full")
@_run_options
def full(**values: Any) -> None:
    """All kinds of prompt, both temperatures, every side; an hour or two."""
    measure_and_report(FULL, **values)


def measure_and_report(size: Size, folder: Path | None, as_json: bool, parts: tuple[str, ...], **values: Any) -> None:
    """Measure, write the reports, print the targets and the line of JSON. Ctrl-C keeps and reports what is there."""
    options = RunOptions(size, parts=parts or PART_NAMES, **values)
    folder = folder or results_folder(RESULTS)
    stopped = False
    try:
        with errors(), console.progress(plain=as_json) as report:
            run_suite(options, folder, report)
    except KeyboardInterrupt:
        stopped = True
        say(f"stopped: {folder / ROWS_FILE} has what was measured; the same command goes on with the next part")
    _report(folder, as_json)
    if stopped:
        raise SystemExit(INTERRUPTED)


def _report(folder: Path, as_json: bool) -> None:
    from edgespec_bench.report.figures import Figures
    from edgespec_bench.report.markdown import markdown_table
    from edgespec_bench.report.tables import machine_line, target_table
    from edgespec_bench.report.targets import judge
    from edgespec_bench.report.write import load_figures, summary, write_reports

    figures: Figures = load_figures(folder)
    try:
        write_reports(folder)
    except MissingDependencyError as error:
        say(f"no reports: {error}")
    if not as_json:
        judged = judge(figures)
        click.echo(machine_line(figures))
        click.echo(markdown_table(target_table(judged)))
        for one in judged:
            if one.verdict == "missed" and one.measured.bound:
                click.echo(f"missed: {one.target.what}: {one.measured.bound}")
        for row in figures.all("skip"):
            click.echo(f"left out: {row['part']}, {row['side'] or 'all'}: {row['reason']}")
    click.echo(json.dumps(summary(folder), allow_nan=False))


@click.command("report")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, default=False, help="Only the line of JSON on stdout.")
def report(folder: Path, as_json: bool) -> None:
    """Make the reports of a run's FOLDER again from its rows."""
    with errors():
        _report(folder, as_json)


@click.command("readme")
@click.option("--check", is_flag=True, default=False, help="Change nothing; fail where the README differs.")
@click.option("--file", "path", default=ROOT / "README.md", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--results", default=RESULTS, type=click.Path(file_okay=False, path_type=Path))
def readme(check: bool, path: Path, results: Path) -> None:
    """Write the README's measured line and its section of figures from the newest run under bench/results."""
    from edgespec_bench.report.readme import newest_run, renew

    with errors():
        if not path.is_file():
            raise ConfigError(f"{path} is missing: this command needs a checkout of the repository")
        source, old = newest_run(results).name, path.read_text(encoding="utf-8")
        new = renew(old, results)
    if new == old:
        click.echo(f"{path.name} says what {source} measured")
    elif check:
        click.echo(f"error: {path} differs from {source}: run `python -m edgespec_bench readme`", err=True)
        raise SystemExit(1)
    else:
        path.write_text(new, encoding="utf-8")
        click.echo(f"{path.name} written from {source}")


COMMANDS = (quick, full, report, readme)
