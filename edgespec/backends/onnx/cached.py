"""One graph that updates its KV cache in place, with the buffers and bindings of one sequence or of a few aligned ones.

The cache is bound once. The arrays of a call shape (rows and logits rows), made once for each, take the place of one
another there: a step costs the host a few array writes, one of another shape a few bindings. Lengths are the caller's:
a run says how many cached tokens it is on, and rewinding costs nothing. Knows nothing of folders and of what a caller
may ask for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.backends.onnx.buffers import Array, aligned_zeros, ort_value, remote_inputs, select_rows, to_float32
from edgespec.backends.onnx.kv_memory import KvMemory
from edgespec.backends.onnx.signature import Port, Signature
from edgespec.backends.onnx.trees import depths, sees
from edgespec.types import FloatArray, Rows

__all__ = ["MAX_BINDINGS", "MIN_CAPACITY", "MIN_LOGITS_ROWS", "CachedGraph"]

# Tokens of the first KV buffer; it doubles from there. onnxruntime sizes the work of its attention threads from the
# buffer, not from the tokens in it: 2,048 was 8 % faster a step than 512 at every past. Untouched pages cost no memory.
MIN_CAPACITY = 2048
MAX_BINDINGS = 24  # call shapes kept per session; prefill chunks of odd lengths push each other out
# The head's kernel for one row rounds differently from the one for several, so a call of several tokens never asks it
# for one row: what a position's logits are may not depend on how many of them are wanted.
MIN_LOGITS_ROWS = 2
# Rows that the first buffer of logits holds: untouched pages cost no memory, and a larger one is bound anew.
FIRST_LOGITS_ROWS = 16

Values = list[tuple[str, Any]]


@dataclass
class _Bound:
    """A binding with the cache in it. remote: inputs to bind again before each run. shape: whose arrays are in it."""

    io: Any
    remote: Values
    shape: _Binding | None = None


@dataclass
class _Binding:
    """The arrays of one call shape; None where the graph has no such port.

    inputs, outputs: what to bind where another shape was bound before. remote: inputs to bind again before each run.
    """

    bound: _Bound
    inputs: Values
    outputs: Values
    ids: Array | None
    features: Array | None
    positions: Array | None
    rows: Array | None
    logits: Array | None
    hidden: dict[str, Array]
    remote: Values
    wanted: list[int] | None = None  # what `rows` was last filled with

    @property
    def io(self) -> Any:
        return self.bound.io

    def enter(self) -> None:
        """Put the arrays where the runtime finds them."""
        bound = self.bound
        if bound.shape is not self:
            for name, value in self.inputs:
                bound.io.bind_ortvalue_input(name, value)
            for name, value in self.outputs:
                bound.io.bind_ortvalue_output(name, value)
            bound.shape = self
        for name, value in (*bound.remote, *self.remote):
            bound.io.bind_ortvalue_input(name, value)


class CachedGraph:
    """`batch` sequences of equal length on a decoder graph or on a part of one (which may lack ids or logits).

    n_ctx: most tokens of a sequence. last_row_only: the graph returns logits of a call's last token alone.
    """

    def __init__(
        self, runtime: Any, signature: Signature, n_ctx: int, *, batch: int = 1, last_row_only: bool = False
    ) -> None:
        self._remote = remote_inputs(runtime)
        self._signature = signature
        self._n_ctx = n_ctx
        self._batch = batch
        self._last_row_only = last_row_only
        self._memory = KvMemory(runtime, signature, batch)
        self.bindings: OrderedDict[tuple[int, int, tuple[str, ...]], _Binding] = OrderedDict()
        self._bound: dict[tuple[str, ...], _Bound] = {}  # by the features that are wanted: outputs cannot be taken out
        self._logits = np.empty(0, np.float32 if signature.logits is None else signature.logits.dtype)
        self._seqlens = np.zeros(batch, np.int32)
        self._total = np.zeros((), np.int32) if signature.total is None else _zeros(signature.total, ())
        self._ones = np.ones(
            (batch, n_ctx if signature.mask else 0), signature.mask.dtype if signature.mask else np.int64
        )
        self._no_bias = self._bias = np.empty(0, np.float32)
        width = 0 if signature.extra is None else signature.extra.shape[0] or 0
        self.extra = np.zeros(width, np.int64 if signature.extra is None else signature.extra.dtype)
        self._runtime = runtime  # last, so that it goes last: bindings to a GPU crash where they outlive it

    @property
    def capacity(self) -> int:
        """Tokens that the present buffers hold before they grow."""
        return self._memory.capacity

    @property
    def cache(self) -> list[Array]:
        """[batch, n_kv_heads, capacity, head_dim] of each key and value; empty while a device holds it."""
        return self._memory.cache

    def close(self) -> None:
        """Free the buffers."""
        self._unbind()
        self._memory.clear()

    def run(
        self,
        n_past: int,
        n_tokens: int,
        rows: list[int],
        taps: tuple[str, ...] = (),
        *,
        tokens: Sequence[int] | Array | None = None,
        features: FloatArray | None = None,
        parents: Sequence[int] | None = None,
        n_done: int = 0,
    ) -> Rows:
        """Run `n_tokens` of each sequence on top of `n_past` cached ones.

        tokens: [n_tokens] or [batch, n_tokens]. features: [n_tokens, d], where the graph takes them. rows: indices into
        the flattened [batch * n_tokens] tokens whose logits are wanted. parents: of a tree, None for a chain.
        n_done: how many of the tree's tokens are the last of the cached ones; `tokens` are the others.
        """
        total, signature = n_past + n_tokens, self._signature
        if total > self.capacity:
            self._grow(total)
        n_all = n_tokens * self._batch
        n_rows = max(len(rows), min(MIN_LOGITS_ROWS, n_all)) if rows else 0
        binding = self._binding(n_tokens, n_rows, taps)
        if binding.ids is not None:
            binding.ids[...] = tokens
        if binding.features is not None:
            binding.features[...] = features
        self._seqlens.fill(total - 1)
        self._total.fill(total)
        if binding.rows is not None and binding.wanted != rows:
            binding.rows[: len(rows)] = rows
            binding.rows[len(rows) :] = rows[-1:] or 0
            binding.wanted = rows
        if binding.positions is not None:
            if parents is None:
                binding.positions[...] = np.arange(n_past, total)
            else:
                binding.positions[...] = n_past - n_done + depths(parents)[n_done:]
        if signature.mask is not None:
            binding.io.bind_ortvalue_input(signature.mask.name, ort_value(self._ones[:, :total]))
        if signature.bias is not None:
            self._bind_bias(binding.io, signature.bias, n_past, n_tokens, parents, n_done)
        run_s = self._execute(binding)
        hidden = {tap: to_float32(array) for tap, array in binding.hidden.items()}
        return Rows(self._wanted(binding, rows, n_all), hidden, run_s)

    def _execute(self, binding: _Binding) -> float:
        """Run it; returns the seconds that this took."""
        started_s = time.perf_counter()
        binding.enter()
        self._runtime.run_with_iobinding(binding.io)
        if self._memory.place is not None:
            self._memory.settle(binding.io.get_outputs())
            self._unbind()
        return time.perf_counter() - started_s

    def move(self, start: int, rows: Sequence[int]) -> None:
        """Make the cached tokens `rows` (ascending, none before its new place) the ones from `start` on."""
        self._memory.move(start, rows)
        if self._memory.place is not None:
            self._unbind()

    def _unbind(self) -> None:
        """What the bindings hold has moved. It is let go at once: a shape and where it is bound know each other."""
        for bound in self._bound.values():
            bound.shape = None
        self.bindings.clear()
        self._bound.clear()

    def _wanted(self, binding: _Binding, rows: list[int], n_all: int) -> FloatArray:
        if binding.logits is None:
            return np.empty((0, 0), np.float32)
        if binding.rows is not None:
            return to_float32(binding.logits[: len(rows)])
        return to_float32(select_rows(binding.logits[0], rows, n_all))

    def _bind_bias(
        self, io: Any, port: Port, n_past: int, n_tokens: int, parents: Sequence[int] | None, n_done: int
    ) -> None:
        """Where each row may look, [1, 1, n_tokens, n_past + n_tokens].

        The operator is causal by itself, so chains share zeros that are never written. A graph wants the exact width,
        hence a new view at each call.
        """
        shape = 1, 1, n_tokens, n_past + n_tokens
        size = n_tokens * (n_past + n_tokens)
        if parents is None:
            if size > self._no_bias.size:
                self._no_bias = aligned_zeros((max(size, 2 * self._no_bias.size),), port.dtype)
            io.bind_ortvalue_input(port.name, ort_value(self._no_bias[:size].reshape(shape)))
            return
        if size > self._bias.size:
            self._bias = aligned_zeros((max(size, 2 * self._bias.size),), port.dtype)
        bias = self._bias[:size].reshape(shape)
        bias[..., : n_past - n_done] = 0
        bias[..., n_past - n_done :] = np.where(sees(parents)[n_done:], 0, np.finfo(port.dtype).min)
        io.bind_ortvalue_input(port.name, ort_value(bias))

    def _grow(self, total: int) -> None:
        """Buffers of at least twice the length, with the cached part copied; bindings are made anew."""
        self._memory.grow(min(max(MIN_CAPACITY, 2 * self.capacity, total), self._n_ctx))
        self._unbind()

    def _binding(self, n_tokens: int, n_rows: int, taps: tuple[str, ...]) -> _Binding:
        key = (n_tokens, n_rows, taps)
        binding = self.bindings.get(key)
        if binding is None:
            self._logits_buffer(n_tokens, n_rows)
            binding = self.bindings[key] = self._bind(n_tokens, n_rows, taps)
            if len(self.bindings) > MAX_BINDINGS:
                self.bindings.popitem(last=False)
        else:
            self.bindings.move_to_end(key)
        return binding

    def _logits_shape(self, n_tokens: int, n_rows: int) -> tuple[int, ...]:
        if self._signature.logits is None:
            return (0,)
        n_vocab = self._signature.n_vocab
        if self._signature.rows is not None:
            return n_rows, n_vocab
        return self._batch, 1 if self._last_row_only else n_tokens, n_vocab

    def _logits_buffer(self, n_tokens: int, n_rows: int) -> None:
        """All bindings share one flat logits buffer; a larger call replaces it and the bindings over it."""
        size = int(np.prod(self._logits_shape(n_tokens, n_rows)))
        if size > self._logits.size:
            first = FIRST_LOGITS_ROWS * self._signature.n_vocab
            self._logits = aligned_zeros((max(size, 2 * self._logits.size, first),), self._logits.dtype)
            self.bindings.clear()

    def _bind_cache(self, taps: tuple[str, ...]) -> _Bound:
        """A binding of all that is the same at every shape."""
        bound = self._bound.get(taps)
        if bound is not None:
            return bound
        signature, memory = self._signature, self._memory
        bound = self._bound[taps] = _Bound(self._runtime.io_binding(), [])
        values: Values = [
            (port.name, ort_value(array))
            for port, array in (
                (signature.seqlens, self._seqlens), (signature.total, self._total), (signature.extra, self.extra)
            )
            if port is not None
        ]  # fmt: skip
        if not memory.is_on_device:
            values += [(past.name, value) for past, value in zip(signature.past, memory.values, strict=True)]
        for name, value in values:
            if name in self._remote:
                bound.remote.append((name, value))
            else:
                bound.io.bind_ortvalue_input(name, value)
        for past, present, value in zip(signature.past, signature.present, memory.values, strict=True):
            if memory.is_on_device:
                bound.io.bind_ortvalue_input(past.name, value)
            if memory.place is None:
                bound.io.bind_ortvalue_output(present.name, value)
            else:
                bound.io.bind_output(present.name, *memory.place)
        return bound

    def _bind(self, n_tokens: int, n_rows: int, taps: tuple[str, ...]) -> _Binding:
        signature, batch = self._signature, self._batch
        inputs: Values = []
        outputs: Values = []
        remote: Values = []

        def bind(port: Port | None, shape: tuple[int, ...]) -> Array | None:
            if port is None:
                return None
            array = _zeros(port, shape)
            (remote if port.name in self._remote else inputs).append((port.name, ort_value(array)))
            return array

        logits = None
        if signature.logits is not None:
            shape = self._logits_shape(n_tokens, n_rows)
            logits = self._logits[: int(np.prod(shape))].reshape(shape)
            outputs.append((signature.logits.name, ort_value(logits)))
        hidden = {}
        for tap in taps:
            port = signature.taps[tap]
            hidden[tap] = _zeros(port, (batch * n_tokens, port.shape[-1] or 0))
            outputs.append((port.name, ort_value(hidden[tap])))
        return _Binding(
            bound=self._bind_cache(taps),
            inputs=inputs,
            outputs=outputs,
            ids=bind(signature.ids, (batch, n_tokens)),
            features=bind(signature.features, (n_tokens, signature.n_features)),
            positions=bind(signature.positions, (batch, n_tokens)),
            rows=bind(signature.rows, (n_rows,)),
            logits=logits,
            hidden=hidden,
            remote=remote,
        )


def _zeros(port: Port, shape: tuple[int, ...]) -> Array:
    return aligned_zeros(shape, port.dtype)
