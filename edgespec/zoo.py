"""Small trained drafts: those that ship with edgespec (the zoo), found for a target and converted once into the cache.

Owns which draft fits which target, and where its bundle lies; what a draft's config.json says is read by `zoo_config`.
A draft's embedding table and head come from the target, so that a bundle is made for one draft and one target bundle.
Training is in edgespec_models, conversion in edgespec_export.drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.bundle import Bundle, BundleInfo
from edgespec.config import cache_dir
from edgespec.conversions import bundle_path, is_bundle, make_bundle, plain_name
from edgespec.downloads import Progress, file_sha256, lock
from edgespec.draft.table import NgramTable, is_table, read_facts
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.options import BUNDLED_DRAFTS
from edgespec.types import ModelInfo
from edgespec.zoo_config import CONFIG, WEIGHTS, ZooConfig, is_draft_folder, read_config

__all__ = [
    "StaticShape",
    "TrainedDraft",
    "bundled_kind",
    "check_fits",
    "converted",
    "ensure",
    "find_draft",
    "find_table",
    "fits",
    "is_draft_folder",
    "list_drafts",
    "open_table",
    "prepare",
    "read_draft",
    "table_of",
]

TABLE = "table"  # folder of a pair's table
KINDS = {name: kind for kind, name in BUNDLED_DRAFTS.items()}  # name in files -> draft kind


@dataclass(frozen=True)
class StaticShape:
    """Ask for a draft in graphs of fixed shapes. n_ctx: None for the exporter's default.

    widths: a step, and a catch-up after rejected tokens or a piece of a prompt.
    """

    n_ctx: int | None = None
    widths: tuple[int, ...] = (1, 8)


@dataclass(frozen=True)
class TrainedDraft:
    """A folder of draft weights. kind: as `draft` names it."""

    kind: str
    folder: Path
    size_bytes: int
    config: ZooConfig

    @property
    def acceptance(self) -> Mapping[str, Any]:
        """What was measured when it was trained; empty where nothing was."""
        return self.config.acceptance or {}

    @property
    def needs(self) -> dict[str, Any]:
        """What a target must be and have; see `check_fits`."""
        return {key: getattr(self.config, key) for key in ("n_embd", "tokenizer_hash", "taps", "exit_layer")}


def zoo_dir() -> Path:
    """Folder of the drafts that ship: in a wheel beside this module, in a checkout models/zoo."""
    here = Path(__file__).resolve().parent
    shipped = here / "zoo"
    return shipped if shipped.is_dir() else here.parent / "models" / "zoo"


def list_drafts(pair: str) -> list[TrainedDraft]:
    """The zoo's drafts for the known pair of that name, by kind; raises ConfigError for a broken one."""
    folders = [zoo_dir() / pair / name for name in KINDS]
    return [read_draft(folder) for folder in folders if (folder / CONFIG).is_file()]


def read_draft(folder: Path) -> TrainedDraft:
    """Read a draft's folder. Raises ConfigError naming the file and the key."""
    config = read_config(folder)
    return TrainedDraft(KINDS[config.kind], folder, (folder / WEIGHTS).stat().st_size, config)


def bundled_kind(path: Path) -> str | None:
    """The draft kind that the weights or the bundle in folder `path` are of; None for an ordinary model."""
    if is_draft_folder(path):
        return read_draft(path).kind
    if is_bundle(path):
        declared = Bundle.open(path).info.draft
        return None if declared is None else KINDS.get(declared["kind"])
    return None


