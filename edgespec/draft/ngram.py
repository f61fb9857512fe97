"""Drafts copied from the request's own tokens: what followed the longest earlier match of the current suffix.

A suffix automaton over the committed tokens finds that match in constant amortised time a token, however long the
context (SAM-Decoding, arXiv:2411.10666). It indexes committed tokens only, so nothing ever has to be rolled back; a new
request starts an empty index. Proposals are point masses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.draft.base import DraftSetup
from edgespec.types import DraftContext, FloatArray, Offer, Proposal

__all__ = ["NgramDrafter", "SuffixAutomaton", "create"]


class SuffixAutomaton:
    """All substrings of a growing token sequence; `match` is the longest suffix that also occurred earlier."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [-1]  # an end position of the state's strings before the last token
        self._last = 0
        self.match_length = 0
        self.match_end = -1

    def append(self, token: int) -> None:
        """Extend by one token; sets `match_length` and `match_end` (index of the earlier match's last token)."""
        position = len(self.tokens)
        self.tokens.append(token)
        state = self._add_state(self._length[self._last] + 1, {}, position)
        walk = self._last
        while walk != -1 and token not in self._next[walk]:
            self._next[walk][token] = state
            walk = self._link[walk]
        self._link[state] = 0 if walk == -1 else self._split(walk, token)
        self._last = state
        suffix = self._link[state]
        self.match_length, self.match_end = self._length[suffix], self._end[suffix]
        if suffix:
            self._end[suffix] = position

    def _add_state(self, length: int, follow: dict[int, int], end: int) -> int:
        self._next.append(follow)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def _split(self, walk: int, token: int) -> int:
        """The state for the longest suffix shared with `walk`'s continuation, cloned where that is longer."""
        follow = self._next[walk][token]
        if self._length[walk] + 1 == self._length[follow]:
            return follow
        clone = self._add_state(self._length[walk] + 1, dict(self._next[follow]), self._end[follow])
        self._link[clone] = self._link[follow]
        self._link[follow] = clone
        while walk != -1 and self._next[walk].get(token) == follow:
            self._next[walk][token] = clone
            walk = self._link[walk]
        return clone


class NgramDrafter:
    """Copies the continuation of the longest match of at least `min_match` tokens."""

    source = "ngram"
    taps: tuple[str, ...] = ()

    def __init__(self, min_match: int = 2) -> None:
        self.min_match = min_match
        self.reset()

    def reset(self) -> None:
        self._index = SuffixAutomaton()

    def offer(self, context: DraftContext) -> Offer:
        """Unlimited where there is a match (a match that runs into the end repeats its period), else nothing."""
        for token in context.tokens[len(self._index.tokens) :]:
            self._index.append(token)
        return Offer(max_k=len(context.tokens) if self._index.match_length >= self.min_match else 0)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        self.offer(context)
        if self._index.match_length < self.min_match:
            return Proposal([], self.source)
        tokens, start = self._index.tokens, self._index.match_end + 1
        drafted = tokens[start : start + k]
        period = len(tokens) - start
        while len(drafted) < k:
            drafted.append(drafted[len(drafted) - period])
        return Proposal(drafted, self.source)

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.reset()


def create(setup: DraftSetup) -> NgramDrafter:
    return NgramDrafter(setup.prompt_lookup_min)
