"""Which drafted tokens to keep, and which token follows them: the rules, for chains and trees alike.

p is the target's distribution after all processors, q the one that a draft token really came from, as in the papers.
Every decision goes through `Noise`. Rows are filtered only when a rule reaches them. A verifier knows no model and no
cache: it sees logits, the proposal and the history, and answers with a path through the proposal and one more token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, IncompatibleError
from edgespec.noise import Noise, Purpose, log
from edgespec.sampling import Sampler
from edgespec.types import Candidates, Proposal, Verdict

__all__ = [
    "VERIFIERS",
    "BlockVerifier",
    "CoupledVerifier",
    "RejectionVerifier",
    "TypicalVerifier",
    "Verifier",
    "create_verifier",
]

FloatArray = NDArray[np.floating[Any]]


class Verifier(ABC):
    """A verification rule, and the way in which drafters must sample for it.

    lossless: the emitted tokens follow the target's distribution. supports_tree: proposals may carry `parents`.
    uses_dists: the rule needs `Proposal.dists` of sampled tokens.
    """

    name: str
    lossless = True
    supports_tree = True
    uses_dists = False

    @abstractmethod
    def verify(
        self,
        proposal: Proposal,
        logits: FloatArray,
        sampler: Sampler,
        noise: Noise,
        history: Sequence[int],
        round: int,
    ) -> Verdict:
        """Decide one round.

        logits: [len(proposal) + 1, n_vocab]; row 0 follows the last token of `history` (prompt + committed), row i + 1
        follows proposal token i. The token decided at depth d has absolute position len(history) + d. Mutates nothing.
        Raises IncompatibleError for a tree that the rule cannot judge, or a token outside its own draft distribution.
        """

    def draw_draft(self, noise: Noise, candidates: Candidates, position: int, round: int, index: int = 0) -> int:
        """The token that a drafter must propose at `position`, given its own distribution.

        index: tells apart the nodes of a tree that share a position; 0 for chains.
        """
        return self.draw_siblings(noise, candidates, 1, position, round, index)[0]

    def draw_siblings(
        self, noise: Noise, candidates: Candidates, n: int, position: int, round: int, index: int = 0
    ) -> list[int]:
        """At most `n` different tokens for the children of one node, in the order in which to list them.

        Each child's entry in `Proposal.dists` is `candidates` itself: the verifier takes earlier siblings out of it.
        """
        if n == 1:  # the same token, without the cost of a ranking
            return [noise.draw(candidates, Purpose.DRAFT, position, round, index)]
        return noise.draw_many(candidates, n, Purpose.DRAFT, position, round, index)


class CoupledVerifier(Verifier):
    """Draft and target see the same Gumbel noise; the target's own token is kept, a draft token if it is the same.

    Exact whatever the drafter does; the same seed gives the same text with any drafter or none (arXiv 2408.07978).
    """

    name = "coupled"

    def draw_siblings(
        self, noise: Noise, candidates: Candidates, n: int, position: int, round: int, index: int = 0
    ) -> list[int]:
        """The best tokens under the noise with which the target will choose: neither round nor node changes it."""
        if n == 1:
            return [noise.draw(candidates, Purpose.TARGET, position)]
        return noise.draw_many(candidates, n, Purpose.TARGET, position)

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        children = _children(proposal)
        path: list[int] = []
        tokens, node = list(history), -1
        while True:
            token = noise.draw(sampler.row(logits[node + 1], tokens), Purpose.TARGET, len(tokens))
            for child in children[node + 1]:
                if proposal.tokens[child] == token:
                    break
            else:
                return Verdict(tuple(path), token, "correction" if children[node + 1] else "bonus")
            path.append(child)
            tokens.append(token)
            node = child


class RejectionVerifier(Verifier):
    """Accept x with probability min(1, p(x) / q(x)), else continue with norm((p - q)+).

    Leviathan 2211.17192, Chen 2302.01318; siblings drawn without replacement are tried in turn, each against what the
    earlier ones left of p and q (recursive rejection, 2402.14160). A point mass is q = 1 at its token.
    """

    name = "rejection"
    uses_dists = True

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        children = _children(proposal)
        path: list[int] = []
        tokens, node = list(history), -1
        while True:
            candidates = sampler.row(logits[node + 1], tokens)
            if not children[node + 1]:
                return Verdict(tuple(path), noise.draw(candidates, Purpose.TARGET, len(tokens), round), "bonus")
            accepted, rest = self._try_siblings(proposal, children[node + 1], candidates, noise, len(tokens), round)
            if accepted is None:
                return Verdict(tuple(path), noise.draw(rest, Purpose.RESIDUAL, len(tokens), round), "correction")
            path.append(accepted)
            tokens.append(proposal.tokens[accepted])
            node = accepted

    def _try_siblings(
        self,
        proposal: Proposal,
        siblings: list[int],
        candidates: Candidates,
        noise: Noise,
        position: int,
        round: int,
    ) -> tuple[int | None, Candidates]:
        """The first sibling accepted, or None, and what is then left of the target's distribution."""
        p = candidates.probs()
        drawn: list[int] = []
        for node in siblings:
            token = proposal.tokens[node]
            q = _draft_probs(proposal, node, drawn)
            ratio = _mass_at(candidates.ids, p, token) / q.at(token)
            if noise.accept(ratio, Purpose.ACCEPT, position, node, round):
                return node, candidates
            p = _residual(p, q.on(candidates.ids))
            if _dist(proposal, node) is not None:
                drawn.append(token)
        return None, _as_candidates(candidates, p)


