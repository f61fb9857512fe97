"""From weights, or from a trained draft, to a bundle of graphs of fixed shapes for NPUs.

Owns the order of the work and what bundle.json says of it. The graphs are `static_graph.py`'s matter, rounding to 8
bits `static_quantize.py`'s, measuring `static_parity.py`'s, compiling for a chip `edgespec.backends.onnx.contexts`'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.onnx.contexts import compiled
from edgespec.backends.onnx.devices import Place, find_device
from edgespec.backends.onnx.socs import find_soc
from edgespec.bundle import EMBEDDING, ROPE, VOCABULARY, Bundle, static_graph, write_bundle
from edgespec.cpu import default_threads
from edgespec.errors import ConfigError, ExportRefusedError
from edgespec_export.config import ModelConfig, check_shapes
from edgespec_export.draft_graphs import N_EXTRA, DraftMatrices
from edgespec_export.drafts import check_target, draft_config, draft_info, write_texts
from edgespec_export.exporter import KeptWeights, Progress, adapted, need_onnx, target_info, write_tokenizer
from edgespec_export.graph import check_options
from edgespec_export.matrices import Matrices
from edgespec_export.options import ExportOptions
from edgespec_export.parity import CheckOptions
from edgespec_export.reference import ReferenceModel
from edgespec_export.rope import tables
from edgespec_export.sources import open_source
from edgespec_export.static_graph import StaticDecoderGraph, StaticDraftGraph
from edgespec_export.static_options import StaticOptions
from edgespec_export.static_parity import Checked, measured
from edgespec_export.static_quantize import quantize_graphs
from edgespec_export.target_tables import TargetTables
from edgespec_export.writer import DataFile, new_folder, write_model
from edgespec_export.zoo import ZooDraft

__all__ = ["MASK", "export_static", "export_static_draft"]

# What hides a place from a row: exp of it is 0 in fp16 as well, and with a score added it stays finite there. In 16-bit
# integers the mask shares its range with the scores, so there it is only as low as the shares need.
MASK = {"fp16": -1e4, "w8a16": -200.0}
NPU = "qnn:htp"


@dataclass(frozen=True)
class _Part:
    """What the two kinds of models bring: their graphs, the host's table, the float model, the facts."""

    config: ModelConfig
    options: ExportOptions
    matrices: Callable[[DataFile], Matrices]
    graph: Callable[[Matrices, int], StaticDecoderGraph]
    embedding: Callable[[], NDArray[np.float32]]
    reference: ReferenceModel
    n_ids: int  # of the tokens that go in, which a draft has more of than logits columns
    n_columns: int  # of the logits that stand for a token
    extra: tuple[int, ...]  # tokens of a draft's last columns while it is calibrated and checked
    info: Callable[[Matrices], dict[str, Any]]


def export_static(
    source: str | Path,
    out: str | Path,
    options: StaticOptions | None = None,
    progress: Progress | None = None,
    *,
    check: CheckOptions | None = None,
    force: bool = False,
) -> Path:
    """Export a GGUF file or a Hugging Face folder as the bundle `out` of fixed shapes.

    check: compare with the float reference on the CPU and, where the NPU or its emulator is here, on that; the figures
    go into bundle.json. Raises ConfigError and ExportError with the way out, BackendError where a compiler fails.
    """
    options = options or StaticOptions()
    need_onnx()
    opened = open_source(source)
    check_shapes(opened.config, opened.shapes)
    graph_options = options.graph_options(opened.config.n_ctx)
    config = adapted(opened.config, graph_options)
    check_options(config, graph_options)
    _check_fit(config, options)
    weights = KeptWeights(opened, options.keep_layers)
    with new_folder(Path(out), force=force) as folder:
        tokenizer = write_tokenizer(folder, opened, config)
        part = _Part(
            config,
            graph_options,
            lambda data: Matrices(config, graph_options, weights, data),
            lambda matrices, width: StaticDecoderGraph(
                config, graph_options, matrices, width=width, context=config.n_ctx
            ),
            lambda: weights("embed_tokens.weight"),
            ReferenceModel(config, weights),
            config.n_vocab,
            config.n_vocab,
            (),
            lambda matrices: target_info(config, graph_options, matrices, opened, tokenizer, None),
        )
        _write(folder, part, options, check, progress or _quiet)
    return Path(out)


