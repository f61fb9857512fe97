"""The round loop: draft, verify in one pass, commit, rewind. One loop serves every drafter on every backend.

It is a generator that does no I/O: it yields `Propose` and `Forward` requests, which a scheduler answers, and
`Committed` reports. It knows no text (stop rules are injected) and no runtime. The committed tokens are the only truth:
at every round boundary the target's cache holds exactly `committed[:-1]`, so a first round, a plain step (k = 0) and a
recovery after a lost cache are the same code. Closing the generator cancels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from edgespec.engine.logprobs import row_logprobs
from edgespec.errors import BackendError, CacheError
from edgespec.types import (
    FILLER,
    Committed,
    DraftContext,
    Drafter,
    ExactRows,
    Forward,
    ModelInfo,
    Proposal,
    Propose,
    RoundRecord,
    Rows,
    Session,
    StopRule,
    Verdict,
)

if TYPE_CHECKING:
    from edgespec.engine.controller import Controller
    from edgespec.noise import Noise
    from edgespec.sampling import Sampler
    from edgespec.verify import Verifier

__all__ = ["PREFILL_ROWS", "Answer", "Event", "Job", "decode", "off_note"]

PREFILL_ROWS = 256

Event = Forward | Propose | Committed
Answer = Rows | Proposal | None


@dataclass
class Job:
    """One sequence to decode and everything that decides its tokens."""

    prompt: list[int]
    sampler: Sampler
    verifier: Verifier
    noise: Noise
    stop: StopRule
    max_tokens: int
    n_logprobs: int | None = None
    notes: list[str] = field(default_factory=list)  # what the user should know afterwards
    is_exact: bool = False  # set by `decode`: every call so far used exact rows
    strict: bool = False  # a draft that fails is an error
    failed: dict[str, str] = field(default_factory=dict)  # drafts that failed: source -> why


@dataclass
class _Loop:
    """State of one decode call; `committed` is only ever appended to."""

    job: Job
    target: Session
    info: ModelInfo
    drafters: Sequence[Drafter]
    controller: Controller
    exact: ExactRows | None
    committed: list[int]
    n_left: int
    guess: int | None = None  # free token for a row that exact mode has to run anyway
    successors: dict[int, int] = field(default_factory=dict)  # token -> what followed it last
    can_rewind: bool = True

    @property
    def taps(self) -> tuple[str, ...]:
        """Features that this round's drafters want; none once speculation is off."""
        if not self.can_rewind:
            return ()
        return tuple(dict.fromkeys(tap for drafter in self.drafters for tap in drafter.taps))

    def pending(self) -> list[int]:
        return self.committed[self.target.n_past :]

    def room(self, n_pending: int) -> int:
        """Most tokens that this round may draft."""
        if not self.can_rewind:
            return 0
        caps = [self.n_left - 1, self.info.n_ctx - len(self.committed)]
        if self.info.max_rewind is not None:
            caps.append(self.info.max_rewind)
        return max(0, min(*caps, self.most_rows - n_pending))

    def width(self, n_rows: int) -> int:
        """Rows to run for `n_rows` wanted ones."""
        return self.exact.width(n_rows) if self.exact else n_rows

    @property
    def most_rows(self) -> int:
        """Longest forward call; prefill chunks are pinned to it."""
        limits = [self.info.max_rows, self.exact.max_rows if self.exact else None]
        return min([PREFILL_ROWS, *(limit for limit in limits if limit is not None)])

    def padded(self, tokens: list[int]) -> list[int]:
        """`tokens` filled up to a row count whose rows are exact."""
        return tokens + [tokens[-1]] * (self.width(len(tokens)) - len(tokens))

    def filler(self, n_pending: int) -> Proposal:
        """The empty proposal, or the free guess where exact mode runs another row anyway."""
        if self.width(n_pending) == n_pending:
            return Proposal([], source="none")
        guess = self.successors.get(self.committed[-1], self.guess)
        return Proposal([] if guess is None else [guess], source=FILLER)

    def rewind(self, n_past: int, path: list[int] | None = None) -> None:
        """Reconcile the target's cache to the first `n_past` committed tokens; a lost cache is refilled later."""
        if path is None and self.target.n_past == n_past:
            return
        try:
            self.target.keep(n_past, path)
        except CacheError as error:
            self.job.notes.append(f"speculation off: {error}")
            if self.exact:
                self.job.notes.append("exact rows off: the rows that fill up a call cannot be taken back")
            self.can_rewind, self.exact, self.job.is_exact = False, None, False
            self.target.keep(0)

    def drop(self, drafter: Drafter, error: BackendError) -> None:
        """Go on without a drafter that failed; it is never asked again. Raises `error` where the job is strict."""
        if self.job.strict:
            raise error
        self.drafters = [other for other in self.drafters if other is not drafter]
        self.job.failed[drafter.source] = str(error)
        self.job.notes.append(off_note(drafter.source, str(error), is_last=not self.drafters))

    def observe(self, start: int, tokens: list[int], rows: Rows, order: Sequence[int]) -> None:
        """Show the drafters the true features of committed positions; order: their rows of the call, ascending."""
        if not rows.hidden or not tokens:
            return
        is_first = order[-1] == len(order) - 1  # always so unless a tree was verified: then a view will do
        wanted = slice(len(order)) if is_first else list(order)
        hidden = {tap: values[wanted] for tap, values in rows.hidden.items()}
        for drafter in self.drafters:
            try:
                drafter.observe(start, tokens, hidden)
            except BackendError as error:
                self.drop(drafter, error)


