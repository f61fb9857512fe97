"""A sequence on a graph that returns a longer copy of its KV cache at every call (optimum's decoders).

The copies are the graph's own and cannot be avoided; rewinding slices them. Knows nothing of folders and devices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.onnx.buffers import select_rows, to_float32
from edgespec.backends.onnx.devices import import_onnxruntime
from edgespec.backends.onnx.session import Capabilities, OnnxSession
from edgespec.backends.onnx.signature import Signature
from edgespec.types import FloatArray, ModelInfo, Rows

__all__ = ["GrowingCacheSession"]


class GrowingCacheSession(OnnxSession):
    """The cache is the list of OrtValues that the last call returned; `keep` cuts it at the next call."""

    def __init__(self, runtime: Any, signature: Signature, info: ModelInfo, capabilities: Capabilities) -> None:
        super().__init__(info, capabilities)
        self._signature = signature
        self._values: list[Any] = []
        self._length = 0  # tokens that `_values` hold, at least n_past
        self._runtime = runtime  # last, so that it goes last: values of a GPU's runtime crash where they outlive it

    def close(self) -> None:
        super().close()
        self._values = []
        self._length = 0

    def _run(
        self,
        n_past: int,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        signature, total = self._signature, n_past + len(tokens)
        assert signature.ids is not None
        assert signature.logits is not None
        io = self._runtime.io_binding()
        io.bind_cpu_input(signature.ids.name, np.array([tokens], signature.ids.dtype))
        if signature.mask is not None:
            io.bind_cpu_input(signature.mask.name, np.ones((1, total), signature.mask.dtype))
        if signature.positions is not None:
            io.bind_cpu_input(signature.positions.name, np.arange(n_past, total, dtype=signature.positions.dtype)[None])
        past = self._past(n_past)  # held until the run is over: a binding does not keep an array's memory alive
        for port, value in zip(signature.past, past, strict=True):
            io.bind_ortvalue_input(port.name, value)
        for port in (signature.logits, *signature.present):
            io.bind_output(port.name, "cpu")
        started_s = time.perf_counter()
        self._runtime.run_with_iobinding(io)
        run_s = time.perf_counter() - started_s
        logits, *self._values = io.get_outputs()
        self._length = total
        return Rows(to_float32(select_rows(logits.numpy()[0], rows, len(tokens))), run_s=run_s)

    def _move(self, start: int, rows: Sequence[int]) -> None:
        raise AssertionError(f"{self._info.name}: its graphs run no trees, so there is no path of one to keep.")

    def _past(self, n_past: int) -> list[Any]:
        """The cached values, cut to `n_past` tokens where a rewind asked for it."""
        assert n_past <= self._length or not self._values
        value_of = import_onnxruntime().OrtValue.ortvalue_from_numpy
        if not self._values:
            ports = self._signature.past
            return [value_of(np.zeros(self._signature.kv_shape(port, 0), port.dtype)) for port in ports]
        if n_past == self._length:
            return self._values
        return [value_of(np.ascontiguousarray(value.numpy()[:, :, :n_past])) for value in self._values]
