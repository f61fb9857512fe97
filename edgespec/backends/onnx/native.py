"""Puts our own operator in the place of a graph's 4-bit products, on a copy of the graph in memory.

Owns which nodes are replaced and the edit of the protobuf bytes (field numbers of onnx.proto); the file, its weights
and every name in it stay as they are. What the operator computes is in `edgespec/kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import BundleError, ConfigError

__all__ = ["OPERATOR", "native_graph", "with_rows_products"]

DOMAIN, OPERATOR = "edgespec", "RowsProduct"
MOST_BYTES = 1 << 26  # of a graph that is edited unasked: larger ones hold their weights, which editing would copy
_REPLACED = b"MatMulNBits"
_GRAPH, _OPSET = 7, 8  # of a model
_NODE = 1  # of a graph
_INPUT, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 1, 4, 5, 7  # of a node
_GROUPS = 4  # the input g_idx, which reorders the weights' inputs


class _Field(NamedTuple):
    """number: an int for varints, bytes of a length-delimited field, None else. raw: the field with its tag."""

    number: int
    value: int | bytes | None
    raw: bytes


def native_graph(path: Path, threads: int, *, must: bool) -> bytes | None:
    """The graph at `path` with our operator; None where nothing would be replaced, or weights make the file large.

    must: the user asked for it: raises ConfigError where there is nothing to replace. Raises BundleError for a damaged
    file.
    """
    if not must and path.stat().st_size > MOST_BYTES:
        return None
    try:
        graph, n_replaced = with_rows_products(path.read_bytes(), threads)
    except (IndexError, ValueError) as error:
        raise BundleError(f"{path} is not a valid ONNX file ({error}): export or pull the bundle again.") from error
    if not n_replaced and must:
        raise ConfigError(
            f"the device option kernels=native has no effect on {path}: it has no products with 4-bit weights at "
            "accuracy level 4; leave the option out, or export with bits=4"
        )
    return graph if n_replaced else None


def with_rows_products(model: bytes, threads: int) -> tuple[bytes, int]:
    """The serialized model with every fitting MatMulNBits replaced, and how many there were.

    Fitting: 4 bits, activations in 8 bits (accuracy level 4), no g_idx. Nodes of subgraphs stay.
    """
    parts, n_replaced = [], 0
    for item in _fields(model):
        if item.number == _GRAPH and isinstance(item.value, bytes):
            graph = []
            for inner in _fields(item.value):
                node = _replaced(inner.value, threads) if inner.number == _NODE else None
                n_replaced += node is not None
                graph.append(inner.raw if node is None else _delimited(_NODE, node))
            parts.append(_delimited(_GRAPH, b"".join(graph)))
        else:
            parts.append(item.raw)
    parts.append(_delimited(_OPSET, _delimited(1, DOMAIN.encode()) + _number(2, 1)))
    return b"".join(parts), n_replaced


def _replaced(node: int | bytes | None, threads: int) -> bytes | None:
    """The node as ours; None for one that stays."""
    assert isinstance(node, bytes)
    items = list(_fields(node))
    if not any(item.number == _OP_TYPE and item.value == _REPLACED for item in items):
        return None
    inputs = [item.value for item in items if item.number == _INPUT]
    numbers = dict(_attribute(item.value) for item in items if item.number == _ATTRIBUTE)
    has_groups = len(inputs) > _GROUPS and inputs[_GROUPS] != b""
    if (numbers.get(b"bits"), numbers.get(b"accuracy_level")) != (4, 4) or has_groups:
        return None
    kept = [item.raw for item in items if item.number not in (_OP_TYPE, _DOMAIN)]
    kept.append(_delimited(_OP_TYPE, OPERATOR.encode()) + _delimited(_DOMAIN, DOMAIN.encode()))
    kept.append(_delimited(_ATTRIBUTE, _delimited(1, b"pieces") + _number(3, threads) + _number(20, 2)))
    return b"".join(kept)


def _attribute(payload: int | bytes | None) -> tuple[bytes, int | None]:
    """(name, value) of an attribute that is a whole number; the value is None for others."""
    assert isinstance(payload, bytes)
    entry = {item.number: item.value for item in _fields(payload)}
    name, value = entry.get(1), entry.get(3)
    return name if isinstance(name, bytes) else b"", value if isinstance(value, int) else None


def _fields(data: bytes) -> Iterator[_Field]:
    position, end = 0, len(data)
    while position < end:
        start = position
        tag, position = _varint(data, position)
        value: int | bytes | None = None
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
        elif wire == 2:
            length, position = _varint(data, position)
            value = data[position : position + length]
            position += length
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position > end:
            raise ValueError("a field runs past its end")
        yield _Field(tag >> 3, value, data[start:position])


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _encoded(number: int) -> bytes:
    parts = bytearray()
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _delimited(number: int, payload: bytes) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3) + _encoded(value)
