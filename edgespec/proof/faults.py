"""Broken verification rules that a proof of losslessness must reject: its negative controls.

Each is a fault that some engine has shipped, made from the production rule by changing one thing. Nothing here is ever
used for decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.noise import Noise
from edgespec.proof.rules import Draft, RuleProof, Toy, prove
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import Candidates, FloatArray, IntArray, Proposal, Verdict
from edgespec.verify import BlockVerifier, RejectionVerifier, Verifier, _draft_probs, _Prefix, _residual

__all__ = ["NoResidualVerifier", "RoundlessVerifier", "enumerate_faults"]


class NoResidualVerifier(RejectionVerifier):
    """After a rejection the token is drawn from p instead of norm((p - q)+)."""

    def _try_siblings(
        self, proposal: Proposal, siblings: list[int], candidates: Candidates, noise: Noise, position: int, round: int
    ) -> tuple[int | None, Candidates]:
        accepted, _ = super()._try_siblings(proposal, siblings, candidates, noise, position, round)
        return accepted, candidates


class RoundlessVerifier(BlockVerifier):
    """A redrawn position sees the noise of the rejected round, whose end was chosen in view of that noise."""

    def draw_siblings(
        self, noise: Noise, candidates: Candidates, n: int, position: int, round: int, index: int = 0
    ) -> list[int]:
        return super().draw_siblings(noise, candidates, n, position, 0, index)

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        return super().verify(proposal, logits, sampler, noise, history, 0)


class _EarlyBonus(RejectionVerifier):
    """The token after full acceptance comes from the row before the last."""

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        shifted = np.concatenate((logits[:-1], logits[-2:-1]))
        return super().verify(proposal, shifted, sampler, noise, history, round)


class _SoloSiblings(RejectionVerifier):
    """Every sibling is judged against the whole of p, as if it were the first."""

    def _try_siblings(
        self, proposal: Proposal, siblings: list[int], candidates: Candidates, noise: Noise, position: int, round: int
    ) -> tuple[int | None, Candidates]:
        rest = candidates
        for node in siblings:
            accepted, rest = super()._try_siblings(proposal, [node], candidates, noise, position, round)
            if accepted is not None:
                return accepted, rest
        return None, rest


class _TokenResidual(BlockVerifier):
    """Block verification with the residual of the token rule: (p - q)+ where (P_i p - q)+ belongs."""

    def _prefixes(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, history: Sequence[int]
    ) -> list[_Prefix]:
        steps = super()._prefixes(proposal, logits, sampler, history)
        for i, (candidates, survival, _) in enumerate(steps[: len(proposal)]):
            q = _draft_probs(proposal, i, []).on(candidates.ids)
            steps[i] = _Prefix(candidates, survival, _residual(candidates.probs(), q))
        return steps


class _CommittedOnly(Sampler):
    """A sampler whose penalties overlook the drafted tokens before a row."""

    def __init__(self, inner: Sampler, n_committed: int) -> None:
        self._inner, self._n_committed = inner, n_committed

    def row(self, logits: FloatArray, history: Sequence[int], ids: IntArray | None = None) -> Candidates:
        return self._inner.row(logits, history[: self._n_committed], ids)


class _StalePenalties(RejectionVerifier):
    """Penalties are computed once a round, from the committed tokens."""

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        stale = _CommittedOnly(sampler, len(history))
        return super().verify(proposal, logits, stale, noise, history, round)


class _UnfilteredDists(Draft):
    """The draft samples its best two tokens and reports the whole distribution."""

    def propose(self, toy: Toy, rule: Verifier, noise: Noise, history: Sequence[int], round: int) -> Proposal:
        proposal = super().propose(toy, rule, noise, history, round)
        whole = replace(self, keep=0)
        before = [[*history, *proposal.tokens[:i]] for i in range(len(proposal))]
        proposal.dists = [whole.candidates(toy, tokens) for tokens in before]
        return proposal


class _ArgmaxWithDists(_UnfilteredDists):
    """The draft proposes its best token and reports the whole distribution instead of a point mass."""


class _DropsImprobable(Draft):
    """A sampled token below probability 0.4 is dropped after it was drawn, and with it the rest."""

    def propose(self, toy: Toy, rule: Verifier, noise: Noise, history: Sequence[int], round: int) -> Proposal:
        proposal = super().propose(toy, rule, noise, history, round)
        assert proposal.dists is not None
        for i, dist in enumerate(proposal.dists):
            if dist is not None and dist.probs()[dist.ids == proposal.tokens[i]].sum() < 0.4:
                return Proposal(proposal.tokens[:i], proposal.source, None, proposal.dists[:i])
        return proposal


def enumerate_faults(seed: int = 0) -> list[RuleProof]:
    """The proofs of rules that are broken on purpose: every one must come out with `passed` False."""
    plain = Toy(seed)
    penalised = Toy(seed, params=SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0))
    rejection, chain = RejectionVerifier(), Draft.chain(2)
    pair = Draft("2 siblings", (-1, -1))
    cases: list[tuple[str, Toy, Verifier, Draft]] = [
        ("no residual", plain, NoResidualVerifier(), chain),
        ("noise without the round", plain, RoundlessVerifier(), chain),
        ("bonus from the row before", plain, _EarlyBonus(), chain),
        ("siblings judged alone", plain, _SoloSiblings(), pair),
        ("token residual in the block rule", plain, _TokenResidual(), chain),
        ("penalties without drafted tokens", penalised, _StalePenalties(), chain),
        ("unfiltered draft distribution", plain, rejection, _UnfilteredDists("chain of 2", chain.parents, keep=2)),
        ("argmax draft not a point mass", plain, rejection, _ArgmaxWithDists("chain of 2", chain.parents, keep=1)),
        ("improbable drafts dropped", plain, rejection, _DropsImprobable("chain of 2", chain.parents)),
    ]
    return [prove(toy, rule, draft, name) for name, toy, rule, draft in cases]
