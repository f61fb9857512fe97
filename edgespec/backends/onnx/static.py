"""One sequence on graphs of fixed shapes, as NPUs want them: what the host prepares for a call, and where keys go.

The host knows lengths and trees; the graphs see embedding rows, rotations, a mask and one-hot places. A call takes the
narrowest graph that holds it, a longer chain several calls of the widest. Every token stands at the cache column of its
number, so with one width for all calls a row's bits do not depend on the call that it came in (a tree's rows do: its
columns are in the order of its nodes). The same session would serve runtimes that capture a graph once and replay it
(CUDA graphs), for they want fixed shapes and addresses too; that has not been run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.backends.base import check_finite
from edgespec.backends.onnx.buffers import Array, aligned_zeros, ort_value, remote_inputs, to_float32
from edgespec.backends.onnx.session import Capabilities, OnnxSession
from edgespec.backends.onnx.signature import Port, read_ports
from edgespec.backends.onnx.trees import depths, sees
from edgespec.backends.onnx.vocabulary import ReducedVocabulary
from edgespec.errors import ConfigError
from edgespec.types import ExactRows, FloatArray, ModelInfo, Rows

__all__ = ["PAST", "PRESENT", "TAP", "HostTables", "StaticGraphs", "StaticSession"]

PAST, PRESENT, TAP = "past_key_values.", "present.", "hidden."


@dataclass(frozen=True)
class HostTables:
    """What the host looks rows up in. embedding: [n_ids, n_embd]; cos, sin: [n_ctx, head_dim / 2] by position.

    mask: what is added to the score of a place that a row must not see: finite, so that a row that sees nothing still
    gives numbers, and far enough below any score that its share is 0 in fp16.
    """

    embedding: Array
    cos: Array
    sin: Array
    mask: float


class StaticGraphs:
    """The runtimes by width, each loaded when it is first needed: exact mode needs one of them only."""

    def __init__(self, widths: Sequence[int], load: Callable[[int], Any]) -> None:
        self.widths = tuple(sorted(widths))
        self._load = load
        self._loaded: dict[int, Any] = {}

    @property
    def widest(self) -> int:
        return self.widths[-1]

    def fitting(self, n_rows: int) -> int:
        """The narrowest width that holds `n_rows`, or the widest."""
        return next((width for width in self.widths if width >= n_rows), self.widest)

    def runtime(self, width: int) -> Any:
        """The InferenceSession for `width` rows; raises BackendError where it cannot load."""
        if width not in self._loaded:
            self._loaded[width] = self._load(width)
        return self._loaded[width]

    def close(self) -> None:
        self._loaded.clear()


class _Binding:
    """The arrays of one width, all bound; the cache's are the session's."""

    def __init__(self, runtime: Any, name: str, cache: Mapping[str, Array]) -> None:
        inputs, outputs = read_ports(runtime, name)
        self._io = runtime.io_binding()
        self.inputs = {name: cache[name] if name in cache else _zeros(port) for name, port in inputs.items()}
        remote = remote_inputs(runtime)
        values = {key: ort_value(array) for key, array in self.inputs.items()}
        self._remote = [(key, value) for key, value in values.items() if key in remote]
        for key, value in values.items():
            self._io.bind_ortvalue_input(key, value)
        self.outputs = {key: _zeros(port) for key, port in outputs.items()}
        for key, array in self.outputs.items():
            self._io.bind_ortvalue_output(key, ort_value(array))
        self._runtime = runtime  # last, so that it goes last: bindings to a GPU crash where they outlive it

    def run(self) -> float:
        """Seconds in the runtime."""
        started_s = time.perf_counter()
        for key, value in self._remote:
            self._io.bind_ortvalue_input(key, value)
        self._runtime.run_with_iobinding(self._io)
        return time.perf_counter() - started_s


class StaticSession(OnnxSession):
    """A KV cache on the host beside graphs of fixed shapes. exact: where set, all calls have the widest graph."""

    def __init__(
        self, graphs: StaticGraphs, info: ModelInfo, tables: HostTables, vocabulary: ReducedVocabulary | None = None
    ) -> None:
        super().__init__(info, Capabilities(), n_ids=len(tables.embedding))
        self.exact: ExactRows | None = None
        self._graphs, self._tables, self._vocabulary = graphs, tables, vocabulary
        self._n_live = info.n_vocab if vocabulary is None else len(vocabulary.ids)
        self._extra = aligned_zeros((vocabulary.n_extra if vocabulary else 0, tables.embedding.shape[1]), _FLOAT)
        self._bindings: dict[int, _Binding] = {}
        self._cache: dict[str, Array] = {}
        self._n_written = 0  # columns of the cache that hold something, be it of rejected tokens

    def set_extra(self, ids: Sequence[int]) -> None:
        """Tokens that the last logits columns are of from now on, beside the reduced vocabulary; the rest are -inf.

        Raises ConfigError where there is no reduced vocabulary, or for ids that do not fit.
        """
        if self._vocabulary is None:
            raise ConfigError(
                f"{self._info.name}: its logits are over the whole vocabulary, so it takes no extra tokens."
            )
        self._vocabulary.check_extra(self._info.name, ids)
        self._extra[: len(ids)] = self._tables.embedding[list(ids)]
        self._n_live = len(self._vocabulary.ids) + len(ids)

    def close(self) -> None:
        super().close()
        self._bindings.clear()
        self._cache.clear()

    def _run_segments(
        self,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        """One call of a graph, or for a chain longer than the widest several."""
        widest = self._graphs.widest
        if len(tokens) <= widest:
            return self._run(self._n_past, tokens, rows, taps, features, parents)
        if parents is not None:
            raise ConfigError(
                f"{self._info.name}: a tree of {len(tokens)} tokens, and its widest graph takes {widest} rows: draft "
                "fewer (--tree-rows), or export it with a larger width."
            )
        logits: dict[int, FloatArray] = {}
        hidden: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
        run_s = 0.0
        for start in range(0, len(tokens), widest):
            piece = tokens[start : start + widest]
            wanted = sorted({row - start for row in rows if start <= row < start + len(piece)})
            part = self._run(self._n_past + start, piece, wanted, taps, None, None)
            # checked here, for a NaN that goes into the cache spoils the pieces after it
            check_finite(self._info.name, part.logits, self._n_past + start, wanted)
            run_s += part.run_s
            logits.update((start + row, part.logits[i].copy()) for i, row in enumerate(wanted))
            for tap in taps:
                hidden[tap].append(part.hidden[tap].copy())
        stacked = np.stack([logits[row] for row in rows]) if rows else np.empty((0, self._info.n_vocab), np.float32)
        return Rows(stacked, {tap: np.concatenate(parts) for tap, parts in hidden.items()}, run_s)

    def _run(
        self,
        n_past: int,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        n = len(tokens)
        binding = self._binding(self._graphs.widest if self.exact else self._graphs.fitting(n))
        for array in self._cache.values():
            array[:, :, n_past : self._n_written] = 0  # the graph adds the new rows to what stands at their places
        self._fill(binding.inputs, n_past, tokens, parents)
        run_s = binding.run()
        self._n_written = n_past + n  # before anything is, for an interrupt may come in between
        for name, array in self._cache.items():
            array[:, :, n_past : n_past + n] = binding.outputs[name.replace(PAST, PRESENT)][:, :, :n]
        logits = to_float32(binding.outputs["logits"])
        if self._n_live < self._info.n_vocab:
            logits[:, self._n_live :] = -np.inf
        is_run = not rows or rows == list(range(rows[0], rows[0] + len(rows)))
        wanted = logits[rows[0] : rows[-1] + 1] if rows and is_run else logits[rows]
        return Rows(wanted, {tap: to_float32(binding.outputs[TAP + tap][:n]) for tap in taps}, run_s)

    def _fill(
        self, inputs: Mapping[str, Any], n_past: int, tokens: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """The inputs of a call. Rows that no token fills repeat the last one, and their keys go nowhere."""
        tables, n, width = self._tables, len(tokens), inputs["embeddings"].shape[1]
        source = np.minimum(np.arange(width), n - 1)
        inputs["embeddings"][0] = tables.embedding[np.asarray(tokens)[source]]
        positions = n_past + (np.arange(n) if parents is None else depths(parents))
        inputs["cos"][0, 0] = tables.cos[positions[source]]
        inputs["sin"][0, 0] = tables.sin[positions[source]]
        mask, place = inputs["mask"][0, 0], inputs["place"][0, 0]
        mask[...] = tables.mask
        mask[:, :n_past] = 0
        seen = np.tri(n, dtype=bool) if parents is None else sees(parents)
        mask[:, n_past : n_past + n][seen[source]] = 0
        place[...] = 0
        place[n_past + np.arange(n), np.arange(n)] = 1
        if "extra_rows" in inputs:
            inputs["extra_rows"][...] = self._extra

    def feeds(self, tokens: Sequence[int]) -> dict[str, Array]:
        """Copies of all inputs of the call that would run `tokens` next, for calibration."""
        binding = self._binding(self._graphs.fitting(len(tokens)))
        self._fill(binding.inputs, self._n_past, tokens, None)
        return {name: np.array(array) for name, array in binding.inputs.items()}

    def _binding(self, width: int) -> _Binding:
        if width not in self._bindings:
            runtime = self._graphs.runtime(width)
            if not self._cache:
                inputs, _outputs = read_ports(runtime, self._info.name)
                self._cache = {name: _zeros(port) for name, port in inputs.items() if name.startswith(PAST)}
            self._bindings[width] = _Binding(runtime, self._info.name, self._cache)
        return self._bindings[width]

    def _move(self, start: int, rows: Sequence[int]) -> None:
        for array in self._cache.values():
            array[:, :, start : start + len(rows)] = array[:, :, list(rows)]


_FLOAT = np.dtype(np.float32)


def _zeros(port: Port) -> Array:
    shape = tuple(size or 0 for size in port.shape)
    return aligned_zeros(shape, port.dtype)
