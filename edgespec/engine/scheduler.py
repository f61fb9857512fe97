"""Who answers the round loop's requests, and when. The serial scheduler runs each at once, on the caller's thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from edgespec.engine.decoder import Answer, Event
from edgespec.errors import BackendError
from edgespec.types import Committed, Forward, Proposal, Propose, Rows

__all__ = ["answer", "run_serial"]


def answer(event: Forward | Propose) -> Rows | Proposal:
    """Run one request of the round loop."""
    if isinstance(event, Propose):
        return event.drafter.propose(event.context, event.k)
    return event.session.forward(event.tokens, parents=event.parents, logits_rows=event.logits_rows, taps=event.taps)


def run_serial(events: Generator[Event, Answer, None]) -> Iterator[Committed]:
    """Drive `events` to its end; closing this iterator closes the loop, which cancels the work.

    What fails is thrown into the loop where it asked: a draft's failure it survives, a target's it passes on.
    """
    reply: Answer = None
    error: BackendError | None = None
    try:
        while True:
            try:
                event = events.send(reply) if error is None else events.throw(error)
            except StopIteration:
                return
            reply = error = None
            if isinstance(event, Committed):
                yield event
                continue
            try:
                reply = answer(event)
            except BackendError as caught:
                error = caught
    finally:
        events.close()
