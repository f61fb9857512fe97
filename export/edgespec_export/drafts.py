"""From a zoo folder and its target's bundle to a draft's bundle.

Owns the order of the work and what bundle.json says of a draft. The zoo's format is `zoo.py`'s matter, the graphs'
mathematics `draft_graphs.py`'s, the target's tables `target_tables.py`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.bundle import VOCABULARY, Bundle, write_bundle
from edgespec.errors import ConfigError, IncompatibleError
from edgespec_export.config import ModelConfig
from edgespec_export.draft_graphs import (
    N_EXTRA,
    DraftGraph,
    DraftMatrices,
    EagleGraph,
    ExitGraph,
    FuseGraph,
    MedusaGraph,
    TinyDraftGraph,
)
from edgespec_export.exporter import need_onnx, quantization_info
from edgespec_export.options import ExportOptions
from edgespec_export.rope import RopeConfig
from edgespec_export.sources import file_sha256
from edgespec_export.target_tables import TargetTables
from edgespec_export.writer import DataFile, new_folder, write_model
from edgespec_export.zoo import ZooDraft

__all__ = ["check_target", "draft_config", "draft_info", "export_draft", "write_texts"]

_TEXTS = ("tokenizer.json", "chat_template.jinja")
_GRAPHS: dict[str, dict[str, type[DraftGraph]]] = {
    "tinydraft": {"model.onnx": TinyDraftGraph, "tree.onnx": TinyDraftGraph},
    "eagle": {"model.onnx": EagleGraph, "tree.onnx": EagleGraph, "fuse.onnx": FuseGraph},
    "medusa": {"model.onnx": MedusaGraph},
    "exit": {"model.onnx": ExitGraph},
}


def export_draft(
    zoo_folder: str | Path,
    target_bundle_folder: str | Path,
    out: str | Path,
    *,
    bits: int = 4,
    block_size: int = 32,
    progress: Callable[[str, int, int], None] | None = None,
    force: bool = False,
) -> Path:
    """Make the bundle folder `out` of a trained draft; it appears only if all went well.

    bits, block_size: of the draft's matrices and its head; the embedding has the target's own bytes. progress(step,
    done, total) is called as graphs are written. Raises ConfigError for a draft that is not valid, IncompatibleError
    for one of another target, ExportError and FormatError for weights that do not fit.
    """
    need_onnx()
    report = progress or (lambda step, done, total: None)
    quantizer = "rtn" if bits == 32 else "mse"
    options = ExportOptions(bits=bits, block_size=block_size, quantizer=quantizer, fallback="pad")
    draft, target = ZooDraft.open(zoo_folder), Bundle.open(target_bundle_folder)
    check_target(draft, target)
    config = draft_config(draft, target)
    tables = TargetTables.read(target)
    with new_folder(Path(out), force=force) as folder:
        with DataFile(folder) as data:
            matrices = DraftMatrices(config, options, draft.tensor, data, tables, draft.vocabulary)
            files = _GRAPHS[draft.config.kind]
            for done, (file, kind) in enumerate(files.items(), 1):
                graph = kind(draft.config, config, options, matrices, has_tree=file == "tree.onnx")
                graph.build()
                write_model(folder, file, graph, data)
                report("graphs", done, len(files))
        (folder / VOCABULARY).write_bytes(draft.vocabulary.astype("<i4").tobytes())
        write_texts(folder, target)
        write_bundle(folder, draft_info(draft, target, config, options, matrices))
    return Path(out)


def write_texts(folder: Path, target: Bundle) -> None:
    """The target's tokenizer and chat template, which are the draft's too."""
    for name in _TEXTS:
        if target.has(name):
            shutil.copyfile(target.path(name), folder / name)


def check_target(draft: ZooDraft, target: Bundle) -> None:
    """Raise where the draft was trained for a model that is not this target, or needs what its bundle lacks."""
    config, info = draft.config, target.info
    if info.draft is not None:
        raise ConfigError(f"{target.folder} is itself a draft ({info.draft.get('kind')}): give the target's bundle.")
    if config.n_embd != info.n_embd:
        raise IncompatibleError(
            f"the draft in {draft.folder} was trained for features of {config.n_embd} channels and {info.name} has"
            f" {info.n_embd}: use a draft of this target."
        )
    if config.tokenizer_hash not in (None, info.tokenizer_hash):
        raise IncompatibleError(
            f"the draft in {draft.folder} was trained with the tokenizer {str(config.tokenizer_hash)[:16]} and"
            f" {info.name} has {str(info.tokenizer_hash)[:16]}: use a draft of this target."
        )
    if draft.vocabulary[-1] >= info.n_vocab:
        raise IncompatibleError(
            f"the draft in {draft.folder} drafts token {draft.vocabulary[-1]} and {info.name} has {info.n_vocab}"
            " tokens: use a draft of this target."
        )
    if config.kind == "exit":
        if config.exit_layer != info.exit_layer:
            raise IncompatibleError(
                f"the exit in {draft.folder} sits after {config.exit_layer} layers and {info.name} was exported with"
                f" exit_layer {info.exit_layer}: export the target with --exit-layer {config.exit_layer}."
            )
        return
    missing = [tap for tap in config.taps if tap not in info.taps]
    if missing:
        raise IncompatibleError(
            f"the draft in {draft.folder} needs the features {', '.join(missing)} and {info.name} gives"
            f" {', '.join(info.taps) or 'none'}: export the target with --taps {','.join(config.taps)}."
        )


def draft_config(draft: ZooDraft, target: Bundle) -> ModelConfig:
    """The draft as a model: its own shape, the target's words and context."""
    zoo, info = draft.config, target.info
    has_layers = zoo.kind in ("tinydraft", "eagle")
    n_layers = zoo.n_layers if zoo.kind in ("tinydraft", "eagle") else 1
    return ModelConfig(
        name=f"{info.name}-{zoo.kind}",
        architecture="llama",
        n_vocab=len(draft.vocabulary) + N_EXTRA,
        n_ctx=info.n_ctx,
        n_layers=n_layers,
        n_embd=zoo.n_embd,
        n_ff=zoo.n_ff,
        n_heads=zoo.n_heads,
        n_kv_heads=zoo.n_kv_heads,
        head_dim=zoo.head_dim if has_layers else info.head_dim,
        norm_eps=zoo.norm_eps,
        rope=RopeConfig(theta=zoo.rope_theta, **zoo.rope_scaling or {}),
        windows=(None,) * n_layers,
        eos_ids=info.eos_ids,
    )


