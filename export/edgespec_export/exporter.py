"""From a source to a bundle: the order of the work.

Owns the sequence read, check, build, write, compare, rename. Each step's substance lives in its own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import write_bundle
from edgespec.errors import ExportError, ExportRefusedError, MissingDependencyError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.calibration import Calibration
from edgespec_export.config import ModelConfig, check_shapes, kept_layers
from edgespec_export.graph import DecoderGraph, HeadGraph, check_options, parts
from edgespec_export.matrices import Matrices
from edgespec_export.options import ExportOptions
from edgespec_export.parity import CheckOptions, GraphRunner, Parity, compare, gate
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import WeightSource, file_sha256, open_source
from edgespec_export.texts import CALIBRATION_FILE, calibration_tokens, check_tokens
from edgespec_export.writer import DataFile, new_folder, write_model

__all__ = ["KeptWeights", "Progress", "adapted", "export_model", "need_onnx", "quantization_info", "target_info",
           "write_tokenizer"]  # fmt: skip

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class KeptWeights:
    """The source's tensors under the layer numbers that are left when only some layers are kept."""

    source: WeightSource
    keep: tuple[int, ...] | None

    def __call__(self, name: str) -> NDArray[np.float32]:
        if self.keep is not None and name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"layers.{self.keep[int(index)]}.{rest}"
        value = self.source.tensor(name)
        if not np.isfinite(value).all():
            raise ExportError(f"tensor {name} of {self.source.path} holds NaN or infinite values: it is damaged.")
        return value


def export_model(
    source: str | Path | WeightSource,
    out: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    *,
    check: CheckOptions | None = None,
    force: bool = False,
) -> Path:
    """Export a GGUF file, a Hugging Face folder or an opened source to the bundle folder `out`.

    The folder appears only if all went well.

    check: compare with a float reference and refuse what is worse than its limits; the figures go into bundle.json.
    progress(step, done, total) is called as layers are written. Raises ConfigError and ExportError with the way out.
    """
    options = options or ExportOptions()
    report = progress or (lambda step, done, total: None)
    need_onnx()
    out = Path(out)
    opened = open_source(source) if isinstance(source, (str, Path)) else source
    check_shapes(opened.config, opened.shapes)
    config = adapted(opened.config, options)
    check_options(config, options)
    weights = KeptWeights(opened, options.keep_layers)
    with new_folder(out, force=force) as folder:
        tokenizer = write_tokenizer(folder, opened, config)
        matrices = _write_graphs(folder, config, options, weights, report)
        parity = None
        if check is not None:
            report("check", 0, 1)
            parity = check_graph(folder, config, options, weights, check)
            report("check", 1, 1)
        write_bundle(folder, target_info(config, options, matrices, opened, tokenizer, parity))
    return out


def check_graph(
    folder: Path, config: ModelConfig, options: ExportOptions, weights: KeptWeights, check: CheckOptions
) -> Parity:
    """Compare the written graph with the float reference; raises ExportError where it is worse than allowed."""
    text = check_tokens(folder, config, check.n_tokens)
    reference = ReferenceModel(config, weights)
    runner = GraphRunner(folder, config, options.taps, n_ctx=len(text))
    parity = compare(runner, reference, text)
    gate(parity, options.bits, check)
    return parity


