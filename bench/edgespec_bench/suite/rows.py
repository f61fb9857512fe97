"""Rows of a run: plain dictionaries, a line of JSON each, written as they come so that an interrupted run keeps them.

Every row has a `row`, its kind: card (machine, versions, commit, options), side (a process that was started), run (one
answer), cost (V(n)), profile (a call by parts), bandwidth, weights, fidelity, prediction, skip (what was left out, and
why), done (a part is complete). All but the card name their `part`. Knows nothing of what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from edgespec.errors import ConfigError
from edgespec.machine import write_atomic

__all__ = ["KINDS", "RowFile", "read_rows"]

KINDS = ("card", "side", "run", "cost", "profile", "bandwidth", "weights", "fidelity", "prediction", "skip", "done")


class RowFile:
    """Appends rows to a file and keeps them; each is on disk before the next one is measured."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows: list[dict[str, Any]] = read_rows(path) if path.is_file() else []
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write(self, row: str, **fields: Any) -> dict[str, Any]:
        """Add one row; it is returned."""
        assert row in KINDS, row
        whole = {"row": row, **fields}
        self._file.write(_line(whole))
        self._file.flush()
        self.rows.append(whole)
        return whole

    def drop(self, is_stale: Callable[[dict[str, Any]], bool]) -> None:
        """Take out the rows that are about to be measured again."""
        kept = [row for row in self.rows if not is_stale(row)]
        if len(kept) == len(self.rows):
            return
        self._file.close()
        write_atomic(self.path, "".join(_line(row) for row in kept))
        self.rows = kept
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, a last line that was cut off left out. Raises ConfigError for what is no such file."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a run's folder has one, name such a folder")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            is_row = isinstance(row, dict) and row.get("row") in KINDS
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was stopped while it wrote
            is_row = False
        if not is_row:
            raise ConfigError(f"{path}, line {number} is no row of a run: remove it, or measure again")
        rows.append(row)
    return rows
