"""The embedding and the head of a bundle, read back from its graph: a draft shares both with its target.

Owns finding the two tables in model.onnx and cutting rows out of them. They stay as they were rounded until rows are
asked for, so a draft's embedding has the very bytes of its target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import EMBEDDING, Bundle
from edgespec.errors import ExportError
from edgespec_export.quantize import QuantizedMatrix, dequantize

__all__ = ["TableRows", "TargetTables"]

FloatArray = NDArray[np.float32]
_SAMPLE = 64  # rows that are compared to tell whether the head is the embedding
_SAME_COSINE = 0.9  # four bits leave 0.98 and more of a row, unrelated tables have around 0


@dataclass(frozen=True)
class TableRows:
    """A table [n, k]: `quantized`, or in float."""

    quantized: QuantizedMatrix | None
    floats: FloatArray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        if self.quantized is not None:
            return self.quantized.n, self.quantized.k
        assert self.floats is not None
        return self.floats.shape[0], self.floats.shape[1]

    def rows(self, ids: NDArray[np.int64]) -> FloatArray:
        """[len(ids), k] float32."""
        matrix = self.quantized
        if matrix is None:
            assert self.floats is not None
            return self.floats[ids]
        zeros = None if matrix.zero_points is None else matrix.zero_points[ids]
        return dequantize(
            replace(matrix, packed=matrix.packed[ids], scales=matrix.scales[ids], zero_points=zeros, n=len(ids))
        )


class TargetTables:
    """`embedding`, `head` and whether they are one table (`is_tied`; a head may be rounded on its own)."""

    def __init__(self, embedding: TableRows, head: TableRows) -> None:
        self.embedding, self.head = embedding, head
        self.is_tied = embedding.shape == head.shape and _are_same(embedding, head)

    @classmethod
    def read(cls, bundle: Bundle) -> TargetTables:
        """Raises ExportError where the graph has no such tables."""
        import onnx

        path, embedding = bundle.model_path, None
        if bundle.info.static is not None:  # its embedding is the host's
            embedding = TableRows(None, np.load(bundle.path(EMBEDDING), allow_pickle=False).astype(np.float32))
        try:
            graph = onnx.load(str(path), load_external_data=False).graph
        except Exception as error:  # protobuf's own types
            raise ExportError(f"{path} cannot be read: {error}.") from error
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        finder = _Finder(path, tensors)
        head = None
        for node in graph.node:
            if node.op_type in ("GatherBlockQuantized", "Gather") and node.input[1] == "input_ids":
                embedding = finder.gathered(node)
            if "logits" in node.output:
                head = finder.multiplied(node)
        if embedding is None or head is None:
            what = "embedding" if embedding is None else "head"
            raise ExportError(f"{path} has no {what} that edgespec understands: export the target with edgespec.")
        for label, table in (("embedding", embedding), ("head", head)):
            if table.shape != (bundle.info.n_vocab, bundle.info.n_embd):
                wanted = [bundle.info.n_vocab, bundle.info.n_embd]
                raise ExportError(f"the {label} of {path} is {list(table.shape)} and bundle.json says {wanted}.")
        return cls(embedding, head)


class _Finder:
    """Tables out of nodes and initializers."""

    def __init__(self, path: Path, tensors: dict[str, Any]) -> None:
        self.path, self.tensors = path, tensors

    def gathered(self, node: Any) -> TableRows:
        if node.op_type == "Gather":
            return TableRows(None, self._array(node.input[0]))
        values = _attributes(node)
        packed, scales = self._array(node.input[0]), self._array(node.input[2])
        return self._quantized(packed, scales, node.input[3:], values.get("bits", 4), values["block_size"], None)

    def multiplied(self, node: Any) -> TableRows | None:
        values = _attributes(node)
        if node.op_type == "Gemm" and values.get("transB"):
            return TableRows(None, self._array(node.input[1]))
        if node.op_type == "MatMul":
            return TableRows(None, np.ascontiguousarray(self._array(node.input[1]).T))
        if node.op_type != "MatMulNBits":
            return None
        packed, scales = self._array(node.input[1]), self._array(node.input[2])
        packed = packed.reshape(packed.shape[0], -1)
        bits, block = values.get("bits", 4), values["block_size"]
        return self._quantized(packed, scales, node.input[3:4], bits, block, values["K"])

    def _quantized(
        self, packed: NDArray[Any], scales: NDArray[Any], rest: Any, bits: int, block: int, k: int | None
    ) -> TableRows:
        """packed: [n, bytes]; filler that an embedding's rows lack is put back."""
        n, k = packed.shape[0], k or packed.shape[1] * 8 // bits
        blocks = -(-k // block)
        missing = blocks * block * bits // 8 - packed.shape[1]
        packed = np.pad(packed, ((0, 0), (0, missing))).reshape(n, blocks, -1)
        zeros = self._array(rest[0]).reshape(n, -1) if rest and rest[0] else None
        return TableRows(QuantizedMatrix(packed, scales.reshape(n, blocks), zeros, n, k, bits, block))

    def _array(self, name: str) -> NDArray[Any]:
        from onnx import TensorProto, numpy_helper

        if name not in self.tensors:
            raise ExportError(f"{self.path} has no initializer '{name}'.")
        tensor = self.tensors[name]
        try:
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.raw_data = self._external({entry.key: entry.value for entry in tensor.external_data})
                tensor.data_location = TensorProto.DEFAULT
            return np.asarray(numpy_helper.to_array(tensor))
        except Exception as error:  # onnx raises many unrelated types
            raise ExportError(f"initializer '{name}' of {self.path} cannot be read: {error}.") from error

    def _external(self, entry: Mapping[str, str]) -> bytes:
        """Bytes beside the graph; read here, since onnx refuses files with several hard links, as backups leave them.

        `Bundle.open` has seen to it that the location is a file of the bundle.
        """
        with (self.path.parent / entry["location"]).open("rb") as file:
            file.seek(int(entry.get("offset", 0)))
            return file.read(int(entry["length"]))


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _are_same(first: TableRows, second: TableRows) -> bool:
    ids = np.unique(np.linspace(0, first.shape[0] - 1, _SAMPLE).astype(np.int64))
    one, other = first.rows(ids).ravel(), second.rows(ids).ravel()
    return bool(one @ other > _SAME_COSINE * np.linalg.norm(one) * np.linalg.norm(other))
