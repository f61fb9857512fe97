"""What a round could do, as the adaptive controller weighs it: a plain step, and each source's proposals by length.

Knows no tokens and decides nothing: see `edgespec.engine.adaptive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.engine.learned import Key
from edgespec.types import Drafter

__all__ = ["LEAST_GAIN", "Bid", "Bidder", "Plain", "shortest"]

LEAST_GAIN = 1.02  # over a plain step, of what runs a model: the next call finds its weights out of the caches


class Plain(NamedTuple):
    """A step without a proposal: seconds, and tokens that it is expected to give (free guesses included).

    call_s: of the seconds, the target's.
    """

    seconds: float
    tokens: float
    call_s: float

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens


class Bidder(NamedTuple):
    """A source with a proposal for this round. hope: chance of its first token.

    n_missed, catch_up_s: tokens that it has sat out, and what that costs it. judges_itself: whether its offers say how
    good they are without being run.
    """

    drafter: Drafter
    key: Key
    hope: float
    n_missed: int
    catch_up_s: float
    is_proven: bool
    judges_itself: bool


class Bid(NamedTuple):
    """One thing that a round could do. n_rows: beyond those of a plain step. passes: runs of the draft's model.

    at_risk_s: beyond a plain step, if nothing is accepted; what catching up costs is apart.
    worth: tokens a second; a model's have to be better by more than estimates are out.
    """

    by: Bidder
    k: int
    worth: float
    tokens: float
    seconds: float
    at_risk_s: float
    n_rows: int
    passes: int
    next_chance: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.worth * LEAST_GAIN if self.passes else self.worth

    def promise(self, plain: Plain) -> float:
        """Plain steps that it saves for each row and run that is lost if it fails."""
        return (self.tokens - self.seconds / plain.token_s) / max(1, self.n_rows + self.passes)


def shortest(bids: Sequence[Bid]) -> list[Bid]:
    """Of each source's bids, which follow one another, the first."""
    return [bid for place, bid in enumerate(bids) if not place or bid.by is not bids[place - 1].by]
