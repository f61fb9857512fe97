"""The account against losses, acceptance estimates and the calibration of confidences, each by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.acceptance import Acceptance, Calibration
from edgespec.engine.ledger import MOST_STEPS, TRICKLE, Ledger

ROUND = st.tuples(st.floats(0.0, 3.0), st.integers(0, 12))  # steps and rows that a failing round costs
GOOD = st.tuples(st.integers(1, 8), st.floats(0.0, 7.0), st.integers(0, 16))  # emitted, gained, rows


def try_useless(ledger: Ledger, rounds: list[tuple[float, int]], gap: int) -> tuple[float, int, int]:
    """Whatever the account allows is tried and fails; plain rounds between. (steps lost, rows spent, tokens)."""
    lost, spent, tokens = 0.0, 0, 0
    for steps, count in rounds:
        if ledger.affords(steps, count):
            ledger.settle(1, -steps, count)
            lost, spent, tokens = lost + steps, spent + count, tokens + 1
        for _ in range(gap):
            ledger.settle(1)
        tokens += gap
    return lost, spent, tokens


@given(st.lists(ROUND, max_size=80), st.integers(0, 20))
def test_what_a_useless_draft_costs_is_bounded_at_every_length(rounds: list[tuple[float, int]], gap: int) -> None:
    lost, spent, tokens = try_useless(Ledger(), rounds, gap)
    assert spent <= 8 + 0.01 * tokens + 1e-9
    assert lost <= 2 + 0.01 * tokens + 1e-9
    if tokens >= 200:
        assert spent <= 0.05 * 200 + 0.01 * (tokens - 200) + 1e-9
        assert lost <= 0.03 * tokens


@given(st.lists(GOOD, max_size=40), st.lists(ROUND, max_size=80), st.integers(0, 20))
def test_a_good_start_buys_no_more_than_the_ceiling(
    good: list[tuple[int, float, int]], rounds: list[tuple[float, int]], gap: int
) -> None:
    """Gains without a ceiling paid for any loss that followed, and a run that was ahead could fall far behind."""
    ledger = Ledger()
    for emitted, gained, count in good:
        ledger.settle(emitted, gained, count)
    lost, _, tokens = try_useless(ledger, rounds, gap)
    assert lost <= MOST_STEPS + TRICKLE * tokens + 1e-9


def test_what_was_booked_is_told() -> None:
    ledger = Ledger()
    ledger.settle(3, 1.5, 4)
    ledger.settle(1, -0.5, 2)
    fields = ledger.to_dict()
    assert (fields["tokens"], fields["extra_rows_and_draft_runs"]) == (4, 6)
    assert (fields["plain_steps_won"], fields["plain_steps_lost"]) == (1.5, 0.5)


def test_chances_are_conditional_and_recent() -> None:
    seen = Acceptance()
    assert seen.chances(2, 0.6) == [0.6, 0.6]
    for _ in range(60):
        seen.learn(3, 1)  # the first right, the second wrong, the third never judged
    first, second, third = seen.chances(3, 0.5)
    assert first > 0.9
    assert second < 0.15
    assert third == second, "a position that was never reached is as good as the one before it"
    for _ in range(15):
        seen.learn(3, 0)
    assert seen.chances(1, 0.5)[0] < 0.5
    seen.fade(0.0)
    assert seen.chances(1, 0.7) == pytest.approx([0.7])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_calibration_finds_the_power(power: float) -> None:
    dice, found = random.Random(3), Calibration()
    for _ in range(4000):
        scores = [dice.uniform(0.05, 0.95) for _ in range(3)]
        accepted = 0
        while accepted < 3 and dice.random() < scores[accepted] ** power:
            accepted += 1
        found.learn(scores, accepted)
    assert found.power == pytest.approx(power, abs=0.3)
    assert found.limit(0.0) == 0.0
    assert found.limit(0.5) ** found.power == pytest.approx(0.5)


def test_what_would_have_paid_gives_rows_back_and_no_time() -> None:
    ledger = Ledger()
    ledger.settle(1, -1.5, 8)
    assert not ledger.affords(0.1, 1)
    ledger.vindicate("ngram")
    assert ledger.affords(0.1, 1, "ngram")
    assert not ledger.affords(0.1, 1, "model"), "it is not for others"
    assert not ledger.affords(0.6, 1, "ngram"), "half a plain step is left"
    assert ledger.won_steps == 0.0
    for _ in range(8):
        assert ledger.affords(0.01, 1, "ngram")
        ledger.settle(0, -0.01, 1, "ngram")
    assert not ledger.affords(0.01, 1, "ngram"), "it is used up"
    assert ledger.spent_count == 16
