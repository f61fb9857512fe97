"""Fixtures of the tests of known pairs: a temporary cache and index around a tiny model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pair_world import World, write_tiny_gguf

from edgespec import downloads


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def world(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EDGESPEC_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(downloads, "POLL_S", 0.01)
    return World(tmp_path, tiny_gguf)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the bundles that the exporter was asked for; it really runs."""
    import edgespec_export

    real, asked = edgespec_export.export_model, []

    def export_model(source: Path, out: Path, options: Any, progress: Any = None, *, check: Any = None) -> Path:
        asked.append(options.name)
        return Path(real(source, out, options, progress, check=check))

    monkeypatch.setattr(edgespec_export, "export_model", export_model)
    return asked
