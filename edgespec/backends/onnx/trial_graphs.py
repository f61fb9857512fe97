"""Tiny graphs that show what a device can do, written without the onnx package (field numbers of onnx.proto).

A product of fixed and of open shape, one with a second result, and the attention operator of our decoders with the
bias that trees need. Knows no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TRIALS", "WIDTH", "attention_rows"]

WIDTH = 32
HEADS, HEAD_DIM = 2, 16
FLOAT, INT32, INT64 = 1, 6, 7
Shape = Sequence[int | str]


def _varint(number: int) -> bytes:
    found = bytearray()
    while True:
        number, low = number >> 7, number & 0x7F
        found.append(low | (0x80 if number else 0))
        if not number:
            return bytes(found)


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field: a number, or a text, message or raw bytes by their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _port(name: str, kind: int, shape: Shape) -> bytes:
    dims = b"".join(_field(1, _field(1, size) if isinstance(size, int) else _field(2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, dims)))


def _node(operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **numbers: int) -> bytes:
    attributes = (_field(1, name) + _field(3, value) + _field(20, 2) for name, value in numbers.items())
    return b"".join(
        [
            *(_field(1, name) for name in inputs),
            *(_field(2, name) for name in outputs),
            _field(4, operator),
            *(_field(5, attribute) for attribute in attributes),
            _field(7, domain),
        ]
    )


def _model(nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes]) -> bytes:
    raw = np.eye(WIDTH, dtype=np.float32).tobytes()
    weights = _field(1, WIDTH) * 2 + _field(2, FLOAT) + _field(8, "w") + _field(9, raw)
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, "trial") + _field(5, weights)
    graph += b"".join(_field(11, port) for port in inputs) + b"".join(_field(12, port) for port in outputs)
    opsets = _field(8, _field(1, "") + _field(2, 20)) + _field(8, _field(1, "com.microsoft") + _field(2, 1))
    return _field(1, 10) + opsets + _field(7, graph)


def _product(rows: int | str, *, has_second: bool = False) -> bytes:
    nodes = [_node("MatMul", ["x", "w"], ["y"])]
    outputs = [_port("y", FLOAT, [rows, WIDTH])]
    if has_second:
        nodes.append(_node("MatMul", ["y", "w"], ["z"]))
        outputs.append(_port("z", FLOAT, [rows, WIDTH]))
    return _model(nodes, [_port("x", FLOAT, [rows, WIDTH])], outputs)


def _attention() -> bytes:
    """GroupQueryAttention over rows of open number, on a past, with positions and a bias."""
    wide: Shape = [1, "n", WIDTH]
    cache: Shape = [1, HEADS, "past", HEAD_DIM]
    inputs = [_port(name, FLOAT, wide) for name in "qkv"]
    inputs += [_port(name, FLOAT, cache) for name in ("past_key", "past_value")]
    inputs += [_port("seqlens", INT32, [1]), _port("total", INT32, [])]
    inputs += [_port(name, FLOAT, ["length", HEAD_DIM // 2]) for name in ("cos", "sin")]
    inputs += [_port("positions", INT64, [1, "n"]), _port("bias", FLOAT, [1, 1, "n", "all"])]
    names = ["q", "k", "v", "past_key", "past_value", "seqlens", "total", "cos", "sin", "positions", "bias"]
    outputs = ["y", "key", "value"]
    heads = {"num_heads": HEADS, "kv_num_heads": HEADS, "do_rotary": 1}
    node = _node("GroupQueryAttention", names, outputs, "com.microsoft", **heads)
    present: Shape = [1, HEADS, "capacity", HEAD_DIM]
    ports = [_port("y", FLOAT, wide), *(_port(name, FLOAT, present) for name in outputs[1:])]
    return _model([node, _node("MatMul", ["q", "w"], ["used"])], inputs, [*ports, _port("used", FLOAT, wide)])


def attention_rows(runtime: Any, sizes: Sequence[int]) -> NDArray[np.float32]:
    """[sum(sizes), WIDTH] of the trial "tree" over fixed random inputs, as many rows a call as `sizes` says."""
    n = sum(sizes)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, n, WIDTH)).astype(np.float32)
    cache = np.zeros((2, 1, HEADS, n, HEAD_DIM), np.float32)
    angles = np.arange(n, dtype=np.float32)[:, None] * np.linspace(1, 0.1, HEAD_DIM // 2, dtype=np.float32)
    rows, start = [], 0
    for size in sizes:
        end = start + size
        feeds = {"q": q[:, start:end], "k": k[:, start:end], "v": v[:, start:end], "cos": np.cos(angles)}
        feeds |= {"sin": np.sin(angles), "past_key": cache[0], "past_value": cache[1]}
        feeds |= {"seqlens": np.array([end - 1], np.int32), "total": np.array(end, np.int32)}
        feeds |= {"positions": np.arange(start, end)[None], "bias": np.zeros((1, 1, size, end), np.float32)}
        y, *cache = runtime.run(["y", "key", "value"], feeds)
        rows.append(y[0])
        start = end
    return np.concatenate(rows)


TRIALS = {
    "fixed": lambda: _product(4),
    "open": lambda: _product("n"),
    "hidden": lambda: _product(4, has_second=True),
    "tree": _attention,
}
"""What is tried -> the graph's bytes."""
