"""What the inputs and outputs of a decoder graph are for, found out from their names and shapes.

Knows nothing of where the graph came from; a folder may hand in the names that its own configuration declares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import BackendError

__all__ = ["Port", "Signature", "read_signature"]

DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
ROLES = {
    "ids": ("input_ids", "tokens"),
    "mask": ("attention_mask",),
    "positions": ("position_ids",),
    "seqlens": ("seqlens_k",),
    "total": ("total_sequence_length", "total_seq_len"),
    "rows": ("logits_rows",),
}
CACHE_NAME = re.compile(r"(?:^|\D)(\d+)\D*(key|value|k|v)\b|(?:^|_)(key|value)\D*(\d+)$")
TAP_PREFIX = "hidden."


@dataclass(frozen=True)
class Port:
    """One input or output of the graph; None in `shape` is a dimension that a call decides."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Signature:
    """The ports of a decoder by role. `past` and `present` are paired: key and value of layer 0, of layer 1, ..."""

    ids: Port
    logits: Port
    past: tuple[Port, ...]
    present: tuple[Port, ...]
    mask: Port | None = None
    positions: Port | None = None
    seqlens: Port | None = None
    total: Port | None = None
    rows: Port | None = None
    taps: Mapping[str, Port] | None = None

    @property
    def n_layers(self) -> int:
        return len(self.past) // 2

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        return self.past[0].dtype

    def kv_shape(self, port: Port, length: int) -> tuple[int, int, int, int]:
        """[1, n_kv_heads, length, head_dim] of a cache port."""
        heads, dim = port.shape[1], port.shape[3]
        assert heads is not None
        assert dim is not None
        return 1, heads, length, dim

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(int(np.prod(self.kv_shape(port, 1))) * port.dtype.itemsize for port in self.past)

    @property
    def n_vocab(self) -> int:
        n_vocab = self.logits.shape[-1]
        assert n_vocab is not None
        return n_vocab


def read_signature(
    runtime: Any,
    what: str,
    *,
    names: Mapping[str, str] | None = None,
    n_vocab: int | None = None,
    kv_shape: tuple[int, int] | None = None,
) -> Signature:
    """The signature of an InferenceSession.

    what: the model in error messages. names: role -> name where a configuration declares it. n_vocab, kv_shape
    (n_kv_heads, head_dim): used where the graph leaves the dimension open.
    Raises BackendError naming the inputs that have no known role, or what a decoder lacks.
    """
    inputs = {port.name: _port(port, what) for port in runtime.get_inputs()}
    outputs = {port.name: _port(port, what) for port in runtime.get_outputs()}
    roles: dict[str, Port] = {}
    for role, known in ROLES.items():
        for name in (*((names or {}).get(role, ()),), *known):
            if name in inputs:
                roles[role] = inputs.pop(name)
                break
    past = _cache_ports(inputs)
    present = _cache_ports({name: port for name, port in outputs.items() if not name.startswith(TAP_PREFIX)})
    left = [name for name in inputs if name not in {port.name for port in past.values()}]
    logits = outputs.get((names or {}).get("logits", "logits"))
    _check_complete(what, roles, past, present, logits, left)
    assert logits is not None
    taps = {name[len(TAP_PREFIX) :]: port for name, port in outputs.items() if name.startswith(TAP_PREFIX)}
    order = sorted(past)
    return Signature(
        ids=roles.pop("ids"),
        logits=_with_last(logits, n_vocab, what),
        past=tuple(_with_heads(past[key], kv_shape, what) for key in order),
        present=tuple(present[key] for key in order),
        taps=taps,
        **roles,
    )


def _port(port: Any, what: str) -> Port:
    if port.type not in DTYPES:
        raise BackendError(f"{what}: {port.name} is a {port.type}, supported are {', '.join(DTYPES)}.")
    shape = tuple(size if isinstance(size, int) and size > 0 else None for size in port.shape)
    return Port(port.name, np.dtype(DTYPES[port.type]), shape)


def _cache_ports(ports: Mapping[str, Port]) -> dict[tuple[int, int], Port]:
    """(layer, 0 for key | 1 for value) -> port, for every rank-4 port whose name says so."""
    found: dict[tuple[int, int], Port] = {}
    for name, port in ports.items():
        match = CACHE_NAME.search(name)
        if match is None or len(port.shape) != 4:
            continue
        layer, kind = (match[1], match[2]) if match[1] is not None else (match[4], match[3])
        found[int(layer), 0 if kind.startswith("k") else 1] = port
    return found


def _check_complete(
    what: str,
    roles: Mapping[str, Port],
    past: Mapping[tuple[int, int], Port],
    present: Mapping[tuple[int, int], Port],
    logits: Port | None,
    left: list[str],
) -> None:
    if "ids" not in roles:
        raise BackendError(f"{what}: the graph has no input_ids, so it is not a decoder that takes tokens.")
    if logits is None:
        raise BackendError(f"{what}: the graph has no logits output.")
    if not past or set(past) != set(present):
        raise BackendError(
            f"{what}: the graph takes {len(past)} cache tensors and returns {len(present)}; a decoder with a cache "
            "takes and returns a key and a value for each layer (export it with past)."
        )
    if left:
        raise BackendError(f"{what}: the graph wants {', '.join(left)}, which edgespec does not know how to fill.")


def _with_last(port: Port, size: int | None, what: str) -> Port:
    if port.shape[-1] is not None:
        return port
    if size is None:
        raise BackendError(f"{what}: neither the graph nor its configuration tells the vocabulary size.")
    return Port(port.name, port.dtype, (*port.shape[:-1], size))


def _with_heads(port: Port, kv_shape: tuple[int, int] | None, what: str) -> Port:
    heads, dim = port.shape[1], port.shape[3]
    if kv_shape is not None:
        heads, dim = heads or kv_shape[0], dim or kv_shape[1]
    if heads is None or dim is None:
        raise BackendError(
            f"{what}: {port.name} has the shape {port.shape}; edgespec needs [batch, n_kv_heads, length, head_dim] "
            "with known heads and head_dim."
        )
    return Port(port.name, port.dtype, (port.shape[0], heads, port.shape[2], dim))
