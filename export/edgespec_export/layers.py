"""Pieces that graphs are made of: norms, products, decoder layers, as a few fused operators each.

Owns the operators and the names of a layer's nodes, inputs and outputs. Which pieces make a graph is up to its
subclasses (`graph.py`, `draft_graphs.py`); where weights come from and how they are rounded to `matrices.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec_export.config import ModelConfig
from edgespec_export.matrices import Matrices, StoredTable
from edgespec_export.options import ExportOptions
from edgespec_export.rope import tables

__all__ = ["LayerGraph"]

Shape = list[int | str]
_MS = "com.microsoft"


class LayerGraph:
    """Builds nodes into `nodes`; `inputs` and `outputs` are (name, type, shape).

    has_tree: layers take position ids and an attention bias, so that rows may lie on branches of a tree.
    """

    def __init__(
        self, config: ModelConfig, options: ExportOptions, matrices: Matrices, *, has_tree: bool = False
    ) -> None:
        self.config, self.options, self.matrices, self.has_tree = config, options, matrices, has_tree
        self.nodes: list[Any] = []
        self.inputs: list[tuple[str, str, Shape]] = []
        self.outputs: list[tuple[str, str, Shape]] = []

    def take(self, name: str, kind: str, shape: Shape) -> str:
        """Declare an input."""
        self.inputs.append((name, kind, shape))
        return name

    def give(self, name: str, shape: Shape) -> str:
        """Declare a float output."""
        self.outputs.append((name, "FLOAT", shape))
        return name

    def declare_layers(self, first: int, end: int, batch: int | str = "batch") -> None:
        """What the layers from `first` up to `end` need: lengths, caches, rotations and, for trees, who sees whom."""
        self.take("seqlens_k", "INT32", [batch])
        self.take("total_sequence_length", "INT32", [])
        if self.has_tree:
            self.take("position_ids", "INT64", [batch, "sequence_length"])
            self.take("attention_bias", "FLOAT", [batch, 1, "sequence_length", "total_length"])
        cache: Shape = [batch, self.config.n_kv_heads, "cache_length", self.config.head_dim]
        for index in range(first, end):
            for part in ("key", "value"):
                self.take(f"past_key_values.{index}.{part}", "FLOAT", cache)
                self.give(f"present.{index}.{part}", cache)
        cos, sin = tables(self.config.rope, self.config.head_dim, self.config.n_ctx)
        self.matrices.constant("cos_cache", cos)
        self.matrices.constant("sin_cache", sin)

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """Append a node and return its first output."""
        from onnx import helper

        name = outputs[0].replace("/", ".")
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def reshape(self, source: str, output: str, shape: list[int]) -> str:
        """0 keeps a dimension, -1 takes what is left."""
        label = self.matrices.constant("shape." + "_".join(map(str, shape)), np.array(shape, np.int64))
        return self.node("Reshape", [source, label], [output])

    def flat(self, source: str, output: str) -> str:
        """[batch, S, n_embd] as rows [batch * S, n_embd]."""
        return self.reshape(source, output, [-1, self.config.n_embd])

    def norm(self, name: str, residual: str, delta: str = "") -> tuple[str, str]:
        """RMS norm of residual + delta; returns (normed, sum)."""
        weight = self.matrices.vector(f"{name}.weight")
        output, total = f"{name}/out", f"{name}/sum"
        eps = self.config.norm_eps
        if not delta:
            inputs = [residual, weight]
            self.node("SimplifiedLayerNormalization", inputs, [output], axis=-1, epsilon=eps, stash_type=1)
            return output, residual
        inputs = [residual, delta, weight]
        self.node("SkipSimplifiedLayerNormalization", inputs, [output, "", "", total], _MS, epsilon=eps)
        return output, total

    def linear(self, name: str, source: str, parts: Sequence[str] = (), output: str = "") -> str:
        """`source` times the stacked weights of `parts` (by default the one called `name`), plus their biases."""
        matrix, output = self.matrices.linear(name, parts or [name]), output or f"{name}/out"
        if matrix.op == "MatMul":
            product = self.node("MatMul", [source, *matrix.inputs], [f"{name}/product" if matrix.bias else output])
            return self.node("Add", [product, matrix.bias], [output]) if matrix.bias else product
        inputs = [source, *matrix.inputs]
        if matrix.bias:
            inputs += [""] * (5 - len(inputs)) + [matrix.bias]  # zero_points and g_idx come before it
        return self.node(matrix.op, inputs, [output], _MS, **matrix.attributes)

    def head(self, rows: str, output: str = "logits") -> str:
        """Logits of [n, n_embd] rows over the whole vocabulary."""
        matrix = self.matrices.head()
        domain = "" if matrix.op == "Gemm" else _MS
        return self.node(matrix.op, [rows, *matrix.inputs], [output], domain, **matrix.attributes)

    def lookup(self, table: StoredTable, ids: str, output: str) -> str:
        """Rows of a table."""
        first, *rest = table.inputs
        if not table.attributes:
            return self.node("Gather", [first, ids], [output])
        return self.node("GatherBlockQuantized", [first, ids, *rest], [output], _MS, **table.attributes)

    def split(self, source: str, outputs: list[str], widths: list[int]) -> None:
        """Cut the last dimension."""
        label = self.matrices.constant("split." + "_".join(map(str, widths)), np.array(widths, np.int64))
        self.node("Split", [source, label], outputs, axis=-1)

    def silu(self, source: str, name: str) -> str:
        if self.options.quick_gelu:  # x * sigmoid(1 * x) is SiLU, in one kernel
            return self.node("QuickGelu", [source], [f"{name}/silu"], _MS, alpha=1.0)
        sigmoid = self.node("Sigmoid", [source], [f"{name}/sigmoid"])
        return self.node("Mul", [source, sigmoid], [f"{name}/silu"])

    def layer(self, index: int, residual: str, delta: str) -> tuple[str, str]:
        """One decoder layer on `residual + delta`; returns the same pair, the sum left to the next norm."""
        name = f"layers.{index}"
        normed, residual = self.norm(f"{name}.input_layernorm", residual, delta)
        self.on_residual(index, residual)
        attended = self._attention(index, normed)
        projected = self.linear(f"{name}.self_attn.o_proj", attended)
        normed, residual = self.norm(f"{name}.post_attention_layernorm", residual, projected)
        return residual, self.gated(f"{name}.mlp", normed, f"{name}.mlp.{{}}_proj")

    def on_residual(self, index: int, total: str) -> None:
        """Called with the residual stream that enters layer `index`."""

    def gated(self, name: str, source: str, pattern: str) -> str:
        """down(silu(gate(x)) * up(x)); pattern: names the three matrices."""
        parts = [pattern.format("gate"), pattern.format("up")]
        if self.options.fuse_gate_up:
            both = self.linear(pattern.format("gate_up"), source, parts)
            gate, up = f"{name}/gate", f"{name}/up"
            self.split(both, [gate, up], [self.config.n_ff] * 2)
        else:
            gate, up = (self.linear(part, source) for part in parts)
        product = self.node("Mul", [self.silu(gate, name), up], [f"{name}/gated"])
        return self.linear(pattern.format("down"), product)

    def _attention(self, index: int, normed: str) -> str:
        config, name = self.config, f"layers.{index}.self_attn"
        parts = [f"{name}.{part}_proj" for part in "qkv"]
        if config.has_qk_norm or not self.options.fuse_qkv:
            query, key, value = self._separate_qkv(name, normed, parts)
        else:
            query, key, value = self.linear(f"{name}.qkv_proj", normed, parts), "", ""
        past = [f"past_key_values.{index}.key", f"past_key_values.{index}.value"]
        inputs = [query, key, value, *past, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"]
        if self.has_tree:
            inputs += ["position_ids", "attention_bias"]
        attributes: dict[str, Any] = {}
        window = config.windows[index]
        if window is not None:
            attributes["local_window_size"] = window
        return self.node(
            "GroupQueryAttention",
            inputs,
            [f"{name}/out", f"present.{index}.key", f"present.{index}.value"],
            _MS,
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            scale=float(config.head_dim**-0.5),
            do_rotary=1,
            **attributes,
        )

    def _separate_qkv(self, name: str, normed: str, parts: list[str]) -> list[str]:
        config = self.config
        outputs = [f"{name}.{part}/out" for part in "qkv"]
        if self.options.fuse_qkv:
            widths = [config.n_heads * config.head_dim] + [config.n_kv_heads * config.head_dim] * 2
            self.split(self.linear(f"{name}.qkv_proj", normed, parts), outputs, widths)
        else:
            outputs = [self.linear(part, normed) for part in parts]
        if config.has_qk_norm:
            outputs[0] = self._head_norm(f"{name}.q_norm", outputs[0], config.n_heads)
            outputs[1] = self._head_norm(f"{name}.k_norm", outputs[1], config.n_kv_heads)
        return outputs

    def _head_norm(self, name: str, source: str, n_heads: int) -> str:
        heads = self.reshape(source, f"{name}/heads", [0, 0, n_heads, self.config.head_dim])
        normed, _ = self.norm(name, heads)
        return self.reshape(normed, f"{name}/flat", [0, 0, n_heads * self.config.head_dim])
