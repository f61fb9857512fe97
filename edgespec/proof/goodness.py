"""Does a stream of emitted tokens follow the distributions that it claims to follow? One p-value for any vocabulary.

Pooled probability integral transform: with its tokens in any order fixed beforehand, u = F(x-) + U p(x) is uniform if x
was drawn from p. Ordering by p / q, target over draft, puts what a faulty rule takes too often (or rarely) at one end,
so a few hundred tokens show a fault that no table of counts over 49,152 tokens would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Noise, Purpose
from edgespec.sampling import Sampler
from edgespec.types import Candidates, FloatArray, Proposal, Verdict
from edgespec.verify import BlockVerifier, Verifier

__all__ = ["Emission", "RecordingVerifier", "ks_pvalue", "pit_pvalue", "pit_values"]


class Emission(NamedTuple):
    """One emitted token, the target's candidates at its row, and the draft's there, if any."""

    target: Candidates
    draft: Candidates | None
    token: int


class RecordingVerifier(Verifier):
    """Another rule, with every token that it emits noted in `emissions`.

    A token's ordering may use only what was fixed before it was drawn. The block rule decides where a round ends by
    looking ahead, so whether a row had a draft is not fixed beforehand: its tokens are ordered by p alone.
    """

    def __init__(self, rule: Verifier) -> None:
        self._rule = rule
        self.name, self.lossless = rule.name, rule.lossless
        self.supports_tree, self.uses_dists = rule.supports_tree, rule.uses_dists
        self.emissions: list[Emission] = []

    def draw_siblings(
        self, noise: Noise, candidates: Candidates, n: int, position: int, round: int, index: int = 0
    ) -> list[int]:
        return self._rule.draw_siblings(noise, candidates, n, position, round, index)

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        verdict = self._rule.verify(proposal, logits, sampler, noise, history, round)
        tokens, node = list(history), -1
        for following in (*verdict.path, None):
            token = verdict.next_token if following is None else proposal.tokens[following]
            target = sampler.row(logits[node + 1], tokens)
            self.emissions.append(Emission(target, self._draft_at(proposal, node), token))
            tokens.append(token)
            node = node if following is None else following
        return verdict

    def _draft_at(self, proposal: Proposal, node: int) -> Candidates | None:
        """The distribution of the first child drafted after `node`; a point mass is one candidate."""
        if isinstance(self._rule, BlockVerifier):
            return None
        parents = range(-1, len(proposal) - 1) if proposal.parents is None else proposal.parents
        child = next((i for i, parent in enumerate(parents) if parent == node), None)
        if child is None:
            return None
        dist = None if proposal.dists is None else proposal.dists[child]
        return dist or Candidates(np.array([proposal.tokens[child]], np.int64), np.zeros(1))


def pit_values(emissions: Iterable[Emission], seed: int = 0) -> NDArray[np.float64]:
    """One value in (0, 1) for each emission: independent and uniform if each token follows its target.

    `seed` picks the randomisation within a token's own mass. A token that the target forbids gives 0.
    """
    noise = Noise(seed)
    values = []
    for number, (target, draft, token) in enumerate(emissions):
        target_probs = target.probs().astype(np.float64)
        place = int(np.searchsorted(target.ids, token))
        if place == len(target.ids) or target.ids[place] != token:
            values.append(0.0)
            continue
        order = _ratio(target.ids, target_probs, draft)
        before = (order < order[place]) | ((order == order[place]) & (target.ids < token))
        inside = noise.uniform(Purpose.ACCEPT, number) * target_probs[place]
        values.append(float(target_probs[before].sum() + inside))
    return np.array(values)


def _ratio(ids: NDArray[np.int64], target_probs: NDArray[np.float64], draft: Candidates | None) -> NDArray[np.float64]:
    """Target over draft probability of each id; without a draft the target's alone; inf where the draft has none."""
    if draft is None:
        return target_probs
    places = np.minimum(np.searchsorted(draft.ids, ids), len(draft.ids) - 1)
    draft_probs = np.where(draft.ids[places] == ids, draft.probs()[places], 0.0)
    ratio = np.full(len(ids), np.inf)
    np.divide(target_probs, draft_probs, out=ratio, where=draft_probs > 0)
    return ratio


def pit_pvalue(emissions: Iterable[Emission], seed: int = 0) -> float:
    """p-value of "each token follows its target's distribution", by Kolmogorov-Smirnov on `pit_values`.

    A sound rule gives a uniform p-value; use at least 500 emissions, and call below 1e-6 a fault.
    """
    return ks_pvalue(pit_values(emissions, seed))


def ks_pvalue(values: NDArray[np.float64]) -> float:
    """p-value of the two-sided Kolmogorov-Smirnov test that `values` [n] are uniform on (0, 1).

    Asymptotic series with Stephens' correction (1970), within 1e-3 from n = 20 on; 1.0 for no values.
    """
    n = len(values)
    if n == 0:
        return 1.0
    ordered = np.sort(values)
    distance = float(max((np.arange(1, n + 1) / n - ordered).max(), (ordered - np.arange(n) / n).max()))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.3:  # the series converges slowly there, and the value is 1 to five digits
        return 1.0
    series = sum((-1.0) ** (j - 1) * math.exp(-2.0 * (j * x) ** 2) for j in range(1, 101))
    return min(1.0, 2.0 * series)
