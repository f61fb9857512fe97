"""The adaptive controller and drafters whose offers are judged whether they run or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from adaptive_world import PLAIN_S, KnowingDrafter, make_world
from test_adaptive import expectation

from edgespec.draft.track import AcceptanceTrack
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.adaptive import Expectation, Learned
from edgespec.engine.costs import MeasuredCosts, Spread
from edgespec.types import DraftContext, Offer, Proposal


class SeenThrough(KnowingDrafter):
    """Runs no model, and says of its last offer how much was right, whoever got the round."""

    def __init__(self, truth: Sequence[int], is_right: Callable[[int], bool]) -> None:
        super().__init__(truth, is_right, 0.0)
        self.track = AcceptanceTrack()

    def offer(self, context: DraftContext) -> Offer:
        judged = self.track.learn(context.tokens)
        start = len(context.tokens)
        named = self._name(start, 4)
        self.track.ask(Proposal(named, self.source), start)
        return Offer(len(self.truth) - start, self.track.rate(), 0, 0, judged)

    def _name(self, start: int, n: int) -> list[int]:
        places = range(start, min(start + n, len(self.truth)))
        return [self.truth[at] if self.is_right(at) else (self.truth[at] + 1) % 16 for at in places]


def test_a_draft_that_becomes_right_is_seen_without_being_tried() -> None:
    """The account was empty after eight wrong rows, and repeating texts were decoded token by token to their end."""
    world, n, turn = make_world(1.0), 200, 60
    world.memory = Learned.expecting(expectation(1.0, 0.0, (0.6, 0.6, 0.6, 0.6)))
    draft = SeenThrough(world.truth(n), lambda at: at >= turn)
    outcome = world.run([draft], n)
    done, late = 3, []
    for record in outcome.stats.records:
        if done >= turn:
            late.append(record)
        done += record.emitted
    assert world.memory.ledger.lost_steps > 0.0, "it was tried while it was wrong"
    assert not late[0].drafted
    assert len(late) <= 0.4 * (n - turn)
    blind = make_world(1.0)
    blind.memory = Learned.expecting(expectation(1.0, 0.0, (0.6, 0.6, 0.6, 0.6)))
    unseen = KnowingDrafter(blind.truth(n), lambda at: at >= turn, 0.0)
    assert len(outcome.stats.records) < len(blind.run([unseen], n).stats.records)


@pytest.mark.parametrize("n", [200, 700])
@pytest.mark.parametrize("row_s", [0.2, 1.0, 3.0])
def test_a_useless_draft_that_judges_itself_costs_no_more_than_another(row_s: float, n: int) -> None:
    world = make_world(row_s)
    draft = SeenThrough(world.truth(n), lambda _: False)
    outcome = world.run([draft], n)
    rows = sum(record.n_rows - 1 for record in outcome.stats.records[1:])
    assert rows <= 0.05 * 200 + 0.01 * (n - 200)
    assert n * PLAIN_S + rows * row_s <= 1.03 * n * PLAIN_S
    assert not world.memory.rest, "what judges itself need not sit out"


def test_rows_that_looked_dear_are_measured_again() -> None:
    """A table whose rows fell into a noisy moment was never run again."""
    world, n = make_world(0.2), 700
    rows = {k: Spread(*[PLAIN_S * (1.0 if k == 1 else 1.3 * k)] * 3, 5) for k in range(1, 10)}
    world.memory = Learned.expecting(Expectation(MeasuredCosts({64: rows}), {}, 0.0))
    outcome = world.run([SeenThrough(world.truth(n), lambda _: True)], n)
    drafted = [record for record in outcome.stats.records if record.drafted]
    assert drafted, "its cost is looked at again"
    assert drafted[0].index < 300


def test_every_offer_teaches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[tuple[int, int]] = []
    learn = Acceptance.learn

    def noting(self: Acceptance, drafted: int, accepted: int) -> None:
        learnt.append((drafted, accepted))
        learn(self, drafted, accepted)

    monkeypatch.setattr(Acceptance, "learn", noting)
    world, n = make_world(0.2), 40
    outcome = world.run([SeenThrough(world.truth(n), lambda at: at % 9 != 0)], n)
    records = outcome.stats.records
    assert records[-1].drafted, "a last proposal is never offered again: it is learnt from its round"
    assert len(learnt) == len(records) - 1
    world.run([SeenThrough(world.truth(n), lambda _: True)], 1)
    assert learnt[len(records) - 1] == (records[-1].drafted, records[-1].accepted)
    assert [drafted for drafted, _ in learnt[: len(records) - 1]] == [min(4, r.emitted) for r in records[:-1]]
