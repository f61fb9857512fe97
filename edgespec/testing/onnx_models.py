"""Writes tiny random ONNX decoders into folders, one for each layout that `edgespec.backends` loads.

Our own bundle (float or int4, sliding window, a tap), an onnxruntime-genai folder (shared KV buffer, all rows or only
the last), and an optimum folder (growing KV, plain operators). All hold the weights of `edgespec.testing.tiny`, whose
numpy reference they must match. Needs the `export` extra.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import MissingDependencyError
from edgespec.testing.tiny import TinySpec, Weights, rope_tables, tiny_weights
from edgespec.testing.tokenizer import write_tokenizer

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ImportError as error:
    raise MissingDependencyError(
        "edgespec.testing.onnx_models needs the onnx package: pip install 'edgespec[export]'"
    ) from error

__all__ = ["quantize_matrix", "write_bundle", "write_genai", "write_optimum"]

INT4_BLOCK = 16  # the smallest block MatMulNBits takes, so that tiny matrices have several


def write_bundle(
    folder: Path,
    spec: TinySpec | None = None,
    *,
    bits: int = 32,
    name: str = "tiny",
    weights: Weights | None = None,
    strings: Sequence[str] | None = None,
) -> Path:
    """Our bundle format; bits 32 is float, 4 is MatMulNBits. The tap "final" is the normed last hidden state.

    strings: the tokenizer's token strings, by default `edgespec.testing.tokenizer.tiny_strings`.
    """
    spec = spec or TinySpec()
    graph = _Graph(spec, tiny_weights(spec) if weights is None else weights, bits)
    hidden = graph.embed("input_ids")
    for layer in range(spec.n_layers):
        hidden = graph.layer(hidden, layer, lambda qkv, i: graph.gqa(qkv, i, "seqlens_k", "total_sequence_length"))
    hidden = graph.norm(hidden, "norm")
    graph.node("Reshape", [hidden, graph.const([-1, spec.n_embd])], out="hidden.final")
    rows = graph.node("Gather", ["hidden.final", "logits_rows"], axis=0)
    graph.linear(rows, "head", out="logits")
    inputs = [
        _value("input_ids", TensorProto.INT64, [1, "S"]),
        _value("seqlens_k", TensorProto.INT32, [1]),
        _value("total_sequence_length", TensorProto.INT32, []),
        _value("logits_rows", TensorProto.INT64, ["n"]),
        *graph.cache("past_key_values", "T", 1),
    ]
    outputs = [
        _value("logits", TensorProto.FLOAT, ["n", spec.n_vocab]),
        *graph.cache("present", "T", 1),
        _value("hidden.final", TensorProto.FLOAT, ["S", spec.n_embd]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    graph.save(folder / "model.onnx", inputs, outputs)
    write_tokenizer(folder, spec.n_vocab, strings=strings)
    _write_json(folder / "bundle.json", _bundle_fields(folder, spec, bits, name))
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
    graph = _Graph(spec, tiny_weights(spec), 32, dtype)
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
    inputs = [
        _value("input_ids", TensorProto.INT64, ["B", 1 if one_row else "S"]),
        _value("attention_mask", TensorProto.INT64, ["B", "total"]),
        *graph.cache("past_key_values", "P", "B"),
    ]
    rows: int | str = 1 if last_row_only or one_row else "S"
    outputs = [_value("logits", graph.kind, ["B", rows, spec.n_vocab]), *graph.cache("present", "T", "B")]
    folder.mkdir(parents=True, exist_ok=True)
    graph.save(folder / "model.onnx", inputs, outputs)
    _write_json(folder / "genai_config.json", _genai_fields(spec))
    return folder


def write_optimum(folder: Path, spec: TinySpec | None = None) -> Path:
    """An optimum folder: config.json, every KV call returns a longer copy, plain operators only."""
    spec = spec or TinySpec()
    graph = _Graph(spec, tiny_weights(spec), 32)
    mask = graph.bias_mask()
    hidden = graph.embed("input_ids")
    for layer in range(spec.n_layers):
        hidden = graph.layer(hidden, layer, lambda qkv, i: graph.plain_attention(qkv, i, mask))
    graph.linear(graph.norm(hidden, "norm"), "head", out="logits")
    inputs = [
        _value("input_ids", TensorProto.INT64, ["B", "S"]),
        _value("attention_mask", TensorProto.INT64, ["B", "total"]),
        _value("position_ids", TensorProto.INT64, ["B", "S"]),
        *graph.cache("past_key_values", "P", "B"),
    ]
    outputs = [_value("logits", TensorProto.FLOAT, ["B", "S", spec.n_vocab]), *graph.cache("present", "total", "B")]
    folder.mkdir(parents=True, exist_ok=True)
    graph.save(folder / "model.onnx", inputs, outputs)
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


def quantize_matrix(matrix: np.ndarray, block: int = INT4_BLOCK) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symmetric int4 of `matrix` [in, out] as MatMulNBits holds it.

    Returns packed uint8 [out, in / block, block / 2], scales float32 [out * in / block], and the float32 matrix
    [in, out] that they stand for.
    """
    blocks = np.ascontiguousarray(matrix.T).reshape(matrix.shape[1], -1, block)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scales = (peak / -8).astype(np.float32)
    scales[scales == 0] = 1
    codes = np.clip(np.rint(blocks / scales) + 8, 0, 15).astype(np.uint8)
    packed = codes[..., ::2] | (codes[..., 1::2] << 4)
    decoded = ((codes.astype(np.float32) - 8) * scales).reshape(matrix.shape[1], -1).T
    return packed, scales.reshape(-1), np.ascontiguousarray(decoded)


