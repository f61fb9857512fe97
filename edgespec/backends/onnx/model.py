"""One decoder graph loaded by ONNX Runtime: the weights, shared by any number of sessions.

Puts the other modules of the package together: folder, device, signature, capabilities; also for a bundle's tree graph
and for its graphs in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.backends.base import check_context
from edgespec.backends.onnx.devices import Place, Placement, find_device, import_onnxruntime, placement
from edgespec.backends.onnx.folders import ModelFolder, read_folder
from edgespec.backends.onnx.probe import open_session, probe_capabilities, rows_agree
from edgespec.backends.onnx.session import Capabilities, OnnxSession
from edgespec.backends.onnx.signature import Signature, read_signature
from edgespec.backends.onnx.split import EXIT, FINAL, SplitModel, SplitSignature
from edgespec.backends.onnx.stateless import StatelessGraph
from edgespec.backends.onnx.static_model import StaticModel, load_static
from edgespec.cpu import default_threads
from edgespec.errors import BackendError, ConfigError, IncompatibleError
from edgespec.types import IntArray, ModelInfo

__all__ = ["OnnxModel", "load"]

HEAD_KINDS = ("medusa", "exit")  # drafts whose graph has no cache


class OnnxModel:
    """A loaded graph. `threads` is what it runs with, `folder` what it was loaded from.

    `info.n_vocab` is the width of its logits: with a reduced vocabulary, `len(vocabulary)` and the extra columns that
    `set_extra` of a session names.
    """

    def __init__(
        self,
        runtime: Any,
        signature: Signature,
        info: ModelInfo,
        capabilities: Capabilities,
        folder: ModelFolder,
        place: Place,
        fuse: StatelessGraph | None = None,
    ) -> None:
        self._runtime = runtime
        self._fuse = fuse
        self.signature = signature
        self._info = info
        self.capabilities = capabilities
        self.folder = folder
        self.place = place
        self.threads = place.threads

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def runtime(self) -> Any:
        """The InferenceSession; raises BackendError once the model is closed."""
        if self._runtime is None:
            raise BackendError(f"{self._info.name}: the model is closed; load it again.")
        return self._runtime

    @property
    def content_key(self) -> str:
        """Names the weights, the runtime's version, the device and the threads: what decides on kernels."""
        version = import_onnxruntime().__version__
        return f"{self.folder.content_key} onnxruntime={version} {self.place}"

    @property
    def vocabulary(self) -> IntArray | None:
        """[V] int64 ascending tokens of the first V logits columns of a draft; None: column i is token i."""
        return None if self.folder.reduced is None else self.folder.reduced.ids

    @property
    def draft(self) -> Mapping[str, Any] | None:
        """What the bundle says of the draft that it is; None for a target."""
        return self.folder.draft

    @property
    def fuse(self) -> StatelessGraph:
        """The draft's graph that makes one feature of the target's taps; raises ConfigError where there is none."""
        if self._fuse is None:
            raise ConfigError(f"{self._info.name}: its bundle has no fuse.onnx, so it is no draft over several taps.")
        return self._fuse

    def open_session(self) -> OnnxSession:
        return open_session(self.runtime, self.signature, self._info, self.capabilities, self.folder.reduced)

    def close(self) -> None:
        """Drop the weights; they are freed when the last open session is closed too."""
        self._runtime = None
        if self._fuse is not None:
            self._fuse.close()


def load(
    path: Path,
    *,
    kind: str,
    device: str = "cpu",
    device_options: Mapping[str, str] | None = None,
    strict_device: bool = False,
    n_ctx: int | None = None,
    threads: int | None = None,
    name: str | None = None,
    tree: bool = False,
    split: bool = False,
) -> OnnxModel | SplitModel | StaticModel:
    """Load the model folder `path`; see `edgespec.backends.load_model`."""
    if tree and split:
        raise ConfigError(f"{path}: tree and split are both set: trees run on the whole graph, so choose one.")
    folder = read_folder(path, kind, "tree" if tree else "split" if split else "model")
    if folder.draft is not None and folder.draft["kind"] in HEAD_KINDS:
        raise ConfigError(
            f"{path} is a draft of the kind {folder.draft['kind']}, which has no cache and is no model by itself: "
            "give it as the draft of its target."
        )
    name = name or folder.name
    context = check_context(name, n_ctx, folder.n_ctx)
    place = Place(find_device(device), threads or default_threads(), device_options or {}, strict_device)
    if folder.is_static:
        return load_static(folder, place, name, context)
    if split:
        return _load_split(folder, place, name, context)
    runtime = place.load(folder.graph)
    kv_shape = _kv_shape(folder)
    signature = read_signature(runtime, name, names=folder.names, n_vocab=folder.n_vocab, kv_shape=kv_shape)
    _check_declared(folder, signature, name, signature.n_vocab, signature.n_layers, tuple(signature.taps))
    fuse = StatelessGraph(folder.fuse, place=place) if folder.fuse else None
    info = _info(folder, signature, place, name, context)
    capabilities = Capabilities() if kind == "bundle" else probe_capabilities(runtime, signature, info)
    if place.device.provider != "cpu" and capabilities.max_rows is None:
        open_one = partial(open_session, runtime, signature, info, capabilities, folder.reduced)
        if not _has_right_rows(open_one, info, folder, signature.n_features):
            capabilities = replace(capabilities, rows_on_past=False)
    where = placement(runtime, place.device) + (fuse.placement if fuse else Placement())
    info = replace(info, placement=where.nodes, fallbacks=where.fallbacks)
    info = _with_capabilities(info, signature, capabilities)
    return OnnxModel(runtime, signature, info, capabilities, folder, place, fuse)


