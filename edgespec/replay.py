"""What a mix of drafts would have yielded on texts that the target wrote: the rounds are run again without any model.

The controllers and the n-gram drafter are production's own; a trained draft is stood in for by what it got right at
each place of the calibration texts (`edgespec.stand_in`). A virtual clock charges what the profile says calls cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from edgespec.draft_records import chances
from edgespec.engine.controller import Controller, create_controller
from edgespec.engine.learned import Expectation, Learned
from edgespec.profile import DraftProfile, Profiles, TargetProfile
from edgespec.sampling import Sampler, SamplingParams
from edgespec.stand_in import StandIn
from edgespec.types import FILLER, DraftContext, Drafter, ExactRows, Proposal, RoundRecord

__all__ = ["Mix", "Yield", "chances_at", "replay"]

TURNS = 3  # over the texts where acceptance is drawn
PREFILL_ROWS = 256  # of a prompt's last call, at most


@dataclass(frozen=True)
class Mix:
    """A way to decode. drafts: those with weights. free: make the drafters before them, which run no model.

    k, min_k: tokens of a proposal, at most and at least. controller: which of the production ones steers.
    saved: tokens drafted by a model -> seconds that such a round is shorter because some of it was drafted ahead.
    expected: what the adaptive controller begins with; None for what is known of these drafts alone.
    """

    drafts: Mapping[str, DraftProfile] = field(default_factory=dict)
    free: Sequence[Callable[[], Drafter]] = ()
    k: int = 0
    controller: str = "fixed"
    min_k: int = 0
    saved: Mapping[int, float] = field(default_factory=dict)
    expected: Expectation | None = None


@dataclass
class Yield:
    """Totals over all texts. rows: of the target's calls, padding included. steps: tokens drafted by a model."""

    tokens: float = 0
    rounds: float = 0
    seconds: float = 0.0
    rows: float = 0
    steps: float = 0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


def replay(target: TargetProfile, mix: Mix) -> Yield:
    """Run the rounds of every text; the first one of each comes with its prompt and does not count."""
    total = Yield()
    for record in _records(target, mix):
        if record.index:
            total.tokens += record.emitted
            total.rounds += 1
            total.seconds += record.target_s + record.draft_s + record.host_s
            total.rows += record.n_rows
            total.steps += record.drafted if record.source in mix.drafts else 0
    if not total.tokens:  # every text was empty: a single plain step stands for them
        total = Yield(1, 1, target.costs.seconds(target.width(1), 64) + target.costs.host_s, target.width(1))
    return total


def chances_at(target: TargetProfile, draft: DraftProfile, k: int) -> tuple[float, ...]:
    """The draft's acceptance by position where it always drafts `k` tokens: rounds then begin at other places.

    What calibration saw at its longest proposals where it is not known by place.
    """
    if not draft.places:
        return draft.chances
    rounds = _records(target, Mix({draft.kind: draft}, k=k))
    return chances([record for record in rounds if record.source == draft.kind])


def _records(target: TargetProfile, mix: Mix) -> Iterator[RoundRecord]:
    """The rounds of every text, more than once where something is drawn."""
    costs, drafts = _Costs(target, mix), mix.drafts
    has_luck = target.guess > 0.0 or any(not draft.places for draft in drafts.values())
    for turn in range(TURNS if has_luck else 1):
        state: dict[str, Any] = {}
        if mix.controller == "adaptive":
            memory = Learned.expecting(mix.expected or Profiles(target, dict(drafts)).expected)
            state = {"memory": memory, "exact": costs.exact}
        for index, (prompt, text) in enumerate(target.texts):
            dice = random.Random(f"{turn} {index}")
            sources = [make() for make in mix.free]
            sources += [StandIn(draft, prompt, text, index, dice, costs.exact) for draft in drafts.values()]
            controller = create_controller(mix.controller, mix.k, mix.min_k, **state)
            yield from _Request(target, sources, controller, costs, dice).run(prompt, text)


