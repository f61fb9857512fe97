"""A sequence on a graph that updates its KV cache in place: past and present are one buffer.

Owns the buffers and the bindings of one sequence. A binding (the arrays of one call shape, bound once) is made for each
pair of row count and logits row count and reused, so that a step costs the host a few array writes. Rewinding only
changes a length. Knows nothing of folders and devices.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import check_finite, check_forward, check_keep, check_path, is_chain
from edgespec.backends.onnx.devices import import_onnxruntime, short_message
from edgespec.backends.onnx.signature import Port, Signature
from edgespec.errors import BackendError, CacheError, ConfigError, EdgeSpecError
from edgespec.types import FloatArray, ModelInfo, Rows

__all__ = ["Capabilities", "OnnxSession", "SharedCacheSession", "select_rows", "to_float32"]

# Tokens of the first KV buffer; it doubles from there. onnxruntime sizes the work of its attention threads from the
# buffer, not from the tokens in it: 2,048 was 8 % faster a step than 512 at every past. Untouched pages cost no memory.
MIN_CAPACITY = 2048
MAX_BINDINGS = 24  # call shapes kept per session; prefill chunks of odd lengths push each other out
ALIGN_BYTES = 64
# The head's kernel for one row rounds differently from the one for several, so a call of several tokens never asks it
# for one row: what a position's logits are may not depend on how many of them are wanted.
MIN_LOGITS_ROWS = 2

Array = NDArray[Any]


@dataclass(frozen=True)
class Capabilities:
    """What a graph really does; the defaults are those of our own bundles, others are probed.

    last_row_only: logits only of a call's last token. rows_on_past: a call may bring several tokens, also after a
    cached prefix. can_rewind: a cache may be cut. is_shared: past and present are one buffer.
    """

    last_row_only: bool = False
    rows_on_past: bool = True
    can_rewind: bool = True
    is_shared: bool = True

    @property
    def max_rows(self) -> int | None:
        return 1 if self.last_row_only or not self.rows_on_past else None


class OnnxSession(ABC):
    """What shared and growing caches have in common: the checks, the split into runs, the lengths."""

    def __init__(self, runtime: Any, signature: Signature, info: ModelInfo, capabilities: Capabilities) -> None:
        self._runtime = runtime
        self._signature = signature
        self._info = info
        self._capabilities = capabilities
        self._n_past = 0
        self._n_last = 0  # tokens of the last pass, which a path may refer to
        self._is_closed = False

    @property
    def n_past(self) -> int:
        return self._n_past

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        self._check_open()
        if not is_chain(parents):
            raise ConfigError(
                f"{self._info.name}: this graph has no tree inputs: draft chains, or export it with tree."
            )
        rows = check_forward(self._info, self._n_past, tokens, logits_rows, taps)
        try:
            result = self._run_segments(tokens, rows, taps)
        except EdgeSpecError:
            raise
        except Exception as error:
            raise BackendError(
                f"{self._info.name}: onnxruntime failed on {len(tokens)} tokens after {self._n_past}: "
                f"{short_message(error)}"
            ) from error
        check_finite(self._info.name, result.logits, self._n_past, rows)
        self._n_past += len(tokens)
        self._n_last = len(tokens)
        return result

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        self._check_open()
        check_keep(self._info, self._n_past, n_past)
        if path is not None:
            check_path(None, self._n_last, path)
            if n_past != self._n_past - self._n_last + len(path):
                raise CacheError(
                    f"{self._info.name}: keep({n_past}) after a path of {len(path)} tokens on "
                    f"{self._n_past - self._n_last} cached ones."
                )
        if n_past not in (0, self._n_past) and not self._capabilities.can_rewind:
            raise CacheError(
                f"{self._info.name}: its cache cannot go back from {self._n_past} to {n_past} tokens, only to 0."
            )
        self._n_last = 0
        self._n_past = n_past

    def close(self) -> None:
        self._is_closed = True
        self._n_past = self._n_last = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise CacheError(f"{self._info.name}: this session is closed; open another one.")

    def _run_segments(self, tokens: Sequence[int], rows: list[int], taps: Sequence[str]) -> Rows:
        """One run, or several where the graph cannot answer the call in one."""
        if self._capabilities.max_rows is None:
            return self._run(self._n_past, tokens, rows, taps)
        can_skip = self._capabilities.rows_on_past
        ends = sorted({row + 1 for row in rows} | {len(tokens)}) if can_skip else range(1, len(tokens) + 1)
        logits: dict[int, FloatArray] = {}
        start, run_s = 0, 0.0
        for end in ends:
            wanted = [end - 1 - start] if end - 1 in rows else []
            part = self._run(self._n_past + start, tokens[start:end], wanted, ())
            run_s += part.run_s
            if wanted:
                logits[end - 1] = part.logits[0].copy()
            start = end
        empty = np.empty((0, self._info.n_vocab), np.float32)
        return Rows(np.stack([logits[row] for row in rows]) if rows else empty, run_s=run_s)

    @abstractmethod
    def _run(self, n_past: int, tokens: Sequence[int], rows: list[int], taps: Sequence[str]) -> Rows:
        """One run of the graph; changes no length."""


@dataclass
class _Binding:
    """The arrays of one call shape, all bound; None where the graph has no such port."""

    io: Any
    ids: Array
    positions: Array | None
    rows: Array | None
    logits: Array
    hidden: dict[str, Array]
    wanted: list[int] | None = None  # what `rows` was last filled with


class SharedCacheSession(OnnxSession):
    """Past and present are the same OrtValue, so no call copies the cache."""

    def __init__(self, runtime: Any, signature: Signature, info: ModelInfo, capabilities: Capabilities) -> None:
        super().__init__(runtime, signature, info, capabilities)
        self._capacity = 0
        self._cache: list[Array] = []
        self._bindings: OrderedDict[tuple[int, int, tuple[str, ...]], _Binding] = OrderedDict()
        self._logits = np.empty(0, signature.logits.dtype)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32) if signature.total is None else _zeros(signature.total, ())
        self._ones = np.ones((1, info.n_ctx), signature.mask.dtype if signature.mask else np.int64)

    @property
    def capacity(self) -> int:
        """Tokens that the present buffers hold before they grow."""
        return self._capacity

    def close(self) -> None:
        super().close()
        self._bindings.clear()
        self._cache.clear()
        self._capacity = 0

    def _run(self, n_past: int, tokens: Sequence[int], rows: list[int], taps: Sequence[str]) -> Rows:
        n_tokens, total, mask = len(tokens), n_past + len(tokens), self._signature.mask
        if total > self._capacity:
            self._grow(total)
        n_rows = max(len(rows), min(MIN_LOGITS_ROWS, n_tokens)) if rows else 0
        binding = self._binding(n_tokens, n_rows, tuple(taps))
        binding.ids[0] = tokens
        self._seqlens[0] = total - 1
        self._total[...] = total
        if binding.rows is not None and binding.wanted != rows:
            binding.rows[: len(rows)] = rows
            binding.rows[len(rows) :] = rows[-1:] or 0
            binding.wanted = rows
        if binding.positions is not None:
            binding.positions[0] = np.arange(n_past, total)
        if mask is not None:
            binding.io.bind_ortvalue_input(mask.name, _ort_value(self._ones[:, :total]))
        started_s = time.perf_counter()
        self._runtime.run_with_iobinding(binding.io)
        run_s = time.perf_counter() - started_s
        if binding.rows is not None:
            logits = binding.logits[: len(rows)]
        else:
            logits = select_rows(binding.logits[0], rows, n_tokens)
        return Rows(to_float32(logits), {tap: to_float32(array) for tap, array in binding.hidden.items()}, run_s)

    def _grow(self, total: int) -> None:
        """Buffers of at least twice the length, with the cached part copied; bindings are made anew."""
        old = self._cache
        self._capacity = min(max(MIN_CAPACITY, 2 * self._capacity, total), self._info.n_ctx)
        shape = self._signature.kv_shape
        self._cache = [_zeros(port, shape(port, self._capacity)) for port in self._signature.past]
        for array, before in zip(self._cache, old, strict=False):
            array[:, :, : before.shape[2]] = before
        self._values = [_ort_value(array) for array in self._cache]
        self._bindings.clear()

    def _binding(self, n_tokens: int, n_rows: int, taps: tuple[str, ...]) -> _Binding:
        key = (n_tokens, n_rows, taps)
        binding = self._bindings.get(key)
        if binding is None:
            self._logits_buffer(n_tokens, n_rows)
            binding = self._bindings[key] = self._bind(n_tokens, n_rows, taps)
            if len(self._bindings) > MAX_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end(key)
        return binding

    def _logits_shape(self, n_tokens: int, n_rows: int) -> tuple[int, ...]:
        n_vocab = self._info.n_vocab
        if self._signature.rows is not None:
            return n_rows, n_vocab
        return 1, 1 if self._capabilities.last_row_only else n_tokens, n_vocab

    def _logits_buffer(self, n_tokens: int, n_rows: int) -> None:
        """All bindings share one flat logits buffer; a larger call replaces it and the bindings over it."""
        size = int(np.prod(self._logits_shape(n_tokens, n_rows)))
        if size > self._logits.size:
            self._logits = _aligned((max(size, 2 * self._logits.size),), self._signature.logits.dtype)
            self._bindings.clear()

    def _bind(self, n_tokens: int, n_rows: int, taps: tuple[str, ...]) -> _Binding:
        signature = self._signature
        io = self._runtime.io_binding()

        def bind(port: Port | None, array: Array | None) -> Array | None:
            if port is None or array is None:
                return None
            io.bind_ortvalue_input(port.name, _ort_value(array))
            return array

        shape = self._logits_shape(n_tokens, n_rows)
        logits = self._logits[: int(np.prod(shape))].reshape(shape)
        io.bind_ortvalue_output(signature.logits.name, _ort_value(logits))
        ids = bind(signature.ids, _zeros(signature.ids, (1, n_tokens)))
        assert ids is not None
        bind(signature.seqlens, self._seqlens)
        bind(signature.total, self._total)
        for past, present, value in zip(signature.past, signature.present, self._values, strict=True):
            io.bind_ortvalue_input(past.name, value)
            io.bind_ortvalue_output(present.name, value)
        hidden = {}
        for tap in taps:
            port = (signature.taps or {})[tap]
            hidden[tap] = _zeros(port, (n_tokens, port.shape[-1] or 0))
            io.bind_ortvalue_output(port.name, _ort_value(hidden[tap]))
        positions, rows = signature.positions, signature.rows
        return _Binding(
            io=io,
            ids=ids,
            positions=bind(positions, None if positions is None else _zeros(positions, (1, n_tokens))),
            rows=bind(rows, None if rows is None else _zeros(rows, (n_rows,))),
            logits=logits,
            hidden=hidden,
        )


def _zeros(port: Port, shape: tuple[int, ...]) -> Array:
    return _aligned(shape, port.dtype)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a cache line, as the runtime's own buffers do; untouched pages cost no memory."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def _ort_value(array: Array) -> Any:
    """An OrtValue over the memory of `array`, which it keeps alive; writing to the array writes to it."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)


def select_rows(logits: Array, rows: list[int], n_tokens: int) -> Array:
    """The wanted rows of [n, n_vocab] logits: a view where they are a run, a copy otherwise."""
    if not rows:
        return logits[:0]
    if logits.shape[0] == 1 and n_tokens > 1:
        assert rows == [n_tokens - 1]
        return logits
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]


def to_float32(array: Array) -> FloatArray:
    return array if array.dtype == np.float32 else array.astype(np.float32)
