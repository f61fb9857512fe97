"""How many of a source's drafted tokens are accepted, by position; recent rounds count more than old ones.

Owns the estimate only: what a round cost, and whether to draft at all, is for `edgespec.engine.adaptive`. It sees
counts, never tokens, and outlives requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Acceptance", "Calibration"]

DECAY = 0.95  # of what is known about a position with every new judgement there: about the last 20 count
TRUST = 2.0  # judgements that the prior of the first position is worth
TRUST_NEXT = 1.5  # the same for later positions, whose prior is the estimate of the one before
FADE_ROUND = 0.995  # of everything with every round of any source: old evidence gives way to a source's own hints
FADE_REQUEST = 0.5  # another text is another source of errors
RATE, MOST_STEP = 0.05, 0.2  # of the power of a calibration, a judged token
LEAST_POWER, MOST_POWER = 0.02, 4.0


class Acceptance:
    """Chance that the token at each position is accepted, given that those before it were; of one source and bucket."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._tries: list[float] = []

    def chances(self, n: int, prior: float) -> list[float]:
        """Conditional acceptance of positions 1..n. prior: of the first, before anything was seen.

        A position that was never reached is taken to be as good as the one before it.
        """
        chances, chance, trust = [], prior, TRUST
        for place in range(n):
            if place < len(self._tries):
                chance = (trust * chance + self._hits[place]) / (trust + self._tries[place])
            chances.append(chance)
            trust = TRUST_NEXT
        return chances

    @property
    def evidence(self) -> float:
        """How many recent judgements of the first position there are."""
        return self._tries[0] if self._tries else 0.0

    def expect(self, chances: Sequence[float], weight: float) -> None:
        """Start as if every position had been judged `weight` times with these shares of hits."""
        self._tries = [weight] * len(chances)
        self._hits = [weight * chance for chance in chances]

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in one judged proposal: the accepted positions were right, the next one (if drafted) was wrong."""
        for place in range(min(drafted, accepted + 1)):
            if place == len(self._tries):
                self._tries.append(0.0)
                self._hits.append(0.0)
            self._tries[place] = self._tries[place] * DECAY + 1.0
            self._hits[place] = self._hits[place] * DECAY + float(place < accepted)

    def fade(self, share: float) -> None:
        """Keep only `share` of the weight of what was seen; the estimate moves towards the prior."""
        self._hits = [value * share for value in self._hits]
        self._tries = [value * share for value in self._tries]


class Calibration:
    """Chance of acceptance as a power of the draft's own probability; the power is learnt by following the likelihood.

    Drafts are over- or under-confident, each in its way: at the power 0 the probability says nothing.
    """

    def __init__(self) -> None:
        self.power = 0.5

    def limit(self, survival: float) -> float:
        """The joint probability at which a chain's chance of survival is `survival`."""
        return float(survival ** (1.0 / self.power)) if survival > 0.0 else 0.0

    def learn(self, scores: Sequence[float], accepted: int) -> None:
        """Take in the judged tokens of one proposal."""
        for place, score in enumerate(scores[: accepted + 1]):
            score = min(max(score, 1e-4), 0.999)
            slope = math.log(score)
            if place >= accepted:
                chance = min(score**self.power, 0.99)
                slope *= -chance / (1.0 - chance)
            step = min(max(RATE * slope, -MOST_STEP), MOST_STEP)
            self.power = min(max(self.power * math.exp(step), LEAST_POWER), MOST_POWER)
