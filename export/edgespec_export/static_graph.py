"""Graphs of fixed shapes for NPUs: one a width, plain operators only, everything that depends on a call from the host.

Owns their mathematics and the names of their inputs and outputs. The host brings embedding rows, the rotations of their
positions, where each row may look and where in the cache it stands (`edgespec.backends.onnx.static`); keys and values
of the rows come out for the host to store. Weights are those of `matrices.py`, in float: a compiler rounds them.
"""

from __future__ import annotations

import numpy as np

from edgespec_export.config import ModelConfig
from edgespec_export.layers import LayerGraph
from edgespec_export.matrices import Matrices
from edgespec_export.options import ExportOptions

__all__ = ["StaticDecoderGraph", "StaticDraftGraph"]

# The norm divides a row by its largest value before it squares it, so that fp16, which ends at 65,504, cannot overflow.
# Rows that are smaller than this are divided by it instead: the formula holds for any divisor.
_SMALLEST_PEAK = 2.0**-10


class StaticDecoderGraph(LayerGraph):
    """A decoder over `width` rows on a cache of `context` places.

    Each row is put into the cache at its own place before any row looks (`place`, a one-hot column a row): a key
    stands at the same column whether it came with this call or an earlier one, so sums over the cache run in the same
    order, and a row's bits depend on neither its place in the call nor the rows beside it.
    """

    def __init__(
        self, config: ModelConfig, options: ExportOptions, matrices: Matrices, *, width: int, context: int
    ) -> None:
        super().__init__(config, options, matrices)
        self.width, self.context = width, context

    def build(self) -> None:
        """Emit the whole graph."""
        config, width = self.config, self.width
        residual, delta = self.take("embeddings", "FLOAT", [1, width, config.n_embd]), ""
        for name in ("cos", "sin"):
            self.take(name, "FLOAT", [1, 1, width, config.head_dim // 2])
        self.take("mask", "FLOAT", [1, 1, width, self.context])
        self.take("place", "FLOAT", [1, 1, self.context, width])
        for index in range(config.n_layers):
            for part in ("key", "value"):
                self.take(
                    f"past_key_values.{index}.{part}", "FLOAT", [1, config.n_kv_heads, self.context, config.head_dim]
                )
                self.give(f"present.{index}.{part}", [1, config.n_kv_heads, width, config.head_dim])
        for index in range(config.n_layers):
            residual, delta = self.layer(index, residual, delta)
        normed, total = self.norm("norm", residual, delta)
        self.on_residual(config.n_layers, total)
        final = self.flat(normed, "norm/flat")
        if "final" in self.options.taps:
            self.node("Identity", [final], [self.give("hidden.final", [width, config.n_embd])])
        self.logits(final)

    def logits(self, rows: str) -> None:
        """Declares `logits`, a row for every row of the call."""
        self.head(rows, self.give("logits", [self.width, self.config.n_vocab]))

    def on_residual(self, index: int, total: str) -> None:
        tap = f"layer.{index - 1}"
        if index > 0 and tap in self.options.taps:
            self.flat(total, self.give(f"hidden.{tap}", [self.width, self.config.n_embd]))

    def norm(self, name: str, residual: str, delta: str = "") -> tuple[str, str]:
        """RMS norm of residual + delta, safe in fp16; returns (normed, sum)."""
        total = self.node("Add", [residual, delta], [f"{name}/sum"]) if delta else residual
        constant = self.matrices.constant
        floor = constant("norm.floor", np.array([_SMALLEST_PEAK], np.float32))
        root_eps = constant("norm.root_eps", np.array([self.config.norm_eps**0.5], np.float32))
        last = constant("norm.axis", np.array([-1], np.int64))
        peak = self.node("ReduceMax", [self.node("Abs", [total], [f"{name}/abs"]), last], [f"{name}/peak"], keepdims=1)
        divisor = self.node("Max", [peak, floor], [f"{name}/divisor"])
        scaled = self.node("Div", [total, divisor], [f"{name}/scaled"])
        square = self.node("Mul", [scaled, scaled], [f"{name}/square"])
        mean = self.node("ReduceMean", [square, last], [f"{name}/mean"], keepdims=1)
        small = self.node("Div", [root_eps, divisor], [f"{name}/small"])
        epsilon = self.node("Mul", [small, small], [f"{name}/epsilon"])
        power = self.node("Add", [mean, epsilon], [f"{name}/power"])
        unit = self.node("Div", [scaled, self.node("Sqrt", [power], [f"{name}/root"])], [f"{name}/unit"])
        return self.node("Mul", [unit, self.matrices.vector(f"{name}.weight")], [f"{name}/out"]), total

    def _attention(self, index: int, normed: str) -> str:
        config, width, name = self.config, self.width, f"layers.{index}.self_attn"
        group = config.n_heads // config.n_kv_heads
        rows = self._separate_qkv(name, normed, [f"{name}.{part}_proj" for part in "qkv"])
        query, key, value = (
            self._heads(f"{name}.{part}", row, n)
            for part, row, n in zip("qkv", rows, (config.n_heads, config.n_kv_heads, config.n_kv_heads), strict=True)
        )
        scale = self.matrices.constant("attention.scale", np.array([config.head_dim**-0.5], np.float32))
        query = self.node("Mul", [self._rotated(f"{name}.q", query), scale], [f"{name}.q/scaled"])
        key = self._rotated(f"{name}.k", key, f"present.{index}.key")
        value = self.node("Identity", [value], [f"present.{index}.value"])
        keys, values = (
            self._placed(f"past_key_values.{index}.{part}", new) for part, new in (("key", key), ("value", value))
        )
        query = self.reshape(query, f"{name}.q/groups", [1, config.n_kv_heads, group * width, config.head_dim])
        turned = self.node("Transpose", [keys], [f"{name}/keys"], perm=[0, 1, 3, 2])
        scores = self.node("MatMul", [query, turned], [f"{name}/scores"])
        scores = self.reshape(scores, f"{name}/scores_rows", [1, config.n_heads, width, self.context])
        masked = self.node("Add", [scores, "mask"], [f"{name}/masked"])
        weights = self.node("Softmax", [masked], [f"{name}/weights"], axis=-1)
        weights = self.reshape(weights, f"{name}/groups", [1, config.n_kv_heads, group * width, self.context])
        mixed = self.node("MatMul", [weights, values], [f"{name}/mixed"])
        mixed = self.reshape(mixed, f"{name}/mixed_rows", [1, config.n_heads, width, config.head_dim])
        mixed = self.node("Transpose", [mixed], [f"{name}/mixed_turned"], perm=[0, 2, 1, 3])
        return self.reshape(mixed, f"{name}/out", [1, width, config.n_heads * config.head_dim])

    def _heads(self, name: str, rows: str, n_heads: int) -> str:
        """[1, width, n_heads * head_dim] as [1, n_heads, width, head_dim]."""
        cut = self.reshape(rows, f"{name}/cut", [1, self.width, n_heads, self.config.head_dim])
        return self.node("Transpose", [cut], [f"{name}/turned"], perm=[0, 2, 1, 3])

    def _rotated(self, name: str, heads: str, output: str = "") -> str:
        first, second = f"{name}/first", f"{name}/second"
        self.split(heads, [first, second], [self.config.head_dim // 2] * 2)
        parts = [
            self.node("Mul", [half, table], [f"{half}_{table}"]) for half in (first, second) for table in ("cos", "sin")
        ]
        first_cos, first_sin, second_cos, second_sin = parts
        low = self.node("Sub", [first_cos, second_sin], [f"{name}/low"])
        high = self.node("Add", [second_cos, first_sin], [f"{name}/high"])
        return self.node("Concat", [low, high], [output or f"{name}/rotated"], axis=-1)

    def _placed(self, past: str, new: str) -> str:
        """The cache with the new rows at their places, where the host has left zeros."""
        moved = self.node("MatMul", ["place", new], [f"{new}/placed"])
        return self.node("Add", [past, moved], [f"{new}/whole"])


class StaticDraftGraph(StaticDecoderGraph):
    """A TinyDraft: logits over the reduced vocabulary, and over the `extra_rows` of the head that the host brings."""

    def __init__(
        self,
        config: ModelConfig,
        options: ExportOptions,
        matrices: Matrices,
        *,
        width: int,
        context: int,
        n_extra: int,
    ) -> None:
        super().__init__(config, options, matrices, width=width, context=context)
        self.n_extra = n_extra

    def logits(self, rows: str) -> None:
        extra = self.take("extra_rows", "FLOAT", [self.n_extra, self.config.n_embd])
        known = self.head(rows, "logits/known")
        turned = self.node("Transpose", [extra], ["extra/columns"], perm=[1, 0])
        others = self.node("MatMul", [rows, turned], ["logits/extra"])
        self.node("Concat", [known, others], [self.give("logits", [self.width, self.config.n_vocab])], axis=-1)
