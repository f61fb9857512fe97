"""From a model's name to a folder that can be loaded: known pairs, the user's own files, and the cache between them.

`pull` downloads and converts, `resolve` finds what is here (and converts, but does not download unless told). Owns the
layout of the cache; transport is in `downloads`, the meaning of manifests in `manifest`, conversion in edgespec_export.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec import zoo
from edgespec.bundle import Bundle
from edgespec.config import cache_dir, nearest
from edgespec.conversions import bundle_path, is_bundle, make_bundle, plain_name
from edgespec.downloads import HubSource, PathSource, Progress, WheelSource, fetch, lock
from edgespec.errors import ConfigError, PullError
from edgespec.manifest import Manifest, known_manifests, read_manifest
from edgespec.options import BUNDLED_DRAFTS

__all__ = [
    "NO_RECOMMENDATION",
    "PairStatus",
    "default_draft",
    "draft_hint",
    "ensure",
    "is_local",
    "list_pairs",
    "pull",
    "resolve",
    "source_path",
]

NO_RECOMMENDATION = "ngram"  # the draft of a pair that recommends none, or none that is here
OWN_GRAPHS = {"taps": (), "tree": False, "exit_layer": None}  # of a target alone: its drafts have no drafts themselves


@dataclass(frozen=True)
class PairStatus:
    """What `list` shows of a known pair.

    drafts: made from the target's own weights; trained: those of the zoo; table: the folder of its table.
    is_pulled: no download is needed; path: its bundle, if it is converted too.
    """

    name: str
    description: str
    license: str
    size_bytes: int | None
    drafts: tuple[str, ...]
    trained: tuple[zoo.TrainedDraft, ...]
    table: Path | None
    default_draft: str
    is_pulled: bool
    path: Path | None


def list_pairs() -> list[PairStatus]:
    """Every known pair, in order of name."""
    return [_status(manifest) for _name, manifest in sorted(known_manifests().items())]


def pull(name: str, progress: Progress | None = None, *, force: bool = False) -> Path:
    """Download and convert a known pair (or a manifest file) with its trained drafts; the target's bundle folder.

    `pair:draft` converts that draft of the manifest too and returns its folder; such drafts are not made unasked. Uses
    no network when everything is in the cache. force: download and convert again. Raises ConfigError for an unknown
    name, PullError for a download that fails, ExportError for weights that cannot be converted.
    """
    manifest, draft = _find(name)
    wanted = [None, draft] if draft else [None]
    paths = [_bundle_path(manifest, variant) for variant in wanted]
    if force or not all(is_bundle(path) for path in paths):
        with lock(cache_dir() / "lock", progress):
            source = fetch(manifest.source, _source_dir(manifest), progress, force=force)
            for variant, path in zip(wanted, paths, strict=True):
                if force or not is_bundle(path):
                    _convert(source, path, _options(manifest, variant), progress)
    trained = zoo.list_drafts(manifest.name)
    if trained:
        target = Bundle.open(paths[0])
        for weights in trained:
            if zoo.fits(weights, target):  # not so where a manifest of the user's took the pair's name
                zoo.ensure(weights, target, progress, force=force)
    return paths[-1]


def resolve(
    name_or_path: str | Path, *, download: bool = False, progress: Progress | None = None, runtime: str = "onnx"
) -> Path:
    """The folder to load for a folder, a .gguf file, a manifest file, a known pair, or `pair:draft`.

    Weights that are no bundle yet are converted once into the cache. Known names win over a folder of the same name in
    the working directory (write ./name for that one). runtime: of the device that is to run it; for "llamacpp" nothing
    is converted, and the .gguf file itself is returned, or the one that a known pair is made from. Raises ConfigError
    for what does not exist or cannot run there, PullError for a pair that was not pulled while `download` is False.
    """
    text = os.fspath(name_or_path)
    if runtime == "llamacpp":
        return _resolve_gguf(text, download, progress)
    if is_local(text):
        return _resolve_local(Path(text).expanduser(), progress)
    manifest, draft = _find(text)
    path = _bundle_path(manifest, draft)
    if is_bundle(path):
        return path
    if not download and not _has_source(manifest):
        raise PullError(f"{manifest.name} is not here yet: run `edgespec pull {manifest.name}` once")
    with lock(cache_dir() / "lock", progress):
        source = fetch(manifest.source, _source_dir(manifest), progress)
        if not is_bundle(path):
            _convert(source, path, _options(manifest, draft), progress)
    return path


def ensure(name_or_path: str | Path, progress: Progress | None = None, runtime: str = "onnx") -> Path:
    """`resolve`, downloading a known pair that is not here yet."""
    return resolve(name_or_path, download=True, progress=progress, runtime=runtime)


def source_path(name: str, progress: Progress | None = None) -> Path:
    """The verified weights that a known pair is made from, downloaded if need be: a GGUF file or a folder."""
    manifest, _draft = _find(name)
    with lock(cache_dir() / "lock", progress):
        return fetch(manifest.source, _source_dir(manifest), progress)


def default_draft(name: str | Path, runtime: str = "onnx") -> tuple[str, str | None]:
    """(draft kinds, draft model) that the manifest of a known pair recommends, as far as they are here; else n-gram.

    runtime: of the target; trained drafts are made for an ONNX bundle.
    """
    known, text = known_manifests(), os.fspath(name)
    if text not in known and not text.endswith(".toml"):
        return NO_RECOMMENDATION, None
    manifest = known[text] if text in known else _find(text)[0]
    if manifest.default_draft in manifest.drafts:
        return "model", f"{manifest.name}:{manifest.default_draft}"
    here = {draft.kind for draft in zoo.list_drafts(manifest.name)} if runtime == "onnx" else set()
    here |= {"table"} if zoo.table_of(manifest.name) else set()
    kinds = [kind.strip() for kind in manifest.default_draft.split(",")]
    able = [kind for kind in kinds if kind in here or kind not in {"table", *BUNDLED_DRAFTS}]
    return ",".join(able) or NO_RECOMMENDATION, None


def draft_hint(model: str | Path, draft: str) -> str | None:
    """What to say where `draft` (an option's value) names a draft model of the known pair `model` instead of a kind."""
    manifest = known_manifests().get(os.fspath(model))
    if manifest is None or draft not in manifest.drafts:
        return None
    return (
        f"draft={draft!r} is a draft model of {manifest.name} and no kind of draft: use "
        f"draft_model='{manifest.name}:{draft}' (--draft-model {manifest.name}:{draft})"
    )


def _find(name: str) -> tuple[Manifest, str | None]:
    """The manifest that `name` or `name:draft` means, and the draft."""
    if name.endswith(".toml"):
        return read_manifest(Path(name).expanduser()), None
    known = known_manifests()
    base, _colon, draft = name.partition(":")
    if base not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f'there is no model "{name}"{nearest(name, known)} (known names: {names}; a folder, a .gguf file or a '
            "manifest works too)"
        )
    manifest = known[base]
    if draft and draft not in manifest.drafts:
        drafts = ", ".join(manifest.drafts) or "none"
        raise ConfigError(f'{base} has no draft "{draft}"{nearest(draft, manifest.drafts)} (it has: {drafts})')
    return manifest, draft or None


