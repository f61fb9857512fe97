"""Draft heads without weights, for tests: right only where they are fed exactly what they should be.

A target's features encode the position, its last tokens and a digest of its whole prefix. An `EagleHead` rebuilds the
prefix from the pairs that it is fed and answers with its draft's row for that prefix; one pair out of place, a feature
of the wrong position or a drafted feature where a true one belongs, and it answers nonsense and notes why. The heads
of the other kinds work alike. With a draft equal to the target, acceptance is 1 only if all bookkeeping is right.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CacheError
from edgespec.testing.table import TableModel, TableSession
from edgespec.types import FloatArray, IntArray, ModelInfo, Rows

__all__ = ["EagleHead", "ExitHead", "MedusaHead", "ReducedTable", "SplitTable", "encode_feature", "feature_target"]

N_RECENT = 3  # last tokens that a feature holds; heads without a cache need draft tables of at most one more
FUSED, OWN = 2.0, 1.0  # mark of a fused feature, and of one that a head made itself
MODULUS = 2039  # below 2048, so that float16 holds every number


def encode_feature(prefix: Sequence[int], tap: str) -> FloatArray:
    """[8] float32: position, last three tokens (-1 for none), two digest numbers, the tap's own number, 0."""
    recent = [*reversed(prefix[-N_RECENT:]), *[-1] * (N_RECENT - len(prefix))]
    digest = zlib.crc32(np.array(prefix, dtype=np.int64).tobytes())
    numbers = [len(prefix) - 1, *recent, digest % MODULUS, digest // MODULUS % MODULUS, _tap_number(tap), 0]
    return np.array(numbers, dtype=np.float32)


def _tap_number(tap: str) -> int:
    return zlib.crc32(tap.encode()) % 1000


def feature_target(n_vocab: int = 16, *, taps: Sequence[str] = ("low", "final"), **options: Any) -> TableModel:
    """A table model whose features encode its prefix."""
    return TableModel(n_vocab, taps=taps, feature=encode_feature, **options)


class _Columns:
    """The columns of a reduced head's logits: its vocabulary, then the extra tokens, their places filled up."""

    def __init__(self, vocabulary: Sequence[int] | None, n_extra: int, n_vocab: int) -> None:
        self.vocabulary: IntArray | None = None if vocabulary is None else np.array(vocabulary, dtype=np.int64)
        self.n_extra = n_extra if vocabulary is not None else 0
        self.width = n_vocab if self.vocabulary is None else len(self.vocabulary) + n_extra

    def of(self, logits: FloatArray, extra: Sequence[int]) -> FloatArray:
        """[n, V + n_extra] of [n, n_vocab]; filled places are the best of all, so that nobody may forget the mask."""
        if self.vocabulary is None:
            return logits
        filled = np.full((len(logits), self.n_extra - len(extra)), 1e3, logits.dtype)
        picked = logits[:, np.concatenate((self.vocabulary, np.array(extra, dtype=np.int64)))]
        return np.concatenate((picked, filled), axis=1)


class ReducedTable:
    """`draft` as a model with a reduced vocabulary, like a TinyDraft bundle."""

    def __init__(self, draft: TableModel, vocabulary: Sequence[int] | None = None, n_extra: int = 4) -> None:
        self.inner = draft
        self.columns = _Columns(vocabulary, n_extra, draft.info.n_vocab)
        self.vocabulary = self.columns.vocabulary
        self.draft: Mapping[str, Any] = {"kind": "tinydraft", "n_extra": self.columns.n_extra}

    @property
    def info(self) -> ModelInfo:
        return dataclasses.replace(self.inner.info, n_vocab=self.columns.width)

    def open_session(self) -> ReducedSession:
        return ReducedSession(self.inner.open_session(), self.columns)

    def close(self) -> None:
        self.inner.close()


class ReducedSession:
    """A session of the inner model whose logits are cut to the columns."""

    def __init__(self, inner: TableSession, columns: _Columns) -> None:
        self.inner = inner
        self.columns = columns
        self.extra: list[int] = []

    @property
    def n_past(self) -> int:
        return self.inner.n_past

    def set_extra(self, ids: Sequence[int]) -> None:
        assert self.columns.vocabulary is not None
        assert len(set(ids)) == len(ids) <= self.columns.n_extra
        assert not np.isin(ids, self.columns.vocabulary).any()
        self.extra = list(ids)

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
        features: FloatArray | None = None,
    ) -> Rows:
        assert features is None
        rows = self.inner.forward(tokens, parents=parents, logits_rows=logits_rows, taps=taps)
        return Rows(self.columns.of(rows.logits, self.extra), rows.hidden, rows.run_s)

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        self.inner.keep(n_past, path)

    def close(self) -> None:
        self.inner.close()


