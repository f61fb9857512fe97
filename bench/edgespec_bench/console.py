"""What every command of the measurements does on the terminal: progress on stderr, errors as one line."""

from __future__ import annotations

import click

from edgespec.errors import ConfigError, EdgeSpecError

__all__ = ["errors", "say"]


def say(text: str) -> None:
    """A line of progress."""
    click.echo(text, err=True)


class errors:  # noqa: N801 - reads as a statement
    """Errors for users as one line: 2 for bad input, 1 for failure."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EdgeSpecError):
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
