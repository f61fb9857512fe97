"""A run as Markdown, for people who read the repository, and as the text of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec_bench.report.tables import Table

__all__ = ["markdown", "markdown_table"]


def markdown(title: str, head: str, tables: Sequence[Table], plots: Sequence[tuple[str, str]]) -> str:
    """The report. plots: (file name in the same folder, caption)."""
    lines = [f"# {title}", "", head, ""]
    for number, table in enumerate(tables):
        lines += [f"## {table.title}", ""]
        lines += [table.remark, ""] if table.remark else []
        lines += [markdown_table(table), ""]
        if number == 0:
            lines += [line for name, caption in plots for line in (f"![{caption}]({name})", "")]
    return "\n".join(lines)


def markdown_table(table: Table) -> str:
    """Rows of cells between bars; a bar or a line break inside a cell is replaced."""
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()) or "-"
