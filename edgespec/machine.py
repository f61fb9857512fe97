"""The machine profile: small measured facts about this machine, kept between runs in one JSON file.

Knows where the file is and how to replace it whole; a file that cannot be read is ignored and built again. What the
facts mean is known to those who store them.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from edgespec import config

__all__ = ["Profile", "open_profile", "write_atomic"]

SCHEMA_VERSION = 1
MAX_ENTRIES = 256  # of each section; the oldest go first


class Profile:
    """Entries by section and key; any JSON value. Every `put` is on disk when it returns, where the disk allows it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, section: str, key: str) -> Any | None:
        """The stored value, or None."""
        return self._read().get(section, {}).get(key)

    def put(self, section: str, key: str, value: Any) -> bool:
        """Store a value; False where the profile cannot be written (it is a cache: nothing else fails)."""
        sections = self._read()
        entries = sections.setdefault(section, {})
        entries.pop(key, None)
        entries[key] = value
        while len(entries) > MAX_ENTRIES:
            del entries[next(iter(entries))]
        try:
            write_atomic(self.path, json.dumps({"schema_version": SCHEMA_VERSION, "sections": sections}, indent=1))
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Forget everything."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            fields = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(fields, dict) or fields.get("schema_version") != SCHEMA_VERSION:
            return {}
        sections = fields.get("sections")
        if not isinstance(sections, dict):
            return {}
        return {name: entries for name, entries in sections.items() if isinstance(entries, dict)}


def open_profile(path: Path | None = None) -> Profile:
    """The profile at `path`, by default machine.json in edgespec's cache folder; it need not exist."""
    return Profile(path or config.cache_dir() / "machine.json")


def write_atomic(path: Path, text: str) -> None:
    """Write `path` so that a reader sees the old content or the new, never a part; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
