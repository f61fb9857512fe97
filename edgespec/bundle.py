"""A bundle: the folder that holds one exported model, and its bundle.json.

Owns the folder's layout, the schema, hashes, and that nothing a bundle names lies outside of it. It does not load a
model and needs no onnx package; backends ask it for paths and facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.onnxfile import context_paths, external_locations

__all__ = ["BUNDLE_FORMAT", "DRAFT_KINDS", "EMBEDDING", "ROPE", "SCHEMA_VERSION", "VOCABULARY", "Bundle", "BundleInfo",
           "static_graph", "write_bundle"]  # fmt: skip

BUNDLE_FORMAT = "edgespec-bundle"
SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
MODEL = "model.onnx"
VOCABULARY = "vocabulary.i32"
EMBEDDING, ROPE = "embedding.npy", "rope.npy"  # the host's tables beside graphs of fixed shapes
DRAFT_KINDS = ("tinydraft", "eagle", "medusa", "exit")
_MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleInfo:
    """What bundle.json says of the model, less its format, version and files. Sizes in tokens, layers, channels."""

    name: str
    architecture: str
    flavour: str
    n_vocab: int
    n_ctx: int
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    tokenizer_hash: str | None
    sliding_window: int | None
    quantization: dict[str, Any]
    taps: tuple[str, ...]
    parity: dict[str, Any] | None
    source: dict[str, Any]
    draft: dict[str, Any] | None = None
    exit_layer: int | None = None
    static: dict[str, Any] | None = None

    @property
    def synthetic(self) -> str | None:
        """What was done to the weights where nobody trained them as they are; None for a trained model."""
        said = self.source.get("synthetic")
        return str(said.get("what", said)) if isinstance(said, dict) else None


# what each field of bundle.json must be; `bool` is not an `int` here
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "architecture": (str,),
    "flavour": (str,),
    **{key: (int,) for key in ("n_vocab", "n_ctx", "n_layers", "n_embd", "n_heads", "n_kv_heads", "head_dim")},
    "eos_ids": (list,),
    "bos_id": (int, type(None)),
    "add_bos": (bool,),
    "tokenizer_hash": (str, type(None)),
    "sliding_window": (int, type(None)),
    "quantization": (dict,),
    "taps": (list,),
    "parity": (dict, type(None)),
    "source": (dict,),
    "draft": (dict, type(None)),
    "exit_layer": (int, type(None)),
    "static": (dict, type(None)),
}
_OPTIONAL = ("draft", "exit_layer", "static")  # None where bundle.json lacks them
_DRAFT_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "taps": (list,),
    "n_heads": (int,),
    "n_extra": (int,),
    "target": (dict,),
    "acceptance": (dict, type(None)),
}
# of a bundle of fixed shapes; contexts: SoC -> what was compiled for it, by whom
_STATIC_TYPES: dict[str, tuple[type, ...]] = {
    "widths": (list,),
    "dtype": (str,),
    "mask": (float, int),
    "contexts": (dict,),
}
_STATIC_DTYPES = ("fp16", "w8a16")
_CONTEXT_KEYS = {"compiler", "graphs", "n_nodes"}
_POSITIVE = ("n_vocab", "n_ctx", "n_layers", "n_embd", "n_heads", "n_kv_heads", "head_dim")


class Bundle:
    """An opened bundle: `info` holds its facts, `path(name)` leads to its files. Read-only."""

    def __init__(self, folder: Path, info: BundleInfo, files: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder = folder
        self.info = info
        self.files = dict(files)

    @classmethod
    def open(cls, folder: str | Path) -> Bundle:
        """Check the manifest, that every file is there whole, and that the model reaches no file outside.

        Raises BundleError, which names the file or the key. Hashes are left to `verify_hashes`, which reads everything.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        info, files = _parsed(folder, manifest)
        bundle = cls(folder, info, files)
        for name, entry in bundle.files.items():
            _check_file(folder, name, entry["bytes"])
        bundle._check_locations()
        return bundle

    @property
    def model_path(self) -> Path:
        """The ONNX graph; of a bundle of fixed shapes, the widest."""
        static = self.info.static
        return self.path(MODEL if static is None else static_graph(max(static["widths"])))

    def path(self, name: str) -> Path:
        """Where the file `name` of bundle.json lies. Raises BundleError for a name that the bundle does not list."""
        if name not in self.files:
            raise BundleError(f"{self.folder} has no file '{name}'; it lists {', '.join(sorted(self.files))}.")
        return self.folder / name

    def has(self, name: str) -> bool:
        """Whether the bundle lists the file `name`."""
        return name in self.files

    def vocabulary(self) -> NDArray[np.int64] | None:
        """Ascending token ids that the logits of a draft begin with, [V]; None for a model of all tokens.

        Raises BundleError where they do not fit what bundle.json says.
        """
        about = self.info.draft
        if about is None:
            return None
        path = self.path(VOCABULARY)
        ids = np.frombuffer(path.read_bytes()[: path.stat().st_size // 4 * 4], "<i4").astype(np.int64)
        wanted = self.info.n_vocab - about["n_extra"]
        if len(ids) != wanted or wanted < 1:
            raise BundleError(f"{path} holds {len(ids)} token ids and bundle.json says {wanted}: export it again.")
        if ids[0] < 0 or (np.diff(ids) <= 0).any() or ids[-1] >= about["target"]["n_vocab"]:
            raise BundleError(
                f"{path} must hold ids of the target's {about['target']['n_vocab']} tokens, ascending and each once:"
                " export it again."
            )
        return ids

    def verify_hashes(self) -> None:
        """Read every file and compare its sha256. Raises BundleError, which names the first that differs."""
        for name, entry in self.files.items():
            found = _sha256(self.folder / name)
            if found != entry["sha256"]:
                raise BundleError(
                    f"{self.folder / name} was altered: its sha256 is {found[:16]}... and bundle.json says"
                    f" {entry['sha256'][:16]}...: export or pull the bundle again."
                )

    def _check_locations(self) -> None:
        """Refuse weights outside of the folder here: runtimes differ in whether they do, and in what they say."""
        static = self.info.static
        needed = [MODEL] if static is None else [EMBEDDING, ROPE, *map(static_graph, static["widths"])]
        missing = [name for name in needed if name not in self.files]
        if missing:
            raise BundleError(f"{self.folder} lists no {', '.join(missing)}: it is not a bundle of a model.")
        compiled = {
            name for entry in (static or {"contexts": {}})["contexts"].values() for name in entry["graphs"].values()
        }
        for name in sorted(self.files):
            if name.endswith(".onnx"):
                self._check_graph(self.folder / name)
                self._check_contexts(self.folder / name, is_compiled=name in compiled)

    def _check_graph(self, path: Path) -> None:
        for location in external_locations(path):
            if not _is_plain_name(location):
                raise BundleError(
                    f"{path} takes weights from '{location}', which is outside of the bundle:"
                    " it was altered or is hostile; get it from a source that you trust."
                )
            if location not in self.files:
                raise BundleError(f"{path} takes weights from '{location}', which bundle.json lacks.")

    def _check_contexts(self, path: Path, *, is_compiled: bool) -> None:
        """Compiled code only where bundle.json says so, and in files of the bundle's own."""
        for location in context_paths(path):
            if not is_compiled or not _is_plain_name(location) or location not in self.files:
                raise BundleError(
                    f"{path} holds code compiled for a device ('{location[:60]}'), which bundle.json does not list:"
                    " it was altered or is hostile; get it from a source that you trust."
                )


def static_graph(width: int) -> str:
    """The file of the graph for `width` rows."""
    return f"width-{width}.onnx"


def write_bundle(folder: str | Path, info: Mapping[str, Any]) -> None:
    """Write bundle.json for the files that lie in `folder`: keys sorted, sizes and hashes filled in.

    info: every field of BundleInfo; those with a default may be left out. Raises BundleError for a missing, unknown or
    mistyped one.
    """
    folder = Path(folder)
    names = sorted(item.name for item in folder.iterdir() if item.name != MANIFEST)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names}
    manifest = {"format": BUNDLE_FORMAT, "schema_version": SCHEMA_VERSION, "files": files, **info}
    text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    _parsed(folder, json.loads(text))
    (folder / MANIFEST).write_bytes(text.encode() + b"\n")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not a bundle: it has no bundle.json" if folder.is_dir() else "is not a folder"
        raise BundleError(f"{folder} {what}. Make one with `edgespec export`, or `edgespec pull` a known one.")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{path} is {path.stat().st_size} bytes long; a manifest has at most {_MAX_MANIFEST_BYTES}.")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}): export or pull the bundle again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != BUNDLE_FORMAT:
        raise BundleError(f'{path} does not say "format": "{BUNDLE_FORMAT}": it belongs to another program.')
    return manifest


def _parsed(folder: Path, manifest: dict[str, Any]) -> tuple[BundleInfo, dict[str, dict[str, Any]]]:
    path = folder / MANIFEST
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise BundleError(
            f"{path} has schema version {version!r} and this edgespec reads version {SCHEMA_VERSION}:"
            " update edgespec, or export the model again."
        )
    known = {"format", "schema_version", "files"} | set(_TYPES)
    manifest = {**dict.fromkeys(_OPTIONAL), **manifest}
    unknown, missing = sorted(set(manifest) - known), sorted(known - set(manifest))
    if unknown or missing:
        parts = [f"{label} {', '.join(keys)}" for label, keys in (("unknown", unknown), ("missing", missing)) if keys]
        raise BundleError(f"{path} has wrong keys ({'; '.join(parts)}): export the model again.")
    for key, kinds in _TYPES.items():
        _check_type(path, key, manifest[key], kinds)
    if manifest["draft"] is not None:
        _check_draft(path, manifest["draft"])
    if (manifest["static"] is not None) != (manifest["flavour"] == "npu"):
        raise BundleError(
            f"{path} has the flavour {manifest['flavour']!r} and its key static does not fit: export it again."
        )
    if manifest["static"] is not None:
        _check_static(path, manifest["static"])
    values = {item.name: manifest[item.name] for item in fields(BundleInfo)}
    values["eos_ids"], values["taps"] = tuple(manifest["eos_ids"]), tuple(manifest["taps"])
    return BundleInfo(**values), _checked_files(path, manifest["files"])


def _check_type(path: Path, key: str, value: Any, kinds: tuple[type, ...]) -> None:
    is_right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if is_right and key in _POSITIVE:
        is_right = value >= 1
    if is_right and key in ("eos_ids", "taps"):
        wanted = int if key == "eos_ids" else str
        is_right = all(type(item) is wanted for item in value)
    if not is_right:
        raise BundleError(f"{path} has {key} = {str(value)[:60]!r}, which is not a valid value for it.")


def _check_draft(path: Path, draft: dict[str, Any]) -> None:
    """What a draft says of itself and of its target."""
    problems = sorted(set(draft) ^ set(_DRAFT_TYPES))
    target = draft.get("target")
    if not problems:
        for key, kinds in _DRAFT_TYPES.items():
            _check_type(path, key, draft[key], kinds)
        assert isinstance(target, dict)
        is_right = draft["kind"] in DRAFT_KINDS and draft["n_extra"] >= 0
        counts = [target.get("n_embd"), target.get("n_vocab")]
        is_right = is_right and all(type(count) is int and count >= 1 for count in counts)
        problems = (
            [] if is_right and isinstance(target.get("tokenizer_hash"), str | None) else ["kind, counts or target"]
        )
    if problems:
        raise BundleError(f"{path}: its draft is not understood ({', '.join(problems)}): export it again.")


def _check_static(path: Path, static: dict[str, Any]) -> None:
    """Widths and compiled contexts of a bundle of fixed shapes."""
    if set(static) != set(_STATIC_TYPES):
        raise BundleError(f"{path}: the keys of static are {', '.join(sorted(static))}: export it again.")
    for key, kinds in _STATIC_TYPES.items():
        _check_type(path, key, static[key], kinds)
    widths = static["widths"]
    is_right = bool(widths) and all(type(width) is int and width >= 1 for width in widths)
    is_right = is_right and widths == sorted(set(widths)) and static["mask"] < 0 and static["dtype"] in _STATIC_DTYPES
    for entry in static["contexts"].values():
        is_right = is_right and isinstance(entry, dict) and set(entry) == _CONTEXT_KEYS
        is_right = (
            is_right
            and isinstance(entry["compiler"], str)
            and isinstance(entry["graphs"], dict)
            and type(entry["n_nodes"]) is int
        )
        is_right = is_right and set(entry["graphs"]) == {str(width) for width in widths}
        is_right = is_right and all(isinstance(name, str) for name in entry["graphs"].values())
    if not is_right:
        raise BundleError(f"{path}: its widths or compiled contexts are not valid: export it again.")


def _checked_files(path: Path, files: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(files, dict) or not files:
        raise BundleError(f"{path} lists no files.")
    for name, entry in files.items():
        if not _is_plain_name(name):
            raise BundleError(f"{path} lists the file '{name}': only plain names inside of the bundle are allowed.")
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
            raise BundleError(f"{path}: the entry of '{name}' must hold bytes and sha256 and nothing else.")
        if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise BundleError(f"{path}: the entry of '{name}' has a size or hash that is not valid.")
    return files


def _is_plain_name(name: str) -> bool:
    """A file right in the folder, on any system: no separators, drive letters, dots alone or control characters."""
    return bool(name) and name not in (".", "..") and not any(char in "/\\:\0" or ord(char) < 32 for char in name)


def _check_file(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise BundleError(f"{path} is a link to {path.resolve()}, outside of the bundle: copy the file instead.")
    if not path.is_file():
        raise BundleError(
            f"{path} is missing: bundle.json lists it with {size} bytes. Export or pull the bundle again."
        )
    found = path.stat().st_size
    if found != size:
        raise BundleError(f"{path} has {found} bytes and bundle.json says {size}: export or pull the bundle again.")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
