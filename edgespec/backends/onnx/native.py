"""Puts our own operators in the place of a graph's 4-bit products and attention, on a copy of the graph in memory.

Owns which nodes are replaced and the edit of the protobuf bytes (field numbers of onnx.proto); the file, its weights
and every name in it stay as they are. What the operators compute is in `edgespec/kernels`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import BundleError, ConfigError

__all__ = ["OPERATORS", "native_graph", "with_own_operators"]

DOMAIN = "edgespec"
MOST_BYTES = 1 << 26  # of a graph that is edited unasked: larger ones hold their weights, which editing would copy
_GRAPH, _OPSET = 7, 8  # of a model
_NODE, _INITIALIZER, _PORT = 1, 5, 11  # of a graph
_INPUT, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 1, 4, 5, 7  # of a node
_FLOAT = 1  # the data type


class _Field(NamedTuple):
    """value: an int for varints, bytes of a length-delimited field, bytes of 4 or 8 else. raw: with its tag."""

    number: int
    value: int | bytes
    raw: bytes


class _Node(NamedTuple):
    """attributes: whole numbers and floats by name, None for others. types: data types by tensor, as far as known."""

    inputs: list[str]
    attributes: Mapping[str, int | float | None]
    types: Mapping[str, int]

    def is_float(self, index: int) -> bool:
        return index < len(self.inputs) and self.types.get(self.inputs[index]) == _FLOAT

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] != ""


def _is_product(node: _Node) -> bool:
    """4 bits, activations in 8 bits (accuracy level 4), scales in float32, no g_idx (input 4)."""
    wanted = {"bits": 4, "accuracy_level": 4}
    return (
        all(node.attributes.get(key) == value for key, value in wanted.items()) and node.is_float(2) and not node.has(4)
    )


def _is_attention(node: _Node) -> bool:
    """Causal over a float32 cache, halves rotated if at all; none of the operator's other modes or inputs."""
    off = {"local_window_size": -1, "rotary_interleaved": 0, "softcap": 0, "smooth_softmax": 0}
    plain = {"num_heads", "kv_num_heads", "scale", "do_rotary"}
    is_known = all(off.get(key) == value for key, value in node.attributes.items() if key not in plain)
    return (
        is_known
        and {"num_heads", "kv_num_heads"} <= set(node.attributes)
        and node.is_float(3)
        and not any(map(node.has, range(11, 20)))
    )


_OURS: dict[bytes, tuple[str, Callable[[_Node], bool]]] = {
    b"MatMulNBits": ("RowsProduct", _is_product),
    b"GroupQueryAttention": ("RowsAttention", _is_attention),
}


OPERATORS = frozenset(name for name, _fits in _OURS.values())


def native_graph(path: Path, threads: int, *, must: bool) -> bytes | None:
    """The graph at `path` with our operators; None where nothing would be replaced, or weights make the file large.

    must: the user asked for it: raises ConfigError where there is nothing to replace. Raises BundleError for a damaged
    file; unasked, that is left to the runtime.
    """
    if not must and path.stat().st_size > MOST_BYTES:
        return None
    try:
        graph, replaced = with_own_operators(path.read_bytes(), threads)
    except (IndexError, ValueError, struct.error) as error:
        if not must:
            return None  # the runtime will say what is wrong with it
        raise BundleError(f"{path} is not a valid ONNX file ({error}): export or pull the bundle again.") from error
    if not replaced and must:
        raise ConfigError(
            f"the device option kernels=native has no effect on {path}: it has no products with 4-bit weights at "
            "accuracy level 4, nor attention over a float32 cache; leave the option out, or export with bits=4"
        )
    return graph if replaced else None


def with_own_operators(model: bytes, threads: int) -> tuple[bytes, Counter[str]]:
    """The serialized model with every node replaced that one of our operators can take, and how many of each.

    Nodes of subgraphs stay.
    """
    parts, replaced = [], Counter[str]()
    for item in _fields(model):
        if item.number == _GRAPH and isinstance(item.value, bytes):
            parts.append(_delimited(_GRAPH, _edited_graph(item.value, threads, replaced)))
        else:
            parts.append(item.raw)
    parts.append(_delimited(_OPSET, _delimited(1, DOMAIN.encode()) + _number(2, 1)))
    return b"".join(parts), replaced


def _edited_graph(graph: bytes, threads: int, replaced: Counter[str]) -> bytes:
    items = list(_fields(graph))
    types = dict(_type_of(item) for item in items if item.number in (_INITIALIZER, _PORT))
    parts = []
    for item in items:
        node = _replaced(_bytes(item), types, threads, replaced) if item.number == _NODE else None
        parts.append(item.raw if node is None else _delimited(_NODE, node))
    return b"".join(parts)


def _replaced(node: bytes, types: Mapping[str, int], threads: int, replaced: Counter[str]) -> bytes | None:
    """The node as ours; None for one that stays."""
    items = list(_fields(node))
    operator = next((_bytes(item) for item in items if item.number == _OP_TYPE), b"")
    if operator not in _OURS:
        return None
    name, fits = _OURS[operator]
    inputs = [_bytes(item).decode() for item in items if item.number == _INPUT]
    attributes = dict(_attribute(_bytes(item)) for item in items if item.number == _ATTRIBUTE)
    if not fits(_Node(inputs, attributes, types)):
        return None
    replaced[name] += 1
    kept = [item.raw for item in items if item.number not in (_OP_TYPE, _DOMAIN)]
    kept.append(_delimited(_OP_TYPE, name.encode()) + _delimited(_DOMAIN, DOMAIN.encode()))
    kept.append(_delimited(_ATTRIBUTE, _delimited(1, b"pieces") + _number(3, threads) + _number(20, 2)))
    return b"".join(kept)


def _type_of(item: _Field) -> tuple[str, int]:
    """(name, data type) of an initializer or of a graph's input; 0 for what is no tensor."""
    fields = {inner.number: inner for inner in _fields(_bytes(item))}
    if item.number == _INITIALIZER:
        name, kind = fields.get(8), fields.get(2)
        return _bytes(name).decode() if name else "", kind.value if kind and isinstance(kind.value, int) else 0
    found = fields.get(2)  # TypeProto, then its tensor, then the tensor's element type
    for _level in range(2):
        found = next((inner for inner in _fields(_bytes(found)) if inner.number == 1), None) if found else None
    return _bytes(fields[1]).decode(), found.value if found and isinstance(found.value, int) else 0


def _bytes(item: _Field) -> bytes:
    if not isinstance(item.value, bytes):
        raise ValueError("a number where a message or text is expected")
    return item.value


def _attribute(payload: bytes) -> tuple[str, int | float | None]:
    """(name, value) of an attribute; None for one that is neither a whole number nor a float."""
    fields = {item.number: item.value for item in _fields(payload)}
    name, number, real = fields.get(1), fields.get(3), fields.get(2)
    text = name.decode() if isinstance(name, bytes) else ""
    if fields.get(20) == 1 and isinstance(real, bytes):
        return text, float(struct.unpack("<f", real)[0])
    if fields.get(20) == 2 and isinstance(number, int):
        return text, number - (1 << 64) if number >> 63 else number
    return text, None


def _fields(data: bytes) -> Iterator[_Field]:
    position, end = 0, len(data)
    while position < end:
        start = position
        tag, position = _varint(data, position)
        value: int | bytes
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
        elif wire == 2:
            length, position = _varint(data, position)
            value = data[position : position + length]
            position += length
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value = data[position : position + size]
            position += size
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
