"""How often a drafter was right so far in this request: the acceptance that its offers name.

Compares what was drafted with what was committed afterwards; knows no rule and no model. A request's counts end with
it, so that what a request is offered does not depend on the ones before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgespec.types import JudgedOffer, Proposal

__all__ = ["AcceptanceTrack"]

NOTHING = JudgedOffer(0, 0, 0)


class AcceptanceTrack:
    """Chance that the next drafted token is right, given that those before it were; by bucket, if there are several.

    priors: for each bucket (hits, tokens judged) to start from. counted: the first tokens of a proposal, that count.
    """

    def __init__(self, priors: Sequence[tuple[float, float]] = ((1.1, 2.0),), counted: int = sys.maxsize) -> None:
        self._priors, self._counted = tuple(priors), counted
        self.reset()

    def reset(self) -> None:
        self._counts = [list(prior) for prior in self._priors]
        self._asked: tuple[int, int, list[int]] | None = None  # bucket, position and tokens of the last proposal

    def ask(self, proposal: Proposal, position: int, bucket: int = 0) -> Proposal:
        """Remember a proposal that begins at `position`; of a tree, the path of first children. Returns it."""
        self._asked = (bucket, position, _spine(proposal))
        return proposal

    def learn(self, tokens: Sequence[int]) -> JudgedOffer:
        """Judge the last proposal, once, by the tokens committed since: up to its first wrong one."""
        if self._asked is None or len(tokens) <= self._asked[1]:
            return NOTHING
        bucket, start, drafted = self._asked
        self._asked = None
        truth = tokens[start : start + len(drafted)]
        accepted = 0
        while accepted < len(truth) and drafted[accepted] == truth[accepted]:
            accepted += 1
        counts = self._counts[bucket]
        counts[0] += min(accepted, self._counted)
        counts[1] += min(accepted + (accepted < len(truth)), self._counted)
        return JudgedOffer(bucket, len(truth), accepted)

    def rate(self, bucket: int = 0) -> float:
        hits, judged = self._counts[bucket]
        return hits / judged


def _spine(proposal: Proposal) -> list[int]:
    if proposal.parents is None:
        return list(proposal.tokens)
    tokens, last = [], -1
    for node, parent in enumerate(proposal.parents):
        if parent == last:
            tokens.append(proposal.tokens[node])
            last = node
    return tokens
