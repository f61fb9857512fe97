"""Which tokens a draft head's logits are over: a reduced vocabulary and, beside it, tokens of the context.

A head that computes logits for the frequent tokens only cannot draft a rare name, though the text may be about it; so
it also has rows for the tokens that the context held last (FR-Spec, arXiv 2502.14856). Elsewhere the draft's
probability is 0, which every rule allows. Knows ids and the layout of a row, no runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import IncompatibleError
from edgespec.types import FloatArray, IntArray

__all__ = ["N_EXTRA", "DraftVocabulary"]

N_EXTRA = 64  # extra rows of a head's logits


class DraftVocabulary:
    """base: ascending ids [V] of the head's own rows; None: its logits are over all ids.

    n_vocab: the target's vocabulary. n_extra: rows behind the base for tokens of the context. `extra`: those tokens in
    their places. `ids`: ascending ids of what `row` returns, None for the whole vocabulary.
    """

    def __init__(self, base: IntArray | None, n_vocab: int, n_extra: int = N_EXTRA) -> None:
        self.base = None if base is None else np.ascontiguousarray(base, dtype=np.int64)
        self.n_vocab = n_vocab
        self.n_extra = n_extra if base is not None else 0
        self._is_base = np.zeros(n_vocab, dtype=bool)
        if self.base is not None:
            if not len(self.base) or self.base[0] < 0 or self.base[-1] >= n_vocab or (np.diff(self.base) <= 0).any():
                raise IncompatibleError(
                    f"A reduced vocabulary of {len(self.base)} tokens must be ascending ids from 0 to {n_vocab - 1}: "
                    "this draft head belongs to another target."
                )
            self._is_base[self.base] = True
        self.reset()

    def reset(self) -> None:
        """A new request: no token of the last one's text stays."""
        self.extra: list[int] = []
        self._place: dict[int, int] = {}  # extra token -> its place, least recent first
        self._n_seen = 0
        self.ids = self.base
        self._order: NDArray[np.int64] | None = None

    def update(self, tokens: Sequence[int]) -> bool:
        """Take in the tokens that came since the last call; whether `extra` changed."""
        if self.base is None or self._n_seen == len(tokens):
            return False
        new = np.asarray(tokens[self._n_seen :], dtype=np.int64)
        self._n_seen = len(tokens)
        rare = new[~self._is_base[new]].tolist()
        changed = [self._touch(token) for token in rare]
        if any(changed):
            self._arrange()
        return any(changed)

    def _touch(self, token: int) -> bool:
        """Make `token` the most recent one; it takes the place of the least recent where all are used."""
        place = self._place.pop(token, None)
        if place is not None:
            self._place[token] = place
            return False
        if len(self.extra) < self.n_extra:
            self.extra.append(token)
            self._place[token] = len(self.extra) - 1
            return True
        if not self.n_extra:
            return False
        oldest = next(iter(self._place))
        self._place[token] = self._place.pop(oldest)
        self.extra[self._place[token]] = token
        return True

    def _arrange(self) -> None:
        assert self.base is not None
        ids = np.concatenate((self.base, np.array(self.extra, dtype=np.int64)))
        self._order = ids.argsort(kind="stable")
        self.ids = ids[self._order]

    def row(self, logits: FloatArray) -> FloatArray:
        """One row of the head's logits over `ids`; places that hold no token are left out.

        A head over all ids may have a padded vocabulary of its own: what the target does not know is cut, what the
        head does not know is -inf.
        """
        if self.base is not None:
            return logits[: len(self.base)] if self._order is None else logits.take(self._order)
        if len(logits) == self.n_vocab:
            return logits
        row = np.full(self.n_vocab, -np.inf, dtype=logits.dtype)
        n_shared = min(len(logits), self.n_vocab)
        row[:n_shared] = logits[:n_shared]
        return row

    def feed(self) -> NDArray[np.int64]:
        """[n_extra] ids for a graph's input `extra_ids`; unused places repeat a token."""
        filler = self.extra[0] if self.extra else 0
        return np.array([*self.extra, *[filler] * (self.n_extra - len(self.extra))], dtype=np.int64)
