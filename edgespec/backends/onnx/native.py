"""Puts our own operators in the place of a graph's 4-bit products and attention, on a copy of the graph in memory.

Owns which nodes are replaced, and which of the nodes before a product it takes over; field numbers are those of
onnx.proto. The file, its weights and every name that is left stay as they are. What the operators compute is in
`edgespec/kernels`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import BundleError, ConfigError
from edgespec.wire import Field, delimited, fields_of, number

__all__ = ["OPERATORS", "native_graph", "with_own_operators"]

DOMAIN = "edgespec"
PRODUCT, ATTENTION = "RowsProduct", "RowsAttention"
OPERATORS = frozenset((PRODUCT, ATTENTION))
MOST_BYTES = 1 << 26  # of a graph that is edited unasked: larger ones hold their weights, which editing would copy
LANES = 16  # what takes over nodes before a product works on whole vectors
_GRAPH, _OPSET = 7, 8  # of a model
_NODE, _INITIALIZER, _PORT, _OUTPUT_PORT = 1, 5, 11, 12  # of a graph
_INPUT, _OUTPUT, _NAME, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 1, 2, 3, 4, 5, 7  # of a node
_FLOAT, _INT = 1, 2  # types of attributes
_FLOAT32, _UINT8 = 1, 2  # data types
_SKIP = 6  # the product's first input beyond those of MatMulNBits
_PLAIN, _GATED, _NORM = 0, 1, 2  # modes of products.c


@dataclass(frozen=True)
class _Node:
    """attributes: whole numbers and floats by name, None for others."""

    at: int  # its place among the graph's fields
    operator: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, int | float | None]
    kept: list[bytes]  # its name and attributes as they are

    @classmethod
    def read(cls, at: int, field: Field) -> _Node:
        items = list(fields_of(field.bytes))
        texts = {key: [item.bytes.decode() for item in items if item.number == key] for key in (1, 2, 4)}
        attributes = dict(_attribute(item.bytes) for item in items if item.number == _ATTRIBUTE)
        kept = [item.raw for item in items if item.number in (_NAME, _ATTRIBUTE)]
        return cls(at, "".join(texts[_OP_TYPE]), texts[_INPUT], texts[_OUTPUT], attributes, kept)

    def has(self, index: int) -> bool:
        """Whether it has that input."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def written(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> bytes:
        """As a node of ours with further attributes."""
        parts = [delimited(_INPUT, name.encode()) for name in inputs]
        parts += [delimited(_OUTPUT, name.encode()) for name in outputs]
        parts += [*self.kept, delimited(_OP_TYPE, operator.encode()), delimited(_DOMAIN, DOMAIN.encode())]
        for name, value in attributes.items():
            parts.append(delimited(_ATTRIBUTE, delimited(1, name.encode()) + number(3, value) + number(20, _INT)))
        return delimited(_NODE, b"".join(parts))


