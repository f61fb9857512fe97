"""How often a drafter was right so far in this request: the acceptance that its offers name.

Compares what was drafted with what was committed afterwards; knows no rule and no model. A request's counts end with
it, so that what a request is offered does not depend on the ones before.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.types import Proposal

__all__ = ["AcceptanceTrack"]


class AcceptanceTrack:
    """Chance that the next drafted token is right, given that those before it were; by bucket, if there are several.

    priors: for each bucket (hits, tokens judged) to start from.
    """

    def __init__(self, priors: Sequence[tuple[float, float]] = ((1.1, 2.0),)) -> None:
        self._priors = tuple(priors)
        self.reset()

    def reset(self) -> None:
        self._counts = [list(prior) for prior in self._priors]
        self._asked: tuple[int, int, list[int]] | None = None  # bucket, position and tokens of the last proposal

    def ask(self, proposal: Proposal, position: int, bucket: int = 0) -> Proposal:
        """Remember a proposal that begins at `position`; of a tree, the path of first children. Returns it."""
        self._asked = (bucket, position, _spine(proposal))
        return proposal

    def learn(self, tokens: Sequence[int]) -> None:
        """Judge the last proposal by the committed tokens, up to its first wrong one."""
        if self._asked is None or len(tokens) <= self._asked[1]:
            return
        bucket, start, drafted = self._asked
        self._asked = None
        counts = self._counts[bucket]
        for token, true in zip(drafted, tokens[start : start + len(drafted)], strict=False):
            counts[1] += 1
            if token != true:
                return
            counts[0] += 1

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