def need_onnx() -> None:
    """Raise MissingDependencyError, which says what to install, where there is no onnx package."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("writing a bundle needs onnx: `pip install 'edgespec[export]'`.") from error


def adapted(config: ModelConfig, options: ExportOptions) -> ModelConfig:
    """The config as exported: fewer layers or a shorter context."""
    if options.keep_layers is not None:
        config = kept_layers(config, options.keep_layers)
    if options.n_ctx is not None:
        if options.n_ctx > config.n_ctx:
            raise ExportRefusedError(f"n_ctx is {options.n_ctx} and the model was made for {config.n_ctx} tokens.")
        config = replace(config, n_ctx=options.n_ctx)
    return replace(config, name=options.name) if options.name else config


def _write_graphs(
    folder: Path, config: ModelConfig, options: ExportOptions, weights: KeptWeights, report: Progress
) -> Matrices:
    """Every graph of the bundle over one file of weights, which the first graph fills."""
    calibration = None
    if options.quantizer == "gptq":
        calibration = Calibration(config, weights, calibration_tokens(folder, config))
    with DataFile(folder) as data:
        matrices = Matrices(config, options, weights, data, calibration)
        whole, *others = parts(config, options)
        graph = DecoderGraph(config, options, matrices, whole)
        graph.build(lambda index: report("layers", index + 1, config.n_layers))
        write_model(folder, whole.file, graph, data)
        for part in others:
            graph = DecoderGraph(config, options, matrices, part)
            graph.build()
            write_model(folder, part.file, graph, data)
        if options.exit_layer is not None:
            head = HeadGraph(config, options, matrices)
            head.build()
            write_model(folder, "head.onnx", head, data)
    return matrices


def write_tokenizer(folder: Path, source: WeightSource, config: ModelConfig) -> Tokenizer:
    """tokenizer.json and the chat template. Returns the source's tokenizer, which knows its BOS and EOS too."""
    tokenizer = Tokenizer.load(source.path)
    if tokenizer.n_vocab > config.n_vocab:
        raise ExportError(
            f"the tokenizer has {tokenizer.n_vocab} tokens and the model only {config.n_vocab}: the two belong to"
            " different models."
        )
    (folder / "tokenizer.json").write_bytes(source.tokenizer_json(tokenizer).encode())
    template = source.chat_template()
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template.encode())
    if Tokenizer.load(folder / "tokenizer.json").hash != tokenizer.hash:
        raise ExportError("the tokenizer that was written differs from the source's: this is a fault of edgespec.")
    return tokenizer


def quantization_info(options: ExportOptions, matrices: Matrices) -> dict[str, Any]:
    """What bundle.json says of the rounding."""
    head_bits, head_block = options.head
    return {
        "bits": options.bits,
        "block_size": options.block_size,
        "symmetric": options.symmetric,
        "accuracy_level": options.accuracy_level,
        "head_bits": head_bits,
        "head_block_size": head_block,
        "embed_bits": matrices.embed_bits,
        "quantizer": options.quantizer,
        "search": options.n_scales,
        "calibration": _calibration_info(matrices.calibration),
        "notes": matrices.notes,
    }


def _calibration_info(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {"sha256": file_sha256(CALIBRATION_FILE), "n_tokens": calibration.n_tokens}


def target_info(
    config: ModelConfig,
    options: ExportOptions,
    matrices: Matrices,
    source: WeightSource,
    tokenizer: Tokenizer,
    parity: Parity | None,
) -> dict[str, Any]:
    """bundle.json of a target."""
    optional = {} if options.exit_layer is None else {"exit_layer": options.exit_layer}
    return {
        **optional,
        "name": config.name,
        "architecture": config.architecture,
        "flavour": "cpu",
        "n_vocab": config.n_vocab,
        "n_ctx": config.n_ctx,
        "n_layers": config.n_layers,
        "n_embd": config.n_embd,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "eos_ids": sorted({*config.eos_ids, *tokenizer.eos_ids}),
        "bos_id": tokenizer.bos_id,
        "add_bos": tokenizer.add_bos,
        "tokenizer_hash": tokenizer.hash,
        "sliding_window": config.sliding_window,
        "quantization": quantization_info(options, matrices),
        "taps": list(options.taps),
        "parity": None if parity is None else parity.to_json(),
        "source": {
            "format": source.format,
            "sha256": source.sha256(),
            "kept_layers": None if options.keep_layers is None else list(options.keep_layers),
            **({} if source.synthetic is None else {"synthetic": dict(source.synthetic)}),
        },
    }
