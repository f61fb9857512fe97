"""A target in three graphs for early exit: lower layers, upper layers, lm head, over one file of weights.

A session can run the lower layers ahead of the rest (`exit_rows`): a draft made of them writes into the target's own
KV cache, and the next forward call of the same tokens runs only the upper layers. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgespec.backends.base import check_forward
from edgespec.backends.onnx.buffers import Array
from edgespec.backends.onnx.cached import MIN_LOGITS_ROWS, CachedGraph
from edgespec.backends.onnx.devices import Place, import_onnxruntime
from edgespec.backends.onnx.folders import ModelFolder
from edgespec.backends.onnx.session import Capabilities, OnnxSession
from edgespec.backends.onnx.signature import Signature
from edgespec.backends.onnx.stateless import StatelessGraph
from edgespec.errors import BackendError
from edgespec.types import ExactRows, FloatArray, ModelInfo, Rows

__all__ = ["EXIT", "FINAL", "SplitModel", "SplitSession", "SplitSignature"]

EXIT, FINAL = "exit", "final"  # the tap that joins the halves, and the one that the head reads


class SplitSignature:
    """Ports of the two halves; `taps` of both together."""

    def __init__(self, lower: Signature, upper: Signature) -> None:
        self.lower, self.upper = lower, upper
        self.lower_taps = tuple(lower.taps)
        self.taps = tuple(dict.fromkeys((*lower.taps, *upper.taps)))

    @property
    def kv_bytes_per_token(self) -> int:
        return self.lower.kv_bytes_per_token + self.upper.kv_bytes_per_token


class SplitModel:
    """The loaded graphs; a `Model` as any other. Each part has a runtime of its own in `place`."""

    vocabulary = None
    draft = None

    def __init__(
        self,
        runtimes: tuple[Any, Any],
        signature: SplitSignature,
        head: StatelessGraph,
        info: ModelInfo,
        folder: ModelFolder,
        place: Place,
    ) -> None:
        self._runtimes: tuple[Any, Any] | None = runtimes
        self._signature = signature
        self._head = head
        self._info = info
        self.folder = folder
        self.place = place
        self.threads = place.threads

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def content_key(self) -> str:
        """Names the weights, the graphs, the runtime's version, the device and the threads: what decides on kernels."""
        version = import_onnxruntime().__version__
        return f"{self.folder.content_key} onnxruntime={version} {self.place}"

    def open_session(self) -> SplitSession:
        if self._runtimes is None:
            raise BackendError(f"{self._info.name}: the model is closed; load it again.")
        return SplitSession(self._runtimes, self._signature, self._head.twin(), self._info)

    def close(self) -> None:
        """Drop the weights; they are freed when the last open session is closed too."""
        self._runtimes = None


