"""Loads what an LLM is made of: the target in the graph that its drafts need, the drafts, the tokenizer.

Owns what options mean before anything is loaded, and the refusals that only a bundle or a loaded model can tell: graphs
that are not there, features that the target does not give, drafts of another target. It knows no prompts and no caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import zoo
from edgespec.bundle import Bundle, static_graph
from edgespec.device_report import DeviceUse, use_of
from edgespec.devices import Device
from edgespec.downloads import Progress
from edgespec.draft.base import FREE_DRAFTS
from edgespec.draft.table import is_table
from edgespec.draft_bundle import PlainHead, open_draft
from edgespec.engine.adaptive import Expectation
from edgespec.errors import BackendError, ConfigError, EdgeSpecError, IncompatibleError, MissingDependencyError
from edgespec.options import AUTO, BUNDLED_DRAFTS, EngineOptions
from edgespec.pairs import draft_hint, is_local, resolve
from edgespec.types import Model
from edgespec.verify import create_verifier
from edgespec.zoo import StaticShape

if TYPE_CHECKING:
    from edgespec.draft.table import NgramTable
    from edgespec.text import Tokenizer

__all__ = ["NO_DRAFT_MODEL", "Loaded", "ModelSource", "kind_of", "load", "refuse_unused", "resolve_options"]

NO_DRAFT_MODEL = "draft='model' needs a draft model: pass draft_model (--draft-model), or use draft='ngram'"
PLAIN_GRAPH, TREE_GRAPH = "model.onnx", "tree.onnx"
SPLIT_GRAPHS = ("lower.onnx", "upper.onnx", "head.onnx")
ModelSource = str | Path | Model


@dataclass
class Loaded:
    """The models of an LLM. folder: what the target was loaded from, None for a Model given as an object.

    draft_model: of the kind `model`. heads: trained draft kind -> what `edgespec.draft.heads` says of it. bundles:
    where those were loaded from. table: of the kind `table`. failed: draft kind -> why its device could not be
    used; found while loading and by later requests. graph: which graph of the target is loaded.
    """

    target: Model
    tokenizer: Tokenizer | None
    folder: Path | None
    graph: str
    draft_model: Model | None = None
    heads: dict[str, Model | PlainHead] = field(default_factory=dict)
    bundles: dict[str, Path] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    table: NgramTable | None = None
    expected: Expectation | None = None
    plan: dict[str, Any] = field(default_factory=dict)

    def working(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Those of `kinds` that have not failed."""
        return tuple(kind for kind in kinds if kind not in self.failed)

    @property
    def draft_uses(self) -> dict[str, DeviceUse]:
        """Kind -> where that draft runs."""
        models: dict[str, Model | PlainHead] = {
            **({"model": self.draft_model} if self.draft_model else {}),
            **self.heads,
        }
        return {
            kind: draft.use if isinstance(draft, PlainHead) else use_of(draft.info) for kind, draft in models.items()
        }

    @property
    def has_other_plain(self) -> bool:
        """Whether plain decoding is faster on a graph of the folder that is not loaded."""
        return self.folder is not None and self.graph in (TREE_GRAPH, " + ".join(SPLIT_GRAPHS))

    def close(self) -> None:
        self.target.close()
        if self.draft_model is not None:
            self.draft_model.close()
        for head in self.heads.values():
            head.close()


def resolve_options(
    draft: str | None,
    draft_model: ModelSource | None,
    options: Mapping[str, Any],
    model: ModelSource | None = None,
) -> EngineOptions:
    """The EngineOptions that LLM's arguments mean; raises ConfigError where they contradict each other."""
    unknown = sorted(set(options) - set(EngineOptions.names()))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(EngineOptions.names())}")
    if draft == AUTO:
        return _resolve_auto(options)
    hint = draft_hint(model, draft) if draft is not None and isinstance(model, (str, Path)) else None
    if hint:
        raise ConfigError(hint)
    given = None if draft_model is None else kind_of(draft_model)
    resolved = EngineOptions(draft=draft if draft is not None else given or "ngram", **options)
    if given is not None and given not in resolved.drafts:
        if given == "model":
            _check_trained(draft_model, resolved.drafts)
        raise ConfigError(
            f"a draft model of the kind {given!r} was given but draft={resolved.draft!r} does not use it: "
            f"use draft={given!r}"
        )
    if "model" in resolved.drafts and given != "model":
        raise ConfigError(NO_DRAFT_MODEL)
    drafts = set(resolved.drafts)
    if not drafts & {"model", *BUNDLED_DRAFTS}:
        refuse_unused(resolved, ("draft_n_ctx", "draft_device", "draft_device_options"), "there is no draft model")
    if not drafts - {*FREE_DRAFTS}:
        refuse_unused(resolved, ("draft_p_min",), f"draft={resolved.draft!r} has no probabilities")
    if not resolved.tree:
        refuse_unused(resolved, ("tree_rows", "tree_width"), "tree is off (--tree)")
    create_verifier(resolved.verifier, lossy=resolved.lossy)
    return resolved


