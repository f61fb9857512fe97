"""Manifests: hand-written TOML files that say where a pair's weights come from and how they are converted.

Owns reading and strict validation. A manifest is data that a user may have been sent: unknown keys are errors, names
are plain, hashes are required for whatever is downloaded as a single file. It does not know how anything is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.config import cache_dir, config_dir, nearest, read_toml
from edgespec.downloads import HubSource, PathSource, Source, WheelSource
from edgespec.draft.base import FREE_DRAFTS
from edgespec.errors import ConfigError
from edgespec.options import BUNDLED_DRAFTS

__all__ = ["BUILT_IN_DRAFTS", "DraftVariant", "Manifest", "known_manifests", "read_manifest"]

SCHEMA_VERSION = 1
BUILT_IN_DRAFTS = ("ngram", "table", "none")  # drafts that need no weights
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
COMMIT = re.compile(r"[0-9a-f]{40}")
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


@dataclass(frozen=True)
class DraftVariant:
    """A draft made from the target's own weights with other export options (fewer layers, fewer bits)."""

    name: str
    description: str
    export: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """One known pair: a target, how to get and convert it, and the drafts that go with it."""

    name: str
    description: str
    license: str
    source: Source
    export: Mapping[str, Any]
    drafts: Mapping[str, DraftVariant]
    default_draft: str
    notes: str
    path: Path


def known_manifests() -> dict[str, Manifest]:
    """Name -> manifest: those that ship with edgespec, those of weights that were made here (in the cache), the user's.

    The user's own lie in ~/.config/edgespec/models; later ones win.
    """
    here = Path(__file__).resolve().parent
    shipped = here / "manifests"  # in an installed wheel
    folders = [shipped if shipped.is_dir() else here.parent / "models", cache_dir() / "models", config_dir() / "models"]
    manifests = (read_manifest(path) for folder in folders for path in sorted(folder.glob("*.toml")))
    return {manifest.name: manifest for manifest in manifests}


def read_manifest(path: Path) -> Manifest:
    """Read and validate one file. Raises ConfigError that names the file, the key and what is wrong with it."""
    table = _Table(read_toml(path), str(path))
    version = table.take("schema_version", int)
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema_version is {version}, this edgespec reads {SCHEMA_VERSION}: update edgespec")
    name = table.take("name", str)
    _must_match(table, "name", name, NAME, "lower-case letters, digits, '.', '_' and '-'")
    target = table.table("target")
    drafts = _read_drafts(table)
    manifest = Manifest(
        name=name,
        description=table.take("description", str),
        license=table.take("license", str),
        source=_read_source(target.table("source"), path),
        export=target.take("export", dict, {}),
        drafts=drafts,
        default_draft=table.take("default_draft", str, "ngram"),
        notes=table.take("notes", str, ""),
        path=path,
    )
    target.end()
    table.end()
    _check_default(manifest)
    return manifest


def _check_default(manifest: Manifest) -> None:
    """`default_draft` is one draft, or a list like "ngram,eagle" of kinds that can stand in one."""
    listed = (*FREE_DRAFTS, *BUNDLED_DRAFTS)
    choices = (*BUILT_IN_DRAFTS, *BUNDLED_DRAFTS, *manifest.drafts)
    parts = [part.strip() for part in manifest.default_draft.split(",")]
    allowed = choices if len(parts) == 1 else listed
    for part in parts:
        if part not in allowed:
            raise ConfigError(
                f"{manifest.path}: default_draft is {manifest.default_draft!r}, and {part!r} is not one of "
                f"{', '.join(allowed)}{nearest(part, allowed)}"
            )


