"""A graph without a cache: draft heads, feature fusion, the lm head of a split model.

Owns its runtime and, for each set of input shapes, arrays that are bound once and reused. Knows nothing of what the
graph is for.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.onnx.buffers import Array, aligned_zeros, close_at_exit, ort_value, remote_inputs
from edgespec.backends.onnx.devices import Place, Placement, find_device, placement, short_message
from edgespec.backends.onnx.signature import Port, read_ports
from edgespec.cpu import default_threads
from edgespec.errors import BackendError, ConfigError

__all__ = ["StatelessGraph"]

MAX_BINDINGS = 24  # sets of input shapes that are remembered


@dataclass
class _Binding:
    io: Any
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    remote: list[tuple[str, Any]]  # inputs to bind again before each run


class StatelessGraph:
    """The graph in the file `path`. `inputs` and `outputs` are its ports, `placement` is where its nodes run.

    place: device, threads and so on; None is the CPU with `threads` threads (None: the fast cores). run_s: seconds
    inside the runtime of the last call; n_runs: calls so far.
    """

    def __init__(self, path: str | Path, threads: int | None = None, place: Place | None = None) -> None:
        self.path = Path(path)
        self.run_s = 0.0
        self.n_runs = 0
        # before the runtime, so that it goes before it: bindings to a GPU crash where they outlive it
        self._bindings: OrderedDict[tuple[tuple[int, ...], ...], _Binding] = OrderedDict()
        place = place or Place(find_device("cpu"), threads or default_threads())
        self._runtime = place.load(self.path)
        self._remote = remote_inputs(self._runtime)
        inputs, outputs = read_ports(self._runtime, self.path.name)
        self.inputs: Mapping[str, Port] = inputs
        self.outputs: Mapping[str, Port] = outputs
        if place.device.row.is_unlisted:  # known once it has run
            self.run({name: np.zeros([size or 1 for size in port.shape]) for name, port in inputs.items()})
            self.run_s, self.n_runs = 0.0, 0
        self.placement: Placement = placement(self._runtime, place.device)
        close_at_exit(self)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Every output for `feeds` (all inputs, converted to their types).

        The arrays are overwritten by the next call of the same shapes: copy to keep. Raises ConfigError for feeds that
        the graph does not take, BackendError where it fails.
        """
        arrays = self._checked(feeds)
        key = tuple(array.shape for array in arrays.values())
        binding = self._bindings.get(key)
        try:
            return self._first(key, arrays) if binding is None else self._again(key, binding, arrays)
        except Exception as error:
            raise BackendError(f"onnxruntime failed on {self.path}: {short_message(error)}") from error

    def twin(self) -> StatelessGraph:
        """The same weights with arrays of its own, for use beside this one."""
        other = copy.copy(self)
        other._bindings = OrderedDict()
        other.run_s, other.n_runs = 0.0, 0
        close_at_exit(other)
        return other

    def close(self) -> None:
        """Free the arrays; the weights go with the last twin."""
        self._bindings.clear()
        self._runtime = None

    def _checked(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        if self._runtime is None:
            raise BackendError(f"{self.path}: the graph is closed; load it again.")
        if feeds.keys() != self.inputs.keys():
            raise ConfigError(f"{self.path} takes {', '.join(self.inputs)}; got {', '.join(feeds) or 'nothing'}.")
        arrays = {}
        for name, port in self.inputs.items():
            array = arrays[name] = np.asarray(feeds[name], port.dtype)
            if len(array.shape) != len(port.shape) or any(
                want not in (None, found) for want, found in zip(port.shape, array.shape, strict=True)
            ):
                raise ConfigError(f"{self.path}: {name} has the shape {array.shape}, the graph takes {port.shape}.")
        return arrays

    def _first(self, key: tuple[tuple[int, ...], ...], arrays: dict[str, Array]) -> dict[str, Array]:
        """A plain run, which shows how large the outputs are; its arrays are bound for the calls to come."""
        assert self._runtime is not None
        started_s = time.perf_counter()
        results = self._runtime.run(list(self.outputs), arrays)
        self._count(started_s)
        io = self._runtime.io_binding()
        inputs = {name: aligned_zeros(array.shape, array.dtype) for name, array in arrays.items()}
        outputs = {
            name: aligned_zeros(array.shape, array.dtype) for name, array in zip(self.outputs, results, strict=True)
        }
        values = {name: ort_value(array) for name, array in inputs.items()}
        remote = [(name, value) for name, value in values.items() if name in self._remote]
        for name, value in values.items():
            if name not in self._remote:
                io.bind_ortvalue_input(name, value)
        for (name, array), result in zip(outputs.items(), results, strict=True):
            array[...] = result
            io.bind_ortvalue_output(name, ort_value(array))
        self._bindings[key] = _Binding(io, inputs, outputs, remote)
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return dict(outputs)

    def _again(self, key: tuple[tuple[int, ...], ...], binding: _Binding, arrays: dict[str, Array]) -> dict[str, Array]:
        assert self._runtime is not None
        self._bindings.move_to_end(key)
        for name, array in arrays.items():
            binding.inputs[name][...] = array
        started_s = time.perf_counter()
        for name, value in binding.remote:
            binding.io.bind_ortvalue_input(name, value)
        self._runtime.run_with_iobinding(binding.io)
        self._count(started_s)
        return dict(binding.outputs)

    def _count(self, started_s: float) -> None:
        self.run_s = time.perf_counter() - started_s
        self.n_runs += 1
