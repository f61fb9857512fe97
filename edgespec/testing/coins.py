"""A target and a draft that agree by the toss of a coin, so that acceptance is what a test asked for.

Each position has its token and its coins, whatever came before: the acceptance of each drafted token is then
independent of the others, as in the formulas of `edgespec.sim`. For speed, never for correctness: a wrong cache would
not show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from edgespec.testing.table import TableModel
from edgespec.types import FloatArray

__all__ = ["CoinModel", "coin_pair"]

BLOCK = 50  # positions among which exactly the asked share agrees, so that short runs show little chance


class CoinModel(TableModel):
    """Position i has a true token. acceptance: share of positions whose best token is the true one; 1 is the target.

    runner_up: share of the others whose second-best token is the true one. The odds between the two best tokens are
    those of the acceptance, where that is over a half.
    """

    def __init__(
        self, n_vocab: int = 32, *, acceptance: float = 1.0, runner_up: float = 1.0, seed: int = 0, n_ctx: int = 8192
    ) -> None:
        super().__init__(n_vocab, n_ctx=n_ctx, tree=False, taps=(), table=self._logits)
        self.acceptance, self.runner_up, self.seed = acceptance, runner_up, seed
        self._rows: dict[int, FloatArray] = {}

    def row(self, prefix: Sequence[int]) -> FloatArray:
        position = len(prefix)
        if position not in self._rows:
            self._rows[position] = self._logits(tuple(prefix)).astype(np.float32)
        return self._rows[position]

    def _logits(self, prefix: tuple[int, ...]) -> FloatArray:
        position, n_vocab = len(prefix), self.info.n_vocab
        dice = random.Random(f"{self.seed}:{position}")
        true, other, third = dice.sample(range(n_vocab), 3)
        if self._agrees(position):
            order = (true, other)
        else:
            order = (other, true) if dice.random() < self.runner_up else (other, third)
        lead = min(max(self.acceptance, 0.55), 0.99)  # a best token has to lead
        logits = np.zeros(n_vocab)
        logits[order[0]], logits[order[1]] = 20 + math.log(lead / (1 - lead)), 20
        return logits

    def _agrees(self, position: int) -> bool:
        block, place = divmod(position, BLOCK)
        coins = [i < round(self.acceptance * BLOCK) for i in range(BLOCK)]
        random.Random(f"{self.seed}:coins:{block}").shuffle(coins)
        return coins[place]


def coin_pair(
    acceptance: float, runner_up: float = 1.0, *, seed: int = 0, n_ctx: int = 8192
) -> tuple[CoinModel, CoinModel]:
    """(target, draft)."""
    return (
        CoinModel(seed=seed, n_ctx=n_ctx),
        CoinModel(acceptance=acceptance, runner_up=runner_up, seed=seed, n_ctx=n_ctx),
    )