class _Costs:
    """The virtual clock's prices."""

    def __init__(self, target: TargetProfile, mix: Mix) -> None:
        self.target, self.mix = target, mix
        self.exact = ExactRows(*target.exact) if target.exact else None
        self.is_weighed = mix.controller == "adaptive"

    def host_s(self, accepted: int, asked_k: int) -> float:
        """Of a round, drafting left out."""
        choice_s = self.target.choice_s[not asked_k] if self.is_weighed else 0.0
        return self.target.costs.host_s + self.target.costs.token_s * accepted + choice_s

    def draft_s(self, proposal: Proposal, n_missed: int) -> tuple[float, bool]:
        """(seconds, whether some of it was there ahead) of a proposal by a source that has missed `n_missed` tokens."""
        draft = self.mix.drafts.get(proposal.source)
        if draft is None or not proposal.tokens:
            return 0.0, False
        seconds = draft.costs.seconds(len(proposal.tokens))
        if n_missed > self.mix.k + 1:
            return seconds + draft.costs.catch_up_token_s * n_missed, False
        return seconds - self.mix.saved.get(len(proposal.tokens), 0.0), bool(self.mix.saved)


@dataclass
class _Request:
    """One text, decoded again."""

    target: TargetProfile
    sources: Sequence[Drafter]
    controller: Controller
    costs: _Costs
    dice: random.Random
    fed: dict[str, int] = field(default_factory=dict)  # source -> committed tokens when it last proposed

    def run(self, prompt: Sequence[int], text: Sequence[int]) -> Iterator[RoundRecord]:
        """The rounds of one text; the first one comes with the prompt and is no part of `decode_tok_s`."""
        truth, tokens, index = [*prompt, *text], list(prompt), 0
        params = SamplingParams(temperature=self.target.temperature)
        sampler = Sampler(params, n_vocab=1, eos_ids=(), n_prompt=len(prompt))
        while len(tokens) < len(truth):
            context = DraftContext(tokens, sampler, cast(Any, None), cast(Any, None), index)
            record = self._round(context, truth, 1 if index else min(len(prompt), PREFILL_ROWS))
            self.controller.update(record)
            tokens += truth[len(tokens) : len(tokens) + record.emitted]
            yield record
            index += 1

    def _round(self, context: DraftContext, truth: Sequence[int], n_pending: int) -> RoundRecord:
        at = len(context.tokens)
        drafter, k = self.controller.choose(self.sources, context, len(truth) - at - 1, n_pending)
        proposal, n_missed = Proposal([], "none"), 0
        if drafter is not None:
            context = context._replace(min_survival=self.controller.min_survival)
            proposal, n_missed = drafter.propose(context, k), at - self.fed.get(drafter.source, 0)
            self.fed[drafter.source] = at
        n_rows = self.target.width(n_pending + len(proposal))
        accepted = 0
        while accepted < len(proposal) and proposal.tokens[accepted] == truth[at + accepted]:
            accepted += 1
        drafted = len(proposal)
        if not proposal.tokens and self.target.width(n_pending) > n_pending:
            proposal.source, drafted = FILLER, 1
            accepted = int(at + 1 < len(truth) and self.dice.random() < self.target.guess)
        draft_s, is_ahead = self.costs.draft_s(proposal, n_missed)
        return RoundRecord(
            index=context.round,
            source=proposal.source,
            asked_k=k,
            drafted=drafted,
            accepted=accepted,
            emitted=accepted + 1,
            cut=0,
            n_rows=n_rows,
            kind="bonus" if accepted == len(proposal) else "correction",
            draft_s=draft_s,
            target_s=self.target.costs.seconds(n_rows, at),
            host_s=self.costs.host_s(accepted, k),
            propose_s=draft_s,
            verify_s=self.target.costs.token_s * (accepted + 1),
            hit=True if is_ahead else None,
            scores=proposal.scores,
        )
