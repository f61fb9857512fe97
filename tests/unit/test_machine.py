"""The machine profile: survives what happens to cache files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgespec.machine import MAX_ENTRIES, Profile, open_profile, write_atomic


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return open_profile(tmp_path / "deep" / "machine.json")


def test_round_trip(profile: Profile) -> None:
    assert profile.get("costs", "a") is None
    assert profile.put("costs", "a", {"ms": [1.5, 2]})
    assert profile.put("costs", "b", 3)
    assert profile.put("other", "a", None)
    again = Profile(profile.path)
    assert again.get("costs", "a") == {"ms": [1.5, 2]}
    assert again.get("costs", "b") == 3
    assert again.get("other", "b") is None
    assert os.listdir(profile.path.parent) == ["machine.json"], "no temporary file is left"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"schema_version": 99, "sections": {"costs": {"a": 1}}}',
        b'{"schema_version": 1, "sections": 5}',
        b'{"schema_version": 1, "sections": {"costs": [1]}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_ignored_and_built_again(profile: Profile, content: bytes) -> None:
    """A profile cut short by a full disk used to stop every later run."""
    profile.path.parent.mkdir()
    profile.path.write_bytes(content)
    assert profile.get("costs", "a") is None
    assert profile.put("costs", "a", 1)
    assert profile.get("costs", "a") == 1


def test_the_oldest_entries_go_first(profile: Profile) -> None:
    entries = {str(index): index for index in range(MAX_ENTRIES)}
    write_atomic(profile.path, json.dumps({"schema_version": 1, "sections": {"costs": entries}}))
    profile.put("costs", "0", "again")
    profile.put("costs", "new", "x")
    assert profile.get("costs", "0") == "again"
    assert profile.get("costs", "1") is None
    assert profile.get("costs", "2") == 2


def test_clear(profile: Profile) -> None:
    profile.clear()
    profile.put("costs", "a", 1)
    profile.clear()
    assert profile.get("costs", "a") is None


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    assert not Profile(blocked / "machine.json").put("costs", "a", 1)
    assert Profile(blocked / "machine.json").get("costs", "a") is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, "old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert open_profile().path == tmp_path / "machine.json"
