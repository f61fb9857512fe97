"""A model whose logits are a plain function of the tokens so far, with a log of every call.

The test double of the project: a real Model and Session (cache, rewinds, trees, taps, limits, refusals) without any
weights, cheap enough for thousands of calls a second. It knows no runtime and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from edgespec.backends.base import check_finite, check_forward, check_keep, check_path, is_chain
from edgespec.errors import BackendError, CacheError, ConfigError
from edgespec.types import FloatArray, ModelInfo, Rows

__all__ = ["ForwardCall", "KeepCall", "TableModel", "TableSession", "check_log"]

Table = Mapping[tuple[int, ...], ArrayLike] | Callable[[tuple[int, ...]], ArrayLike]
Feature = Callable[[tuple[int, ...], str], ArrayLike]


@dataclass(frozen=True)
class ForwardCall:
    """One forward pass as it was asked for; `rows` are the logits rows that were returned."""

    session: int
    n_past: int
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    taps: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeepCall:
    """One rewind: `before` cached tokens became `n_past`."""

    session: int
    before: int
    n_past: int
    path: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TableOptions:
    """How the logits are made and where the model gives up; see TableModel."""

    seed: int = 0
    order: int = 2
    scale: float = 3.0
    table: Table | None = None
    noise: float = 0.0
    noise_seed: int = 1
    dtype: type[np.floating[Any]] = np.float32
    window: int | None = None
    max_rows: int | None = None
    refuse_keep: bool = False
    nan_at: Collection[int] = ()
    guard: bool = True
    fail_at: Collection[int] = ()
    inexact_rows: Collection[int] = ()
    n_hidden: int = 8
    feature: Feature | None = None
    n_ids: int | None = None


class TableModel:
    """Logits from a table; every session of it writes to one `log`.

    n_vocab, n_ctx, eos_ids, name, tokenizer_hash, max_rewind, tree, taps: as in ModelInfo. `max_rewind` counts from the
    longest the cache has been since it was last empty, as a ring buffer does; keep(0) always works.
    Further keywords are TableOptions:
    table: a mapping from the last `order` tokens (fewer at the start) to logits, or a function of the whole prefix;
        None draws normal logits of deviation `scale` from (seed, last `order` tokens).
    noise: deviation of what is added to every row, so that the same seed with noise is a draft near its target.
    window: only the last `window` tokens are visible, and only `window` + max_rewind are kept.
    max_rows: longer calls raise ConfigError. refuse_keep: every partial keep raises CacheError, undeclared in `info`.
    nan_at: absolute positions whose row is NaN; `guard` False returns them instead of raising NumericsError.
    fail_at: absolute positions at which a pass raises BackendError, as a device that goes away does.
    inexact_rows: row counts of a call at which all rows differ by about 1e-3, as another kernel's would.
    feature: the taps' rows as a function of (whole prefix, tap); None draws `n_hidden` numbers from the last tokens.
    n_ids: token ids go up to it, None for n_vocab.
    """

    def __init__(
        self,
        n_vocab: int = 16,
        *,
        n_ctx: int = 256,
        eos_ids: Sequence[int] = (),
        name: str = "table",
        tokenizer_hash: str | None = None,
        max_rewind: int | None = None,
        tree: bool = True,
        taps: Sequence[str] = ("final",),
        **options: Any,
    ) -> None:
        self.options = TableOptions(**options)
        self.log: list[ForwardCall | KeepCall] = []
        self._cache: dict[tuple[int, ...], FloatArray] = {}
        self._n_sessions = 0
        self._info = ModelInfo(
            name=name,
            n_vocab=n_vocab,
            n_ctx=n_ctx,
            eos_ids=tuple(eos_ids),
            tokenizer_hash=tokenizer_hash,
            weight_bytes=0,
            kv_bytes_per_token=0,
            max_rewind=max_rewind,
            max_rows=self.options.max_rows,
            tree=tree,
            taps=tuple(taps),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def forwards(self) -> list[ForwardCall]:
        """The forward passes of all sessions, in order."""
        return [call for call in self.log if isinstance(call, ForwardCall)]

    @property
    def keeps(self) -> list[KeepCall]:
        """The rewinds of all sessions, in order."""
        return [call for call in self.log if isinstance(call, KeepCall)]

    def open_session(self) -> TableSession:
        self._n_sessions += 1
        return TableSession(self, self._n_sessions - 1)

    def close(self) -> None:
        self._cache.clear()

    def row(self, prefix: Sequence[int]) -> FloatArray:
        """[n_vocab] read-only logits of the token after `prefix`; what a forward pass returns for it."""
        options = self.options
        seen = tuple(prefix) if options.window is None else tuple(prefix[-options.window :])
        if not callable(options.table):
            seen = seen[len(seen) - options.order :] if options.order < len(seen) else seen
        row = self._cache.get(seen)
        if row is None:
            row = self._compute(seen)
            row.flags.writeable = False
            self._cache[seen] = row
        return row

    def _compute(self, seen: tuple[int, ...]) -> FloatArray:
        options = self.options
        if options.table is None:
            base = options.scale * np.random.default_rng([options.seed, 0, *seen]).standard_normal(self._info.n_vocab)
        else:
            base = np.array(options.table(seen) if callable(options.table) else options.table[seen], np.float64)
            if base.shape != (self._info.n_vocab,):
                raise ConfigError(
                    f"table row {seen} has shape {base.shape}, the model has {self._info.n_vocab} tokens."
                )
        if options.noise:
            rng = np.random.default_rng([options.noise_seed, 1, *seen])
            base = base + options.noise * rng.standard_normal(self._info.n_vocab)
        result: FloatArray = base.astype(options.dtype)
        return result

    def feature(self, prefix: Sequence[int], tap: str) -> FloatArray:
        """[n_hidden] float32 fake feature of the last token of `prefix`; by default the last four tokens decide."""
        if self.options.feature is not None:
            return np.asarray(self.options.feature(tuple(prefix), tap), np.float32)
        rng = np.random.default_rng([self.options.seed, 2, *tap.encode(), *prefix[-4:]])
        return rng.standard_normal(self.options.n_hidden, np.float32)


class TableSession:
    """The cache is the list of tokens itself (`tokens`)."""

    def __init__(self, model: TableModel, index: int) -> None:
        self.model = model
        self.index = index
        self.tokens: list[int] = []  # after a tree pass: the committed prefix, without the pass
        self._last: list[int] = []
        self._parents: list[int] | None = None
        self._peak = 0
        self._is_closed = False

    @property
    def n_past(self) -> int:
        return len(self.tokens) + (len(self._last) if self._parents is not None else 0)

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        info, n_past = self.model.info, self.n_past
        self._check_open()
        rows = check_forward(info, n_past, tokens, logits_rows, taps, self.model.options.n_ids)
        self._check_shape(tokens, parents)
        if any(n_past + i in self.model.options.fail_at for i in range(len(tokens))):
            raise BackendError(f"{info.name}: the device is gone after {n_past} tokens.")
        prefixes = self._prefixes(tokens, parents)
        logits = np.empty((len(rows), info.n_vocab), self.model.options.dtype)
        for i, row in enumerate(rows):
            logits[i] = self.model.row(prefixes[row])
            if len(prefixes[row]) - 1 in self.model.options.nan_at:
                logits[i] = np.nan
        if len(tokens) in self.model.options.inexact_rows:
            logits += 1e-3 * np.random.default_rng(len(tokens)).standard_normal(info.n_vocab).astype(logits.dtype)
        call = ForwardCall(
            self.index, n_past, tuple(tokens), tuple(rows), None if parents is None else tuple(parents), tuple(taps)
        )
        self.model.log.append(call)
        if self.model.options.guard:
            check_finite(info.name, logits, n_past, rows)
        self._append(tokens, parents)
        hidden = {tap: np.stack([self.model.feature(prefix, tap) for prefix in prefixes]) for tap in taps}
        return Rows(logits, hidden)

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        info, before = self.model.info, self.n_past
        self._check_open()
        check_keep(info, before, n_past)
        base = len(self.tokens) - (len(self._last) if self._parents is None else 0)
        if path is not None:
            check_path(self._parents, len(self._last), path)
            if n_past != base + len(path):
                raise CacheError(f"{info.name}: keep({n_past}) after a path of {len(path)} on {base} cached tokens.")
        elif self._parents is not None and n_past > base:
            raise CacheError(f"{info.name}: a tree pass on {base} tokens is cached, so keep({n_past}) needs a path.")
        self._check_rewind(before, n_past)
        kept = [] if path is None else [self._last[index] for index in path]
        self.tokens = self.tokens[:base] + kept if path is not None else self.tokens[:n_past]
        self._last, self._parents = [], None
        self._peak = 0 if n_past == 0 else self._peak
        self.model.log.append(KeepCall(self.index, before, n_past, None if path is None else tuple(path)))

    def close(self) -> None:
        self._is_closed = True
        self.tokens, self._last, self._parents = [], [], None

    def _check_open(self) -> None:
        if self._is_closed:
            raise CacheError(f"{self.model.info.name}: this session is closed; open another one.")

    def _check_shape(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        info, limit = self.model.info, self.model.options.max_rows
        if limit is not None and len(tokens) > limit:
            raise ConfigError(f"{info.name}: {len(tokens)} rows in one call, it takes at most {limit}.")
        if self._parents is not None:
            raise CacheError(f"{info.name}: a tree pass is cached; keep a path of it before the next forward pass.")
        if parents is None:
            return
        if not info.tree and not is_chain(parents):
            raise ConfigError(f"{info.name}: cannot run trees; use a chain.")
        if len(parents) != len(tokens) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise ConfigError(f"{info.name}: parents {list(parents)} do not describe a tree over {len(tokens)} tokens.")

    def _prefixes(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[list[int]]:
        options = self.model.options
        is_short = options.table is None and options.feature is None and not options.nan_at and options.order < 4
        start = self.tokens[-4:] if is_short else self.tokens
        prefixes: list[list[int]] = []
        for i, token in enumerate(tokens):
            parent = i - 1 if parents is None else parents[i]
            prefixes.append([*(prefixes[parent] if parent >= 0 else start), int(token)])
        return prefixes

    def _append(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        self._last = [int(token) for token in tokens]
        self._parents = None if is_chain(parents) else list(parents or ())
        if self._parents is None:
            self.tokens.extend(self._last)
        self._peak = max(self._peak, self.n_past)

    def _check_rewind(self, before: int, n_past: int) -> None:
        info = self.model.info
        if n_past in (0, before):
            return
        if self.model.options.refuse_keep:
            raise CacheError(f"{info.name}: the cache refused to go back from {before} to {n_past} tokens.")
        if info.max_rewind is not None and self._peak - n_past > info.max_rewind:
            raise CacheError(
                f"{info.name}: from {self._peak} back to {n_past} tokens is more than the {info.max_rewind} it can."
            )


def check_log(model: TableModel) -> None:
    """Raise AssertionError where a session's calls are not contiguous: each begins where the one before left off."""
    lengths: dict[int, int] = {}
    for call in model.log:
        before = lengths.get(call.session, 0)
        if isinstance(call, ForwardCall):
            assert call.n_past == before, f"session {call.session}: forward at {call.n_past}, the cache held {before}"
            lengths[call.session] = call.n_past + len(call.tokens)
        else:
            assert call.before == before, f"session {call.session}: keep from {call.before}, the cache held {before}"
            lengths[call.session] = call.n_past
