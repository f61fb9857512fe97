"""Writes tiny random ONNX decoders into folders, one for each layout that `edgespec.backends` loads.

Our own bundle (float or int4, sliding window, taps, a tree graph, the parts for early exit), a draft over features with
a reduced vocabulary, an onnxruntime-genai folder (shared KV buffer, all rows or only the last), and an optimum folder
(growing KV, plain operators). All hold the weights of `edgespec.testing.tiny`, whose numpy reference they must match.
Needs the `export` extra.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.testing.onnx_graph import INT4_BLOCK, TensorProto, TinyGraph, quantize_matrix
from edgespec.testing.tiny import TinySpec, Weights, tiny_weights
from edgespec.testing.tokenizer import write_tokenizer

__all__ = ["quantize_matrix", "write_bundle", "write_feature_draft", "write_genai", "write_optimum"]


def write_bundle(
    folder: Path,
    spec: TinySpec | None = None,
    *,
    bits: int = 32,
    name: str = "tiny",
    weights: Weights | None = None,
    strings: Sequence[str] | None = None,
    tree: bool = False,
    exit_layer: int | None = None,
    is_half: bool = False,
) -> Path:
    """Our bundle format; bits 32 is float, 4 is MatMulNBits. The tap "final" is the normed last hidden state.

    strings: the tokenizer's token strings, by default `edgespec.testing.tokenizer.tiny_strings`. tree: write tree.onnx
    too. exit_layer: write the parts below and above it, and the head, too. is_half: float16 weights, cache and logits.
    """
    spec = spec or TinySpec()
    dtype = np.float16 if is_half else np.float32
    weights = tiny_weights(spec) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    for file, has_tree in (("model.onnx", False), *((("tree.onnx", True),) if tree else ())):
        graph = TinyGraph(spec, weights, bits, dtype, has_tree=has_tree)
        hidden = graph.layers(graph.embed(graph.take("input_ids", TensorProto.INT64, ["B", "S"])), 0, spec.n_layers)
        final = graph.tap("final", graph.norm(hidden, "norm"))
        rows = graph.node("Gather", [final, graph.take("logits_rows", TensorProto.INT64, ["n"])], axis=0)
        graph.linear(rows, "head", out=graph.give("logits", ["n", spec.n_vocab]))
        graph.save(folder / file)
    if exit_layer is not None:
        _write_parts(folder, spec, weights, bits, exit_layer)
    write_tokenizer(folder, spec.n_vocab, strings=strings)
    extra = {} if exit_layer is None else {"exit_layer": exit_layer}
    _write_json(folder / "bundle.json", {**_bundle_fields(folder, spec, bits, name), **extra})
    return folder


def _write_parts(folder: Path, spec: TinySpec, weights: Weights, bits: int, exit_layer: int) -> None:
    lower = TinyGraph(spec, weights, bits)
    ids = lower.take("input_ids", TensorProto.INT64, ["B", "S"])
    lower.tap("exit", lower.layers(lower.embed(ids), 0, exit_layer))
    lower.save(folder / "lower.onnx")
    upper = TinyGraph(spec, weights, bits)
    features = upper.take("features", TensorProto.FLOAT, ["S", spec.n_embd])
    hidden = upper.node("Reshape", [features, upper.const([1, -1, spec.n_embd])])
    hidden = upper.layers(hidden, exit_layer, spec.n_layers, batch=1)
    upper.tap("final", upper.norm(hidden, "norm"))
    upper.save(folder / "upper.onnx")
    head = TinyGraph(spec, weights, bits)
    rows = head.take("features", TensorProto.FLOAT, ["n", spec.n_embd])
    head.linear(rows, "head", out=head.give("logits", ["n", spec.n_vocab]))
    head.save(folder / "head.onnx")


def write_feature_draft(
    folder: Path,
    vocabulary: Sequence[int],
    spec: TinySpec | None = None,
    *,
    n_extra: int = 4,
    tree: bool = False,
    name: str = "tiny-draft",
) -> Path:
    """A draft bundle as EAGLE's: it adds a feature to each token's embedding, and its logits are over `vocabulary`
    (ascending) and `n_extra` more tokens. The tap "own" is the residual stream after the last layer."""
    spec = spec or TinySpec()
    weights = tiny_weights(spec)
    folder.mkdir(parents=True, exist_ok=True)
    for file, has_tree in (("model.onnx", False), *((("tree.onnx", True),) if tree else ())):
        graph = TinyGraph(spec, weights, 32, has_tree=has_tree)
        embedded = graph.embed(graph.take("input_ids", TensorProto.INT64, [1, "S"]))
        features = graph.take("features", TensorProto.FLOAT, ["S", spec.n_embd])
        features = graph.node("Reshape", [features, graph.const([1, -1, spec.n_embd])])
        hidden = graph.layers(graph.node("Add", [embedded, features]), 0, spec.n_layers, batch=1)
        own = graph.tap("own", hidden)
        rows = graph.node("Gather", [own, graph.take("logits_rows", TensorProto.INT64, ["n"])], axis=0)
        table = graph.init("head", weights["head"])
        extra = graph.take("extra_ids", TensorProto.INT64, [n_extra])
        ids = graph.node("Concat", [graph.const(list(vocabulary)), extra], axis=0)
        columns = graph.node("Gather", [table, ids], axis=1)
        out = graph.give("logits", ["n", len(vocabulary) + n_extra])
        graph.node("MatMul", [graph.norm(rows, "norm"), columns], out=out)
        graph.save(folder / file)
    (folder / "vocabulary.i32").write_bytes(np.asarray(vocabulary, "<i4").tobytes())
    write_tokenizer(folder, spec.n_vocab)
    fields = _bundle_fields(folder, spec, 32, name)
    about = {key: fields[key] for key in ("n_embd", "n_vocab", "tokenizer_hash")}
    draft = {"kind": "eagle", "taps": ["final"], "n_heads": 1, "n_extra": n_extra, "target": about, "acceptance": None}
    changes = {"n_vocab": len(vocabulary) + n_extra, "taps": ["own"], "draft": draft}
    _write_json(folder / "bundle.json", {**fields, **changes})
    return folder


def write_genai(
    folder: Path,
    spec: TinySpec | None = None,
    *,
    last_row_only: bool = False,
    one_row: bool = False,
    is_half: bool = False,
) -> Path:
    """An onnxruntime-genai folder: attention_mask instead of lengths, KV in a shared buffer.

    last_row_only: logits of a call's last token alone. one_row: the graph is fixed to one token a call. is_half:
    float16 weights, cache and logits.
    """
    spec = spec or TinySpec()
    dtype = np.float16 if is_half else np.float32
    graph = TinyGraph(spec, tiny_weights(spec), 32, dtype)
    graph.take("input_ids", TensorProto.INT64, ["B", 1 if one_row else "S"])
    graph.take("attention_mask", TensorProto.INT64, ["B", "total"])
    graph.cache(0, spec.n_layers, "P", "T", "B")
    total = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), graph.const(1)], axis=0)
    total32 = graph.node("Cast", [total], to=TensorProto.INT32)
    count = graph.node("ReduceSum", ["attention_mask", graph.const([1])], keepdims=0)
    seqlens = graph.node("Cast", [graph.node("Sub", [count, graph.const([1])])], to=TensorProto.INT32)
    hidden = graph.embed("input_ids")
    for layer in range(spec.n_layers):
        hidden = graph.layer(hidden, layer, lambda qkv, i: graph.gqa(qkv, i, seqlens, total32))
    if last_row_only:
        hidden = graph.node("Gather", [hidden, graph.const([-1])], axis=1)
    graph.linear(graph.norm(hidden, "norm"), "head", out="logits")
    rows: int | str = 1 if last_row_only or one_row else "S"
    graph.give("logits", ["B", rows, spec.n_vocab])
    folder.mkdir(parents=True, exist_ok=True)
    graph.save(folder / "model.onnx")
    _write_json(folder / "genai_config.json", _genai_fields(spec))
    return folder


def write_optimum(folder: Path, spec: TinySpec | None = None) -> Path:
    """An optimum folder: config.json, every KV call returns a longer copy, plain operators only."""
    spec = spec or TinySpec()
    graph = TinyGraph(spec, tiny_weights(spec), 32)
    for port in ("input_ids", "position_ids"):
        graph.take(port, TensorProto.INT64, ["B", "S"])
    graph.take("attention_mask", TensorProto.INT64, ["B", "total"])
    graph.cache(0, spec.n_layers, "P", "total", "B")
    mask = graph.bias_mask()
    hidden = graph.embed("input_ids")
    for layer in range(spec.n_layers):
        hidden = graph.layer(hidden, layer, lambda qkv, i: graph.plain_attention(qkv, i, mask))
    graph.linear(graph.norm(hidden, "norm"), "head", out="logits")
    graph.give("logits", ["B", "S", spec.n_vocab])
    folder.mkdir(parents=True, exist_ok=True)
    graph.save(folder / "model.onnx")
    config = {
        "model_type": "llama",
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.n_ctx,
        "eos_token_id": list(spec.eos_ids),
    }
    _write_json(folder / "config.json", config)
    return folder


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=1))


def _bundle_fields(folder: Path, spec: TinySpec, bits: int, name: str) -> dict[str, Any]:
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "bundle.json":
            data = path.read_bytes()
            files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    quantization = {"bits": bits, "block_size": INT4_BLOCK, "symmetric": True, "accuracy_level": 4, "head_bits": bits}
    return {
        "format": "edgespec-bundle",
        "schema_version": 1,
        "name": name,
        "architecture": "llama",
        "flavour": "cpu",
        "n_vocab": spec.n_vocab,
        "n_ctx": spec.n_ctx,
        "n_layers": spec.n_layers,
        "n_embd": spec.n_embd,
        "n_heads": spec.n_heads,
        "n_kv_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "eos_ids": list(spec.eos_ids),
        "bos_id": None,
        "add_bos": False,
        "tokenizer_hash": hashlib.sha256(f"tiny {spec.n_vocab}".encode()).hexdigest(),
        "sliding_window": spec.window,
        "quantization": quantization,
        "taps": ["final"],
        "files": files,
        "parity": None,
        "source": {"format": "random", "seed": spec.seed},
    }


def _genai_fields(spec: TinySpec) -> dict[str, Any]:
    decoder = {
        "filename": "model.onnx",
        "head_size": spec.head_dim,
        "hidden_size": spec.n_embd,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "session_options": {"provider_options": []},
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "llama",
        "context_length": spec.n_ctx,
        "vocab_size": spec.n_vocab,
        "eos_token_id": list(spec.eos_ids),
        "decoder": decoder,
    }
    return {"model": model, "search": {"max_length": spec.n_ctx, "past_present_share_buffer": True}}
