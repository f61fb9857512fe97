"""What a draft gets right at every place of a text, not only where rounds happen to begin.

The production loop runs with the verifier of the request, of whose verdict one token is committed: so the next round
begins at the next place, and the text is the same. Knows no costs; who asks, and where it is kept, is for
`edgespec.profile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.engine.controller import Controller
from edgespec.types import DraftContext, Drafter, Proposal, RoundRecord, Verdict
from edgespec.verify import FloatArray, Verifier

if TYPE_CHECKING:
    from edgespec.noise import Noise
    from edgespec.sampling import Sampler
    from edgespec.types import Candidates

__all__ = ["Asking", "Judge", "Judged"]

LEAST_SURVIVAL = 1e-30  # ends no chain, but lets the draft say how sure it is


class Judged(NamedTuple):
    """One place. drafted, accepted: tokens. scores: how sure the draft was of each, where that decides anything."""

    drafted: int
    accepted: int
    scores: tuple[float, ...] = ()

    def to_json(self) -> list[Any]:
        return [self.drafted, self.accepted, *self.scores]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Judged:
        return cls(int(values[0]), int(values[1]), tuple(map(float, values[2:])))


class Judge(Verifier):
    """Another rule, of whose verdict only the first token is committed. accepted: tokens that it would have kept."""

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule
        self.name, self.lossless = rule.name, rule.lossless
        self.supports_tree, self.uses_dists = rule.supports_tree, rule.uses_dists
        self.accepted: list[int] = []

    def verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, noise: Noise, history: Sequence[int], round: int
    ) -> Verdict:
        verdict = self.rule.verify(proposal, logits, sampler, noise, history, round)
        self.accepted.append(len(verdict.path))
        return Verdict((), proposal.tokens[verdict.path[0]], "correction") if verdict.path else verdict

    def draw_siblings(
        self, noise: Noise, candidates: Candidates, n: int, position: int, round: int, index: int = 0
    ) -> list[int]:
        return self.rule.draw_siblings(noise, candidates, n, position, round, index)

    def take(self, records: Sequence[RoundRecord], source: str) -> tuple[Judged, ...]:
        """The judgements of one request's rounds, which are forgotten here; `accepted` of the records becomes true."""
        found = []
        for record, accepted in zip(records, self.accepted, strict=True):
            is_own = record.source == source
            record.accepted = accepted if is_own else 0
            scores = tuple(round(score, 3) for score in record.scores or ()) if is_own else ()
            found.append(Judged(record.drafted if is_own else 0, record.accepted, scores))
        self.accepted = []
        return tuple(found)


class Asking(Controller):
    """Always asks the one draft for k tokens. wants_scores: and how sure it is of each.

    most: tokens that it ever offered. passes: of its model for a proposal, as in `Offer`.
    """

    def __init__(self, k: int, *, wants_scores: bool) -> None:
        super().__init__(k)
        self.min_survival = LEAST_SURVIVAL if wants_scores else 0.0
        self.most = 0
        self.passes: int | None = None

    def choose(
        self, drafters: Sequence[Drafter], context: DraftContext, room: int, n_pending: int = 1
    ) -> tuple[Drafter | None, int]:
        for drafter in drafters:
            offer = drafter.offer(context)
            self.most, self.passes = max(self.most, offer.max_k), offer.passes
        return super().choose(drafters, context, room, n_pending)