def export_static_draft(
    zoo_folder: str | Path,
    target_bundle_folder: str | Path,
    out: str | Path,
    options: StaticOptions | None = None,
    progress: Progress | None = None,
    *,
    check: CheckOptions | None = None,
    force: bool = False,
) -> Path:
    """Export a trained TinyDraft for the target in `target_bundle_folder` as the bundle `out` of fixed shapes.

    Raises ConfigError for a draft of another kind, and otherwise what `export_static` raises.
    """
    options = options or StaticOptions()
    need_onnx()
    draft, target = ZooDraft.open(zoo_folder), Bundle.open(target_bundle_folder)
    check_target(draft, target)
    _check_draft(draft, options)
    graph_options = options.graph_options(target.info.n_ctx)
    config = adapted(draft_config(draft, target), graph_options)
    _check_fit(config, options)
    host = TargetTables.read(target)
    if not host.is_tied:
        raise ExportRefusedError(
            f"{target.info.name} has a head of its own beside its embedding, and a draft of fixed shapes takes the "
            "extra rows of its head from the one table that the host has: use the draft on the CPU."
        )

    extra = np.setdiff1d(np.arange(target.info.n_vocab), draft.vocabulary)[:N_EXTRA]
    rows = {
        "embed_tokens.weight": np.arange(target.info.n_vocab),
        "lm_head.weight": np.concatenate((draft.vocabulary, extra)),
    }

    def weights(name: str) -> NDArray[np.float32]:
        return host.embedding.rows(rows[name]) if name in rows else draft.tensor(name)

    with new_folder(Path(out), force=force) as folder:
        (folder / VOCABULARY).write_bytes(draft.vocabulary.astype("<i4").tobytes())
        write_texts(folder, target)
        part = _Part(
            config,
            graph_options,
            lambda data: DraftMatrices(config, graph_options, draft.tensor, data, host, draft.vocabulary),
            lambda matrices, width: StaticDraftGraph(
                config, graph_options, matrices, width=width, context=config.n_ctx, n_extra=N_EXTRA
            ),
            lambda: weights("embed_tokens.weight"),
            ReferenceModel(replace(config, is_tied=False), weights),
            target.info.n_vocab,
            len(rows["lm_head.weight"]),
            tuple(extra.tolist()),
            lambda matrices: draft_info(draft, target, config, graph_options, matrices),
        )
        _write(folder, part, options, check, progress or _quiet)
    return Path(out)


def _check_draft(draft: ZooDraft, options: StaticOptions) -> None:
    kind = draft.config.kind
    if kind != "tinydraft":
        raise ConfigError(
            f"{draft.folder} is a draft of the kind {kind}, and graphs of fixed shapes are made of models and of"
            " tinydraft: use it on the CPU, or train a tinydraft."
        )
    if options.taps or options.keep_layers is not None:
        raise ConfigError("taps and kept layers are for targets; a draft is exported whole and gives no features.")


def _check_fit(config: ModelConfig, options: StaticOptions) -> None:
    """Raise where the context is too short for the widest graph or too long for the window, or no compiler is here."""
    if options.socs:
        find_device(NPU)  # before the long part of the work
    if config.n_ctx < options.widths[-1]:
        raise ConfigError(
            f"the widest graph has {options.widths[-1]} rows and {config.name} a context of {config.n_ctx}: give "
            "narrower --widths."
        )
    window = config.sliding_window
    if window is not None and window < config.n_ctx:
        raise ExportRefusedError(
            f"{config.name} has a sliding window of {window} tokens and the graphs would have a context of"
            f" {config.n_ctx}: export with a context of at most {window} (--ctx-size), where the window has no effect."
        )


def _write(folder: Path, part: _Part, options: StaticOptions, check: CheckOptions | None, report: Progress) -> None:
    """Graphs, tables, figures, compiled code, bundle.json."""
    with DataFile(folder) as data:
        matrices = part.matrices(data)
        for done, width in enumerate(options.widths, 1):
            graph = part.graph(matrices, width)
            graph.build()
            write_model(folder, static_graph(width), graph, data)
            report("graphs", done, len(options.widths))
    np.save(folder / EMBEDDING, part.embedding().astype(np.float16))
    np.save(folder / ROPE, np.stack(tables(part.config.rope, part.config.head_dim, part.config.n_ctx)))
    static = {"widths": list(options.widths), "dtype": options.dtype, "mask": MASK[options.dtype], "contexts": {}}
    info = {**part.info(matrices), "flavour": "npu", "static": static}
    info["quantization"] = _quantization(options, None)
    text_config = replace(part.config, n_vocab=part.n_ids)
    if options.calibration is not None:
        write_bundle(folder, info)  # calibrating runs the float graphs as a session does
        calibration = quantize_graphs(folder, text_config, options, part.extra, report)
        info["quantization"] = _quantization(options, calibration)
    if check is not None:
        write_bundle(folder, info)
        report("check", 0, 1)
        checked = Checked(text_config, part.reference, part.extra, part.n_columns)
        info["parity"] = measured(folder, checked, options.dtype, check)
        report("check", 1, 1)
    if options.socs:
        write_bundle(folder, info)
        static["contexts"] = _compile(folder, options.socs, report)
    write_bundle(folder, info)


def _quantization(options: StaticOptions, calibration: dict[str, Any] | None) -> dict[str, Any]:
    is_float = options.dtype == "fp16"
    return {
        "dtype": options.dtype,
        "bits": 16 if is_float else 8,
        "activation_bits": 16,
        "embed_bits": 16,
        "calibration": calibration,
        "notes": ["the file holds float32, which the NPU's compiler rounds to fp16"] if is_float else [],
    }


def _compile(folder: Path, socs: Sequence[str], report: Progress) -> dict[str, Any]:
    """Compiled code for each chip, copied into the bundle; the entries of bundle.json."""
    bundle = Bundle.open(folder)
    place = Place(find_device(NPU), default_threads())
    entries = {}
    for done, name in enumerate(socs):
        report(f"compile for {name}", done, len(socs))
        soc = find_soc(name)
        made = compiled(bundle, place, soc)
        entries[soc.name] = {
            "compiler": made.compiler,
            "graphs": made.copy_into(folder),
            "n_nodes": made.n_nodes,
        }
        report(f"compile for {name}", done + 1, len(socs))
    return entries


def _quiet(step: str, done: int, total: int) -> None:
    """No progress."""