def find_draft(kind: str, target: Bundle) -> TrainedDraft:
    """The zoo's draft of that kind for `target`: by the target's name, else by its size and tokenizer.

    Raises IncompatibleError, naming what there is and how to train one.
    """
    info, root = target.info, zoo_dir()
    pairs = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    named = [draft for draft in (list_drafts(info.name) if info.name in pairs else []) if draft.kind == kind]
    if named:
        return named[0]
    drafts = [draft for pair in pairs for draft in list_drafts(pair)]
    fitting = [draft for draft in drafts if _misfit(draft.needs, target) is None]
    for draft in fitting:
        if draft.kind == kind:
            return draft
    here = ", ".join(dict.fromkeys(draft.kind for draft in fitting)) or "none"
    raise IncompatibleError(
        f"there is no {kind} draft for {info.name} (trained drafts that fit it: {here}): train one with "
        f"`edgespec train {BUNDLED_DRAFTS[kind]}` and give its folder as draft_model (--draft-model), or use "
        "draft='ngram' (--draft ngram)"
    )


def table_of(pair: str) -> Path | None:
    """The folder of the table for the known pair of that name; None where there is none."""
    folder = zoo_dir() / pair / TABLE
    return folder if is_table(folder) else None


def find_table(info: ModelInfo | BundleInfo) -> Path | None:
    """The folder of the zoo's table for that target: by its name, else by its tokenizer; None where there is none."""
    root = zoo_dir()
    folders = [path / TABLE for path in sorted(root.iterdir()) if is_table(path / TABLE)] if root.is_dir() else []
    folders.sort(key=lambda folder: folder.parent.name != info.name)
    for folder in folders:
        try:
            facts = read_facts(folder)
        except ConfigError:  # said where that one is asked for
            continue
        if facts.get("tokenizer_hash") is not None and facts["tokenizer_hash"] == info.tokenizer_hash:
            return folder
    return None


def open_table(info: ModelInfo, given: Path | None = None) -> NgramTable:
    """The table in the folder `given`, else the zoo's. Raises IncompatibleError where there is none for that target."""
    folder = given or find_table(info)
    if folder is None:
        raise IncompatibleError(
            f"there is no table of what {info.name} writes: count one with `edgespec train table` and give its folder "
            "as draft_model (--draft-model), or use draft='ngram' (--draft ngram)"
        )
    table = NgramTable.read(folder)
    theirs, ours = table.tokenizer_hash, info.tokenizer_hash
    is_same = table.n_vocab <= info.n_vocab if theirs is None or ours is None else theirs == ours
    if not is_same or table.largest >= info.n_vocab:
        raise IncompatibleError(
            f"{folder} was counted on another tokenizer's texts ({table.n_vocab:,} tokens) than that of {info.name} "
            f"({info.n_vocab:,}): count one with `edgespec train table`, or use draft='ngram' (--draft ngram)"
        )
    return table


def check_fits(kind: str, needs: Mapping[str, Any], target: Bundle) -> None:
    """Raises IncompatibleError, naming both values, where a draft was made for another target than `target`.

    needs: n_embd and tokenizer_hash of its target, the taps that it reads, the exit_layer that it sits after (or None).
    """
    misfit = _misfit(needs, target)
    if misfit:
        raise IncompatibleError(
            f"this {kind} draft was made for another target than {target.info.name}: {misfit}; use the draft of this "
            f"target, or train one with `edgespec train {BUNDLED_DRAFTS[kind]}`"
        )

    taps, exit_layer, info = needs.get("taps") or (), needs.get("exit_layer"), target.info
    if any(tap not in info.taps for tap in taps):
        raise IncompatibleError(
            f"the {kind} draft reads the features {', '.join(taps)}, and {info.name} gives "
            f"{', '.join(info.taps) or 'none'}: export the target with taps={[*taps]!r}, or use another draft"
        )
    if exit_layer is not None and exit_layer != info.exit_layer:
        raise IncompatibleError(
            f"the {kind} draft sits after {exit_layer} layers, and {info.name} was exported with exit_layer="
            f"{info.exit_layer}: export the target with exit_layer={exit_layer}, or use another draft"
        )


def fits(draft: TrainedDraft, target: Bundle) -> bool:
    """Whether `check_fits` has nothing against it."""
    try:
        check_fits(draft.kind, draft.needs, target)
    except IncompatibleError:
        return False
    return True


