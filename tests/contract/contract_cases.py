"""Every backend in the layouts that it loads, each with an independent source of truth for its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export import ExportOptions, StaticOptions, export_model, export_static
from edgespec_export.exporter import KeptWeights
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import open_source
from export.tiny_models import tiny_config, write_hf
from npu.emulator import own_cache, require_qnn

from edgespec.backends import load_model
from edgespec.testing import TableModel
from edgespec.testing.gguf_models import write_gguf
from edgespec.testing.onnx_models import write_bundle, write_genai, write_optimum
from edgespec.testing.tiny import TinySpec, tiny_logits, tiny_weights
from edgespec.types import FloatArray, Model

SPEC = TinySpec()
WINDOWED = TinySpec(window=8)
WIDE_HEADS = TinySpec(head_dim=32)  # which cached blocks of 32 values divide


@dataclass(frozen=True)
class Case:
    """A loaded model; `truth(tokens)` is [len(tokens), n_vocab] logits that did not go through a cached prefix."""

    name: str
    model: Model
    truth: Callable[[Sequence[int]], FloatArray]
    atol: float


def table_case(name: str, **options: object) -> Case:
    model = TableModel(SPEC.n_vocab, n_ctx=SPEC.n_ctx, order=5, seed=4, **options)
    judge = TableModel(SPEC.n_vocab, n_ctx=SPEC.n_ctx, order=5, seed=4, **options)
    return Case(name, model, lambda tokens: np.stack([judge.row(tokens[: i + 1]) for i in range(len(tokens))]), 0.0)


def float_case(name: str, folder: Path, spec: TinySpec, atol: float = 1e-4, **options: Any) -> Case:
    weights = tiny_weights(spec)
    model = load_model(folder, threads=1, **options)
    return Case(name, model, lambda tokens: tiny_logits(spec, tokens, weights), atol)


def one_pass_case(name: str, folder: Path, atol: float = 0.05, **options: Any) -> Case:
    """The truth is one pass of the plain graph in a fresh session: a graph that no independent numbers exist for.

    Kernels of different row counts may round differently: an activation that rounds to the next of its 8-bit steps
    moves logits of an int4 model by some 1e-2. Another device's kernels do by more, so its truth is its own.
    """
    model = load_model(folder, threads=1, **options)
    plain = load_model(folder, threads=1, device=options.get("device", "cpu"))

    def one_pass(tokens: Sequence[int]) -> FloatArray:
        session = plain.open_session()
        logits = session.forward(tokens).logits.copy()
        session.close()
        return logits

    return Case(name, model, one_pass, atol)


def llama_case(
    name: str, path: Path, atol: float = 1e-4, type: str = "F32", spec: TinySpec = SPEC, **options: str
) -> Case:
    """A GGUF in llama.cpp, all in floats by default; flash attention rounds keys and values to half precision.

    Of quantized ones the truth is one pass in a fresh session; activations are rounded to 8 bits, which kernels of
    other row counts may do on another side.
    """
    file = write_gguf(path / "tiny.gguf", spec, type=type)
    floats = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    model = load_model(file, device="llamacpp:cpu", threads=1, device_options={**floats, **options})
    if type == "F32":
        weights = tiny_weights(spec)
        return Case(name, model, lambda tokens: tiny_logits(spec, tokens, weights), atol)

    def one_pass(tokens: Sequence[int]) -> FloatArray:
        session = model.open_session()
        logits = session.forward(tokens).logits.copy()
        session.close()
        return logits

    return Case(name, model, one_pass, atol)


def exported(path: Path, family: str = "llama-biased") -> Path:
    """A bundle as the exporter writes it: four layers, by default with biases, taps, a tree graph, an exit."""
    config = tiny_config(family, n_layers=4, n_ctx=SPEC.n_ctx)
    options = ExportOptions(bits=32, taps=("layer.0", "layer.2", "final"), tree=True, exit_layer=2)
    return export_model(write_hf(path / "source", config), path / "bundle", options)


def static_case(name: str, path: Path, family: str, atol: float, device: str = "cpu") -> Case:
    """Graphs of fixed shapes. The truth is the exporter's numpy model with the embedding rounded."""
    is_whole = device != "webgpu"  # which has no Max
    source = write_hf(path / "source", tiny_config(family, n_ctx=SPEC.n_ctx))
    options = StaticOptions(widths=(1, 4, 9), n_ctx=SPEC.n_ctx, taps=("layer.0", "final"))
    folder = export_static(source, path / "bundle", options)
    opened = open_source(source)
    load = KeptWeights(opened, None)

    def weights(key: str) -> FloatArray:
        value = load(key)
        return value.astype(np.float16).astype(np.float32) if key == "embed_tokens.weight" else value

    reference = ReferenceModel(opened.config, weights)
    with own_cache(path / "home"):
        model = load_model(folder, threads=1, device=device, strict_device=is_whole)
    return Case(name, model, reference.forward, atol)