class _Graph:
    """Collects nodes and weights; every method appends nodes and returns the name of a result."""

    def __init__(self, spec: TinySpec, weights: Weights, bits: int, dtype: type[np.generic] = np.float32) -> None:
        assert bits in (4, 32)
        self.spec, self.bits = spec, bits
        self.weights = {name: array.astype(dtype) for name, array in weights.items()}
        self.kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, onnx.TensorProto] = {}
        cos, sin = rope_tables(spec)
        self.init("cos", cos.astype(dtype))
        self.init("sin", sin.astype(dtype))

    def init(self, name: str, array: Any) -> str:
        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def const(self, value: int | float | list[int], dtype: type[np.generic] = np.int64) -> str:
        return self.init(f"const.{dtype.__name__}.{value}", np.array(value, dtype))

    def node(self, op: str, inputs: list[str], *, out: str | None = None, domain: str = "", **attrs: Any) -> str:
        name = out or f"{op}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"node.{name}", domain=domain, **attrs))
        return name

    def embed(self, ids: str) -> str:
        return self.node("Gather", [self.init("embed", self.weights["embed"]), ids], axis=0)

    def norm(self, x: str, weight: str) -> str:
        scale = self.init(weight, self.weights[weight])
        return self.node("SimplifiedLayerNormalization", [x, scale], axis=-1, epsilon=self.spec.rms_eps, stash_type=1)

    def linear(self, x: str, weight: str, out: str | None = None) -> str:
        matrix = self.weights[weight]
        if self.bits == 32:
            return self.node("MatMul", [x, self.init(weight, matrix)], out=out)
        packed, scales, _ = quantize_matrix(matrix, INT4_BLOCK)
        inputs = [x, self.init(f"{weight}.q", packed), self.init(f"{weight}.s", scales)]
        attrs = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": 4, "block_size": INT4_BLOCK, "accuracy_level": 4}
        return self.node("MatMulNBits", inputs, out=out, domain="com.microsoft", **attrs)

    def layer(self, hidden: str, index: int, attention: Any) -> str:
        qkv = self.linear(self.norm(hidden, f"{index}.norm1"), f"{index}.qkv")
        hidden = self.node("Add", [hidden, self.linear(attention(qkv, index), f"{index}.out")])
        normed = self.norm(hidden, f"{index}.norm2")
        gate = self.linear(normed, f"{index}.gate")
        silu = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
        product = self.node("Mul", [silu, self.linear(normed, f"{index}.up")])
        return self.node("Add", [hidden, self.linear(product, f"{index}.down")])

    def gqa(self, qkv: str, index: int, seqlens: str, total: str) -> str:
        past = [f"past_key_values.{index}.key", f"past_key_values.{index}.value"]
        name = f"attention.{index}"
        node = helper.make_node(
            "GroupQueryAttention",
            [qkv, "", "", *past, seqlens, total, "cos", "sin"],
            [name, f"present.{index}.key", f"present.{index}.value"],
            name=f"node.{name}",
            domain="com.microsoft",
            num_heads=self.spec.n_heads,
            kv_num_heads=self.spec.n_kv_heads,
            do_rotary=1,
            local_window_size=self.spec.window or -1,
        )
        self.nodes.append(node)
        return name

    def bias_mask(self) -> str:
        """[S, total] float32: 0 where a query sees a key, a large negative number elsewhere."""
        total = self.node("Gather", [self.node("Shape", ["attention_mask"]), self.const(1)], axis=0)
        keys = self.node("Range", [self.const(0), total, self.const(1)])
        queries = self.node("Transpose", ["position_ids"], perm=[1, 0])
        distance = self.node("Sub", [queries, keys])
        hides = self.node("Less", [distance, self.const(0)])
        if self.spec.window is not None:
            far = self.node("GreaterOrEqual", [distance, self.const(self.spec.window)])
            hides = self.node("Or", [hides, far])
        return self.node("Where", [hides, self.const(-1e9, np.float32), self.const(0.0, np.float32)])

    def plain_attention(self, qkv: str, index: int, mask: str) -> str:
        spec = self.spec
        counts = [spec.n_heads, spec.n_kv_heads, spec.n_kv_heads]
        parts = [f"split.{index}.{i}" for i in range(3)]
        sizes = self.const([count * spec.head_dim for count in counts])
        self.nodes.append(helper.make_node("Split", [qkv, sizes], parts, axis=-1, name=f"node.split.{index}"))
        query, key, value = (self._heads(part, count) for part, count in zip(parts, counts, strict=True))
        key = self.node("Concat", [f"past_key_values.{index}.key", self._rope(key)], out=f"present.{index}.key", axis=2)
        past = f"past_key_values.{index}.value"
        value = self.node("Concat", [past, value], out=f"present.{index}.value", axis=2)
        query, key, value = self._rope(query), self._repeat(key), self._repeat(value)
        scores = self.node("MatMul", [query, self.node("Transpose", [key], perm=[0, 1, 3, 2])])
        scores = self.node("Mul", [scores, self.const(spec.head_dim**-0.5, np.float32)])
        probs = self.node("Softmax", [self.node("Add", [scores, mask])], axis=-1)
        merged = self.node("Transpose", [self.node("MatMul", [probs, value])], perm=[0, 2, 1, 3])
        return self.node("Reshape", [merged, self.const([0, 0, spec.n_heads * spec.head_dim])])

    def _heads(self, x: str, count: int) -> str:
        split = self.node("Reshape", [x, self.const([0, 0, count, self.spec.head_dim])])
        return self.node("Transpose", [split], perm=[0, 2, 1, 3])

    def _repeat(self, x: str) -> str:
        """Key-value heads repeated to the number of query heads."""
        indices = [head * self.spec.n_kv_heads // self.spec.n_heads for head in range(self.spec.n_heads)]
        return self.node("Gather", [x, self.const(indices)], axis=1)

    def _rope(self, x: str) -> str:
        half = self.spec.head_dim // 2
        axis = self.const([3])
        low = self.node("Slice", [x, self.const([0]), self.const([half]), axis])
        high = self.node("Slice", [x, self.const([half]), self.const([2 * half]), axis])
        rotated = self.node("Concat", [self.node("Neg", [high]), low], axis=3)
        return self.node(
            "Add", [self.node("Mul", [x, self._angle("cos")]), self.node("Mul", [rotated, self._angle("sin")])]
        )

    def _angle(self, table: str) -> str:
        rows = self.node("Gather", [table, "position_ids"], axis=0)
        both = self.node("Concat", [rows, rows], axis=-1)
        return self.node("Unsqueeze", [both, self.const([1])])

    def cache(self, prefix: str, length: str, batch: int | str) -> list[onnx.ValueInfoProto]:
        shape = [batch, self.spec.n_kv_heads, length, self.spec.head_dim]
        return [
            _value(f"{prefix}.{layer}.{kind}", self.kind, shape)
            for layer in range(self.spec.n_layers)
            for kind in ("key", "value")
        ]

    def save(self, path: Path, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> None:
        graph = helper.make_graph(self.nodes, "tiny", inputs, outputs, list(self.tensors.values()))
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # onnx appends to a file that is there
        onnx.save_model(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=256)


def _value(name: str, kind: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


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
