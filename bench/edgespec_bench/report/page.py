"""A run as one HTML file that needs nothing else: tables, plots inline, no scripts, no addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgespec_bench.report.tables import Table

__all__ = ["page"]


def page(title: str, head: str, tables: Sequence[Table], plots: Mapping[str, tuple[str, str]]) -> str:
    """plots: name -> (caption, SVG text of our own making, put in as it is). All other text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True)
    template = environment.get_template("page.html.jinja")
    return template.render(title=title, head=head, tables=tables, plots=list(plots.values()))