class BlockVerifier(Verifier):
    """Judges a chain as a whole: at least as many accepted tokens as any rule of its kind (2403.10444).

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), a prefix of length i < k survives with probability
    S_i / (S_i + 1 - P_i), S_i = sum (P_i p - q)+, and the whole chain with P_k. The longest survivor is kept; then
    comes a token from norm((P_i p - q)+), or from p after the whole chain.
    """

    name = "block"
    supports_tree = False
    uses_dists = True

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        if proposal.parents is not None and proposal.parents != list(range(-1, len(proposal) - 1)):
            raise IncompatibleError(
                "Block verification judges chains, this proposal is a tree: use the rejection rule."
            )
        start, k = len(history), len(proposal)
        steps = self._prefixes(proposal, logits, sampler, history)
        i = len(steps) - 1
        while not noise.accept(steps[i].survival, Purpose.ACCEPT, start + i, i, round):
            i -= 1  # ends at 0: the empty prefix survives with probability 1
        path, step = tuple(range(i)), steps[i]
        if i == k:
            return Verdict(path, noise.draw(step.candidates, Purpose.TARGET, start + i, round), "bonus")
        rest = _as_candidates(step.candidates, step.residual)
        return Verdict(path, noise.draw(rest, Purpose.RESIDUAL, start + i, round), "correction")

    def _prefixes(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, history: Sequence[int]
    ) -> list[_Prefix]:
        """Prefixes 0, 1, ... of the chain that can survive; the target's first forbidden token ends the list."""
        tokens, k = list(history), len(proposal)
        weight, steps = 1.0, []
        for i in range(k):
            candidates = sampler.row(logits[i], tokens)
            p = candidates.probs()
            q = _draft_probs(proposal, i, [])
            excess = np.maximum(weight * p - q.on(candidates.ids), 0)
            mass = float(excess.sum())
            survival = mass / (mass + 1.0 - weight) if weight < 1.0 else 1.0
            steps.append(_Prefix(candidates, survival, _normalised(excess, p)))
            token = proposal.tokens[i]
            weight = min(1.0, weight * _mass_at(candidates.ids, p, token) / q.at(token))
            if weight == 0.0:
                return steps
            tokens.append(token)
        candidates = sampler.row(logits[k], tokens)
        return [*steps, _Prefix(candidates, weight, candidates.logits)]


class TypicalVerifier(CoupledVerifier):
    """Lossy: keeps a token whose p exceeds min(epsilon, delta * exp(-entropy of p)) (Medusa, 2401.10774).

    The longest path kept wins, the first listed among equals; the token after it is drawn from p.
    """

    name = "typical"
    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon = epsilon
        self.delta = delta

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        children = _children(proposal)
        best: tuple[int, ...] = ()
        rows: dict[tuple[int, ...], Candidates] = {}
        waiting: list[tuple[int, ...]] = [()]
        while waiting:
            path = waiting.pop()
            node = path[-1] if path else -1
            tokens = [*history, *(proposal.tokens[i] for i in path)]
            rows[path] = candidates = sampler.row(logits[node + 1], tokens)
            if len(path) > len(best):
                best = path
            kept = [child for child in children[node + 1] if self._is_typical(candidates, proposal.tokens[child])]
            waiting.extend((*path, child) for child in reversed(kept))
        token = noise.draw(rows[best], Purpose.TARGET, len(history) + len(best))
        is_leaf = not children[best[-1] + 1 if best else 0]
        return Verdict(best, token, "bonus" if is_leaf else "correction")

    def _is_typical(self, candidates: Candidates, token: int) -> bool:
        p = candidates.probs()
        entropy = -float((p * np.log(np.maximum(p, np.finfo(p.dtype).tiny))).sum())
        return _mass_at(candidates.ids, p, token) > min(self.epsilon, self.delta * float(np.exp(-entropy)))


