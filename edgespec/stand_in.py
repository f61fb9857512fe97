"""A drafter that proposes what a trained draft would have, as far as a profile knows it, without running it.

Where the profile saw the draft at this place of this text, so many of its tokens are right; elsewhere that is drawn
from its chances. Right tokens are the text's own, wrong ones are no token at all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from edgespec.draft.base import EarlyStop
from edgespec.draft.track import AcceptanceTrack
from edgespec.profile import DraftProfile
from edgespec.types import DraftContext, ExactRows, FloatArray, Offer, Proposal

__all__ = ["StandIn"]

WRONG = -1


class StandIn:
    """A draft on one calibration text. dice: for what the profile does not know of it."""

    taps: tuple[str, ...] = ()

    def __init__(
        self,
        draft: DraftProfile,
        prompt: Sequence[int],
        text: Sequence[int],
        index: int,
        dice: random.Random,
        exact: ExactRows | None,
    ) -> None:
        self.source = draft.kind
        self.draft, self.dice = draft, dice
        self.truth, self.n_prompt = [*prompt, *text], len(prompt)
        self.places = draft.places[index] if draft.places else ()
        self.depth = max((place.drafted for place in self.places), default=0)
        self.stop = EarlyStop(multiple=exact.multiple if exact else 1)
        self._track = AcceptanceTrack()

    def reset(self) -> None:
        self._track.reset()

    def offer(self, context: DraftContext) -> Offer:
        self._track.learn(context.tokens)
        place = len(context.tokens) - self.n_prompt
        if place < len(self.places) and not self.places[place].drafted:
            return Offer(0)
        return Offer(self.draft.most, self._track.rate(), passes=self.draft.passes)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        at = len(context.tokens)
        right, scores = self._chain(at - self.n_prompt, k)
        n = self._length(scores, k, context.min_survival)
        tokens = self.truth[at : at + min(right, n)]
        tokens += [WRONG] * (n - len(tokens))
        known = scores[:n] if context.min_survival and len(scores) >= n else None
        return self._track.ask(Proposal(tokens, self.source, scores=known), at)

    def _chain(self, place: int, k: int) -> tuple[int, list[float]]:
        """How many of `k` tokens are right, and how sure the draft is of each, as far as it is known.

        A chain that was right to its end goes on as the draft did at the place after it.
        """
        right: int = 0
        scores: list[float] = []
        while right < k and place + right < len(self.places):
            seen = self.places[place + right]
            scores = scores[:right] + list(seen.scores)
            right += seen.accepted
            if seen.accepted < seen.drafted or seen.drafted < self.depth:
                return right, scores
        return (right, scores) if right >= k else (right + self._luck(k - right), scores)

    def _luck(self, k: int) -> int:
        chances, n = self.draft.chances, 0
        while n < k and self.dice.random() < chances[min(n, len(chances) - 1)]:
            n += 1
        return n

    def _length(self, scores: Sequence[float], k: int, min_survival: float) -> int:
        """Where the chain ends by itself."""
        stop = self.stop.chain(min_survival)
        for n, score in enumerate(scores[: k - 1], 1):
            if stop.after(score, n):
                return n
        return k

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.reset()