class EagleHead:
    """An EAGLE head over `draft`, for targets made by `feature_target`. `mistakes`: what it was fed wrongly.

    Inside it is a table model over pairs: every pair of a feature and a token gets a number of its own.
    """

    def __init__(
        self,
        draft: TableModel,
        vocabulary: Sequence[int] | None = None,
        n_extra: int = 4,
        *,
        taps: Sequence[str] = ("low", "final"),
        n_ctx: int = 256,
        tree: bool = True,
        max_rewind: int | None = None,
        refuse_keep: bool = False,
    ) -> None:
        self.base = draft
        self.columns = _Columns(vocabulary, n_extra, draft.info.n_vocab)
        self.vocabulary = self.columns.vocabulary
        self.draft: Mapping[str, Any] = {"kind": "eagle", "taps": list(taps), "n_extra": self.columns.n_extra}
        self.fuse = FuseHead(taps)
        self.mistakes: list[str] = []
        self._pairs: list[tuple[tuple[float, ...], int]] = []
        self._number: dict[tuple[tuple[float, ...], int], int] = {}
        self.inner = TableModel(
            draft.info.n_vocab,
            n_ctx=n_ctx,
            name="eagle",
            tree=tree,
            taps=("own",),
            table=self._row,
            feature=self._own,
            n_ids=1 << 40,
            dtype=draft.options.dtype,
            max_rewind=max_rewind,
            refuse_keep=refuse_keep,
        )

    @property
    def info(self) -> ModelInfo:
        return dataclasses.replace(self.inner.info, n_vocab=self.columns.width)

    def open_session(self) -> EagleSession:
        return EagleSession(self)

    def close(self) -> None:
        self.inner.close()

    def number(self, feature: FloatArray, token: int) -> int:
        """The pair's number in the inner model."""
        pair = (tuple(feature.tolist()), token)
        if pair not in self._number:
            self._number[pair] = len(self._pairs)
            self._pairs.append(pair)
        return self._number[pair]

    def _tokens(self, prefix: Sequence[int]) -> list[int] | str:
        """The text that the pairs spell, or what is wrong with them."""
        tokens: list[int] = []
        has_own = False
        for place, number in enumerate(prefix):
            feature, token = self._pairs[number]
            if not tokens:
                tokens.append(int(feature[1]))
            is_own = feature[7] == OWN
            expected = encode_feature(tokens, "final")
            if list(feature[:6]) != expected[:6].tolist():
                return f"row {place} has the feature {feature}, the text so far {tokens} has {expected.tolist()}"
            if not is_own and feature[7] != FUSED:
                return f"row {place} has a feature that was never fused"
            if has_own and not is_own:
                return f"row {place} has a true feature after a drafted one"
            has_own |= is_own
            tokens.append(token)
        return tokens

    def _row(self, prefix: tuple[int, ...]) -> FloatArray:
        tokens = self._tokens(prefix)
        if isinstance(tokens, list):
            return self.base.row(tokens)
        self.mistakes.append(tokens)
        return np.random.default_rng(len(prefix)).standard_normal(self.base.info.n_vocab) * 9

    def _own(self, prefix: tuple[int, ...], tap: str) -> FloatArray:
        tokens = self._tokens(prefix)
        feature = encode_feature(tokens if isinstance(tokens, list) else [0], tap)
        feature[7] = OWN
        return feature


class EagleSession(ReducedSession):
    """Rows are pairs of a feature and a token."""

    def __init__(self, model: EagleHead) -> None:
        super().__init__(model.inner.open_session(), model.columns)
        self.model = model

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
        features: FloatArray | None = None,
    ) -> Rows:
        assert features is not None
        assert features.dtype == np.float32
        assert len(features) == len(tokens)
        pairs = [self.model.number(feature, int(token)) for feature, token in zip(features, tokens, strict=True)]
        rows = self.inner.forward(pairs, parents=parents, logits_rows=logits_rows, taps=taps)
        return Rows(self.columns.of(rows.logits, self.extra), rows.hidden, rows.run_s)


class FuseHead:
    """Checks that the taps are of one position and in order, and passes the encoding on, marked as fused."""

    def __init__(self, taps: Sequence[str]) -> None:
        self.taps = tuple(taps)
        self.run_s = 0.0
        self.rows: list[int] = []  # positions of each call

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        parts = _split_taps(feeds["features"], self.taps)
        self.rows.append(len(parts[0]))
        fused = parts[0].copy()
        fused[:, 6] = 0
        fused[:, 7] = FUSED
        return {"hidden.fused": fused}


