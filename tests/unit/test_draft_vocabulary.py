"""The reduced vocabulary with tokens of the context: against a plain count of the most recent ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.errors import IncompatibleError

BASE = np.array([1, 4, 9, 16])


def recent(tokens: list[int], n: int) -> set[int]:
    """The last n different tokens outside the base."""
    found: list[int] = []
    for token in reversed(tokens):
        if token not in BASE and token not in found and len(found) < n:
            found.append(token)
    return set(found)


@given(st.lists(st.lists(st.integers(0, 19), max_size=8), max_size=8), st.integers(0, 4))
@settings(deadline=None)
def test_extra_tokens_are_the_most_recent_ones(pieces: list[list[int]], n_extra: int) -> None:
    vocabulary, tokens = DraftVocabulary(BASE, 20, n_extra), []
    for piece in pieces:
        before = list(vocabulary.extra)
        tokens = [*tokens, *piece]
        changed = vocabulary.update(tokens)
        assert changed or vocabulary.extra == before
        assert set(vocabulary.extra) == recent(tokens, n_extra)
        assert len(vocabulary.feed()) == n_extra
        assert vocabulary.ids is not None
        assert vocabulary.ids.tolist() == sorted({*BASE.tolist(), *vocabulary.extra})
        # a head's row: its own tokens, the extra ones, and filled places that must never be seen
        logits = np.array([*BASE, *vocabulary.extra, *[999] * (n_extra - len(vocabulary.extra))], np.float32)
        assert vocabulary.row(logits).tolist() == vocabulary.ids.tolist()
    vocabulary.reset()
    assert vocabulary.extra == []
    assert vocabulary.update([3]) == (n_extra > 0)


def test_a_full_vocabulary_passes_rows_on_and_fits_padded_ones() -> None:
    vocabulary = DraftVocabulary(None, 6)
    row = np.arange(6.0)
    assert vocabulary.row(row) is row
    assert vocabulary.ids is None
    assert not vocabulary.update([1, 2])
    assert vocabulary.row(np.arange(8.0)).tolist() == row.tolist()
    assert vocabulary.row(np.arange(4.0)).tolist() == [0, 1, 2, 3, -np.inf, -np.inf]


@pytest.mark.parametrize("base", [[], [3, 2], [1, 1], [-1, 4], [3, 20]])
def test_ids_that_are_none_of_the_targets_are_refused(base: list[int]) -> None:
    with pytest.raises(IncompatibleError, match="belongs to another target"):
        DraftVocabulary(np.array(base), 20)
