"""Which outcomes of a round in flight are worth drafting for, before the target has said what it is.

An outcome is how many drafted tokens are accepted and which token follows them. Pure arithmetic on chances: the
overlapped scheduler and the simulator use the same rules, so that one predicts the other. Knows no model and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LEAST_CHANCE", "RUNNER_UP", "Outcome", "is_worth_starting", "rank_outcomes"]

# Chance that the draft's second choice is the target's token where its first is not. A starting point for the order
# only; what really happens is counted.
RUNNER_UP = 0.5
# Rarer outcomes are left alone: what they save is less than what contention and bookkeeping cost.
LEAST_CHANCE = 0.02


class Outcome(NamedTuple):
    """accepted: drafted tokens that the target keeps. rank: the token after them is the draft's own next choice (0,
    after full acceptance only) or its second one (1). chance: how likely, as far as the draft can tell."""

    accepted: int
    rank: int
    chance: float


def rank_outcomes(chances: Sequence[float]) -> list[Outcome]:
    """The outcomes worth preparing, likeliest first; among equals the one that accepts more.

    chances: [k + 1] chance that each drafted token is accepted given those before it, and last that of the draft's own
    guess at the token after all of them. That guess costs a step of its own, and its runner-up is known only then, so
    the latter never comes first.
    """
    k, survival, outcomes = len(chances) - 1, 1.0, []
    for accepted, chance in enumerate(chances):
        second = survival * (1 - chance) * RUNNER_UP
        if accepted == k:
            outcomes.append(Outcome(k, 0, survival * chance))
            second = min(second, survival * chance)
        outcomes.append(Outcome(accepted, 1, second))
        survival *= chance
    worth = [outcome for outcome in outcomes if outcome.chance >= LEAST_CHANCE]
    return sorted(worth, key=lambda outcome: (-outcome.chance, outcome.rank, -outcome.accepted))


def is_worth_starting(chance: float, pass_s: float, left_s: float) -> bool:
    """Whether a draft pass of `pass_s` seconds pays where the target is expected to be done in `left_s`.

    It saves itself where the outcome comes true, and delays the verdict by what it overruns.
    """
    return pass_s - left_s <= chance * pass_s