# --- the user's own files ---------------------------------------------------------------------------------------------


def is_local(text: str) -> bool:
    """Whether `text` means something on disk rather than a known pair."""
    if text.endswith(".toml"):
        return False
    if text.partition(":")[0] in known_manifests():
        return False
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    looks_local = text.startswith("~") or text.endswith(".gguf") or any(mark in text for mark in separators)
    return looks_local or Path(text).exists()


def _resolve_local(path: Path, progress: Progress | None) -> Path:
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: give a bundle's folder, a .gguf file, or a name from `edgespec list`"
        )
    if path.is_dir() and not _needs_conversion(path):
        return path
    if zoo.is_draft_folder(path):
        raise ConfigError(
            f"{path} holds the weights of a draft, not of a model: give it as draft_model (--draft-model)"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a folder nor a .gguf file: give the folder that holds the model")
    name = plain_name(path.stem if path.is_file() else path.name)
    options = {"name": name}
    target = bundle_path(name, _local_identity(path), options)
    if not is_bundle(target):
        with lock(cache_dir() / "lock", progress):
            if not is_bundle(target):
                _convert(path, target, options, progress)
    return target


def _resolve_gguf(text: str, download: bool, progress: Progress | None) -> Path:
    """The .gguf file that llama.cpp is to run for a path or a known pair."""
    if is_local(text):
        path = Path(text).expanduser()
        if not path.exists():
            raise ConfigError(f"{path} does not exist: give a .gguf file, or a name from `edgespec list`")
        if path.is_file() and path.suffix.lower() == ".gguf":
            return path
        is_source = path.is_dir() and _needs_conversion(path)
        remedy = f"make one (`edgespec export {path} OUT.gguf --format gguf`)" if is_source else "give the .gguf file"
        raise ConfigError(f"{path} is no .gguf file, which is what llama.cpp runs: {remedy}, or use device cpu")
    manifest, draft = _find(text)
    if draft:
        raise ConfigError(f"{text} is made as an ONNX bundle, and llama.cpp runs .gguf files: use device cpu for it")
    if not download and not _has_source(manifest):
        raise PullError(f"{manifest.name} is not here yet: run `edgespec pull {manifest.name}` once")
    with lock(cache_dir() / "lock", progress):
        source = fetch(manifest.source, _source_dir(manifest), progress)
    if source.suffix.lower() != ".gguf":
        raise ConfigError(
            f"{text} is made from {source.name}, and llama.cpp runs .gguf files: give one, or use device cpu"
        )
    return source


def _needs_conversion(folder: Path) -> bool:
    """A folder of safetensors weights without any ONNX model."""
    return any(folder.glob("*.safetensors")) and not any(folder.rglob("*.onnx"))


def _local_identity(path: Path) -> str:
    """Tells these files from an edited version by names, sizes and times, so that gigabytes need not be hashed."""
    files = [path] if path.is_file() else sorted(item for item in path.iterdir() if item.is_file())
    parts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- the cache --------------------------------------------------------------------------------------------------------


def _status(manifest: Manifest) -> PairStatus:
    path = _bundle_path(manifest, None)
    return PairStatus(
        name=manifest.name,
        description=manifest.description,
        license=manifest.license,
        size_bytes=manifest.source.size_bytes,
        drafts=tuple(manifest.drafts),
        trained=tuple(zoo.list_drafts(manifest.name)),
        table=zoo.table_of(manifest.name),
        default_draft=manifest.default_draft,
        is_pulled=is_bundle(path) or _has_source(manifest),
        path=path if is_bundle(path) else None,
    )


def _source_identity(manifest: Manifest) -> str:
    source = manifest.source
    if isinstance(source, PathSource):
        return source.sha256 or (_local_identity(source.path) if source.path.exists() else "missing")
    if isinstance(source, HubSource) and source.sha256 is None:
        return hashlib.sha256(f"{source.repo}@{source.revision}".encode()).hexdigest()
    assert source.sha256 is not None
    return source.sha256


def _source_dir(manifest: Manifest) -> Path:
    return cache_dir() / "sources" / _source_identity(manifest)[:16]


def _has_source(manifest: Manifest) -> bool:
    """Whether the weights were downloaded before (or need no download)."""
    source = manifest.source
    if isinstance(source, PathSource):
        return True
    name = source.member if isinstance(source, WheelSource) else source.file
    return (_source_dir(manifest) / (name.rsplit("/", 1)[-1] if name else "repository")).exists()


def _options(manifest: Manifest, draft: str | None) -> dict[str, Any]:
    """Export options of the target, or of a draft: the target's with the draft's own over them."""
    own = {**OWN_GRAPHS, **manifest.drafts[draft].export} if draft else {}
    return {"name": _bundle_name(manifest, draft), **manifest.export, **own}


def _bundle_name(manifest: Manifest, draft: str | None) -> str:
    return f"{manifest.name}-{draft}" if draft else manifest.name


def _bundle_path(manifest: Manifest, draft: str | None) -> Path:
    return bundle_path(_bundle_name(manifest, draft), _source_identity(manifest), _options(manifest, draft))


def _convert(source: Path, target: Path, options: Mapping[str, Any], progress: Progress | None) -> None:
    """Export the weights `source` to the bundle `target`. The caller holds the lock."""
    from edgespec_export import CheckOptions, ExportOptions, export_model

    known = {field.name for field in dataclasses.fields(ExportOptions)}
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown export option {key!r}{nearest(key, known)}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}

    def report(_step: str, done: int, total: int) -> None:
        if progress:
            progress(f"Converting {options['name']}", done, total)

    def make(folder: Path) -> Path:
        # Measured and written down, but only what is broken (NaN, constant logits) stops it: nobody chose a limit here.
        check = CheckOptions(min_top1=0.0, max_kld=math.inf)
        return Path(export_model(source, folder, ExportOptions(**values), progress=report, check=check))

    make_bundle(target, make)