def _misfit(needs: Mapping[str, Any], target: Bundle) -> str | None:
    n_embd, tokenizer = needs.get("n_embd"), needs.get("tokenizer_hash")
    if n_embd != target.info.n_embd:
        return f"its features have {n_embd} channels, the target's {target.info.n_embd}"
    ours = target.info.tokenizer_hash
    if tokenizer is not None and ours is not None and tokenizer != ours:
        return f"its tokenizer is {tokenizer[:12]}..., the target's {ours[:12]}..."
    return None


def converted(draft: TrainedDraft, target: Bundle, static: StaticShape | None = None) -> Path:
    """Where the bundle of `draft` for `target` lies in the cache, whether it is there or not."""
    files = [target.files[name]["sha256"] for name in sorted(target.files)]
    weights = [file_sha256(draft.folder / name) for name in (CONFIG, WEIGHTS)]
    name = f"{plain_name(target.info.name)}-{BUNDLED_DRAFTS[draft.kind]}"
    if static is None:
        return bundle_path(name, weights, files)
    return bundle_path(f"{name}-npu", weights, files, [static.n_ctx, *static.widths])


def ensure(
    draft: TrainedDraft,
    target: Bundle,
    progress: Progress | None = None,
    *,
    force: bool = False,
    static: StaticShape | None = None,
) -> Path:
    """The bundle of `draft` for `target`, converted where the cache lacks it (seconds); static: in fixed shapes.

    Raises IncompatibleError for a draft of another target, ExportError for weights that cannot be converted.
    """
    check_fits(draft.kind, draft.needs, target)
    path = converted(draft, target, static)
    if force or not is_bundle(path):
        with lock(cache_dir() / "lock", progress):
            if force or not is_bundle(path):
                _convert(draft, target, path, progress, static)
    return path


def _convert(
    draft: TrainedDraft, target: Bundle, path: Path, progress: Progress | None, static: StaticShape | None
) -> None:
    """The caller holds the lock."""
    from edgespec_export import StaticOptions, export_draft, export_static_draft

    def report(_step: str, done: float = 0, total: float | None = None) -> None:
        if progress:
            progress(f"Converting the {draft.kind} draft of {target.info.name}", done, total)

    def make(out: Path) -> Path:
        if static is None:
            return Path(export_draft(draft.folder, target.folder, out, progress=report))
        options = StaticOptions(widths=static.widths, n_ctx=static.n_ctx)
        return Path(export_static_draft(draft.folder, target.folder, out, options, report))

    report("begin")
    make_bundle(path, make)


def prepare(
    kinds: Sequence[str],
    target: Bundle,
    given: Path | None = None,
    progress: Progress | None = None,
    *,
    static: StaticShape | None = None,
) -> dict[str, Path]:
    """Draft kind -> its bundle for `target`, converted where needed; `given` (weights or a bundle) wins for its kind.

    Kinds without weights of their own are left out. static: convert to fixed shapes. Raises IncompatibleError or
    ConfigError before anything is made.
    """
    given_kind = None if given is None else bundled_kind(given)
    found: dict[str, TrainedDraft | Path] = {}
    for kind in kinds:
        if kind not in BUNDLED_DRAFTS:
            continue
        if kind == given_kind:
            assert given is not None
            found[kind] = read_draft(given) if is_draft_folder(given) else given
        else:
            found[kind] = find_draft(kind, target)
    for kind, draft in found.items():
        check_fits(kind, draft.needs if isinstance(draft, TrainedDraft) else _needs(draft), target)
    return {
        kind: ensure(draft, target, progress, static=static) if isinstance(draft, TrainedDraft) else draft
        for kind, draft in found.items()
    }


def _needs(folder: Path) -> dict[str, Any]:
    """What the draft bundle in `folder` says of its target."""
    info = Bundle.open(folder).info
    assert info.draft is not None
    return {**info.draft["target"], "taps": info.draft["taps"], "exit_layer": info.exit_layer}