VERIFIERS: dict[str, type[Verifier]] = {
    rule.name: rule for rule in (CoupledVerifier, RejectionVerifier, BlockVerifier, TypicalVerifier)
}


def create_verifier(name: str, lossy: str | None = None) -> Verifier:
    """The rule of that name: coupled | rejection | block | typical.

    lossy: has to repeat the name of a rule that changes the output distribution. Raises ConfigError otherwise.
    """
    if name not in VERIFIERS:
        raise ConfigError(f"There is no verification rule {name!r}: choose one of {', '.join(VERIFIERS)}.")
    rule = VERIFIERS[name]
    if not rule.lossless and lossy != name:
        raise ConfigError(
            f"The rule {name!r} changes the target's output and lossy is {lossy!r}: "
            f"ask for it with lossy={name!r} (--lossy {name}), or use a lossless rule."
        )
    if rule.lossless and lossy is not None:
        raise ConfigError(f"lossy is {lossy!r}, but the rule {name!r} is lossless: drop one of the two.")
    return rule()


class _Prefix(NamedTuple):
    """A prefix of a chain: the row that follows it, its survival probability, the residual (unused for the last)."""

    candidates: Candidates
    survival: float
    residual: FloatArray


class _Probs(NamedTuple):
    """Probabilities of ascending token ids."""

    ids: NDArray[np.int64]
    values: FloatArray

    def at(self, token: int) -> float:
        """q of a token that was drawn from here: never 0."""
        mass = _mass_at(self.ids, self.values, token)
        if mass > 0.0:
            return mass
        raise IncompatibleError(
            f"Draft token {token} has probability 0 under the distribution given for it ({len(self.ids)} candidates): "
            "a drafter must report the distribution that it drew from."
        )

    def on(self, ids: NDArray[np.int64]) -> FloatArray:
        """[len(ids)] probabilities on another set of ascending ids, 0 where it has others."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        result: FloatArray = np.where(self.ids[places] == ids, self.values[places], 0)
        return result


def _children(proposal: Proposal) -> list[list[int]]:
    """For the root, then for each proposal token: its children's indices."""
    k = len(proposal.tokens)
    if proposal.parents is None:
        return [*([node] for node in range(k)), []]
    children: list[list[int]] = [[] for _ in range(k + 1)]
    if len(proposal.parents) != k:
        raise IncompatibleError(f"A proposal of {k} tokens has {len(proposal.parents)} parents: give one for each.")
    for node, parent in enumerate(proposal.parents):
        if not -1 <= parent < node:
            raise IncompatibleError(f"Proposal token {node} names parent {parent}: parents come before their children.")
        children[parent + 1].append(node)
    return children


def _dist(proposal: Proposal, node: int) -> Candidates | None:
    return None if proposal.dists is None else proposal.dists[node]


def _draft_probs(proposal: Proposal, node: int, drawn: list[int]) -> _Probs:
    """q of one token: its distribution without the siblings drawn before it, or a point mass."""
    dist = _dist(proposal, node)
    if dist is None:
        return _Probs(np.array([proposal.tokens[node]], dtype=np.int64), np.ones(1))
    q = dist.probs()
    if not drawn:
        return _Probs(dist.ids, q)
    q = np.where(np.isin(dist.ids, drawn), 0, q)
    return _Probs(dist.ids, _normalised(q, q))


def _mass_at(ids: NDArray[np.int64], probs: FloatArray, token: int) -> float:
    place = int(np.searchsorted(ids, token))
    return float(probs[place]) if place < len(ids) and ids[place] == token else 0.0


def _normalised(weights: FloatArray, otherwise: FloatArray) -> FloatArray:
    """`weights` divided by their sum; `otherwise` where they are all zero, which only rounding brings about."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def _residual(p: FloatArray, q: FloatArray) -> FloatArray:
    """norm((p - q)+), or p itself where nothing is left of it."""
    return _normalised(np.maximum(p - q, 0), p)


def _as_candidates(candidates: Candidates, probs: FloatArray) -> Candidates:
    """The tokens of `candidates` with positive probability under `probs` [m], as candidates again."""
    kept = np.flatnonzero(probs)
    return Candidates(candidates.ids[kept], log(probs[kept].astype(np.float64)))