def _resolve_auto(options: Mapping[str, Any]) -> EngineOptions:
    """Options of a run whose drafts the planner chooses."""
    resolved = EngineOptions(draft=AUTO, **options)
    if resolved.tree:
        raise IncompatibleError("tree=True (--tree) with draft='auto': what it chooses runs chains; name the draft")
    create_verifier(resolved.verifier, lossy=resolved.lossy)
    return resolved


def kind_of(draft_model: ModelSource) -> str:
    """The draft kind that a draft model is for: what its folder says, else `model`."""
    if not isinstance(draft_model, (str, Path)):
        return "model"
    text = os.fspath(draft_model)
    path = Path(text).expanduser()
    if not is_local(text) or not path.is_dir():
        return "model"
    return "table" if is_table(path) else zoo.bundled_kind(path) or "model"


def _check_trained(draft_model: ModelSource | None, kinds: Sequence[str]) -> None:
    """Raises ConfigError where trained weights are wanted and a path leads to none."""
    if not isinstance(draft_model, (str, Path)) or not set(kinds) & set(BUNDLED_DRAFTS):
        return
    text = os.fspath(draft_model)
    if not is_local(text):
        return
    path = Path(text).expanduser()
    what = "holds no trained draft" if path.exists() else "does not exist"
    raise ConfigError(
        f"draft_model={text} {what}: for draft={','.join(kinds)!r} give the folder that `edgespec train` made "
        "(config.json and weights.safetensors) or its bundle, or use draft='model' for an ordinary model"
    )


def refuse_unused(options: EngineOptions, names: Sequence[str], why: str) -> None:
    """Raises ConfigError where one of `names` differs from its default."""
    for name in names:
        if getattr(options, name) != EngineOptions.__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={getattr(options, name)!r} would have no effect, as {why}")


