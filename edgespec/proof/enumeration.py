"""Every outcome of a random procedure with its exact probability, and the distribution that a round loop emits.

`EnumeratingNoise` stands in for `Noise`: where that one would decide by a hash, this one takes each branch in turn. It
also notes the key of every decision, since real noise is a function of its key: a key that serves two decisions of one
run would make them dependent. It knows nothing of rules; `edgespec.proof.rules` brings the tables and the rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Noise, Purpose
from edgespec.types import Candidates

__all__ = ["EnumeratingNoise", "Worlds", "emitted_distribution", "enumerate_worlds", "total_variation"]

Outcome = TypeVar("Outcome", bound=Hashable)
Key = tuple[Hashable, ...]
Tokens = tuple[int, ...]
PlayRound = Callable[[Noise, Tokens, int], Tokens]


class EnumeratingNoise(Noise):
    """Noise that follows `trail`, a list of branch numbers, and takes branch 0 beyond its end.

    sizes: number of branches at each decision so far. probability: of the branches taken. keys: of all decisions; a
    draw has one for each candidate, as its noise has. reused: keys that decided twice.
    """

    def __init__(self, trail: Sequence[int]) -> None:
        super().__init__(seed=0)
        self._trail = trail
        self.sizes: list[int] = []
        self.probability = 1.0
        self.keys: set[Key] = set()
        self.reused: set[Key] = set()

    def gumbel(
        self, purpose: Purpose, position: int, tokens: NDArray[np.int64], round: int = 0, index: int = 0
    ) -> NDArray[np.float64]:
        """Refused: a real number cannot be enumerated."""
        raise TypeError("rules under enumeration decide by accept, draw and draw_many")

    def uniform(self, purpose: Purpose, position: int, index: int = 0, round: int = 0) -> float:
        """Refused: a real number cannot be enumerated."""
        raise TypeError("rules under enumeration decide by accept, draw and draw_many")

    def accept(self, probability: float, purpose: Purpose, position: int, index: int = 0, round: int = 0) -> bool:
        self._note(("accept", purpose, position, index, round))
        chance = min(max(probability, 0.0), 1.0)
        return self._branch([chance, 1.0 - chance]) == 0

    def draw(self, candidates: Candidates, purpose: Purpose, position: int, round: int = 0, index: int = 0) -> int:
        return self.draw_many(candidates, 1, purpose, position, round, index)[0]

    def draw_many(
        self, candidates: Candidates, n: int, purpose: Purpose, position: int, round: int = 0, index: int = 0
    ) -> list[int]:
        ids = candidates.ids.tolist()
        weights = candidates.probs().astype(np.float64)
        for token in ids:
            self._note(("draw", purpose, position, index, round, token))
        drawn: list[int] = []
        for _ in range(min(n, len(ids))):
            place = self._branch((weights / weights.sum()).tolist())
            drawn.append(ids[place])
            weights[place] = 0.0
        return drawn

    def _note(self, key: Key) -> None:
        (self.reused if key in self.keys else self.keys).add(key)

    def _branch(self, chances: Sequence[float]) -> int:
        """The option taken: those of probability 0 are none, and a single one needs no decision."""
        options = [place for place, chance in enumerate(chances) if chance > 0.0]
        if len(options) == 1:
            return options[0]
        depth = len(self.sizes)
        option = options[self._trail[depth] if depth < len(self._trail) else 0]
        self.sizes.append(len(options))
        self.probability *= chances[option]
        return option


@dataclass
class Worlds(Generic[Outcome]):
    """All runs of a procedure: probability of each outcome, keys used by any run, keys that a run used twice."""

    outcomes: dict[Outcome, float] = field(default_factory=lambda: defaultdict(float))
    keys: set[Key] = field(default_factory=set)
    reused: set[Key] = field(default_factory=set)
    n: int = 0


def enumerate_worlds(play: Callable[[Noise], Outcome]) -> Worlds[Outcome]:
    """Call `play` once for every combination of its random decisions; it may depend on nothing else.

    `play` may be one round or a whole run of the decoder: the number of calls is the number of combinations.
    """
    worlds: Worlds[Outcome] = Worlds()
    trail: list[int] | None = []
    while trail is not None:
        noise = EnumeratingNoise(trail)
        worlds.outcomes[play(noise)] += noise.probability
        worlds.keys |= noise.keys
        worlds.reused |= noise.reused
        worlds.n += 1
        trail = _next_trail([*trail, *[0] * (len(noise.sizes) - len(trail))], noise.sizes)
    return worlds


def _next_trail(trail: list[int], sizes: list[int]) -> list[int] | None:
    """Depth-first successor of a finished trail, None after the last."""
    while trail:
        if trail[-1] + 1 < sizes[len(trail) - 1]:
            return [*trail[:-1], trail[-1] + 1]
        trail.pop()
    return None


def emitted_distribution(play_round: PlayRound, is_final: Callable[[Tokens], bool]) -> Worlds[Tokens]:
    """Joint distribution of all tokens emitted by round after round until `is_final`.

    play_round(noise, emitted so far, round number) -> the tokens that this round commits. Rounds are enumerated one by
    one for each state, which is exact as long as no key serves in two rounds: such keys are reported as reused.
    """
    total: Worlds[Tokens] = Worlds()
    states: dict[Tokens, float] = {(): 1.0}
    round = 0
    while states:
        following: dict[Tokens, float] = defaultdict(float)
        keys: set[Key] = set()
        for state, chance in states.items():
            worlds = enumerate_worlds(partial(_play, play_round, state, round))
            for tokens, probability in worlds.outcomes.items():
                after = state + tokens
                (total.outcomes if is_final(after) else following)[after] += chance * probability
            keys |= worlds.keys
            total.reused |= worlds.reused
            total.n += worlds.n
        total.reused |= keys & total.keys
        total.keys |= keys
        states = following
        round += 1
    return total


def _play(play_round: PlayRound, state: Tokens, round: int, noise: Noise) -> Tokens:
    return play_round(noise, state, round)


def total_variation(one: dict[Outcome, float], other: dict[Outcome, float]) -> float:
    """Half the sum of |difference| of two distributions."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
