"""The cache of converted weights: under which key a bundle lies, and how it gets there whole or not at all.

Knows neither known pairs nor drafts; `pairs` and `zoo` say what is converted and from what.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from edgespec.config import bundles_dir
from edgespec.downloads import staging
from edgespec.errors import MissingDependencyError

__all__ = ["bundle_path", "is_bundle", "make_bundle", "plain_name"]


def bundle_path(name: str, *parts: Any) -> Path:
    """Where the bundle `name` made from `parts` (JSON values) lies; other parts or another converter, another place."""
    text = json.dumps([*parts, _converter_identity()], sort_keys=True)
    return bundles_dir() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def is_bundle(path: Path) -> bool:
    """Whether a finished bundle lies at `path`."""
    return (path / "bundle.json").is_file()


def make_bundle(path: Path, make: Callable[[Path], Path]) -> None:
    """`make(folder)` writes a bundle at `folder` or below and returns where; it then takes the place of `path`.

    The caller holds the cache's lock. Nothing half-made stays behind, and what was at `path` stays until the end.
    """
    with staging(path.parent) as temporary:
        made = make(temporary / "bundle")
        if path.exists():
            os.replace(path, temporary / "old")
        os.replace(made, path)


def plain_name(name: str) -> str:
    """`name` with nothing in it that a file system could mind, at most 64 characters."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)
    return plain[:64]


@cache
def _converter_identity() -> str:
    """Hash over the source of everything that decides what a bundle holds; read, not imported: onnx may be absent."""
    found = util.find_spec("edgespec_export")
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            "edgespec_export, which comes with edgespec, cannot be found: install edgespec (`pip install -e .` in a "
            "checkout) instead of running it from its folder"
        )
    here = Path(__file__).parent
    digest = hashlib.sha256((here / "bundle.py").read_bytes() + (here / "zoo_config.py").read_bytes())
    for folder in (Path(found.submodule_search_locations[0]), here / "text"):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
