"""The suffix automaton against a naive search, and its cost in counted steps."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.draft.ngram import NgramDrafter, SuffixAutomaton
from edgespec.noise import Noise
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import DraftContext
from edgespec.verify import create_verifier


def naive_match(tokens: list[int]) -> int:
    """Length of the longest proper suffix that also ends earlier."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        suffix = tokens[n - length :]
        if any(tokens[i : i + length] == suffix for i in range(n - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_match_is_the_longest_and_real(tokens: list[int]) -> None:
    index = SuffixAutomaton()
    for n, token in enumerate(tokens, 1):
        index.append(token)
        length, end = index.match_length, index.match_end
        assert length == naive_match(tokens[:n])
        if length:
            assert end < n - 1
            assert tokens[end - length + 1 : end + 1] == tokens[n - length : n]


def context(tokens: list[int]) -> DraftContext:
    sampler = Sampler(SamplingParams(), n_vocab=100, eos_ids=(), n_prompt=len(tokens))
    return DraftContext(tokens, sampler, Noise(0), create_verifier("coupled"), 0)


def test_proposals_copy_what_followed_the_match() -> None:
    drafter = NgramDrafter(min_match=2)
    tokens = [9, 1, 2, 3, 4, 5, 8, 1, 2]
    assert drafter.offer(context(tokens)).max_k > 0
    assert drafter.propose(context(tokens), 3).tokens == [3, 4, 5]


def test_a_match_that_runs_into_the_end_repeats_its_period() -> None:
    drafter = NgramDrafter(min_match=2)
    assert drafter.propose(context([7, 1, 2, 3, 1, 2, 3]), 5).tokens == [1, 2, 3, 1, 2]


def test_no_match_of_the_minimum_length_means_no_offer() -> None:
    drafter = NgramDrafter(min_match=3)
    assert drafter.offer(context([1, 2, 5, 1, 2])).max_k == 0
    assert len(drafter.propose(context([1, 2, 5, 1, 2]), 4)) == 0


def test_a_new_request_starts_an_empty_index() -> None:
    """An index kept between requests copied one user's text into another's drafts."""
    drafter = NgramDrafter(min_match=2)
    drafter.propose(context([1, 2, 3, 1, 2]), 2)
    drafter.reset()
    assert drafter.offer(context([1, 2])).max_k == 0


def test_work_per_token_is_flat_up_to_32k_tokens() -> None:
    """Counted in executed lines, on text that repeats and text that does not."""
    rng = np.random.default_rng(0)
    texts = {
        "random": rng.integers(0, 500, 32_768).tolist(),
        "periodic": [1, 2, 3, 4] * 8_192,
        "constant": [7] * 32_768,
    }
    for name, tokens in texts.items():
        first, last = _lines(tokens[:4_096]), _lines(tokens) - _lines(tokens[:28_672])
        assert last < 1.5 * first, name


def _lines(tokens: list[int]) -> int:
    index, count = SuffixAutomaton(), 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    old = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for token in tokens:
            index.append(token)
    finally:
        sys.settrace(old)
    return count
