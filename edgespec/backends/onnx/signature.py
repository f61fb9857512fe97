"""What the inputs and outputs of a decoder graph are for, found out from their names and shapes.

Knows nothing of where the graph came from; a folder may hand in the names that its own configuration declares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.errors import BackendError

__all__ = ["Port", "Signature", "read_ports", "read_signature"]

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
    "features": ("features",),
    "extra": ("extra_ids",),
    "bias": ("attention_bias",),
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
    """The ports of a decoder by role. `past` and `present` are paired: key and value of layer 0, of layer 1, ...

    A part of a decoder may lack `ids` (it takes `features`) and `logits` (it gives `taps`).
    """

    ids: Port | None
    logits: Port | None
    past: tuple[Port, ...]
    present: tuple[Port, ...]
    mask: Port | None = None
    positions: Port | None = None
    seqlens: Port | None = None
    total: Port | None = None
    rows: Port | None = None
    features: Port | None = None
    extra: Port | None = None
    bias: Port | None = None
    taps: Mapping[str, Port] = field(default_factory=dict)

    @property
    def has_tree(self) -> bool:
        """Whether a call may say where each row stands and what it sees."""
        return self.bias is not None and self.positions is not None and self.seqlens is not None

    @property
    def n_features(self) -> int:
        """Channels of the `features` input; 0 where there is none."""
        return 0 if self.features is None else self.features.shape[-1] or 0

    @property
    def n_layers(self) -> int:
        return len(self.past) // 2

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        return self.past[0].dtype

    def kv_shape(self, port: Port, length: int, batch: int = 1) -> tuple[int, int, int, int]:
        """[batch, n_kv_heads, length, head_dim] of a cache port."""
        heads, dim = port.shape[1], port.shape[3]
        assert heads is not None
        assert dim is not None
        return batch, heads, length, dim

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(int(np.prod(self.kv_shape(port, 1))) * port.dtype.itemsize for port in self.past)

    @property
    def n_vocab(self) -> int:
        """Width of a logits row."""
        n_vocab = self.logits.shape[-1] if self.logits is not None else None
        assert n_vocab is not None
        return n_vocab


def read_signature(
    runtime: Any,
    what: str,
    *,
    names: Mapping[str, str] | None = None,
    n_vocab: int | None = None,
    kv_shape: tuple[int, int] | None = None,
    is_part: bool = False,
) -> Signature:
    """The signature of an InferenceSession.

    what: the model in error messages. names: role -> name where a configuration declares it. n_vocab, kv_shape
    (n_kv_heads, head_dim): used where the graph leaves the dimension open. is_part: some of a decoder's layers, which
    may take features and give taps alone.
    Raises BackendError naming the inputs that have no known role, or what a decoder lacks.
    """
    inputs, outputs = read_ports(runtime, what)
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
    _check_cache(what, past, present, left)
    if not is_part:
        _check_decoder(what, roles, logits)
    taps = {name[len(TAP_PREFIX) :]: port for name, port in outputs.items() if name.startswith(TAP_PREFIX)}
    order = sorted(past)
    return Signature(
        ids=roles.pop("ids", None),
        logits=None if logits is None else _with_last(logits, n_vocab, what),
        past=tuple(_with_heads(past[key], kv_shape, what) for key in order),
        present=tuple(present[key] for key in order),
        taps=taps,
        **roles,
    )


def read_ports(runtime: Any, what: str) -> tuple[dict[str, Port], dict[str, Port]]:
    """Inputs and outputs of an InferenceSession by name; raises BackendError for types that edgespec lacks."""
    inputs = {port.name: _port(port, what) for port in runtime.get_inputs()}
    outputs = {port.name: _port(port, what) for port in runtime.get_outputs()}
    return inputs, outputs


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


def _check_decoder(what: str, roles: Mapping[str, Port], logits: Port | None) -> None:
    if "ids" not in roles:
        raise BackendError(f"{what}: the graph has no input_ids, so it is not a decoder that takes tokens.")
    if logits is None:
        raise BackendError(f"{what}: the graph has no logits output.")


def _check_cache(
    what: str,
    past: Mapping[tuple[int, int], Port],
    present: Mapping[tuple[int, int], Port],
    left: list[str],
) -> None:
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
