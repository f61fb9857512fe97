"""Where the KV cache of a graph that updates it in place lies: in the host's memory, or in the device's own.

A cache in the host's memory is one set of arrays that past and present are both bound to. A device with memory of its
own would have to copy those in and out at every call, so there the first run leaves the cache on the device, and past
and present are bound to what it left. Knows nothing of tokens and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.backends.onnx.buffers import HOST_MEMORY, Array, aligned_zeros, ort_value
from edgespec.backends.onnx.signature import Signature

__all__ = ["KvMemory"]

# onnxruntime's name for a device's memory -> what a binding calls it. A device that is not listed copies at each call.
PLACES = {"WebGPU_Buf": "webgpu", "Cuda": "cuda"}


class KvMemory:
    """[batch, n_kv_heads, capacity, head_dim] of each key and value.

    values: what to bind as past and present. cache: the same as arrays; empty while the device holds it. place: device
    type and number of the outputs that are to stay on the device; None where past and present are bound to `values`.
    """

    def __init__(self, runtime: Any, signature: Signature, batch: int) -> None:
        self._signature = signature
        self._batch = batch
        self._own = _own_memory(runtime, signature)
        self.place: tuple[str, int] | None = None
        self.cache: list[Array] = []
        self.values: list[Any] = []
        self.capacity = 0

    @property
    def is_on_device(self) -> bool:
        return bool(self.values) and not self.cache

    def clear(self) -> None:
        self.cache.clear()
        self.values.clear()
        self.capacity, self.place = 0, None

    def grow(self, capacity: int) -> None:
        """Longer buffers that begin with what the present ones hold."""
        old, self.capacity = self._fetched(), capacity
        shape = self._signature.kv_shape
        new = [aligned_zeros(shape(port, capacity, self._batch), port.dtype) for port in self._signature.past]
        for array, before in zip(new, old, strict=False):
            array[:, :, : before.shape[2]] = before
        self._put(new)

    def settle(self, outputs: Sequence[Any]) -> None:
        """Take over the present that a run left on the device; `outputs` begin with it."""
        self.values = list(outputs[: len(self.values)])
        self.cache, self.place = [], None

    def move(self, start: int, rows: Sequence[int]) -> None:
        """Make the cached tokens `rows` (ascending, none before its new place) the ones from `start` on.

        Each run of neighbours is one copy; rows that stay where they are cost nothing.
        """
        if list(rows) == list(range(start, start + len(rows))):
            return
        arrays, begin = self._fetched(), 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and rows[end] == rows[end - 1] + 1:
                continue
            first, place = rows[begin], start + begin
            if first != place:
                for array in arrays:
                    array[:, :, place : place + end - begin] = array[:, :, first : first + end - begin]
            begin = end
        if arrays is not self.cache:
            self._put(arrays)

    def _fetched(self) -> list[Array]:
        """The arrays, copied from the device where it holds them."""
        return [value.numpy() for value in self.values] if self.is_on_device else self.cache

    def _put(self, arrays: list[Array]) -> None:
        self.cache = arrays
        self.values = [ort_value(array) for array in arrays]
        self.place = self._own


def _own_memory(runtime: Any, signature: Signature) -> tuple[str, int] | None:
    """Device type and number of the memory that the graph writes its cache to; None for the host's and unknown ones."""
    places = {
        port.name: place for port, place in zip(runtime.get_outputs(), runtime.get_output_memory_infos(), strict=True)
    }
    found = [places[port.name] for port in signature.present]
    if any(place.name == HOST_MEMORY or place.name not in PLACES for place in found):
        return None
    return PLACES[found[0].name], found[0].device_id
