"""How commands speak: results on stdout, everything else on stderr, colours only for people.

Knows rich and nothing about models. Consoles are made on each call so that they follow a redirected `sys.stdout`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from edgespec.config import wants_no_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Reporter", "err", "format_bytes", "out", "print_json", "progress", "say"]


def out() -> Console:
    """Console on stdout: plain text when piped or under NO_COLOR; never invents markup, emoji or highlighting."""
    return _console(stderr=False)


def err() -> Console:
    """Console on stderr, for progress and remarks."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    plain = wants_no_color() or not stream.isatty()
    return Console(stderr=stderr, no_color=plain or None, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """One plain line on stderr."""
    click.echo(text, err=True)


def print_json(value: Any) -> None:
    """`value` as one line of JSON on stdout. NaN and infinities, which JSON lacks, are an error of ours."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def format_bytes(count: float) -> str:
    """Bytes in decimal units, three digits at most: 98362432 -> "98.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Reporter:
    """Takes progress reports `(stage, done, total)`: a bar on a terminal, otherwise one plain line for each stage."""

    def __init__(self, bar: Progress | None, show_lines: bool) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._stage = ""
        self._show_lines = show_lines

    def __call__(self, stage: str, done: float = 0, total: float | None = None) -> None:
        """done and total count whatever the stage counts (bytes for downloads); total None: unknown."""
        if self._bar is None:
            if stage != self._stage and self._show_lines:
                say(stage)
        elif stage != self._stage or self._task is None:
            self._finish_task()
            self._task = self._bar.add_task(stage, total=total, completed=int(done))
        else:
            self._bar.update(self._task, total=total, completed=done)
        self._stage = stage

    def _finish_task(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=1, completed=1)


@contextmanager
def progress(description: str = "", total: float | None = None, *, plain: bool = False) -> Iterator[Reporter]:
    """A Reporter for the time of a `with` block.

    plain: no bar although stderr is a terminal, as `--json` wants; a line for each stage still goes to stderr.
    """
    if plain or not sys.stderr.isatty():
        reporter = Reporter(None, show_lines=True)
        if description:
            reporter(description, 0, total)
        yield reporter
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err(), transient=False) as bar:
        reporter = Reporter(bar, show_lines=False)
        if description:
            reporter(description, 0, total)
        yield reporter
        reporter._finish_task()
