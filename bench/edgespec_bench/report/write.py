"""Writes the reports of a run's folder from its rows: report.md, report.html, plots; the summary of the last line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec_bench.report.figures import Figures
from edgespec_bench.report.markdown import markdown
from edgespec_bench.report.page import page
from edgespec_bench.report.plots import draw_all
from edgespec_bench.report.tables import all_tables, machine_line
from edgespec_bench.report.targets import judge
from edgespec_bench.suite.rows import read_rows
from edgespec_bench.suite.runner import ROWS_FILE

__all__ = ["load_figures", "summary", "write_reports"]


def load_figures(folder: Path) -> Figures:
    """Of a run's folder; raises ConfigError where it holds no run."""
    return Figures(read_rows(folder / ROWS_FILE))


def write_reports(folder: Path) -> None:
    """Everything but the rows, replaced. Raises MissingDependencyError without matplotlib."""
    figures = load_figures(folder)
    plots, tables = draw_all(figures), all_tables(figures, judge(figures))
    card = figures.card
    title = f"edgespec, {card.get('model')}: {card.get('size')} run of {card.get('started', '')[:10]}"
    head = machine_line(figures)
    for name, (_, svg) in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    listed = [(name, caption) for name, (caption, _) in plots.items()]
    (folder / "report.md").write_text(markdown(title, head, tables, listed), encoding="utf-8")
    (folder / "report.html").write_text(page(title, head, tables, plots), encoding="utf-8")


def summary(folder: Path) -> dict[str, Any]:
    """What the last line of a run says."""
    figures = load_figures(folder)
    judged = [one.to_dict() for one in judge(figures)]
    return {
        "folder": str(folder),
        "targets": judged,
        "missed": [one["key"] for one in judged if one["verdict"] == "missed"],
        "same_texts": list(figures.same_texts("sides")),
        "not_measured": [one["key"] for one in judged if one["verdict"] == "not measured"],
        **{
            key: figures.card.get(key)
            for key in ("size", "model", "threads", "commit", "started", "machine", "versions", "note")
        },
    }