class _Graph:
    """A graph's fields, what makes and takes each tensor, and the edits so far: place -> bytes, none to drop it."""

    def __init__(self, data: bytes) -> None:
        self.fields = list(fields_of(data))
        self.nodes = [_Node.read(at, item) for at, item in enumerate(self.fields) if item.number == _NODE]
        self.makers = {name: node for node in self.nodes for name in node.outputs if name}
        self.uses = Counter(name for node in self.nodes for name in node.inputs if name)
        self.uses.update(_port_name(item) for item in self.fields if item.number == _OUTPUT_PORT)
        ports = {_port_name(item): item for item in self.fields if item.number == _PORT}
        weights = {_port_name(item, 8): item for item in self.fields if item.number == _INITIALIZER}
        self.types = dict(_type_of(item) for item in (*weights.values(), *ports.values()))
        self.widths = {name: _width_of(item) for name, item in ports.items()}
        self.constants = set(weights) - set(ports)
        self.edits: dict[int, bytes] = {}

    def is_float(self, node: _Node, index: int) -> bool:
        """Whether an input that the graph or its weights give is float32."""
        return node.has(index) and self.types.get(node.inputs[index]) == _FLOAT32

    def only_maker(self, name: str, *operators: str) -> _Node | None:
        """What makes `name`, if it is one of the operators and nothing but the asking node takes the result."""
        maker = self.makers.get(name)
        fits = maker is not None and maker.operator in operators and self.uses[name] == 1
        return maker if fits else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """The values of a small int64 initializer; none where it is not one."""
        for item in self.fields:
            if item.number == _INITIALIZER and _port_name(item, 8) == name:
                raw = next((inner.bytes for inner in fields_of(item.bytes) if inner.number == 9), b"")
                return struct.unpack(f"<{len(raw) // 8}q", raw) if len(raw) % 8 == 0 else ()
        return ()

    def written(self) -> bytes:
        return b"".join(self.edits.get(at, item.raw) for at, item in enumerate(self.fields))


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
    for item in fields_of(model):
        if item.number == _GRAPH:
            graph = _Graph(item.bytes)
            for node in graph.nodes:
                name, fits, replace = _OURS.get(node.operator, ("", _never, _never))
                if fits(graph, node):
                    replace(graph, node, threads)
                    replaced[name] += 1
            parts.append(delimited(_GRAPH, graph.written()))
        else:
            parts.append(item.raw)
    parts.append(delimited(_OPSET, delimited(1, DOMAIN.encode()) + number(2, 1)))
    return b"".join(parts), replaced


def _never(*_arguments: object) -> bool:
    return False


def _is_product(graph: _Graph, node: _Node) -> bool:
    """4 bits, activations in 8 bits (accuracy level 4), constant weights with float32 scales, no g_idx (input 4)."""
    is_right = node.attributes.get("bits") == 4 and node.attributes.get("accuracy_level") == 4 and not node.has(4)
    kinds = {1: _UINT8, 2: _FLOAT32, 3: _UINT8, 5: _FLOAT32}  # weights, scales, zero points, bias
    given = {node.inputs[index]: kind for index, kind in kinds.items() if node.has(index)}
    return is_right and all(name in graph.constants and graph.types[name] == kind for name, kind in given.items())


def _replace_product(graph: _Graph, node: _Node, threads: int) -> None:
    for take in (_take_gate, _take_norm):
        if take(graph, node, threads):
            return
    graph.edits[node.at] = node.written(PRODUCT, node.inputs, node.outputs, pieces=threads, mode=_PLAIN)


def _take_gate(graph: _Graph, node: _Node, threads: int) -> bool:
    """Split, QuickGelu with alpha 1 (SiLU) and Mul before a product, where nothing else uses them."""
    k = node.attributes.get("K")
    product = graph.only_maker(node.inputs[0], "Mul")
    silu = graph.only_maker(product.inputs[0], "QuickGelu") if product else None
    split = graph.only_maker(silu.inputs[0], "Split") if silu else None
    if product is None or silu is None or split is None or not isinstance(k, int) or k % LANES:
        return False
    is_halved = split.attributes.get("axis") == -1 and split.has(1) and graph.numbers(split.inputs[1]) == (k, k)
    is_gate = split.outputs == [silu.inputs[0], product.inputs[1]] and graph.uses[product.inputs[1]] == 1
    if not is_halved or not is_gate or silu.attributes.get("alpha") != 1.0:
        return False
    graph.edits.update({dropped.at: b"" for dropped in (split, silu, product)})
    inputs = [split.inputs[0], *node.inputs[1:]]
    graph.edits[node.at] = node.written(PRODUCT, inputs, node.outputs, pieces=threads, mode=_GATED)
    return True


