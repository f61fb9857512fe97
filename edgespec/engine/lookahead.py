"""Continuations that a draft prepares while the target verifies a round: which, how far, and what was used of them.

A continuation is kept under the tokens that the round would have to commit: drafted tokens accepted, and the token
after them. Runs on the caller's thread and asks between the draft's passes whether the target is done, or would have to
wait for another one. What a draft prepares for an outcome is what it would propose after it, so a hit changes the time
and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from edgespec.draft.base import finish
from edgespec.engine.ahead import is_worth_starting, rank_outcomes
from edgespec.errors import BackendError
from edgespec.trace import Trace
from edgespec.types import AheadDrafter, Drafter, Proposal, Propose, RoundRecord

__all__ = ["PROBE_EVERY", "Lookahead"]

# One round in so many is verified with the draft at rest, so that contention shows in what the others take.
PROBE_EVERY = 32
# How fast the usual duration of a call follows the last one.
PACE = 0.25
# Chance of a draft's own next token in a request that has not shown it yet.
UNKNOWN = 0.5


@dataclass
class _Branch:
    """A continuation under way. proposal: once it is complete; until then `steps` goes on with it."""

    steps: Generator[None, None, Proposal]
    proposal: Proposal | None = None
    n_passes: int = 0


class Lookahead:
    """What one request has prepared for its round in flight. drafters: all of the request, in order of priority."""

    def __init__(
        self, drafters: Sequence[Drafter], clock: Callable[[], float] = time.perf_counter, trace: Trace | None = None
    ) -> None:
        self._able = [drafter for drafter in drafters if isinstance(drafter, AheadDrafter)]
        self._clock, self._trace = clock, trace
        self._branches: dict[tuple[int, ...], _Branch] = {}
        self._owner: AheadDrafter | None = None
        self._start = 0  # committed tokens when the round began
        self._started_s = 0.0
        self._width = 0  # tokens that the target is verifying
        self._usual_target_s: dict[int, float] = {}  # by width
        self._usual_pass_s = 0.0
        self._fault: tuple[Drafter, BackendError] | None = None
        self._n_rounds = 0
        self._passes, self._passes_s, self._late_s = 0, 0.0, 0.0
        self._hit: bool | None = None

    def wants(self, proposal: Proposal) -> bool:
        """Whether to prepare while this one is verified; without, the target may run at once."""
        self._n_rounds += 1
        is_probe = self._n_rounds % PROBE_EVERY == 0
        return bool(self._able) and len(proposal) > 0 and proposal.parents is None and not is_probe

    def prepare(self, asked: Propose, proposal: Proposal, is_done: Callable[[], bool]) -> None:
        """Draft for the likeliest outcomes of `proposal` until all are there or `is_done`."""
        self._owner = next((drafter for drafter in self._able if drafter is asked.drafter), self._able[0])
        self._start = len(asked.context.tokens)
        self._started_s, self._width = self._clock(), len(proposal)
        try:
            self._prepare(asked, proposal, proposal.runners_up, is_done)
        except BackendError as error:  # raised again where the draft is asked next: there the loop expects faults
            self._fault = self._owner, error
            self.drop(self._owner)

    def drop(self, drafter: Drafter) -> None:
        """Prepare nothing more with a drafter that failed."""
        self._branches = {}
        self._able = [other for other in self._able if other is not drafter]

    def _prepare(
        self,
        asked: Propose,
        proposal: Proposal,
        runners_up: Sequence[tuple[int, float] | None] | None,
        is_done: Callable[[], bool],
    ) -> None:
        second: tuple[int, float] | None = None  # to the guess after all drafted tokens
        k = len(proposal)
        for outcome in rank_outcomes(self._chances(asked, proposal, runners_up)):
            path = proposal.tokens[: outcome.accepted]
            if outcome.rank == 0:
                guess = _Branch(self._steps(asked, path, 1))
                if not self._grow(guess, outcome.chance, is_done) or not guess.proposal:
                    return
                token = guess.proposal.tokens[0]
                second = guess.proposal.runners_up[0] if guess.proposal.runners_up else None
            else:
                seconds = [*(runners_up or [None] * k), second]
                if (other := seconds[outcome.accepted]) is None:
                    continue
                token = other[0]
            branch = self._branches[(*path, token)] = _Branch(self._steps(asked, [*path, token], asked.k))
            if not self._grow(branch, outcome.chance, is_done):
                return

    def _chances(
        self, asked: Propose, proposal: Proposal, runners_up: Sequence[tuple[int, float] | None] | None
    ) -> list[float]:
        """Of each drafted token, and of the guess after them: what the draft thinks, tempered by how it has done."""
        assert self._owner is not None
        rate = self._owner.offer(asked.context).acceptance
        rate = UNKNOWN if rate is None else rate
        thinks = [None] * len(proposal) if runners_up is None else runners_up
        return [*(rate if one is None else (rate + one[1]) / 2 for one in thinks), rate]

    def _steps(self, asked: Propose, guesses: Sequence[int], k: int) -> Generator[None, None, Proposal]:
        assert self._owner is not None
        context = asked.context
        ahead = context._replace(
            tokens=[*context.tokens, *guesses], round=context.round + 1, n_ahead=context.n_ahead + len(guesses)
        )
        return self._owner.steps(ahead, k)

    def _grow(self, branch: _Branch, chance: float, is_done: Callable[[], bool]) -> bool:
        """Run its passes to the end, or until the target is done or would have to wait; whether it is complete."""
        while branch.proposal is None:
            if is_done() or not is_worth_starting(chance, self._usual_pass_s, self._left_s()):
                return False
            started = self._clock()
            try:
                next(branch.steps)
            except StopIteration as end:
                branch.proposal = end.value
            branch.n_passes += 1
            took_s = self._clock() - started
            self._usual_pass_s += (took_s - self._usual_pass_s) * (PACE if self._usual_pass_s else 1)
            self._passes += 1
            self._passes_s += took_s
            if self._trace:
                self._trace.span("draft", "ahead", started, started + took_s)
        return True

    def _left_s(self) -> float:
        """Until the target is done, by what such calls usually take; unlimited before one was seen."""
        usual = self._usual_target_s.get(self._width)
        return math.inf if usual is None else usual - (self._clock() - self._started_s)

    def late(self, ready_s: float) -> None:
        """The target was done at `ready_s`; now the draft's pass in flight is, too."""
        took_s = ready_s - self._started_s
        usual_s = self._usual_target_s.get(self._width, took_s)
        self._usual_target_s[self._width] = usual_s + PACE * (took_s - usual_s)
        self._late_s += max(0.0, self._clock() - ready_s)

    def take(self, asked: Propose) -> Proposal | None:
        """What was prepared for the round as it came out; raises the error that preparing met."""
        if self._fault is not None and asked.drafter is self._fault[0]:
            raise self._fault[1]
        if not self._branches:
            return None
        tokens, owner = asked.context.tokens, self._owner
        branch = self._branches.get(tuple(tokens[self._start :])) if asked.drafter is owner else None
        self._branches = {}
        self._hit = branch is not None and branch.n_passes > 0
        if branch is None or owner is None or not self._hit:
            return None
        started = self._clock()
        proposal = branch.proposal or finish(branch.steps)
        return owner.adopt(asked.context, _cut(proposal, asked.k, self._clock() - started))

    def book(self, record: RoundRecord) -> None:
        """Write what happened ahead of and beside a round into its record."""
        record.ahead, record.ahead_s, record.late_s, record.hit = self._passes, self._passes_s, self._late_s, self._hit
        record.host_s -= self._late_s
        self._passes, self._passes_s, self._late_s, self._hit = 0, 0.0, 0.0, None


def _cut(proposal: Proposal, k: int, run_s: float) -> Proposal:
    """Its first `k` tokens; run_s: seconds that this round still spent on it."""
    return dataclasses.replace(
        proposal,
        tokens=proposal.tokens[:k],
        dists=proposal.dists[:k] if proposal.dists is not None else None,
        scores=proposal.scores[:k] if proposal.scores is not None else None,
        runners_up=proposal.runners_up[:k] if proposal.runners_up is not None else None,
        run_s=run_s,
        is_ahead=True,
    )
