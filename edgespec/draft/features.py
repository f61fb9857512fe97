"""The fused target features of every position that a drafter has observed.

The target's taps arrive after prefill chunks and commits; they are fused in batches when somebody needs them. What was
observed is compared with the committed tokens, never assumed: a new request may share only a prefix with the last.
Knows arrays and positions, no head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.draft.heads import StatelessHead
from edgespec.types import FloatArray

__all__ = ["FUSE_ROWS", "FeatureStore"]

FUSE_ROWS = 256  # positions fused in one call; a longer queue is fused at once, so that raw taps never pile up


class FeatureStore:
    """fuse: from `features` [n, n_taps * d] to `hidden.fused` [n, d]. taps: their order in that input.

    Fused features are kept as float16: half the memory, and far more digits than a 4-bit head can use.
    """

    def __init__(self, fuse: StatelessHead, taps: tuple[str, ...]) -> None:
        self._fuse = fuse
        self._taps = taps
        self._tokens: list[int] = []  # of all observed positions, fused and queued
        self._fused: NDArray[np.float16] = np.empty((0, 0), np.float16)
        self._n_fused = 0
        self._queue: list[FloatArray] = []
        self._owed_s = 0.0
        self._n_agreed = 0

    @property
    def n_observed(self) -> int:
        return len(self._tokens)

    def reset(self) -> None:
        """A new request: what is kept counts only as far as its tokens agree."""
        self._n_agreed = 0

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Take in the taps of positions from `start` on; later positions known before are forgotten.

        After a gap, which a target leaves that lost its cache, nothing is taken in.
        """
        if start > len(self._tokens):
            return
        self._cut(start)
        self._tokens += tokens
        self._queue.append(np.concatenate([hidden[tap] for tap in self._taps], axis=1, dtype=np.float32))
        if len(self._tokens) - self._n_fused >= FUSE_ROWS:
            self._owed_s += self._fuse_all()

    def _cut(self, n: int) -> None:
        """Forget all but the first n positions."""
        if n == len(self._tokens):
            return
        del self._tokens[n:]
        self._n_agreed = min(self._n_agreed, n)
        n_queued = max(0, n - self._n_fused)
        self._n_fused = min(self._n_fused, n)
        kept = np.concatenate(self._queue)[:n_queued] if n_queued else None
        self._queue = [] if kept is None else [kept]

    def agree(self, tokens: Sequence[int]) -> int:
        """Observed positions that are those of `tokens`; work is done only for what is new."""
        stop = min(len(self._tokens), len(tokens))
        i = min(self._n_agreed, stop)
        while i < stop and self._tokens[i] == tokens[i]:
            i += 1
        self._n_agreed = i
        return i

    def fuse_queue(self) -> float:
        """Fuse what is queued; seconds in the runtime since the last call."""
        run_s, self._owed_s = self._owed_s + self._fuse_all(), 0.0
        return run_s

    def _fuse_all(self) -> float:
        if not self._queue:
            return 0.0
        raw = self._queue[0] if len(self._queue) == 1 else np.concatenate(self._queue)
        self._queue = []
        run_s = 0.0
        for first in range(0, len(raw), FUSE_ROWS):
            self._store(self._fuse.run({"features": raw[first : first + FUSE_ROWS]})["hidden.fused"])
            run_s += self._fuse.run_s
        return run_s

    def _store(self, fused: NDArray[Any]) -> None:
        n = self._n_fused + len(fused)
        if n > len(self._fused):
            grown = np.empty((max(n, 2 * len(self._fused), FUSE_ROWS), fused.shape[1]), np.float16)
            if self._n_fused:
                grown[: self._n_fused] = self._fused[: self._n_fused]
            self._fused = grown
        self._fused[self._n_fused : n] = fused
        self._n_fused = n

    def features(self, start: int, stop: int) -> FloatArray:
        """[stop - start, d] float32 fused features of these positions."""
        assert stop <= self._n_fused
        return self._fused[start:stop].astype(np.float32)