def _split_taps(features: NDArray[Any], taps: tuple[str, ...]) -> list[NDArray[Any]]:
    """[n, 8] of each tap, after a check that all encode the same position."""
    parts = np.split(features, len(taps), axis=1)
    for tap, part in zip(taps, parts, strict=True):
        assert (part[:, 6] == _tap_number(tap)).all(), f"the taps are not in the order {taps}"
        assert (part[:, :6] == parts[0][:, :6]).all()
    return parts


def _recent(feature: NDArray[Any]) -> list[int]:
    """The last tokens of the feature's prefix, oldest first."""
    return [int(token) for token in feature[N_RECENT:0:-1] if token >= 0]


class MedusaHead:
    """Head j guesses j places further along the draft's most likely continuation; draft tables of order <= 4."""

    def __init__(
        self,
        draft: TableModel,
        n_heads: int = 3,
        vocabulary: Sequence[int] | None = None,
        n_extra: int = 4,
        *,
        taps: Sequence[str] = ("low", "final"),
    ) -> None:
        self.base = draft
        self.columns = _Columns(vocabulary, n_extra, draft.info.n_vocab)
        self.vocabulary = self.columns.vocabulary
        self.draft: Mapping[str, Any] = {
            "kind": "medusa",
            "taps": list(taps),
            "n_heads": n_heads,
            "n_extra": self.columns.n_extra,
        }
        self.run_s = 0.0

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        feature = _split_taps(feeds["features"], tuple(self.draft["taps"]))[0][0]
        tokens = [*_recent(feature), int(feeds["input_ids"][0, 0])]
        rows = []
        for _ in range(self.draft["n_heads"]):
            rows.append(self.base.row(tokens))
            tokens.append(int(rows[-1].argmax()))
        return {"logits": self.columns.of(np.stack(rows), _extra(feeds, self.columns))}


class ExitHead:
    """The exit of a `SplitTable`: the draft's row after the tokens that the hidden row encodes."""

    def __init__(self, draft: TableModel, vocabulary: Sequence[int] | None = None, n_extra: int = 4) -> None:
        self.base = draft
        self.columns = _Columns(vocabulary, n_extra, draft.info.n_vocab)
        self.vocabulary = self.columns.vocabulary
        self.draft: Mapping[str, Any] = {"kind": "exit", "n_extra": self.columns.n_extra}
        self.run_s = 0.0

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        features = _split_taps(feeds["features"], ("exit",))[0]
        rows = np.stack([self.base.row(_recent(feature)) for feature in features])
        return {"logits": self.columns.of(rows, _extra(feeds, self.columns))}


def _extra(feeds: Mapping[str, NDArray[Any]], columns: _Columns) -> list[int]:
    """The different ids of `extra_ids`, as long as they are outside the vocabulary: the rest is filling."""
    if columns.vocabulary is None:
        return []
    ids = feeds["extra_ids"].tolist()
    assert len(ids) == columns.n_extra
    return [token for token in dict.fromkeys(ids) if token not in columns.vocabulary]


class SplitTable(TableModel):
    """A target in two parts: its sessions run the lower one ahead."""

    def open_session(self) -> SplitTableSession:
        self._n_sessions += 1
        return SplitTableSession(self, self._n_sessions - 1)


class SplitTableSession(TableSession):
    """`ahead`: tokens that only the lower part has run; the next forward pass has to begin with them."""

    def __init__(self, model: TableModel, index: int) -> None:
        super().__init__(model, index)
        self.ahead: list[int] = []

    def exit_rows(self, tokens: Sequence[int]) -> tuple[FloatArray, float]:
        """(hidden [n, d], seconds) of `tokens` after the lower part's cache."""
        if self.n_past + len(self.ahead) + len(tokens) > self.model.info.n_ctx:
            raise CacheError(f"{self.model.info.name}: the lower part's rows run over the context.")
        rows = []
        for token in tokens:
            self.ahead.append(token)
            rows.append(encode_feature([*self.tokens, *self.ahead], "exit"))
        return np.stack(rows), 0.0

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        assert list(tokens[: len(self.ahead)]) == self.ahead, "other tokens than those run ahead"
        self.ahead = []
        return super().forward(tokens, parents=parents, logits_rows=logits_rows, taps=taps)

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        self.ahead = []
        super().keep(n_past, path)
