"""The weights of a model as initializers that several graphs share: each is rounded and written once.

Owns which bits, block and bias a matrix gets and the names under which the store holds them. How values are rounded is
`quantize.py`'s and `gptq.py`'s matter, where bytes end up `writer.py`'s, the operators `layers.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec_export.calibration import Calibration
from edgespec_export.config import ModelConfig
from edgespec_export.gptq import quantize_gptq
from edgespec_export.options import ExportOptions
from edgespec_export.quantize import QuantizedMatrix, plan_block, quantize

__all__ = ["Matrices", "StoredMatrix", "StoredTable", "TensorStore", "Weights"]

FloatArray = NDArray[np.float32]
Weights = Callable[[str], FloatArray]


class TensorStore(Protocol):
    """Where initializers go."""

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Declare an initializer; equal bytes are kept once, whatever their names and shapes."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in the store: the operator that multiplies with it, its inputs after the source, its attributes."""

    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    bias: str = ""


@dataclass(frozen=True)
class StoredTable:
    """A table of rows in the store: inputs[0] is the table, what follows comes after the ids; no attributes: float."""

    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]


class Matrices:
    """Rounds and stores each weight when a graph first asks for it, and remembers its name for the next graph."""

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
        self.notes: list[str] = []
        self.embed_bits = self._embed_format()[0]
        self._matrices: dict[str, StoredMatrix] = {}
        self._tables: dict[str, StoredTable] = {}
        self._vectors: set[str] = set()

    def vector(self, name: str) -> str:
        """The weight `name` as it is, in float32."""
        if name not in self._vectors:
            self.store.add(name, self.weights(name))
            self._vectors.add(name)
        return name

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """An array that is no weight."""
        self.store.add(name, array)
        return name

    def linear(self, name: str, parts: Sequence[str]) -> StoredMatrix:
        """The stacked weights of `parts`, with their biases if the model has them."""
        if name not in self._matrices:
            weight = np.concatenate([self.weights(f"{part}.weight") for part in parts])
            bias = ""
            if self._has_bias(parts[0]):
                bias = f"{name}.bias"
                self.store.add(bias, np.concatenate([self.weights(f"{part}.bias") for part in parts]))
            self._matrices[name] = self._matrix(name, weight, bias, self.options.bits, self.options.block_size, parts)
        return self._matrices[name]

    def head(self) -> StoredMatrix:
        """The lm head."""
        if "lm_head" not in self._matrices:
            bits, block = self.options.head
            weight = self.weights("embed_tokens.weight" if self.config.is_tied else "lm_head.weight")
            self._matrices["lm_head"] = self.head_rows("lm_head", weight, bits, block)
        return self._matrices["lm_head"]

    def head_rows(self, name: str, weight: FloatArray, bits: int, block: int) -> StoredMatrix:
        """`weight` [n_vocab, k] as a head."""
        if bits == 32:  # transposed by the operator, so that a tied table is kept once
            self.store.add(f"{name}.weight", weight)
            return StoredMatrix("Gemm", (f"{name}.weight",), {"transB": 1})
        return self._matrix(name, weight, "", bits, block, [name])

    def embedding(self) -> StoredTable:
        """Rows of the embedding table; where it is the head's, its quantized bytes serve both."""
        return self.table("embed_tokens", *self._embed_format())

    def table(self, name: str, bits: int, block: int) -> StoredTable:
        """The weight `name` [n, k] as a table of rows."""
        if name not in self._tables:
            self._tables[name] = self._table(name, bits, block)
        return self._tables[name]

    def _table(self, name: str, bits: int, block: int) -> StoredTable:
        weight = self.weights(f"{name}.weight")
        if bits == 32:
            self.store.add(f"{name}.weight", weight)
            return StoredTable((f"{name}.weight",), {})
        return self.store_table(name, self._quantized(name, weight, bits, block))

    def store_table(self, name: str, matrix: QuantizedMatrix) -> StoredTable:
        """A table that is quantized already."""
        row_bytes = matrix.k * matrix.bits // 8  # without the last block's filler, which would become channels
        rows = np.ascontiguousarray(matrix.packed.reshape(matrix.n, -1)[:, :row_bytes])
        inputs = self._stored(name, replace(matrix, packed=rows))
        attributes = {"bits": matrix.bits, "block_size": matrix.block, "gather_axis": 0, "quantize_axis": 1}
        return StoredTable(inputs, attributes)

    def _embed_format(self) -> tuple[int, int]:
        head_bits, head_block = self.options.head
        if self.options.embed_bits is None and self.config.is_tied and self.options.quantizer != "gptq":
            return head_bits, head_block
        return self.options.embed_bits or (32 if self.options.bits == 32 else 8), head_block

    def _has_bias(self, part: str) -> bool:
        if part.endswith(("q_proj", "k_proj", "v_proj")):
            return self.config.has_qkv_bias
        if part.endswith("o_proj"):
            return self.config.has_out_bias
        return self.config.has_mlp_bias and ".mlp." in part

    def _matrix(
        self, name: str, weight: FloatArray, bias: str, bits: int, block: int, parts: Sequence[str]
    ) -> StoredMatrix:
        if bits == 32:
            self.store.add(f"{name}.weight", np.ascontiguousarray(weight.T))
            return StoredMatrix("MatMul", (f"{name}.weight",), {}, bias)
        matrix = self._quantized(name, weight, bits, block, parts)
        inputs = self._stored(name, matrix)
        attributes = {"K": matrix.k, "N": matrix.n, "bits": bits, "block_size": matrix.block}
        attributes["accuracy_level"] = self.options.accuracy_level
        return StoredMatrix("MatMulNBits", inputs, attributes, bias)

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

    def _stored(self, name: str, matrix: QuantizedMatrix) -> tuple[str, ...]:
        self.store.add(f"{name}.packed", matrix.packed)
        self.store.add(f"{name}.scales", matrix.scales)
        if matrix.zero_points is None:
            return f"{name}.packed", f"{name}.scales"
        self.store.add(f"{name}.zero_points", matrix.zero_points)
        return f"{name}.packed", f"{name}.scales", f"{name}.zero_points"