def off_note(source: str, reason: str, *, is_last: bool) -> str:
    """What the user is told of a draft that failed. is_last: no other draft is left."""
    return f"{'speculation' if is_last else f'draft {source}'} off: {reason}"


def decode(
    job: Job,
    target: Session,
    info: ModelInfo,
    drafters: Sequence[Drafter],
    controller: Controller,
    exact: ExactRows | None = None,
) -> Generator[Event, Answer, None]:
    """Generate until the stop rule, `max_tokens` or the context ends it.

    `target` may already hold a prefix of the prompt (all but its last token at most). With `exact`, every call on the
    target uses a row count in that range, so the text does not depend on how many rows were run together.
    """
    if exact is not None and len(job.prompt) + exact.width(1) > info.n_ctx + 1:
        job.notes.append(f"exact rows off: the context has no room for the {exact.width(1)} rows of a step")
        exact = None
    job.is_exact = exact is not None
    slack = max(0, exact.width(1) - 2) if exact else 0  # so that a padded call fits at the very end
    n_left = min(job.max_tokens, info.n_ctx - len(job.prompt) - slack)
    loop = _Loop(job, target, info, drafters, controller, exact, list(job.prompt), n_left)
    if loop.width(1) > 1:
        loop.successors.update(itertools.pairwise(job.prompt))
    assert target.n_past < len(job.prompt), "the prompt's last token must not be in the cache"
    reason, index = None, 0
    while reason is None:
        started = time.perf_counter()
        prefill_s = yield from _prefill(loop)
        committed = yield from _round(loop, index)
        record = committed.record
        record.target_s += prefill_s
        record.host_s = time.perf_counter() - started - record.target_s - record.draft_s
        controller.update(record)
        yield committed
        reason, index = committed.finish_reason, index + 1


def _prefill(loop: _Loop) -> Generator[Event, Answer, float]:
    """Feed pinned chunks until one call can hold the rest and a proposal; seconds in the runtime."""
    limit, run_s = loop.most_rows, 0.0
    while len(pending := loop.pending()) > max(1, limit - loop.controller.max_k):
        piece = pending[: min(limit, len(pending) - 1)]
        start = loop.target.n_past
        rows = cast(Rows, (yield Forward(loop.target, loop.padded(piece), logits_rows=(), taps=loop.taps)))
        run_s += rows.run_s
        loop.observe(start, piece, rows, range(len(piece)))
        loop.rewind(start + len(piece))
    return run_s