def _load_split(folder: ModelFolder, place: Place, name: str, n_ctx: int) -> SplitModel:
    """The halves and the head, each in a runtime of its own."""
    lower_path, upper_path, head_path = folder.graphs
    runtimes = place.load(lower_path), place.load(upper_path)
    lower, upper = (
        read_signature(runtime, f"{name} ({path.name})", kv_shape=_kv_shape(folder), is_part=True)
        for runtime, path in zip(runtimes, folder.graphs, strict=False)
    )
    head = StatelessGraph(head_path, place=place)
    if lower.ids is None or EXIT not in lower.taps or upper.features is None or FINAL not in upper.taps:
        raise IncompatibleError(f"{name}: lower.onnx and upper.onnx are not the halves of one model: export it again.")
    signature = SplitSignature(lower, upper)
    n_vocab = head.outputs["logits"].shape[-1]
    _check_declared(folder, lower, name, n_vocab, lower.n_layers + upper.n_layers, signature.taps)
    info = ModelInfo(
        name=name,
        n_vocab=n_vocab or folder.n_vocab or 0,
        n_ctx=n_ctx,
        eos_ids=folder.eos_ids,
        tokenizer_hash=folder.tokenizer_hash,
        device=place.device.name,
        weight_bytes=folder.weight_bytes,
        kv_bytes_per_token=signature.kv_bytes_per_token,
        taps=signature.taps,
        synthetic=folder.synthetic,
    )
    if place.device.provider != "cpu":
        open_one = SplitModel(runtimes, signature, head, info, folder, place).open_session
        _has_right_rows(open_one, info, folder, can_do=False)
    where = placement(runtimes[0], place.device) + placement(runtimes[1], place.device) + head.placement
    info = replace(info, placement=where.nodes, fallbacks=where.fallbacks)
    return SplitModel(runtimes, signature, head, info, folder, place)


def _has_right_rows(
    open_one: Callable[[], OnnxSession], info: ModelInfo, folder: ModelFolder, n_features: int = 0, can_do: bool = True
) -> bool:
    """Whether the device may be asked for several rows.

    can_do: whether the model could do with single ones. Raises BackendError where it could not.
    """
    n_ids = info.n_vocab if folder.reduced is None else folder.reduced.n_full
    if rows_agree(open_one, info, n_ids, n_features):
        return True
    if n_features or not can_do:
        raise BackendError(
            f"{info.name}: device {info.device!r} gives other logits for several rows in one call than for one at a "
            "time, and this model needs several: use another device"
        )
    return False


def _kv_shape(folder: ModelFolder) -> tuple[int, int] | None:
    return (folder.n_kv_heads, folder.head_dim) if folder.n_kv_heads and folder.head_dim else None


def _info(
    folder: ModelFolder,
    signature: Signature,
    place: Place,
    name: str,
    n_ctx: int,
) -> ModelInfo:
    """What is known before anything has run; the graph is taken to be able to do what our own graphs do."""
    info = ModelInfo(
        name=name,
        n_vocab=signature.n_vocab,
        n_ctx=n_ctx,
        eos_ids=folder.eos_ids,
        tokenizer_hash=folder.tokenizer_hash,
        device=place.device.name,
        weight_bytes=folder.weight_bytes,
        kv_bytes_per_token=signature.kv_bytes_per_token,
        taps=tuple(signature.taps) if folder.kind == "bundle" else (),
        synthetic=folder.synthetic,
    )
    return _with_capabilities(info, signature, Capabilities())


def _with_capabilities(info: ModelInfo, signature: Signature, capabilities: Capabilities) -> ModelInfo:
    return replace(
        info,
        max_rewind=None if capabilities.can_rewind else 0,
        max_rows=capabilities.max_rows,
        tree=signature.has_tree and capabilities.is_shared and capabilities.max_rows is None,
        taps=info.taps if capabilities.max_rows is None else (),  # single runs return no features
    )


def _check_declared(
    folder: ModelFolder,
    signature: Signature,
    name: str,
    n_vocab: int | None,
    n_layers: int,
    taps: tuple[str, ...],
) -> None:
    """The configuration of one model beside the weights of another: raise, listing what differs.

    n_vocab, n_layers, taps: of the whole model, where `signature` is of a part.
    """
    _, heads, _, dim = signature.kv_shape(signature.past[0], 0)
    pairs = {
        "n_vocab": (folder.n_vocab, n_vocab),
        "n_layers": (folder.n_layers, n_layers),
        "n_kv_heads": (folder.n_kv_heads, heads),
        "head_dim": (folder.head_dim, dim),
    }
    differing = [
        f"{key} {declared} against {found}" for key, (declared, found) in pairs.items() if declared not in (None, found)
    ]
    if any(tap not in taps for tap in folder.taps):
        differing.append(f"taps {list(folder.taps)} against {sorted(taps)}")
    if differing:
        raise IncompatibleError(
            f"{name}: the configuration and the graph are of different models ({'; '.join(differing)}): "
            "put the files of one model together."
        )
