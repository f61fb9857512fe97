"""Several sequences of equal length run together, to write training corpora and features.

The sequences are aligned: each call appends the same number of tokens to all of them, so there is no padding and no
mask. Decoding does not use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.base import check_finite
from edgespec.backends.onnx.cached import CachedGraph
from edgespec.backends.onnx.devices import short_message
from edgespec.backends.onnx.model import OnnxModel
from edgespec.errors import BackendError, CacheError, ConfigError
from edgespec.types import FloatArray, Rows

__all__ = ["BatchSession"]


class BatchSession:
    """`batch` sequences of at most `capacity` tokens on a bundle's model.onnx.

    Raises ConfigError where the graph takes one sequence only.
    """

    def __init__(self, model: OnnxModel, batch: int, capacity: int) -> None:
        info, signature = model.info, model.signature
        if batch < 1:
            raise ConfigError(f"{info.name}: a batch of {batch} sequences: give 1 or more.")
        if not 1 <= capacity <= info.n_ctx:
            raise ConfigError(f"{info.name}: a capacity of {capacity} tokens, allowed are 1..{info.n_ctx}.")
        is_plain = signature.ids is not None and signature.rows is not None and signature.bias is None
        if not is_plain or signature.features is not None:
            raise ConfigError(f"{info.name}: batches run on the model.onnx of a target's bundle, loaded without tree=.")
        if batch > 1 and signature.ids is not None and signature.ids.shape[0] is not None:
            raise ConfigError(f"{info.name}: its graph takes one sequence, not {batch}: export the bundle again.")
        self.batch, self.capacity = batch, capacity
        self._info = info
        self._graph = CachedGraph(model.runtime, signature, capacity, batch=batch)
        self._n_past = 0

    @property
    def n_past(self) -> int:
        """Tokens of each sequence in the cache."""
        return self._n_past

    def forward(self, tokens: Any, taps: Sequence[str] = ()) -> Rows:
        """Append `tokens` [batch, S] to the sequences.

        Returns logits [batch, n_vocab] after the last token of each, and hidden [batch, S, d] of every tap; views that
        hold until the next call. A batch on top of a cached prefix runs token by token, which is how the attention
        operator takes it. Raises ConfigError over the capacity.
        """
        ids = self._checked(np.asarray(tokens, np.int64), taps)
        n_tokens = ids.shape[1]
        try:
            if self.batch == 1 or self._n_past == 0 or n_tokens == 1:
                rows = self._run(ids, tuple(taps))
            else:
                rows = self._steps(ids, tuple(taps))
        except Exception as error:
            raise BackendError(
                f"{self._info.name}: onnxruntime failed on {self.batch} x {n_tokens} tokens after {self._n_past}: "
                f"{short_message(error)}"
            ) from error
        check_finite(self._info.name, rows.logits, self._n_past, [n_tokens - 1] * self.batch)
        self._n_past += n_tokens
        return rows

    def keep(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens of each sequence."""
        if not 0 <= n_past <= self._n_past:
            raise CacheError(f"{self._info.name}: cannot keep {n_past} of {self._n_past} cached tokens.")
        self._n_past = n_past

    def close(self) -> None:
        """Free the cache."""
        self._graph.close()
        self._n_past = self.capacity = 0

    def _checked(self, ids: Any, taps: Sequence[str]) -> Any:
        info = self._info
        if ids.ndim != 2 or ids.shape[0] != self.batch or not ids.shape[1]:
            raise ConfigError(
                f"{info.name}: tokens have the shape {ids.shape}, a call takes [{self.batch}, 1 or more]."
            )
        if self._n_past + ids.shape[1] > self.capacity:
            raise ConfigError(
                f"{info.name}: {self._n_past} cached + {ids.shape[1]} new tokens exceed the capacity of "
                f"{self.capacity}."
            )
        if ids.min() < 0 or ids.max() >= info.n_vocab:
            raise ConfigError(f"{info.name}: tokens {ids.min()}..{ids.max()} reach outside 0..{info.n_vocab - 1}.")
        for tap in taps:
            if tap not in info.taps:
                raise ConfigError(f"{info.name}: has no tap {tap!r}; it offers {list(info.taps) or 'none'}.")
        return ids

    def _run(self, ids: Any, taps: tuple[str, ...], done: int = 0) -> Rows:
        n_tokens = ids.shape[1]
        last = [index * n_tokens + n_tokens - 1 for index in range(self.batch)]
        rows = self._graph.run(self._n_past + done, n_tokens, last, taps, tokens=ids)
        hidden = {tap: array.reshape(self.batch, n_tokens, -1) for tap, array in rows.hidden.items()}
        return Rows(rows.logits, hidden, rows.run_s)

    def _steps(self, ids: Any, taps: tuple[str, ...]) -> Rows:
        parts: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
        run_s, rows = 0.0, Rows(np.empty((0, 0), np.float32))
        for done in range(ids.shape[1]):
            rows = self._run(ids[:, done : done + 1], taps, done)
            run_s += rows.run_s
            for tap in taps:
                parts[tap].append(rows.hidden[tap].copy())
        return Rows(rows.logits, {tap: np.concatenate(part, axis=1) for tap, part in parts.items()}, run_s)
