"""Builds the tiny random decoders of `edgespec.testing.onnx_models`, node by node.

Owns the graph of one file: layers, attention in place or growing, int4 matrices. Knows nothing of folders. Needs the
`export` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import MissingDependencyError
from edgespec.testing.tiny import TinySpec, Weights, rope_tables

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ImportError as error:
    raise MissingDependencyError(
        "edgespec.testing.onnx_models needs the onnx package: pip install 'edgespec[export]'"
    ) from error

__all__ = ["INT4_BLOCK", "TensorProto", "TinyGraph", "quantize_matrix", "tensor_value"]

INT4_BLOCK = 16  # the smallest block MatMulNBits takes, so that tiny matrices have several
TREE_PORTS = ["position_ids", "attention_bias"]


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


class TinyGraph:
    """Collects nodes and weights; every method appends nodes and returns the name of a result."""

    def __init__(
        self,
        spec: TinySpec,
        weights: Weights,
        bits: int,
        dtype: type[np.generic] = np.float32,
        *,
        has_tree: bool = False,
    ) -> None:
        assert bits in (4, 32)
        self.has_tree = has_tree
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
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

    def layer(self, hidden: str, index: int, attention: Callable[[str, int], str]) -> str:
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
            [qkv, "", "", *past, seqlens, total, "cos", "sin", *TREE_PORTS * self.has_tree],
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

    def take(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """Declare an input."""
        self.inputs.append(tensor_value(name, kind, shape))
        return name

    def give(self, name: str, shape: Sequence[int | str]) -> str:
        """Declare an output."""
        self.outputs.append(tensor_value(name, self.kind, shape))
        return name

    def cache(self, first: int, end: int, past: str, present: str, batch: int | str) -> None:
        """Declare the cache tensors of the layers from `first` up to `end`; past, present: names of their lengths."""
        for layer in range(first, end):
            for kind in ("key", "value"):
                shape = [batch, self.spec.n_kv_heads, past, self.spec.head_dim]
                self.take(f"past_key_values.{layer}.{kind}", self.kind, shape)
                self.give(f"present.{layer}.{kind}", [batch, self.spec.n_kv_heads, present, self.spec.head_dim])

    def layers(self, hidden: str, first: int, end: int, batch: int | str = "B") -> str:
        """Layers with in-place caches from `first` up to `end`, and the inputs that they need."""
        self.take("seqlens_k", TensorProto.INT32, [batch])
        self.take("total_sequence_length", TensorProto.INT32, [])
        if self.has_tree:
            self.take("position_ids", TensorProto.INT64, [batch, "S"])
            self.take("attention_bias", self.kind, [batch, 1, "S", "total"])
        self.cache(first, end, "T", "T", batch)
        for layer in range(first, end):
            hidden = self.layer(hidden, layer, lambda qkv, i: self.gqa(qkv, i, "seqlens_k", "total_sequence_length"))
        return hidden

    def tap(self, name: str, hidden: str) -> str:
        """Give `hidden` [batch, S, d] as rows under the name of a tap."""
        shape = self.const([-1, self.spec.n_embd])
        return self.node("Reshape", [hidden, shape], out=self.give(f"hidden.{name}", ["rows", self.spec.n_embd]))

    def save(self, path: Path) -> None:
        graph = helper.make_graph(self.nodes, "tiny", self.inputs, self.outputs, list(self.tensors.values()))
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # onnx appends to a file that is there
        onnx.save_model(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=256)


def tensor_value(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