def _round(loop: _Loop, index: int) -> Generator[Event, Answer, Committed]:
    """Draft, verify, commit, rewind."""
    job, start = loop.job, loop.target.n_past
    pending = loop.pending()
    context = DraftContext(loop.committed, job.sampler, job.noise, job.verifier, index)
    drafter, k = loop.controller.choose(loop.drafters, context, loop.room(len(pending)), len(pending))
    context = context._replace(min_survival=loop.controller.min_survival)
    proposal, propose_s = loop.filler(len(pending)), 0.0
    if drafter is not None:
        started = time.perf_counter()
        drafted = yield from _ask(loop, drafter, context, k)
        propose_s = time.perf_counter() - started
        proposal = drafted if len(drafted) else proposal

    tokens = loop.padded(pending + proposal.tokens)
    parents = _tree_parents(proposal, len(pending))
    wanted = range(len(pending) - 1, len(pending) + len(proposal))
    rows = cast(Rows, (yield Forward(loop.target, tokens, parents, wanted, loop.taps)))
    started = time.perf_counter()
    verdict = job.verifier.verify(proposal, rows.logits, job.sampler, job.noise, loop.committed, index)
    verify_s = time.perf_counter() - started

    emitted, reason = _commit(loop, proposal, verdict)
    record = _record(index, k, proposal, verdict, len(emitted), len(tokens))
    record.draft_s, record.target_s = proposal.run_s, rows.run_s
    record.propose_s, record.verify_s = propose_s, verify_s
    if job.n_logprobs is not None:
        at = [0, *(i + 1 for i in verdict.path)]
        record.logprobs = [row_logprobs(rows.logits[at[d]], t, job.n_logprobs) for d, t in enumerate(emitted)]
    loop.guess = _next_guess(proposal, verdict, rows)
    cached = [*range(len(pending)), *(len(pending) + i for i in verdict.path[: len(emitted) - 1])]
    loop.observe(start, loop.committed[start:-1], rows, cached)
    loop.rewind(len(loop.committed) - 1, cached if parents else None)
    return Committed(tuple(emitted), record, reason)


def _ask(loop: _Loop, drafter: Drafter, context: DraftContext, k: int) -> Generator[Event, Answer, Proposal]:
    """The drafter's proposal; an empty one where it fails, which costs its speed and never the text."""
    try:
        return cast(Proposal, (yield Propose(drafter, context, k)))
    except BackendError as error:
        loop.drop(drafter, error)
        return Proposal([], drafter.source)


def _tree_parents(proposal: Proposal, n_pending: int) -> list[int] | None:
    """Parents within the call: the pending chain first, the proposal hanging off its last token."""
    if proposal.parents is None:
        return None
    return [*range(-1, n_pending - 1), *(n_pending + p for p in proposal.parents)]


def _commit(loop: _Loop, proposal: Proposal, verdict: Verdict) -> tuple[list[int], str | None]:
    """Append the verdict's tokens up to the first stop or limit."""
    emitted: list[int] = []
    for token in [*(proposal.tokens[i] for i in verdict.path), verdict.next_token]:
        loop.successors[loop.committed[-1]] = token
        loop.committed.append(token)
        emitted.append(token)
        loop.n_left -= 1
        if signal := loop.job.stop.push(token):
            return emitted, signal.reason
        if loop.n_left == 0:
            return emitted, "length"
    return emitted, None


def _record(index: int, k: int, proposal: Proposal, verdict: Verdict, n_emitted: int, n_rows: int) -> RoundRecord:
    """Counts of what the user got: drafted tokens beyond a cut were never judged."""
    n_accepted = len(verdict.path)
    cut = int(n_emitted <= n_accepted)
    return RoundRecord(
        index=index,
        source=proposal.source,
        asked_k=k,
        drafted=min(len(proposal), n_emitted) if cut else len(proposal),
        accepted=min(n_accepted, n_emitted),
        emitted=n_emitted,
        cut=cut,
        n_rows=n_rows,
        kind=verdict.kind,
        scores=proposal.scores,
        hit=True if proposal.is_ahead else None,
    )


def _next_guess(proposal: Proposal, verdict: Verdict, rows: Rows) -> int | None:
    """What the target would say after the first rejected token: the best free guess for the position after next."""
    if proposal.parents is not None or len(verdict.path) == len(proposal):
        return verdict.next_token
    return int(rows.logits[len(verdict.path) + 1].argmax())