def load(
    model: ModelSource,
    draft_model: ModelSource | None,
    options: EngineOptions,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> Loaded:
    """Load the target and the drafts of `options`; drafts are converted for the target where the cache lacks them.

    Everything that can be refused without loading is refused first. Raises ConfigError and its kin.
    """
    runtime = Device.parse(options.device).runtime
    if isinstance(model, (str, Path)):
        folder: Path | None = resolve(model, progress=progress, runtime=runtime)
    else:
        folder = _folder_of(model)
    bundle = Bundle.open(folder) if folder is not None and (folder / "bundle.json").is_file() else None
    kinds = [kind for kind in options.loaded_drafts if kind in BUNDLED_DRAFTS]
    if isinstance(model, (str, Path)):
        _check_graphs(folder, bundle, options)
    bundles = _bundles(kinds, draft_model, bundle, str(folder or "the loaded model"), options, progress)
    loaded = _load_target(model, folder, options, tokenizer)
    try:
        if options.tree and not loaded.target.info.tree:
            raise IncompatibleError(
                f"tree=True (--tree), but {loaded.target.info.name} runs no trees on this backend: drop the tree"
            )
        if "model" in options.drafts:
            assert draft_model is not None
            _load_draft_model(loaded, draft_model, options, progress)
        if "table" in options.drafts:
            loaded.table = zoo.open_table(loaded.target.info, _table_folder(draft_model))
        loaded.bundles = bundles
        for kind, path in bundles.items():
            with _contained(loaded, kind, options):
                loaded.heads[kind] = open_draft(path, options)
    except BaseException:
        if isinstance(model, (str, Path)):
            loaded.target.close()
        raise
    return loaded


def _folder_of(model: Model) -> Path | None:
    """The folder that a loaded model came from, where it says so."""
    graph = getattr(getattr(model, "folder", None), "graph", None)
    return graph.parent if isinstance(graph, Path) else None


def _check_graphs(folder: Path | None, bundle: Bundle | None, options: EngineOptions) -> None:
    """Raises IncompatibleError where the target's folder lacks the graphs that the options need."""
    is_static = bundle is not None and bundle.info.static is not None  # its graphs run trees too
    wants = {
        "tree=True (--tree)": (options.tree and not is_static, (TREE_GRAPH,), "export it with tree", "drop the tree"),
        "draft='early-exit'": (
            "early-exit" in options.drafts,
            SPLIT_GRAPHS,
            "export it with exit_layer",
            "use another draft",
        ),
    }
    for what, (is_wanted, names, remedy, otherwise) in wants.items():
        missing = [name for name in names if bundle is None or not bundle.has(name)]
        if is_wanted and missing:
            here = "is no bundle" if bundle is None else f"has {', '.join(_graphs(bundle))}"
            raise IncompatibleError(
                f"{what} needs {', '.join(missing)} of the target, and {folder} {here}: {remedy} (`edgespec export`; "
                f"a known pair is converted again by `edgespec pull --force`), or {otherwise}"
            )


def _graphs(bundle: Bundle) -> list[str]:
    return sorted(name for name in bundle.files if name.endswith(".onnx"))


def _bundles(
    kinds: Sequence[str],
    draft_model: ModelSource | None,
    target: Bundle | None,
    where: str,
    options: EngineOptions,
    progress: Progress | None,
) -> dict[str, Path]:
    """Draft kind -> its bundle for this target, in fixed shapes where the draft's device wants them."""
    if not kinds:
        return {}
    if target is None:
        raise IncompatibleError(
            f"draft={kinds[0]!r} is made for one bundle, and {where} is none: make one from the weights with "
            "`edgespec export`, or use draft='ngram' (--draft ngram)"
        )
    is_path = isinstance(draft_model, (str, Path)) and kind_of(draft_model) in BUNDLED_DRAFTS
    given = Path(os.fspath(draft_model)).expanduser() if is_path else None  # type: ignore[arg-type]
    shape = StaticShape(options.draft_n_ctx) if _wants_static(options.draft_device) else None
    return zoo.prepare(kinds, target, given, progress, static=shape)


def _table_folder(draft_model: ModelSource | None) -> Path | None:
    """The folder of a table that was given as draft model."""
    is_given = isinstance(draft_model, (str, Path)) and kind_of(draft_model) == "table"
    return Path(os.fspath(draft_model)).expanduser() if is_given else None  # type: ignore[arg-type]


def _wants_static(name: str) -> bool:
    """Whether the device runs graphs of fixed shapes alone, as NPUs do."""
    device = Device.parse(name)
    if not device.provider and device.runtime == "onnx":  # a generic name: whatever stands behind it here
        from edgespec.backends.onnx.devices import find_device

        try:
            device = find_device(device)
        except EdgeSpecError:  # said again where the draft is loaded, which may go on without one
            return False
    return device.runtime == "onnx" and (device.row.is_static or device.kind == "npu")


def _load_target(
    model: ModelSource, folder: Path | None, options: EngineOptions, tokenizer: Tokenizer | None
) -> Loaded:
    if not isinstance(model, (str, Path)):
        return Loaded(model, tokenizer, None, "the loaded model")
    assert folder is not None
    from edgespec.backends import load_model

    split = "early-exit" in options.drafts
    target = load_model(folder, tree=options.tree, split=split, **options.target_place)
    has_tree_graph = options.tree and (folder / TREE_GRAPH).is_file()
    graph = TREE_GRAPH if has_tree_graph else " + ".join(SPLIT_GRAPHS) if split else PLAIN_GRAPH
    if folder.is_file():
        graph = folder.name
    elif isinstance(widths := getattr(target, "widths", None), tuple):
        graph = " or ".join(map(static_graph, widths))
    return Loaded(target, tokenizer or _tokenizer_of(target, folder), folder, graph)


def _tokenizer_of(model: Model, folder: Path) -> Tokenizer:
    """The one that the backend has read already, else the folder's."""
    from edgespec.text import Tokenizer

    found = getattr(model, "tokenizer", None)
    return found if isinstance(found, Tokenizer) else Tokenizer.load(folder)


def _load_draft_model(loaded: Loaded, source: ModelSource, options: EngineOptions, progress: Progress | None) -> None:
    """Load the draft of the kind `model` and compare its tokens with the target's."""
    if not isinstance(source, (str, Path)):
        loaded.draft_model = source
        _check_same_vocabulary(loaded.target, loaded.tokenizer, source, None)
        return
    from edgespec.backends import load_model

    folder = resolve(source, progress=progress, runtime=Device.parse(options.draft_device).runtime)
    with _contained(loaded, "model", options):
        loaded.draft_model = load_model(folder, **options.draft_place)
    if loaded.draft_model is not None:
        tokenizer = _tokenizer_of(loaded.draft_model, folder)
        _check_same_vocabulary(loaded.target, loaded.tokenizer, loaded.draft_model, tokenizer)


@contextmanager
def _contained(loaded: Loaded, kind: str, options: EngineOptions) -> Iterator[None]:
    """A draft whose device cannot be used is written down and left out, unless the options are strict.

    On the CPU it is the draft's files that are at fault, and the error stays one.
    """
    try:
        yield
    except (BackendError, MissingDependencyError) as error:
        if options.strict_device or Device.parse(options.draft_device).provider == "cpu":
            raise
        loaded.failed[kind] = str(error)


def _check_same_vocabulary(
    target: Model, tokenizer: Tokenizer | None, draft: Model, draft_tokenizer: Tokenizer | None
) -> None:
    """Raises IncompatibleError naming the first token that differs; padded vocabularies pass."""
    if tokenizer is not None and draft_tokenizer is not None:
        difference = tokenizer.first_difference(draft_tokenizer)
        if difference:
            raise IncompatibleError(
                f"target and draft have different tokenizers: {difference}. Use a draft with the target's tokenizer, "
                "or draft='ngram' (--draft ngram)"
            )
    elif target.info.n_vocab != draft.info.n_vocab:
        raise IncompatibleError(
            f"target has {target.info.n_vocab:,} tokens, draft has {draft.info.n_vocab:,}: use a draft with the same "
            "tokenizer, or draft='ngram' (--draft ngram)"
        )