class _AheadRows:
    """Rows of the lower half beyond the session's tokens: their ids, features, and whether they are exact."""

    def __init__(self, signature: Signature) -> None:
        self.tokens: list[int] = []
        self.is_exact: list[bool] = []
        self._hidden = {tap: np.empty((16, port.shape[-1] or 0), np.float32) for tap, port in signature.taps.items()}

    def clear(self) -> None:
        self.cut(0)

    def cut(self, n_rows: int) -> None:
        """Forget all but the first `n_rows`."""
        del self.tokens[n_rows:], self.is_exact[n_rows:]

    def append(self, tokens: Sequence[int], hidden: Mapping[str, Array], is_exact: bool) -> None:
        """hidden: [at least len(tokens), d] of every tap; rows beyond the tokens are filler."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        for tap, rows in self._hidden.items():
            if end > len(rows):
                self._hidden[tap] = np.concatenate([rows, np.empty_like(rows, shape=(end, rows.shape[1]))])
            self._hidden[tap][start:end] = hidden[tap][: len(tokens)]
        self.tokens += tokens
        self.is_exact += [is_exact] * len(tokens)

    def n_usable(self, tokens: Sequence[int], must_be_exact: bool) -> int:
        """How many rows are those of the first `tokens`."""
        count = 0
        for token, own, is_exact in zip(tokens, self.tokens, self.is_exact, strict=False):
            if token != own or (must_be_exact and not is_exact):
                break
            count += 1
        return count

    def rows(self, tap: str, start: int = 0) -> FloatArray:
        return self._hidden[tap][start : len(self.tokens)]


class SplitSession(OnnxSession):
    """One sequence on both halves.

    exact: row counts whose rows are the same whatever the count; where set, the lower half runs in such counts only and
    a row run otherwise is never reused. reuse: False runs every row of a forward call through both halves, to show what
    sharing is worth. n_lower_rows_run, n_upper_rows_run: rows that each half has run, filler included.
    """

    def __init__(
        self, runtimes: tuple[Any, Any], signature: SplitSignature, head: StatelessGraph, info: ModelInfo
    ) -> None:
        super().__init__(info, Capabilities())
        self.exact: ExactRows | None = None
        self.reuse = True
        self.n_lower_rows_run = 0
        self.n_upper_rows_run = 0
        self._signature = signature
        self._lower = CachedGraph(runtimes[0], signature.lower, info.n_ctx)
        self._upper = CachedGraph(runtimes[1], signature.upper, info.n_ctx)
        self._head = head
        self._ahead = _AheadRows(signature.lower)

    @property
    def n_ahead(self) -> int:
        """Tokens that only the lower half has run."""
        return len(self._ahead.tokens)

    def exit_rows(self, tokens: Sequence[int]) -> tuple[FloatArray, float]:
        """Run the lower half on `tokens`, on top of all that it holds.

        Returns [n, d] rows of the residual stream after it (a view that holds until the session's next call) and the
        seconds in the runtime. The rows are kept for the next `forward` and forgotten by `keep`. Raises ConfigError for
        tokens or a context that do not fit.
        """
        self._check_open()
        n_ahead = self.n_ahead
        check_forward(self._info, self._n_past + n_ahead, tokens, ())
        try:
            run_s = self._extend(tokens)
        except Exception as error:
            raise self._failed(len(tokens), error) from error
        return self._ahead.rows(EXIT, n_ahead), run_s

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        super().keep(n_past, path)
        self._ahead.clear()

    def close(self) -> None:
        super().close()
        self._ahead.clear()
        self._lower.close()
        self._upper.close()
        self._head.close()

    def _run(
        self,
        n_past: int,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        ahead = self._ahead
        kept = ahead.n_usable(tokens, self.exact is not None) if self.reuse else 0
        ahead.cut(kept)
        run_s = self._extend(tokens[kept:]) if kept < len(tokens) else 0.0
        upper_taps = [tap for tap in taps if tap not in self._signature.lower_taps]
        wanted = tuple(dict.fromkeys((FINAL, *upper_taps)))
        upper = self._upper.run(n_past, len(tokens), [], wanted, features=ahead.rows(EXIT))
        self.n_upper_rows_run += len(tokens)
        logits, head_s = self._logits(upper.hidden[FINAL], rows)
        hidden = {tap: upper.hidden[tap] if tap in upper_taps else ahead.rows(tap) for tap in taps}
        ahead.clear()  # their place in the buffers is the forward's now; the views above stay as they are
        return Rows(logits, hidden, run_s + upper.run_s + head_s)

    def _move(self, start: int, rows: Sequence[int]) -> None:
        raise AssertionError(f"{self._info.name}: its graphs run no trees, so there is no path of one to keep.")

    def _extend(self, tokens: Sequence[int]) -> float:
        """Lower rows of `tokens` behind those that are ahead, in an exact row count where one is set and fits."""
        n_before, n_tokens = self._n_past + self.n_ahead, len(tokens)
        width, exact = n_tokens, self.exact
        if exact is not None and n_before + exact.width(n_tokens) <= self._info.n_ctx:
            width = exact.width(n_tokens)
        is_exact = exact is not None and width == exact.width(n_tokens) and width <= exact.max_rows
        padded = [*tokens, *[tokens[-1]] * (width - n_tokens)]
        result = self._lower.run(n_before, width, [], self._signature.lower_taps, tokens=padded)
        self.n_lower_rows_run += width
        self._ahead.append(list(tokens), result.hidden, is_exact)
        return result.run_s

    def _logits(self, final: FloatArray, rows: list[int]) -> tuple[FloatArray, float]:
        """The head on the wanted rows; as many of them as the whole graph would run (see MIN_LOGITS_ROWS)."""
        if not rows:
            return np.empty((0, self._info.n_vocab), np.float32), 0.0
        n_rows = max(len(rows), min(MIN_LOGITS_ROWS, len(final)))
        picked = final[[*rows, *[rows[-1]] * (n_rows - len(rows))]]
        logits = self._head.run({"features": picked})["logits"]
        return logits[: len(rows)], self._head.run_s