def emulated_case(path: Path) -> Case:
    require_qnn()
    return static_case("static-qnn", path, "llama", 0.05, "qnn:htp")


BUILDERS: dict[str, Callable[..., Case]] = {
    "table": lambda _: table_case("table"),
    "table-window": lambda _: table_case("table-window", window=8),
    "bundle": lambda path, **on: float_case("bundle", write_bundle(path), SPEC, **on),
    "bundle-window": lambda path, **on: float_case("bundle-window", write_bundle(path, WINDOWED), WINDOWED, **on),
    "bundle-int4": lambda path, **on: one_pass_case("bundle-int4", write_bundle(path, bits=4), **on),
    "tree": lambda path, **on: float_case("tree", write_bundle(path, tree=True), SPEC, tree=True, **on),
    "tree-int4": lambda path, **on: one_pass_case("tree-int4", write_bundle(path, bits=4, tree=True), tree=True, **on),
    "split": lambda path, **on: float_case("split", write_bundle(path, exit_layer=1), SPEC, split=True, **on),
    "split-int4": lambda path, **on: one_pass_case(
        "split-int4", write_bundle(path, bits=4, exit_layer=1), split=True, **on
    ),
    "exported": lambda path, **on: one_pass_case("exported", exported(path), 1e-4, **on),
    "exported-tree": lambda path, **on: one_pass_case("exported-tree", exported(path), 1e-4, tree=True, **on),
    "exported-split": lambda path, **on: one_pass_case("exported-split", exported(path), 1e-4, split=True, **on),
    "static": lambda path, **on: static_case("static", path, "llama-biased", 1e-4, **on),
    "static-norms": lambda path, **on: static_case("static-norms", path, "qwen3", 1e-4, **on),
    "static-qnn": emulated_case,
    "genai": lambda path, **on: float_case("genai", write_genai(path), SPEC, **on),
    "genai-half": lambda path, **on: float_case("genai-half", write_genai(path, is_half=True), SPEC, 0.2, **on),
    "genai-last-row": lambda path, **on: float_case(
        "genai-last-row", write_genai(path, last_row_only=True), SPEC, **on
    ),
    "genai-one-row": lambda path, **on: float_case("genai-one-row", write_genai(path, one_row=True), SPEC, **on),
    "genai-window": lambda path, **on: float_case("genai-window", write_genai(path, WINDOWED), WINDOWED, **on),
    "llamacpp": lambda path: llama_case("llamacpp", path),
    "llamacpp-shared": lambda path: llama_case("llamacpp-shared", path, sequences="4"),
    "llamacpp-flash": lambda path: llama_case("llamacpp-flash", path, 0.03, flash_attn="on"),
    "llamacpp-q8": lambda path: llama_case("llamacpp-q8", path, 0.25, "Q8_0"),
    "llamacpp-q4": lambda path: llama_case(
        "llamacpp-q4", path, 0.5, "Q4_0", WIDE_HEADS, flash_attn="on", type_k="q8_0", type_v="q8_0"
    ),
    "optimum": lambda path, **on: float_case("optimum", write_optimum(path), SPEC, **on),
    "optimum-window": lambda path, **on: float_case("optimum-window", write_optimum(path, WINDOWED), WINDOWED, **on),
}

# What runs in environments of their own (`pytest --device NAME`), where a call may take a second.
ON_DEVICE: dict[str, tuple[str, ...]] = {
    "cpu": tuple(BUILDERS),
    "openvino:cpu": tuple(name for name in BUILDERS if not name.startswith(("table", "static-qnn", "llamacpp"))),
    "webgpu": ("bundle", "bundle-int4", "optimum", "static"),
}
