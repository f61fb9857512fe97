"""A bundle of graphs of fixed shapes, loaded: which graphs, compiled for which chip, and the host's tables.

Puts `contexts` (compiled graphs) and `static` (sessions) together. On the CPU and on devices other than Qualcomm's the
float graphs run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.onnx.contexts import Contexts, compiled, compiler, from_bundle
from edgespec.backends.onnx.devices import Place, import_onnxruntime, placement
from edgespec.backends.onnx.folders import ModelFolder
from edgespec.backends.onnx.signature import Port, read_ports
from edgespec.backends.onnx.socs import find_soc
from edgespec.backends.onnx.static import PAST, TAP, HostTables, StaticGraphs, StaticSession
from edgespec.bundle import EMBEDDING, ROPE, Bundle, static_graph
from edgespec.errors import BundleError, ConfigError, IncompatibleError
from edgespec.types import IntArray, ModelInfo

__all__ = ["StaticModel", "load_static"]

SOC_OPTION = "soc"  # a device option of ours: the chip by name


class StaticModel:
    """Graphs of fixed shapes on one device. `info.max_rows` is the widest; longer chains take several calls."""

    def __init__(
        self, graphs: StaticGraphs, info: ModelInfo, tables: HostTables, folder: ModelFolder, place: Place, made_by: str
    ) -> None:
        self._graphs, self._info, self._tables = graphs, info, tables
        self.folder, self.place, self._made_by = folder, place, made_by

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the graphs, ascending."""
        return self._graphs.widths

    @property
    def fixed_width(self) -> int:
        """Rows of every call of a session whose `exact` is set."""
        return self._graphs.widest

    @property
    def content_key(self) -> str:
        """Names the weights, the runtime's version, the device and the threads: what decides on kernels."""
        version = import_onnxruntime().__version__
        return f"{self.folder.content_key} onnxruntime={version} {self._made_by} {self.place} static"

    @property
    def vocabulary(self) -> IntArray | None:
        """[V] int64 ascending tokens of the first V logits columns of a draft; None: column i is token i."""
        return None if self.folder.reduced is None else self.folder.reduced.ids

    @property
    def draft(self) -> Mapping[str, Any] | None:
        """What the bundle says of the draft that it is; None for a target."""
        return self.folder.draft

    def open_session(self) -> StaticSession:
        return StaticSession(self._graphs, self._info, self._tables, self.folder.reduced)

    def close(self) -> None:
        """Drop the weights; they are freed when the last open session is closed too."""
        self._graphs.close()


