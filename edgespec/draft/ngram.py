"""Drafts copied from the request's own tokens: what followed the longest earlier match of the current suffix.

A suffix automaton over the committed tokens finds that match in constant amortised time a token, however long the
context (SAM-Decoding, arXiv:2411.10666). It indexes committed tokens only, so nothing ever has to be rolled back; a new
request starts an empty index. Proposals are point masses: the continuation of that match, or with trees also those of
shorter matches, merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.draft.base import DraftSetup, TreePlan
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.tree import merge_sequences
from edgespec.types import DraftContext, FloatArray, Offer, Proposal

__all__ = ["NgramDrafter", "SuffixAutomaton", "create"]

JUDGED_TOKENS = 8  # of every match, whether it is proposed or not
COUNTED_TOKENS = 4  # of those, in the acceptance that offers name
# Acceptance by match length before anything was seen, as (hits, tokens judged): 1, 2, 3, 4-7 and 8 tokens or more.
PRIORS = ((0.4, 2.0), (0.8, 2.0), (1.2, 2.0), (1.4, 2.0), (1.7, 2.0))


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

    def follow(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(length, end) of the longest suffix of the text with `tokens` after it that occurs in the text; adds none."""
        if not tokens:
            return self.match_length, self.match_end
        state, length = max(self._link[self._last], 0), self.match_length
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            length = length + 1 if token in self._next[state] else 0
            state = self._next[state].get(token, 0)
        return length, self._end[state]

    def matches(self) -> list[tuple[int, int]]:
        """(length, end) of the longest match and then of shorter suffixes that occurred elsewhere, longest first."""
        found: list[tuple[int, int]] = []
        state = self._link[self._last]
        while state > 0:
            end = self.match_end if not found else self._end[state]
            found.append((self._length[state], end))
            state = self._link[state]
        return found

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
    """Copies the continuation of the longest match of at least `min_match` tokens; with `tree` also those of others."""

    source = "ngram"
    taps: tuple[str, ...] = ()

    def __init__(self, min_match: int = 2, tree: TreePlan | None = None) -> None:
        self.min_match = min_match
        self.tree = tree
        self.reset()

    def reset(self) -> None:
        self._index = SuffixAutomaton()
        self._track = AcceptanceTrack(PRIORS, COUNTED_TOKENS)

    def offer(self, context: DraftContext) -> Offer:
        """Unlimited where there is a match (a match that runs into the end repeats its period), else nothing.

        The acceptance is that of earlier matches of about this length in this request.
        """
        judged = self._track.learn(context.tokens)
        for token in context.tokens[len(self._index.tokens) :]:
            self._index.append(token)
        if self._index.match_length < self.min_match:
            return Offer(max_k=0, judged=judged)
        bucket, n_tokens = _bucket(self._index.match_length), len(context.tokens)
        guess = Proposal(self._continuation(self._index.match_end, JUDGED_TOKENS), self.source)
        self._track.ask(guess, n_tokens, bucket)  # judged also where another drafter gets the round
        return Offer(n_tokens, self._track.rate(bucket), bucket, 0, judged)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        self.offer(context)
        if self._index.match_length < self.min_match:
            return Proposal([], self.source)
        if self.tree is not None:
            return self._merge(k, self.tree)
        return Proposal(self._continuation(self._index.match_end, k), self.source)

    def guess(self, context: DraftContext, k: int) -> list[int]:
        """As `edgespec.draft.base.Guesser`: the index holds committed tokens, and is followed along the others."""
        n_true = len(context.tokens) - context.n_ahead
        for token in context.tokens[len(self._index.tokens) : n_true]:
            self._index.append(token)
        length, end = self._index.follow(context.tokens[n_true:])
        return _continue(context.tokens, end, k) if length >= self.min_match else []

    def _continuation(self, end: int, n: int) -> list[int]:
        return _continue(self._index.tokens, end, n)

    def _merge(self, k: int, plan: TreePlan) -> Proposal:
        """Half of the rows for the longest match, then what followed shorter ones; the longest takes what is left."""
        matches = self._index.matches()
        ends = list(dict.fromkeys(end for length, end in matches if length >= self.min_match))[: plan.width]
        rows = min(k, plan.rows)
        sequences = [self._continuation(ends[0], -(-rows // 2))]
        sequences += [self._continuation(end, min(plan.depth, rows)) for end in ends[1:]]
        return merge_sequences([*sequences, self._continuation(ends[0], rows)], self.source, rows)

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.reset()


def _continue(tokens: list[int], end: int, n: int) -> list[int]:
    """`n` tokens as they followed position `end`; one that runs into the end of the text repeats its period."""
    start = end + 1
    drafted = tokens[start : start + n]
    period = len(tokens) - start
    while len(drafted) < n:
        drafted.append(drafted[len(drafted) - period])
    return drafted


def _bucket(length: int) -> int:
    return min(length, 3) - 1 if length < 4 else 3 if length < 8 else 4


def create(setup: DraftSetup) -> NgramDrafter:
    return NgramDrafter(setup.prompt_lookup_min, setup.tree)
