"""Memory that numpy and onnxruntime share, and how rows of results are picked from it.

Knows arrays, not graphs: an array made here is bound to a graph without being copied.
"""

from __future__ import annotations

import atexit
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.onnx.devices import import_onnxruntime
from edgespec.types import FloatArray

__all__ = ["Array", "aligned_zeros", "close_at_exit", "ort_value", "remote_inputs", "select_rows", "to_float32"]

ALIGN_BYTES = 64
HOST_MEMORY = "Cpu"  # onnxruntime's name for memory that numpy can reach

Array = NDArray[Any]


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a cache line, as the runtime's own buffers do; untouched pages cost no memory."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


class Closable(Protocol):
    """A holder of bindings."""

    def close(self) -> None: ...


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(holder: Closable) -> None:
    """Have `holder` free its bindings before the interpreter ends.

    A binding to a GPU that outlives onnxruntime's own globals ends the process with a segmentation fault.
    """
    _open.add(holder)


@atexit.register
def _close_all() -> None:
    for holder in list(_open):
        holder.close()


def ort_value(array: Array) -> Any:
    """An OrtValue over the memory of `array`, which it keeps alive; writing to the array writes to it."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)


def remote_inputs(runtime: Any) -> frozenset[str]:
    """Inputs that the graph reads from a device's own memory.

    Binding an array to one of them copies it there at once, and what is written to the array later is not seen: such
    inputs have to be bound again before each run. (WebGPU gave the rows of the first call for ever.)
    """
    places = zip(runtime.get_inputs(), runtime.get_input_memory_infos(), strict=True)
    return frozenset(port.name for port, place in places if place.name != HOST_MEMORY)


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