def load_static(folder: ModelFolder, place: Place, name: str, n_ctx: int) -> StaticModel:
    """Load the widest graph; the others follow when they are needed.

    On qnn:htp the graphs are compiled first unless the bundle or the cache has them. Raises BackendError where the
    device does not take them, ConfigError for an unknown chip, BundleError for tables that do not fit.
    """
    bundle = Bundle.open(folder.graph.parent)
    static = bundle.info.static
    assert static is not None
    place, contexts = _contexts(bundle, place)

    def load(width: int) -> Any:
        runtime = place.load(contexts.path(width) if contexts else bundle.path(static_graph(width)))
        _check_ports(bundle, *read_ports(runtime, name), width, name)
        return runtime

    graphs = StaticGraphs(static["widths"], load)
    runtime = graphs.runtime(graphs.widest)
    inputs, outputs = read_ports(runtime, name)
    where = placement(runtime, place.device)
    nodes = {next(iter(where.nodes)): contexts.n_nodes} if contexts and len(where.nodes) == 1 else where.nodes
    cache = [port for key, port in inputs.items() if key.startswith(PAST)]
    info = ModelInfo(
        name=name,
        n_vocab=bundle.info.n_vocab,
        n_ctx=n_ctx,
        eos_ids=folder.eos_ids,
        tokenizer_hash=folder.tokenizer_hash,
        device=place.device.name,
        weight_bytes=sum(bundle.files[key]["bytes"] for key in bundle.files if key.endswith(".data")),
        kv_bytes_per_token=sum(_size(port) // bundle.info.n_ctx for port in cache),
        max_rows=graphs.widest,
        tree=graphs.widest > 1,
        taps=tuple(key.removeprefix(TAP) for key in outputs if key.startswith(TAP)),
        placement=nodes,
        fallbacks=where.fallbacks,
    )
    made_by = contexts.compiler if contexts else ""
    return StaticModel(graphs, info, _tables(bundle), folder, place, made_by)


def _contexts(bundle: Bundle, place: Place) -> tuple[Place, Contexts | None]:
    """(the place without our own option, the compiled graphs for it or None where it runs the float ones)."""
    options = dict(place.options)
    chip = options.pop(SOC_OPTION, None)
    is_npu = place.device.provider == "qnn" and place.device.kind == "npu"
    if not is_npu:
        if chip is not None:
            raise ConfigError(
                f"the device option {SOC_OPTION}={chip} is for qnn:htp and the device is {place.device.name}"
            )
        return place, None
    soc = None if chip is None else find_soc(chip)
    stranger = next((key for key in (soc.options if soc else {}) if key in options), None)
    if soc is not None and stranger is not None:
        raise ConfigError(
            f"the device options {SOC_OPTION}={chip} and {stranger}={options[stranger]} both name the chip: drop one"
        )
    place = replace(place, options=options)
    contexts = from_bundle(bundle, soc) if soc else None
    if contexts is None or contexts.compiler != compiler():  # made by another version: it may not load
        contexts = compiled(bundle, place, soc)
    return replace(place, options={**options, **(soc.options if soc else {})}), contexts


def _tables(bundle: Bundle) -> HostTables:
    info, static = bundle.info, bundle.info.static
    assert static is not None
    embedding, rope = _array(bundle.path(EMBEDDING)), _array(bundle.path(ROPE))
    n_ids = info.n_vocab if info.draft is None else info.draft["target"]["n_vocab"]
    for found, wanted, name in (
        (embedding.shape, (n_ids, info.n_embd), EMBEDDING),
        (rope.shape, (2, info.n_ctx, info.head_dim // 2), ROPE),
    ):
        if found != wanted:
            raise BundleError(f"{bundle.folder / name} is {list(found)} and bundle.json says {list(wanted)}.")
    return HostTables(embedding, rope[0], rope[1], float(static["mask"]))


def _array(path: Path) -> Any:
    """The array, mapped so that only rows that are looked up are read."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} is no array that numpy can read ({error}): export the bundle again.") from error
    if array.dtype not in (np.float16, np.float32):
        raise BundleError(f"{path} holds {array.dtype} and float16 or float32 is wanted: export the bundle again.")
    return array


def _check_ports(
    bundle: Bundle, inputs: Mapping[str, Port], outputs: Mapping[str, Port], width: int, name: str
) -> None:
    """Raise IncompatibleError where the graph's shapes are not those of bundle.json."""
    info = bundle.info
    cache = (1, info.n_kv_heads, info.n_ctx, info.head_dim)
    wanted: dict[str, tuple[int, ...]] = {
        "embeddings": (1, width, info.n_embd),
        "cos": (1, 1, width, info.head_dim // 2),
        "sin": (1, 1, width, info.head_dim // 2),
        "mask": (1, 1, width, info.n_ctx),
        "place": (1, 1, info.n_ctx, width),
        "logits": (width, info.n_vocab),
    }
    if info.draft is not None:
        wanted["extra_rows"] = (info.draft["n_extra"], info.n_embd)
    for index in range(info.n_layers):
        for part in ("key", "value"):
            wanted[f"{PAST}{index}.{part}"] = cache
            wanted[f"present.{index}.{part}"] = (1, info.n_kv_heads, width, info.head_dim)
    found = {key: port.shape for key, port in {**inputs, **outputs}.items() if not key.startswith(TAP)}
    if found != wanted:
        key = min(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        raise IncompatibleError(
            f"{name}: the graph has {key} of {found.get(key)} and bundle.json says {wanted.get(key)}: put the files of "
            "one model together."
        )


def _size(port: Port) -> int:
    return int(np.prod([size or 0 for size in port.shape])) * port.dtype.itemsize
