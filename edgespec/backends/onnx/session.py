"""One sequence on a loaded graph: what a forward or keep call may ask for, and how many tokens are cached.

`OnnxSession` holds what all kinds have in common; `SharedCacheSession` runs graphs that update their KV cache in place.
Knows nothing of folders and devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.backends.base import check_finite, check_forward, check_keep, check_parents, check_path, is_chain
from edgespec.backends.onnx.buffers import close_at_exit
from edgespec.backends.onnx.cached import CachedGraph
from edgespec.backends.onnx.devices import short_message
from edgespec.backends.onnx.signature import Signature
from edgespec.backends.onnx.vocabulary import ReducedVocabulary
from edgespec.errors import BackendError, CacheError, ConfigError, EdgeSpecError
from edgespec.types import FloatArray, ModelInfo, Rows

__all__ = ["Capabilities", "OnnxSession", "SharedCacheSession"]


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
    """The checks, the split into runs, the lengths.

    n_features: channels that `forward(features=)` must bring, 0 for graphs of tokens alone. n_ids: token ids go up to
    it, None for the width of the logits.
    """

    def __init__(
        self, info: ModelInfo, capabilities: Capabilities, *, n_features: int = 0, n_ids: int | None = None
    ) -> None:
        self._info = info
        self._capabilities = capabilities
        self._n_features = n_features
        self._n_ids = n_ids
        self._n_past = 0
        self._n_last = 0  # tokens of the last pass, which a path may refer to
        self._parents: Sequence[int] | None = None  # of a tree pass that `keep` has not yet seen
        self._is_closed = False
        close_at_exit(self)

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
        features: FloatArray | None = None,
    ) -> Rows:
        """Run `tokens` on top of the cache; see `edgespec.types.Session`.

        features: [n_tokens, d] float32, for a graph that takes a feature beside each token. After a tree pass only
        `keep` may follow.
        """
        self._check_open()
        rows = check_forward(self._info, self._n_past, tokens, logits_rows, taps, self._n_ids)
        if parents is not None:
            parents = self._tree(tokens, parents)
        if features is not None or self._n_features:
            self._check_features(len(tokens), features)
        if self._parents is not None:
            raise CacheError(
                f"{self._info.name}: a tree pass is cached; keep a path of it before the next forward pass."
            )
        try:
            result = self._run_segments(tokens, rows, tuple(taps), features, parents)
        except EdgeSpecError:
            raise
        except Exception as error:
            raise self._failed(len(tokens), error) from error
        check_finite(self._info.name, result.logits, self._n_past, rows)
        self._n_past += len(tokens)
        self._n_last = len(tokens)
        self._parents = parents
        return result

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        """Forget all but the first `n_past` tokens; see `edgespec.types.Session`."""
        self._check_open()
        check_keep(self._info, self._n_past, n_past)
        base = self._n_past - self._n_last
        if path is not None:
            check_path(self._parents, self._n_last, path)
            if n_past != base + len(path):
                raise CacheError(
                    f"{self._info.name}: keep({n_past}) after a path of {len(path)} tokens on {base} cached ones."
                )
        elif self._parents is not None and n_past > base:
            raise CacheError(
                f"{self._info.name}: a tree pass on {base} tokens is cached, so keep({n_past}) needs a path."
            )
        if n_past not in (0, self._n_past) and not self._capabilities.can_rewind:
            raise CacheError(
                f"{self._info.name}: its cache cannot go back from {self._n_past} to {n_past} tokens, only to 0."
            )
        if self._parents is not None and path:
            self._move(base, [base + index for index in path])
        self._n_last, self._parents = 0, None
        self._n_past = n_past

    def close(self) -> None:
        self._is_closed = True
        self._n_past = self._n_last = 0
        self._parents = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise CacheError(f"{self._info.name}: this session is closed; open another one.")

    def _failed(self, n_tokens: int, error: Exception) -> BackendError:
        return BackendError(
            f"{self._info.name}: onnxruntime failed on {n_tokens} tokens after {self._n_past}: {short_message(error)}"
        )

    def _tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[int] | None:
        """The parents of a call that is no chain; raises ConfigError where the graph cannot run it."""
        check_parents(self._info, len(tokens), parents)
        if is_chain(parents):
            return None
        if not self._info.tree:
            raise ConfigError(
                f"{self._info.name}: this graph has no tree inputs: draft chains, or load a bundle that was exported "
                "with --tree as a tree."
            )
        return list(parents)

    def _check_features(self, n_tokens: int, features: FloatArray | None) -> None:
        wanted = (n_tokens, self._n_features)
        if features is None:
            raise ConfigError(
                f"{self._info.name}: its graph takes a feature beside each token: give features {wanted}."
            )
        if not self._n_features:
            raise ConfigError(f"{self._info.name}: its graph takes no features, got {features.shape}.")
        if features.shape != wanted:
            raise ConfigError(f"{self._info.name}: features are {features.shape}, the call takes {wanted}.")

    def _run_segments(
        self,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        """One run, or several where the graph cannot answer the call in one."""
        if self._capabilities.max_rows is None:
            return self._run(self._n_past, tokens, rows, taps, features, parents)
        can_skip = self._capabilities.rows_on_past
        ends = sorted({row + 1 for row in rows} | {len(tokens)}) if can_skip else range(1, len(tokens) + 1)
        logits: dict[int, FloatArray] = {}
        start, run_s = 0, 0.0
        for end in ends:
            wanted = [end - 1 - start] if end - 1 in rows else []
            part = self._run(self._n_past + start, tokens[start:end], wanted, (), None, None)
            run_s += part.run_s
            if wanted:
                logits[end - 1] = part.logits[0].copy()
            start = end
        empty = np.empty((0, self._info.n_vocab), np.float32)
        return Rows(np.stack([logits[row] for row in rows]) if rows else empty, run_s=run_s)

    @abstractmethod
    def _run(
        self,
        n_past: int,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        """One run of the graph; changes no length. `features` and `parents` only where the graph takes them."""

    @abstractmethod
    def _move(self, start: int, rows: Sequence[int]) -> None:
        """Make the cached tokens `rows` the ones from `start` on; only asked of graphs that run trees."""


class SharedCacheSession(OnnxSession):
    """Past and present are the same OrtValue, so no call copies the cache."""

    def __init__(
        self,
        runtime: Any,
        signature: Signature,
        info: ModelInfo,
        capabilities: Capabilities,
        vocabulary: ReducedVocabulary | None = None,
    ) -> None:
        n_ids = None if vocabulary is None else vocabulary.n_full
        super().__init__(info, capabilities, n_features=signature.n_features, n_ids=n_ids)
        self._graph = CachedGraph(runtime, signature, info.n_ctx, last_row_only=capabilities.last_row_only)
        self._vocabulary = vocabulary
        self._n_live = (
            info.n_vocab if vocabulary is None else len(vocabulary.ids)
        )  # logits columns that stand for a token

    @property
    def capacity(self) -> int:
        """Tokens that the present buffers hold before they grow."""
        return self._graph.capacity

    def set_extra(self, ids: Sequence[int]) -> None:
        """Tokens that the last logits columns are of from now on, beside the reduced vocabulary; the rest are -inf.

        Raises ConfigError where there is no reduced vocabulary, or for ids that do not fit.
        """
        vocabulary = self._vocabulary
        if vocabulary is None:
            raise ConfigError(
                f"{self._info.name}: its logits are over the whole vocabulary, so it takes no extra tokens."
            )
        vocabulary.check_extra(self._info.name, ids)
        self._graph.extra[: len(ids)] = ids
        self._graph.extra[len(ids) :] = vocabulary.ids[0]
        self._n_live = len(vocabulary.ids) + len(ids)

    def close(self) -> None:
        super().close()
        self._graph.close()

    def _run(
        self,
        n_past: int,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int] | None,
    ) -> Rows:
        if parents is not None and n_past == 0:
            result = self._run_first_tree(tokens, rows, taps, features, parents)
        else:
            result = self._graph.run(n_past, len(tokens), rows, taps, tokens=tokens, features=features, parents=parents)
        if self._n_live < self._info.n_vocab:
            result.logits[:, self._n_live :] = -np.inf
        return result

    def _run_first_tree(
        self,
        tokens: Sequence[int],
        rows: list[int],
        taps: tuple[str, ...],
        features: FloatArray | None,
        parents: Sequence[int],
    ) -> Rows:
        """A tree on an empty cache: the chain that it begins with (a prompt, mostly), then the others on top of it.

        The attention operator numbers the rows of a first call in their order, whatever the positions say. The whole
        chain goes first, as plain decoding runs it: with int8 activations, rows computed otherwise differ by whole
        logits.
        """
        n_first = next(i for i, parent in enumerate(parents) if parent != i - 1)
        own, rest = (None, None) if features is None else (features[:n_first], features[n_first:])
        known = sorted({row for row in rows if row < n_first})
        first = self._graph.run(0, n_first, known, taps, tokens=tokens[:n_first], features=own)
        logits = {row: first.logits[i].copy() for i, row in enumerate(known)}
        hidden = {tap: array.copy() for tap, array in first.hidden.items()}
        others = sorted({row - n_first for row in rows if row >= n_first})
        n_others = len(tokens) - n_first
        result = self._graph.run(
            n_first, n_others, others, taps, tokens=tokens[n_first:], features=rest, parents=parents, n_done=n_first
        )
        logits.update((row + n_first, result.logits[i]) for i, row in enumerate(others))
        return Rows(
            np.stack([logits[row] for row in rows]) if rows else result.logits,
            {tap: np.concatenate([array, result.hidden[tap]]) for tap, array in hidden.items()},
            first.run_s + result.run_s,
        )

    def _move(self, start: int, rows: Sequence[int]) -> None:
        self._graph.move(start, rows)
