"""The decoder as an ONNX graph: a few fused operators a layer, in the order in which they run.

Owns the architecture of a bundle's graph and the names of its inputs and outputs. Where bytes end up is `writer.py`'s
matter (`TensorStore`), how they are rounded `quantize.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportRefusedError
from edgespec_export.calibration import Calibration
from edgespec_export.config import ModelConfig
from edgespec_export.gptq import quantize_gptq
from edgespec_export.options import ExportOptions
from edgespec_export.quantize import QuantizedMatrix, plan_block, quantize
from edgespec_export.rope import tables

__all__ = ["DecoderGraph", "TensorStore"]

FloatArray = NDArray[np.float32]
Weights = Callable[[str], FloatArray]
_MS = "com.microsoft"


class TensorStore(Protocol):
    """Where initializers go."""

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Declare an initializer; equal bytes are kept once, whatever their names and shapes."""


class DecoderGraph:
    """Builds nodes into `nodes` and weights into the store; `inputs` and `outputs` are (name, type, shape)."""

    def __init__(
        self,
        config: ModelConfig,
        options: ExportOptions,
        weights: Weights,
        store: TensorStore,
        calibration: Calibration | None = None,
    ) -> None:
        self.config, self.options, self.weights, self.store = config, options, weights, store
        self.calibration = calibration
        self.nodes: list[Any] = []
        self.inputs: list[tuple[str, str, list[int | str]]] = []
        self.outputs: list[tuple[str, str, list[int | str]]] = []
        self.notes: list[str] = []
        self.embed_bits = self._embed_format()[0]

    def build(self, on_layer: Callable[[int], None]) -> None:
        """Emit the whole graph; `on_layer(i)` is called after each layer."""
        self._declare()
        cos, sin = tables(self.config.rope, self.config.head_dim, self.config.n_ctx)
        self.store.add("cos_cache", cos)
        self.store.add("sin_cache", sin)
        residual, delta = self._embed(), ""
        for index in range(self.config.n_layers):
            residual, delta = self._layer(index, residual, delta)
            on_layer(index)
        self._head(residual, delta)

    def _declare(self) -> None:
        config = self.config
        self._check_taps()
        cache: list[int | str] = [1, config.n_kv_heads, "cache_length", config.head_dim]
        self.inputs += [
            ("input_ids", "INT64", [1, "sequence_length"]),
            ("seqlens_k", "INT32", [1]),
            ("total_sequence_length", "INT32", []),
            ("logits_rows", "INT64", ["n_logits"]),
        ]
        self.outputs.append(("logits", "FLOAT", ["n_logits", config.n_vocab]))
        for index in range(config.n_layers):
            for part in ("key", "value"):
                self.inputs.append((f"past_key_values.{index}.{part}", "FLOAT", cache))
                self.outputs.append((f"present.{index}.{part}", "FLOAT", cache))
        for tap in self.options.taps:
            self.outputs.append((f"hidden.{tap}", "FLOAT", ["sequence_length", config.n_embd]))

    def _check_taps(self) -> None:
        known = ["final", *(f"layer.{index}" for index in range(self.config.n_layers))]
        for tap in self.options.taps:
            if tap not in known:
                raise ExportRefusedError(f"tap '{tap}' is not in the model: use final, or layer.0 to {known[-1]}.")

    def _node(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = outputs[0].replace("/", ".")
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def _layer(self, index: int, residual: str, delta: str) -> tuple[str, str]:
        """One decoder layer on `residual + delta`; returns the same pair, the sum left to the next norm."""
        name = f"layers.{index}"
        normed, residual = self._norm(f"{name}.input_layernorm", residual, delta, tap=f"layer.{index - 1}")
        attended = self._attention(index, normed)
        projected = self._linear(f"{name}.self_attn.o_proj", attended, [f"{name}.self_attn.o_proj"])
        normed, residual = self._norm(f"{name}.post_attention_layernorm", residual, projected)
        return residual, self._mlp(f"{name}.mlp", normed)

    def _norm(self, name: str, residual: str, delta: str, tap: str = "") -> tuple[str, str]:
        """RMS norm of residual + delta; returns (normed, sum)."""
        self.store.add(f"{name}.weight", self.weights(f"{name}.weight"))
        output, total = f"{name}/out", f"{name}/sum"
        eps = self.config.norm_eps
        if not delta:
            inputs = [residual, f"{name}.weight"]
            self._node("SimplifiedLayerNormalization", inputs, [output], axis=-1, epsilon=eps, stash_type=1)
            return output, residual
        inputs = [residual, delta, f"{name}.weight"]
        self._node("SkipSimplifiedLayerNormalization", inputs, [output, "", "", total], _MS, epsilon=eps)
        if tap in self.options.taps:
            self._flat(total, f"hidden.{tap}")
        return output, total

    def _flat(self, source: str, output: str) -> str:
        return self._reshape(source, output, [-1, self.config.n_embd])

    def _reshape(self, source: str, output: str, shape: list[int]) -> str:
        label = "shape." + "_".join(map(str, shape))
        self.store.add(label, np.array(shape, np.int64))
        return self._node("Reshape", [source, label], [output])

    def _attention(self, index: int, normed: str) -> str:
        config, name = self.config, f"layers.{index}.self_attn"
        parts = [f"{name}.{part}_proj" for part in "qkv"]
        if config.has_qk_norm or not self.options.fuse_qkv:
            query, key, value = self._separate_qkv(name, normed, parts)
        else:
            query, key, value = self._linear(f"{name}.qkv_proj", normed, parts), "", ""
        past = [f"past_key_values.{index}.key", f"past_key_values.{index}.value"]
        attributes: dict[str, Any] = {}
        window = config.windows[index]
        if window is not None:
            attributes["local_window_size"] = window
        return self._node(
            "GroupQueryAttention",
            [query, key, value, *past, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"],
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
            self.store.add("split.qkv", np.array(widths, np.int64))
            packed = self._linear(f"{name}.qkv_proj", normed, parts)
            self._node("Split", [packed, "split.qkv"], outputs, axis=-1)
        else:
            outputs = [self._linear(part, normed, [part]) for part in parts]
        if config.has_qk_norm:
            outputs[0] = self._head_norm(f"{name}.q_norm", outputs[0], config.n_heads)
            outputs[1] = self._head_norm(f"{name}.k_norm", outputs[1], config.n_kv_heads)
        return outputs

    def _head_norm(self, name: str, source: str, n_heads: int) -> str:
        heads = self._reshape(source, f"{name}/heads", [1, -1, n_heads, self.config.head_dim])
        normed, _ = self._norm(name, heads, "")
        return self._reshape(normed, f"{name}/flat", [1, -1, n_heads * self.config.head_dim])

    def _mlp(self, name: str, normed: str) -> str:
        parts = [f"{name}.gate_proj", f"{name}.up_proj"]
        if self.options.fuse_gate_up:
            both = self._linear(f"{name}.gate_up_proj", normed, parts)
            gate, up = f"{name}/gate", f"{name}/up"
            self.store.add("split.gate_up", np.array([self.config.n_ff] * 2, np.int64))
            self._node("Split", [both, "split.gate_up"], [gate, up], axis=-1)
        else:
            gate, up = (self._linear(part, normed, [part]) for part in parts)
        if self.options.quick_gelu:  # x * sigmoid(1 * x) is SiLU, in one kernel
            active = self._node("QuickGelu", [gate], [f"{name}/silu"], _MS, alpha=1.0)
        else:
            sigmoid = self._node("Sigmoid", [gate], [f"{name}/sigmoid"])
            active = self._node("Mul", [gate, sigmoid], [f"{name}/silu"])
        gated = self._node("Mul", [active, up], [f"{name}/gated"])
        return self._linear(f"{name}.down_proj", gated, [f"{name}.down_proj"])

    def _linear(self, name: str, source: str, parts: list[str]) -> str:
        """`source` times the stacked weights of `parts`, plus their biases if the model has them."""
        weight = np.concatenate([self.weights(f"{part}.weight") for part in parts])
        bias = ""
        if self._has_bias(parts[0]):
            bias = f"{name}.bias"
            self.store.add(bias, np.concatenate([self.weights(f"{part}.bias") for part in parts]))
        return self._product(name, source, weight, bias, self.options.bits, self.options.block_size, parts=parts)

    def _has_bias(self, part: str) -> bool:
        if part.endswith(("q_proj", "k_proj", "v_proj")):
            return self.config.has_qkv_bias
        return self.config.has_out_bias if part.endswith("o_proj") else self.config.has_mlp_bias

    def _product(
        self,
        name: str,
        source: str,
        weight: FloatArray,
        bias: str,
        bits: int,
        block: int,
        output: str = "",
        parts: Sequence[str] = (),
    ) -> str:
        output = output or f"{name}/out"
        if bits == 32:
            self.store.add(f"{name}.weight", np.ascontiguousarray(weight.T))
            product = self._node("MatMul", [source, f"{name}.weight"], [f"{name}/product" if bias else output])
            return self._node("Add", [product, bias], [output]) if bias else product
        matrix = self._quantized(name, weight, bits, block, parts)
        inputs = self._stored(name, matrix)
        if bias:
            inputs += [""] * (4 - len(inputs)) + [bias]  # zero_points and g_idx come before it
        return self._node(
            "MatMulNBits",
            [source, *inputs],
            [output],
            _MS,
            K=matrix.k,
            N=matrix.n,
            bits=bits,
            block_size=matrix.block,
            accuracy_level=self.options.accuracy_level,
        )

    def _quantized(
        self, name: str, weight: FloatArray, bits: int, block: int, parts: Sequence[str] = ()
    ) -> QuantizedMatrix:
        """parts: the matrices that `weight` stacks, where calibration knows their inputs."""
        options, columns = self.options, weight.shape[1]
        used = plan_block(columns, block, options.fallback, name)
        if used != block:
            self.notes.append(f"{name}: block {used} instead of {block}, rows have {columns} values")
        elif columns % block:
            self.notes.append(f"{name}: last block of {block} padded, rows have {columns} values")
        how: dict[str, Any] = {"symmetric": options.symmetric, "search": options.n_scales}
        if self.calibration is None or not parts:
            return quantize(weight, bits, used, **how)
        return quantize_gptq(weight, self.calibration.moments(parts[0]), bits, used, **how)

    def _stored(self, name: str, matrix: QuantizedMatrix) -> list[str]:
        self.store.add(f"{name}.packed", matrix.packed)
        self.store.add(f"{name}.scales", matrix.scales)
        if matrix.zero_points is None:
            return [f"{name}.packed", f"{name}.scales"]
        self.store.add(f"{name}.zero_points", matrix.zero_points)
        return [f"{name}.packed", f"{name}.scales", f"{name}.zero_points"]

    def _embed(self) -> str:
        """Rows of the embedding table; where it is the head's, its quantized bytes serve both."""
        table, output = "embed_tokens", "embed_tokens/out"
        bits, block = self._embed_format()
        if bits == 32:
            self.store.add(f"{table}.weight", self.weights("embed_tokens.weight"))
            return self._node("Gather", [f"{table}.weight", "input_ids"], [output])
        matrix = self._quantized(table, self.weights("embed_tokens.weight"), bits, block)
        row_bytes = matrix.k * bits // 8  # without the last block's filler, which would become channels
        rows = np.ascontiguousarray(matrix.packed.reshape(matrix.n, -1)[:, :row_bytes])
        packed, *rest = self._stored(table, replace(matrix, packed=rows))
        return self._node(
            "GatherBlockQuantized",
            [packed, "input_ids", *rest],
            [output],
            _MS,
            bits=bits,
            block_size=matrix.block,
            gather_axis=0,
            quantize_axis=1,
        )

    def _embed_format(self) -> tuple[int, int]:
        head_bits, head_block = self.options.head
        if self.options.embed_bits is None and self.config.is_tied and self.options.quantizer != "gptq":
            return head_bits, head_block
        return self.options.embed_bits or (32 if self.options.bits == 32 else 8), head_block

    def _head(self, residual: str, delta: str) -> None:
        last = f"layer.{self.config.n_layers - 1}"
        normed, _ = self._norm("norm", residual, delta, tap=last)
        final = self._flat(normed, "hidden.final" if "final" in self.options.taps else "norm/flat")
        rows = self._node("Gather", [final, "logits_rows"], ["logits_rows/out"], axis=0)
        bits, block = self.options.head
        weight = self.weights("embed_tokens.weight" if self.config.is_tied else "lm_head.weight")
        if bits == 32:  # transposed by the operator, so that a tied table is kept once
            self.store.add("lm_head.weight", weight)
            self._node("Gemm", [rows, "lm_head.weight"], ["logits"], transB=1)
        else:
            self._product("lm_head", rows, weight, "", bits, block, output="logits", parts=["lm_head"])
