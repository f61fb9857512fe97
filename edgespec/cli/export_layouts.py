"""`edgespec export --optimize-for`: options in, `edgespec.layouts` does the work, what was measured out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import format_bytes, print_json, progress

if TYPE_CHECKING:
    from edgespec.layouts import Choice

__all__ = ["write_fastest"]


def write_fastest(
    source: Path, out: Path, options: Any, optimize_for: str, limits: Any, *, force: bool, as_json: bool
) -> None:
    """Export in the fastest layout within the limits; prints every candidate."""
    from edgespec.errors import ConfigError
    from edgespec.layouts import export_fastest

    if limits is None:
        raise ConfigError(
            "--optimize-for judges layouts by the check, which --no-check leaves out: drop one of the two"
        )
    with progress(plain=as_json) as report:
        choice = export_fastest(
            source,
            out,
            options,
            report,
            optimize_for=optimize_for,
            max_kld=limits.max_kld,
            min_top1=limits.min_top1,
            check_tokens=limits.n_tokens,
            force=force,
        )
    if as_json:
        print_json({"path": str(choice.path), **choice.to_json()})
    else:
        click.echo(_table(choice))


def _table(choice: Choice) -> str:
    """Plain text, so that it reads the same in a log."""
    lines = [f"{'layout':28}  {'KLD':>8}  {'top-1':>6}  {'size':>8}  ms at 1 and {choice.rows} rows by kernels"]
    for item in choice.candidates:
        times = "; ".join(f"{name} {by_rows[1]:.2f} {by_rows[choice.rows]:.2f}" for name, by_rows in item.ms.items())
        label = f"{'*' if item is choice.chosen else ' '} {item.layout.label:26}"
        lines.append(f"{label}  {item.kld:8.4f}  {item.top1:6.1%}  {format_bytes(item.n_bytes):>8}  {times}")
    kernels, ms = choice.chosen.fastest(choice.rows)
    hint = " with --device-option kernels=native" if kernels == "native" else ""
    lines.append(f"chosen: {choice.chosen.layout.label}, {ms:.2f} ms at {choice.rows} rows{hint}: {choice.path}")
    return "\n".join(lines)
