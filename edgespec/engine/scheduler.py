"""Who answers the round loop's requests, and when: the serial and the overlapped schedule, side by side.

Serial: each at once, on the caller's thread. Overlapped: the target verifies on a thread of its own while the draft
prepares for the round's outcomes on the caller's. The loop is the same, and so is the text. Neither knows tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from edgespec.engine.decoder import Answer, Event
from edgespec.engine.lookahead import Lookahead
from edgespec.errors import BackendError, ConfigError
from edgespec.trace import Trace
from edgespec.types import Committed, Drafter, Forward, Proposal, Propose, RoundRecord, Rows

__all__ = ["SCHEDULES", "Events", "TargetThread", "answer", "run_overlapped", "run_schedule", "run_serial"]

SCHEDULES = ("serial", "overlapped")

Result = TypeVar("Result", covariant=True)
Events = Generator[Event, Answer, None]


class Task(Protocol[Result]):
    """A call in flight."""

    def done(self) -> bool: ...

    def result(self) -> Result: ...


class Worker(Protocol):
    """Runs one call at a time beside the caller."""

    def submit(self, call: Callable[[], Result]) -> Task[Result]: ...

    def close(self) -> None:
        """Wait for the call in flight, then end."""


class TargetThread:
    """A thread for the target's calls; it begins with the first of them and ends with `close`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="edgespec-target")

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        return self._pool.submit(call)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def answer(event: Forward | Propose) -> Rows | Proposal:
    """Run one request of the round loop."""
    return _propose(event) if isinstance(event, Propose) else _forward(event)


def _propose(event: Propose) -> Proposal:
    return event.drafter.propose(event.context, event.k)


def _forward(event: Forward) -> Rows:
    return event.session.forward(event.tokens, parents=event.parents, logits_rows=event.logits_rows, taps=event.taps)


def run_schedule(
    schedule: str, events: Events, drafters: Sequence[Drafter], trace: Trace | None = None
) -> Iterator[Committed]:
    """`events` under the schedule of that name; raises ConfigError for an unknown one."""
    if schedule == "serial":
        return run_serial(events, trace)
    if schedule == "overlapped":
        return run_overlapped(events, drafters, trace)
    raise ConfigError(f"schedule={schedule!r} is not known: use {', '.join(SCHEDULES)}")


def run_serial(events: Events, trace: Trace | None = None) -> Iterator[Committed]:
    """Drive `events` to its end; closing this iterator closes the loop, which cancels the work.

    What fails is thrown into the loop where it asked: a draft's failure it survives, a target's it passes on.
    """
    watch = _Watch(trace.clock if trace else time.perf_counter, trace)
    return _drive(events, watch.answer, lambda record: None, trace)


def run_overlapped(
    events: Events,
    drafters: Sequence[Drafter],
    trace: Trace | None = None,
    *,
    start_worker: Callable[[], Worker] = TargetThread,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Committed]:
    """The same with drafting beside verification, for those of `drafters` that can draft ahead.

    Closing this iterator waits for the target's call in flight; no thread outlives it.
    """
    worker = start_worker()
    overlap = _Overlap(Lookahead(drafters, clock, trace), worker, _Watch(clock, trace))
    try:
        yield from _drive(events, overlap.answer, overlap.ahead.book, trace)
    finally:
        worker.close()


def _drive(
    events: Events,
    answer_one: Callable[[Forward | Propose], Rows | Proposal],
    book: Callable[[RoundRecord], None],
    trace: Trace | None,
) -> Iterator[Committed]:
    """Answer requests and pass reports on."""
    reply: Answer = None
    error: BackendError | None = None
    started = trace.clock() if trace else 0.0
    try:
        while True:
            try:
                event = events.send(reply) if error is None else events.throw(error)
            except StopIteration:
                return
            reply = error = None
            if isinstance(event, Committed):
                book(event.record)
                if trace:
                    started = _trace_round(trace, event.record, started)
                yield event
                continue
            try:
                reply = answer_one(event)
            except BackendError as caught:
                error = caught
    finally:
        events.close()


class _Watch:
    """Answers requests at once, on the caller's thread, and traces them."""

    def __init__(self, clock: Callable[[], float], trace: Trace | None) -> None:
        self.clock, self.trace = clock, trace

    def answer(self, event: Forward | Propose) -> Rows | Proposal:
        return self.propose(event) if isinstance(event, Propose) else self.forward(event)

    def propose(self, event: Propose) -> Proposal:
        started = self.clock()
        proposal = _propose(event)
        self.note_draft(f"draft: {event.drafter.source}", started, len(proposal))
        return proposal

    def forward(self, event: Forward) -> Rows:
        started = self.clock()
        rows = _forward(event)
        self.note_forward(event, started, self.clock())
        return rows

    def note_draft(self, name: str, start_s: float, n_tokens: int) -> None:
        if self.trace:
            self.trace.span("draft", name, start_s, self.clock(), tokens=n_tokens)

    def note_forward(self, event: Forward, start_s: float, end_s: float) -> None:
        if self.trace:
            name = "verify" if event.logits_rows is None or len(event.logits_rows) else "prefill"
            self.trace.span("target", name, start_s, end_s, rows=len(event.tokens))


class _Overlap:
    """Answers requests for one request's loop. A call of the target before which nothing was drafted runs at once."""

    def __init__(self, ahead: Lookahead, worker: Worker, watch: _Watch) -> None:
        self.ahead = ahead
        self._worker, self._watch = worker, watch
        self._drafted: tuple[Propose, Proposal] | None = None  # in this round

    def answer(self, event: Forward | Propose) -> Rows | Proposal:
        if isinstance(event, Forward):
            return self._forward(event)
        try:
            proposal = self._propose(event)
        except BackendError:
            self.ahead.drop(event.drafter)
            raise
        self._drafted = event, proposal
        return proposal

    def _propose(self, event: Propose) -> Proposal:
        started = self._watch.clock()
        proposal = self.ahead.take(event)
        if proposal is None:
            return self._watch.propose(event)
        self._watch.note_draft("rest of a hit", started, len(proposal))
        return proposal

    def _forward(self, event: Forward) -> Rows:
        drafted, self._drafted = self._drafted, None
        if drafted is None or not self.ahead.wants(drafted[1]):
            return self._watch.forward(event)
        started = self._watch.clock()
        task = self._worker.submit(lambda: (_forward(event), self._watch.clock()))
        self.ahead.prepare(*drafted, task.done)
        rows, ready_s = task.result()
        self.ahead.late(ready_s)
        self._watch.note_forward(event, started, ready_s)
        return rows


def _trace_round(trace: Trace, record: RoundRecord, start_s: float) -> float:
    """The round that ends now, from `start_s` on, and what came of what was prepared for it; the time now."""
    now = trace.clock()
    if record.hit is not None:
        trace.mark("rounds", "hit" if record.hit else "miss", start_s, round=record.index)
    trace.span(
        "rounds", f"round {record.index}", start_s, now, source=record.source, drafted=record.drafted,
        accepted=record.accepted, emitted=record.emitted, rows=record.n_rows, ahead=record.ahead, kind=record.kind,
    )  # fmt: skip
    return now