def _take_norm(graph: _Graph, node: _Node, threads: int) -> bool:
    """An RMS norm before a product, with the sum before it. The product takes the norm's place: others use the sum."""
    k = node.attributes.get("K")
    norm = graph.only_maker(node.inputs[0], "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
    if norm is None or not isinstance(k, int) or k % LANES:
        return False
    has_skip = norm.operator.startswith("Skip")
    n_inputs = 3 if has_skip else 2
    has_sum = len(norm.outputs) == (4 if has_skip else 1) and norm.outputs[-1] != ""
    is_plain = (
        has_sum and len(norm.inputs) == n_inputs and graph.is_float(norm, n_inputs - 1) and not any(norm.outputs[1:3])
    )
    if not is_plain or norm.attributes.get("axis", -1) != -1 or not isinstance(norm.attributes.get("epsilon"), float):
        return False
    inputs = [norm.inputs[0], *node.inputs[1:]]
    inputs += [""] * (_SKIP - len(inputs)) + [norm.inputs[1] if has_skip else "", norm.inputs[-1]]
    outputs = [*node.outputs, *norm.outputs[3:]]
    epsilon = [item for item in norm.kept if b"epsilon" in item]
    written = _Node(norm.at, "", [], [], {}, node.kept + epsilon)
    graph.edits[node.at] = b""
    graph.edits[norm.at] = written.written(PRODUCT, inputs, outputs, pieces=threads, mode=_NORM)
    return True


def _is_attention(graph: _Graph, node: _Node) -> bool:
    """Causal over a float32 cache of whole vectors, halves rotated if at all; no other modes or inputs."""
    off = {"local_window_size": -1, "rotary_interleaved": 0, "softcap": 0, "smooth_softmax": 0}
    plain = {"num_heads", "kv_num_heads", "scale", "do_rotary"}
    is_known = all(off.get(key) == value for key, value in node.attributes.items() if key not in plain)
    has_heads = {"num_heads", "kv_num_heads"} <= set(node.attributes)
    has_cache = graph.is_float(node, 3) and graph.widths.get(node.inputs[3], 1) % LANES == 0
    return is_known and has_heads and has_cache and not any(map(node.has, range(11, 20)))


def _replace_attention(graph: _Graph, node: _Node, threads: int) -> None:
    graph.edits[node.at] = node.written(ATTENTION, node.inputs, node.outputs, pieces=threads)


_OURS: dict[str, tuple[str, Callable[[_Graph, _Node], bool], Callable[[_Graph, _Node, int], object]]] = {
    "MatMulNBits": (PRODUCT, _is_product, _replace_product),
    "GroupQueryAttention": (ATTENTION, _is_attention, _replace_attention),
}


def _port_name(item: Field, key: int = 1) -> str:
    """The name of a graph's input or output (key 1) or initializer (key 8)."""
    return next((inner.bytes.decode() for inner in fields_of(item.bytes) if inner.number == key), "")


def _type_of(item: Field) -> tuple[str, int]:
    """(name, data type) of an initializer or of a graph's input; 0 for what is no tensor."""
    fields = {inner.number: inner for inner in fields_of(item.bytes)}
    if item.number == _INITIALIZER:
        kind = fields.get(2)
        return _port_name(item, 8), kind.value if kind and isinstance(kind.value, int) else 0
    kind = _last(item.bytes, 2, 1, 1)  # TypeProto, then its tensor, then the tensor's element type
    return _port_name(item), kind.value if kind and isinstance(kind.value, int) else 0


def _width_of(item: Field) -> int:
    """The last dimension of a graph's input; 1 where it is not fixed or not known."""
    size = _last(item.bytes, 2, 1, 2, 1, 1)  # TypeProto, its tensor, the shape, its last dimension, the value
    return size.value if size and isinstance(size.value, int) else 1


def _last(data: bytes, *path: int) -> Field | None:
    """The last field of each number of `path`, one inside the other; None where one is missing."""
    found = None
    for key in path:
        found = next((inner for inner in reversed([*fields_of(data)]) if inner.number == key), None)
        if found is None:
            return None
        data = found.value if isinstance(found.value, bytes) else b""
    return found


def _attribute(payload: bytes) -> tuple[str, int | float | None]:
    """(name, value) of an attribute; None for one that is neither a whole number nor a float."""
    fields = {item.number: item.value for item in fields_of(payload)}
    name, number, real = fields.get(1), fields.get(3), fields.get(2)
    text = name.decode() if isinstance(name, bytes) else ""
    if fields.get(20) == 1 and isinstance(real, bytes):
        return text, float(struct.unpack("<f", real)[0])
    if fields.get(20) == 2 and isinstance(number, int):
        return text, number - (1 << 64) if number >> 63 else number
    return text, None