def draft_info(
    draft: ZooDraft, target: Bundle, config: ModelConfig, options: ExportOptions, matrices: DraftMatrices
) -> dict[str, Any]:
    """bundle.json of a draft."""
    zoo, info = draft.config, target.info
    counts = ("n_vocab", "n_ctx", "n_layers", "n_embd", "n_heads", "n_kv_heads", "head_dim")
    about: dict[str, Any] = {
        "kind": zoo.kind,
        "taps": list(zoo.taps),
        "n_heads": zoo.n_medusa,
        "n_extra": N_EXTRA,
        "target": {
            "name": info.name,
            "n_embd": info.n_embd,
            "n_vocab": info.n_vocab,
            "tokenizer_hash": info.tokenizer_hash,
        },
        "acceptance": zoo.acceptance,
    }
    return {
        "name": config.name,
        "architecture": config.architecture,
        "flavour": "cpu",
        **{name: getattr(config, name) for name in counts},
        "eos_ids": list(info.eos_ids),
        "bos_id": info.bos_id,
        "add_bos": info.add_bos,
        "tokenizer_hash": info.tokenizer_hash,
        "sliding_window": None,
        "quantization": quantization_info(options, matrices),
        "taps": ["own"] if zoo.kind == "eagle" else [],
        "parity": None,
        "source": {"format": "edgespec-draft", "sha256": file_sha256(draft.weights_path)},
        "draft": about,
        **({} if zoo.exit_layer is None else {"exit_layer": zoo.exit_layer}),
    }