def _read_drafts(table: _Table) -> dict[str, DraftVariant]:
    drafts = {}
    content = table.take("drafts", dict, {})
    for name in content:
        _must_match(table, f"drafts.{name}", name, NAME, "lower-case letters, digits, '.', '_' and '-'")
        if name in (*BUILT_IN_DRAFTS, *BUNDLED_DRAFTS, "model"):
            raise ConfigError(f"{table.where}: [drafts.{name}] takes the name of a built-in draft: choose another")
        variant = _Table(content, f"{table.where} [drafts]").table(name)
        drafts[name] = DraftVariant(name, variant.take("description", str), variant.take("export", dict))
        variant.end()
    return drafts


def _read_source(table: _Table, path: Path) -> Source:
    kind = table.take("kind", str)
    readers: dict[str, Callable[[_Table, Path], Source]] = {"wheel": _read_wheel, "hub": _read_hub, "path": _read_path}
    if kind not in readers:
        raise ConfigError(f"{table.where}: kind is {kind!r}, not one of {', '.join(readers)}{nearest(kind, readers)}")
    source = readers[kind](table, path)
    table.end()
    return source


def _read_wheel(table: _Table, _path: Path) -> WheelSource:
    source = WheelSource(
        requirement=table.take("requirement", str),
        member=table.take("member", str),
        sha256=table.take("sha256", str),
        size_bytes=table.take("bytes", int),
    )
    _must_match(table, "member", source.member.rsplit("/", 1)[-1], FILE_NAME, "a plain file name after the last /")
    _must_match(table, "requirement", source.requirement, REQUIREMENT, "name==version")
    _must_match(table, "sha256", source.sha256, SHA256, "64 hexadecimal digits")
    return source


def _read_hub(table: _Table, _path: Path) -> HubSource:
    source = HubSource(
        repo=table.take("repo", str),
        revision=table.take("revision", str),
        file=table.take("file", str, None),
        sha256=table.take("sha256", str, None),
        size_bytes=table.take("bytes", int, None),
    )
    _must_match(table, "revision", source.revision, COMMIT, "a commit of 40 hexadecimal digits: branches move")
    if (source.file is None) != (source.sha256 is None):
        raise ConfigError(f"{table.where}: `file` and `sha256` go together; leave out both to fetch a whole repository")
    if source.file is not None:
        _must_match(table, "file", source.file.rsplit("/", 1)[-1], FILE_NAME, "a plain file name after the last /")
    if source.sha256 is not None:
        _must_match(table, "sha256", source.sha256, SHA256, "64 hexadecimal digits")
    return source


def _read_path(table: _Table, path: Path) -> PathSource:
    location = Path(table.take("path", str)).expanduser()
    sha256 = table.take("sha256", str, None)
    if sha256 is not None:
        _must_match(table, "sha256", sha256, SHA256, "64 hexadecimal digits")
    return PathSource(path.parent.absolute() / location, sha256, table.take("bytes", int, None))


def _must_match(table: _Table, key: str, value: str, pattern: re.Pattern[str], wanted: str) -> None:
    if not pattern.fullmatch(value):
        raise ConfigError(f"{table.where}: {key} is {value!r} where {wanted} is expected")


_REQUIRED: Any = object()


class _Table:
    """A TOML table whose keys are taken one by one; what is left at the end is an error."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._content = content
        self._taken: set[str] = set()

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `key`, which must be of type `kind`."""
        self._taken.add(key)
        if key not in self._content:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}: the key {key!r} is missing{nearest(key, self._content)}")
            return default
        value = self._content[key]
        if type(value) is not kind:  # bool is an int to isinstance
            raise ConfigError(
                f"{self.where}: {key} is {value!r} ({type(value).__name__}) where {kind.__name__} is expected"
            )
        return value

    def table(self, key: str) -> _Table:
        """A required sub-table."""
        return _Table(self.take(key, dict), f"{self.where} [{key}]")

    def end(self) -> None:
        """Raises ConfigError for a key that nothing took."""
        for key in self._content:
            if key not in self._taken:
                raise ConfigError(f"{self.where}: unknown key {key!r}{nearest(key, self._taken)}")
