"""How many tokens to draft: fixed, and the two adaptive rules of the literature under their own names.

A controller sees offers and round records; it knows no tokens and no tensors. `k = 0` is a plain step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from edgespec.errors import ConfigError
from edgespec.types import FILLER, DraftContext, Drafter, RoundRecord

__all__ = ["CONTROLLERS", "Controller", "MultiplicativeController", "WindowController", "create_controller"]


# Acceptance that a drafter may fall short of a later one and still go first: earlier ones are the cheaper ones.
HINT_MARGIN = 0.1


class Controller:
    """Always asks for `k` tokens from the first drafter that has any and does not call itself worse than a later one.

    Drafters stand in order of priority; one without an acceptance of its own is taken as it comes.
    """

    name = "fixed"

    def __init__(self, k: int, min_k: int = 0) -> None:
        self.k = k
        self.min_k = min_k
        self.max_k = k
        self.min_survival = 0.0  # of this round: a chain ends after a token that makes it less likely than this

    def choose(
        self, drafters: Sequence[Drafter], context: DraftContext, room: int, n_pending: int = 1
    ) -> tuple[Drafter | None, int]:
        """(drafter, k) for this round, min_k to `room` tokens; (None, 0) for a plain step.

        n_pending: committed tokens that the call runs before the drafted ones; more than 1 after a prompt.
        """
        lowest = max(1, self.min_k)
        if min(self.k, room) < lowest:
            return None, 0
        best: tuple[Drafter, int, float] | None = None
        for drafter in drafters:
            offer = drafter.offer(context)
            k = min(self.k, room, offer.max_k)
            if k < lowest:
                continue
            if best is None or (offer.acceptance is not None and offer.acceptance > best[2] + HINT_MARGIN):
                best = (drafter, k, 1.0 if offer.acceptance is None else offer.acceptance)
            if best[2] + HINT_MARGIN >= 1.0:
                break
        return (None, 0) if best is None else best[:2]

    def update(self, record: RoundRecord) -> None:
        """Learn from a finished round; plain rounds and free guesses teach nothing."""
        if record.drafted and record.source != FILLER:
            self.learn(record.accepted / record.drafted)

    def learn(self, rate: float) -> None:
        """Take in the acceptance rate of one round."""

    def summary(self) -> dict[str, Any]:
        """What was decided and why, as plain data for the run report; empty where there is nothing to say."""
        return {}


class MultiplicativeController(Controller):
    """After each round: acceptance above target + 0.1 lengthens by a tenth, below target - 0.1 shortens by a tenth.

    The length is kept as a real number and rounded only when used, so that a short length can grow back, up to k.
    """

    name = "multiplicative"
    target, margin, factor = 0.7, 0.1, 0.1

    def __init__(self, k: int, min_k: int = 0) -> None:
        super().__init__(k, min_k)
        self.length = float(k)

    def learn(self, rate: float) -> None:
        if rate > self.target + self.margin:
            self.length *= 1 + self.factor
        elif rate < self.target - self.margin:
            self.length *= 1 - self.factor
        self.length = min(max(self.length, 1.0, float(self.min_k)), float(self.max_k))
        self.k = round(self.length)


class WindowController(Controller):
    """Sliding window of 100 acceptance ratios; from 10 samples on, +1 or -1 around the target rate, between 1 and k."""

    name = "window"
    target, margin, size, warm_up = 0.7, 0.1, 100, 10

    def __init__(self, k: int, min_k: int = 0) -> None:
        super().__init__(k, min_k)
        self.ratios: deque[float] = deque(maxlen=self.size)

    def learn(self, rate: float) -> None:
        self.ratios.append(rate)
        if len(self.ratios) < self.warm_up:
            return
        mean = sum(self.ratios) / len(self.ratios)
        step = (mean > self.target + self.margin) - (mean < self.target - self.margin)
        self.k = min(max(self.k + step, 1, self.min_k), self.max_k)


# "adaptive" is made by `edgespec.llm` from what earlier requests taught (`edgespec.engine.adaptive`).
CONTROLLERS: dict[str, type[Controller] | None] = {
    **{kind.name: kind for kind in (Controller, MultiplicativeController, WindowController)},
    "adaptive": None,
}


def create_controller(name: str, k: int, min_k: int = 0, **state: Any) -> Controller:
    """state: further arguments of the adaptive controller. Raises ConfigError for an unknown name."""
    if name not in CONTROLLERS:
        raise ConfigError(f"unknown controller {name!r}: use one of {', '.join(CONTROLLERS)}")
    kind = CONTROLLERS[name]
    if kind is None:
        from edgespec.engine.adaptive import AdaptiveController

        return AdaptiveController(k, min_k, **state)
    return kind(k, min_k)
