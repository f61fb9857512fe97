"""The adaptive controller in the production loop, on virtual clocks: what it chooses, and how little it loses."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from adaptive_world import PLAIN_S, KnowingDrafter, World, avoids_ngrams, make_world
from loop_driver import Outcome, drafter, run

from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.adaptive import Expectation, Learned
from edgespec.engine.controller import create_controller
from edgespec.engine.costs import DraftCosts, MeasuredCosts, Spread
from edgespec.engine.learned import Key, Rest
from edgespec.sampling import SamplingParams
from edgespec.testing import TableModel
from edgespec.types import DraftContext, ExactRows, Offer

COSTS = [(1.0, 0.4), (0.2, 0.2), (4.0, 0.8), (0.2, 4.0), (0.0, 0.0)]  # seconds of a further row, and of a draft step


def bill(outcome: Outcome, world: World, step_s: float, since: int = 0) -> tuple[int, float]:
    """(rows beyond one a call + draft steps, seconds of V(rows) and drafting) of the rounds after `since` tokens."""
    count, seconds, done = 0, 0.0, 0
    for record in outcome.stats.records:
        if done >= since:
            steps = record.asked_k
            count += record.n_rows - 1 + steps if record.index else 0
            rows = record.n_rows if record.index else 1  # the prompt's call is the same in plain decoding
            seconds += PLAIN_S + (rows - 1) * world.row_s + steps * step_s
        done += record.emitted
    return count, seconds


@pytest.mark.parametrize(("row_s", "step_s"), COSTS)
@pytest.mark.parametrize("n", [200, 700])
def test_a_useless_draft_costs_next_to_nothing(row_s: float, step_s: float, n: int) -> None:
    world = make_world(row_s)
    draft = KnowingDrafter(world.truth(n), lambda _: False, step_s)
    outcome = world.run([draft], n)
    count, seconds = bill(outcome, world, step_s)
    assert draft.asked, "it was tried"
    assert count <= 0.05 * 200 + 0.01 * (n - 200)
    assert seconds <= 1.03 * n * PLAIN_S
    assert world.memory.ledger.spent_count == count


def expectation(row_s: float, step_s: float, chances: tuple[float, ...]) -> Expectation:
    """What a profile of `make_world(row_s)` and a draft of that speed would say."""
    rows = {n: Spread(*[PLAIN_S + (n - 1) * row_s] * 3, 5) for n in range(1, 10)}
    draft = DraftCosts({k: Spread(*[k * step_s] * 3, 5) for k in range(1, 9)})
    return Expectation(MeasuredCosts({64: rows}, 0.0, {"model": draft}), {"model": chances}, 0.0)


@pytest.mark.parametrize(("row_s", "step_s"), COSTS)
@pytest.mark.parametrize("n", [200, 700])
def test_a_profile_that_promises_too_much_changes_no_bound(row_s: float, step_s: float, n: int) -> None:
    world = make_world(row_s)
    world.memory = Learned.expecting(expectation(row_s, step_s, (0.95, 0.95, 0.95, 0.95)))
    draft = KnowingDrafter(world.truth(n), lambda _: False, step_s)
    outcome = world.run([draft], n)
    count, seconds = bill(outcome, world, step_s)
    assert draft.asked
    assert count <= 0.05 * 200 + 0.01 * (n - 200)
    assert seconds <= 1.03 * n * PLAIN_S


@pytest.mark.parametrize(("expected", "first"), [((0.9, 0.9, 0.9, 0.9), 4), ((0.5, 0.1), 1), (None, None)])
def test_what_the_profile_expects_is_drafted_from_the_first_round(
    expected: tuple[float, ...] | None, first: int | None
) -> None:
    """Without a profile the first rounds measure plain steps, and lengths are tried one by one.

    The round that ends the prompt used to be left out: its rows were weighed as if it could do without them.
    """
    world, n = make_world(1.0), 60
    if expected:
        world.memory = Learned.expecting(expectation(1.0, 0.2, expected))
    draft = KnowingDrafter(world.truth(n), lambda _: True, 0.2)
    record = world.run([draft], n).stats.records[0]
    assert record.asked_k == (first or 0)
    assert record.n_rows == 3 + record.drafted


@pytest.mark.parametrize(("row_s", "step_s"), COSTS[:4])
@pytest.mark.parametrize("turn", [150, 301])
def test_a_draft_that_turns_useless_is_dropped_in_time(row_s: float, step_s: float, turn: int) -> None:
    """An account that let a good start pay for what followed lost 4.6 % from the turn on."""
    world, n = make_world(row_s), 800
    draft = KnowingDrafter(world.truth(n), lambda at: at < turn, step_s)
    outcome = world.run([draft], n)
    after = [record for record in outcome.stats.records if record.index][-1]
    assert after.emitted == 1
    for window in (200, 400):
        done, seconds, tokens = 0, 0.0, 0
        for record in outcome.stats.records:
            if done >= turn and tokens < window:
                seconds += PLAIN_S + (record.n_rows - 1) * row_s + record.asked_k * step_s
                tokens += record.emitted
            done += record.emitted
        assert seconds <= 1.03 * tokens * PLAIN_S


@pytest.mark.parametrize(("row_s", "step_s"), COSTS[:4])
@pytest.mark.parametrize("turn", [0, 200])
def test_the_bound_holds_where_times_jitter(row_s: float, step_s: float, turn: int) -> None:
    """A plain step whose one slow sample was taken for its cost made every failing round look like a gain: 1.37x."""
    for seed in range(3):
        world, n = make_world(row_s), 400
        world.target.jitter, world.target._random = 0.4, random.Random(seed)
        draft = KnowingDrafter(world.truth(n), lambda at: at < turn, step_s)
        outcome = world.run([draft], n)
        _, seconds = bill(outcome, world, step_s, since=turn)
        tokens, done = 0, 0
        for record in outcome.stats.records:
            tokens += record.emitted if done >= turn else 0
            done += record.emitted
        assert seconds <= 1.03 * tokens * PLAIN_S


@pytest.mark.parametrize("exact", [ExactRows(2, 64, 1), ExactRows(2, 64, 2), ExactRows(4, 64, 4)])
def test_the_bound_holds_against_plain_decoding_with_exact_rows(exact: ExactRows) -> None:
    """There a plain step has free guesses, which a useless draft takes the place of."""
    for row_s, step_s in COSTS[:3]:
        plain, world, n = make_world(row_s), make_world(row_s), 300
        plain.run([], n, exact=exact)
        draft = KnowingDrafter(world.truth(n), lambda _: False, step_s)
        outcome = world.run([draft], n, exact=exact)
        extra = sum(r.n_rows - exact.width(1) + r.asked_k for r in outcome.stats.records[1:])
        assert draft.asked
        assert extra <= 0.05 * 200 + 0.01 * (n - 200)
        assert world.target.cost_s + draft.cost_s <= 1.03 * plain.target.cost_s


def test_good_drafts_are_used_at_their_best_length() -> None:
    """With a row at 0.05 and a step at 0.05 of a plain step and nothing ever wrong, the longest chain is best."""
    world, n = make_world(0.2), 400
    outcome = world.run([KnowingDrafter(world.truth(n), lambda _: True, 0.2)], n)
    assert outcome.stats.rounds < 1.35 * n / 9
    assert max(record.asked_k for record in outcome.stats.records) == 8


def test_a_draft_as_slow_as_the_target_ends_at_zero() -> None:
    world, n = make_world(0.2), 400
    outcome = world.run([KnowingDrafter(world.truth(n), lambda at: at % 5 > 0, PLAIN_S)], n)
    assert sum(record.asked_k > 0 for record in outcome.stats.records[100:]) <= 3
    assert world.controller is not None
    assert world.controller.summary()["off"]["no gain"]["rounds"] > 300


def test_both_ways_in_one_sequence_of_requests() -> None:
    """Useless n-grams, then a text that copies itself, then useless ones again; what was learnt is shared."""
    world = make_world(1.0, table=avoids_ngrams)
    copying = make_world(1.0, table=lambda prefix: [5.0 if t == (prefix[-1] + 1) % 7 else 0.0 for t in range(16)])
    copying.memory = world.memory
    counts, n = [], 300
    for place in (world, copying, world, copying):
        outcome = place.run([NgramDrafter(min_match=1)], n)
        counts.append(sum(r.drafted for r in outcome.stats.records))
        if place is world:
            extra = sum(r.n_rows - 1 for r in outcome.stats.records[1:])
            assert outcome.stats.accepted == 0
            assert extra <= 0.05 * 200 + 0.01 * (n - 200)
            assert PLAIN_S * len(outcome.stats.records) + extra * world.row_s <= 1.03 * n * PLAIN_S
        else:
            assert outcome.stats.rounds < 0.5 * n
    assert counts[1] > 10 * max(counts[0], 1)
    assert counts[3] > 10 * max(counts[2], 1)


def test_tries_of_a_useless_draft_come_at_growing_distances() -> None:
    world, n = make_world(0.0), 3000
    draft = KnowingDrafter(world.truth(n), lambda _: False, 0.0)
    world.run([draft], n)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(draft.asked)]
    late = gaps[len(gaps) // 2 :]
    assert late
    assert min(late) >= 64
    assert len(draft.asked) < 45


def test_a_source_that_does_not_pay_is_seldom_asked() -> None:
    """Asking takes a percent of a small model's step; what begins to copy is still noticed within four tokens."""
    world, n = make_world(), 400
    asked: list[int] = []

    class Counted(KnowingDrafter):
        def offer(self, context: DraftContext) -> Offer:
            asked.append(len(context.tokens) - 3)
            return super().offer(context)

    world.run([Counted(world.truth(n), lambda _: False, 2.0)], n)
    assert len(asked) < n / 2
    assert max(b - a for a, b in itertools.pairwise(asked)) == 4
    assert world.memory.ledger.tokens == n


def test_what_is_drawn_and_what_is_likeliest_are_learnt_apart() -> None:
    """Requests at T = 0.8 accept less; those at T = 0 that took turns with them used to draft as little."""
    world, n = make_world(0.2), 120
    shares = []
    for turn in range(8):
        temperature = 0.8 * (turn % 2)
        draft = KnowingDrafter(world.truth(n), lambda _, t=temperature: t == 0.0, 0.4)  # type: ignore[misc]
        outcome = world.run([draft], n, temperature=temperature)
        shares.append(sum(record.asked_k > 0 for record in outcome.stats.records) / len(outcome.stats.records))
    assert min(shares[2::2]) > 0.9
    assert max(shares[3::2]) < 0.2
    chances = [world.memory.acceptance[Key("model", 0, drawn)].chances(1, 0.5)[0] for drawn in (False, True)]
    assert chances[0] > 0.8 > 0.4 > chances[1]


def test_a_profile_counts_less_at_the_other_temperature() -> None:
    expected = Expectation(MeasuredCosts({1: {1: Spread(1, 1, 1, 1)}}), {"model": (0.9,)}, is_drawn=True)
    memory = Learned.expecting(expected)
    assert [memory.acceptance[Key("model", 0, drawn)].evidence for drawn in (False, True)] == [2.0, 8.0]


def test_the_hosts_time_follows_the_temperature() -> None:
    memory = Learned()
    memory.costs.host_s, memory.costs.token_s = 1.0, 0.1
    memory.begin_request(True)
    assert memory.costs.host_s == 1.0  # until it is known better
    memory.costs.host_s, memory.costs.token_s = 2.0, 0.5
    for is_drawn, host_s, token_s in ((False, 1.0, 0.1), (False, 1.0, 0.1), (True, 2.0, 0.5)):
        memory.begin_request(is_drawn)
        assert (memory.costs.host_s, memory.costs.token_s) == (host_s, token_s)


def test_what_sits_out_is_weighed_now_and_then_and_when_it_has_news() -> None:
    rest = Rest()
    assert not rest.sleeps(Offer(8, 0.4))
    rest.begin()
    rest.left = 40
    assert [at for at in range(40) if not rest.sleeps(Offer(8, 0.42))] == [7, 23, 39]
    rest.left = 40
    assert not rest.sleeps(Offer(8, 0.6))
    assert rest.sleeps(Offer(8, 0.6))


def test_a_source_that_failed_is_tried_later_on_the_next_text() -> None:
    """Sooner than on the last one, but not as if it had never failed."""
    memory = Learned()
    rest = memory.rest[Key("model", 0, False)] = Rest()
    for _ in range(4):
        rest.begin()
    assert (rest.left, rest.wait) == (64, 128)
    for wait in (64, 32, 16, 8, 8):
        memory.begin_request(False)
        assert (rest.left, rest.wait) == (None, wait)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["ngram", "noisy", "wrong", "same"])
def test_the_text_is_that_of_plain_decoding(kind: str, temperature: float) -> None:
    target = TableModel(16, n_ctx=512, seed=2)
    world = make_world(0.2, seed=2)
    settings = SamplingParams(max_tokens=150, temperature=temperature, seed=5, ignore_eos=True)
    plain = run(target, [], [1, 2, 3], settings)
    for _ in range(3):  # what was learnt must not show
        outcome = world.run(drafter(kind, target), 150, temperature=temperature)
        assert outcome.tokens == plain.tokens


def test_rows_that_run_anyway_are_filled() -> None:
    """With calls of 4, 8, 12... rows a free proposal of 3 tokens costs what a plain step does."""
    world = make_world(1.0, table=lambda prefix: [5.0 if t == (prefix[-1] + 1) % 7 else 0.0 for t in range(16)])
    outcome = world.run([NgramDrafter(min_match=1)], 200, exact=ExactRows(4, 64, 4))
    asked = {record.asked_k for record in outcome.stats.records[20:-3]}
    assert asked <= {3, 7}
    assert {record.n_rows for record in outcome.stats.records[1:]} <= {4, 8}


def test_the_better_source_gets_the_round() -> None:
    world, n = make_world(0.4), 300
    truth = world.truth(n)
    poor = KnowingDrafter(truth, lambda at: at % 3 == 0, 0.2, "poor")
    good = KnowingDrafter(truth, lambda at: at % 9 > 0, 0.2, "good")
    world.run([poor, good], n)
    assert len(good.asked) > 5 * len(poor.asked)


def test_a_doubtful_chain_stops_early_and_stays_the_same_text() -> None:
    """A noisy draft knows at T = 0 where it is unsure; its chains get shorter than what was asked for."""
    target = TableModel(16, n_ctx=512, seed=2)
    world = make_world(0.6, seed=2)
    outcome = world.run(drafter("noisy", target), 300)
    longer = [record for record in outcome.stats.records if record.asked_k >= 2 and not record.cut]
    assert longer
    assert any(record.drafted < record.asked_k for record in longer)
    assert all(record.scores for record in longer if record.drafted)
    assert outcome.tokens == run(target, [], [1, 2, 3], SamplingParams(max_tokens=300, temperature=0.0)).tokens


def test_limits_of_the_power_state_are_kept_and_named() -> None:
    from edgespec.engine.adaptive import AdaptiveController

    world, n = make_world(0.2), 200
    draft = KnowingDrafter(world.truth(n), lambda _: True, 0.2)
    for limit, most in (((2, "battery at 12 %"), 2), ((0, "hot"), 0)):
        draft.asked.clear()
        controller = AdaptiveController(8, most_k=lambda limit=limit: limit)  # type: ignore[misc]
        run(
            world.target,
            [draft],
            [1, 2, 3],
            SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True),
            controller=controller,
        )  # type: ignore[arg-type]
        assert max((k for _, k in draft.asked), default=0) == most
        if most == 0:
            assert controller.summary()["off"]["power"]["why"] == "hot"


# --- inputs that broke other engines: rows 43 and 45 ------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_perfect_draft_needs_one_call_for_every_k_plus_one_tokens(k: int) -> None:
    world, n = make_world(), 61
    draft = KnowingDrafter(world.truth(n), lambda _: True, 0.1)
    outcome = run(
        world.target,
        [draft],
        [1, 2, 3],
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0),
        controller=create_controller("fixed", k),
    )  # type: ignore[arg-type]
    assert outcome.stats.rounds == -(-n // (k + 1))


def test_asked_for_five_the_first_round_proposes_five() -> None:
    world, n = make_world(), 40
    draft = KnowingDrafter(world.truth(n), lambda _: False, 0.1)
    outcome = run(
        world.target,
        [draft],
        [1, 2, 3],
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0),
        controller=create_controller("fixed", 5),
    )  # type: ignore[arg-type]
    assert outcome.stats.records[0].drafted == 5


def test_a_draft_that_is_always_wrong_causes_no_more_calls() -> None:
    world, n = make_world(0.2), 100
    world.run([KnowingDrafter(world.truth(n), lambda _: False, 0.2)], n)
    calls = world.target.n_calls
    assert calls <= 1.1 * n


# --- an LLM's requests ------------------------------------------------------------------------------------------------


def test_the_report_says_why_and_what_was_learnt_outlives_a_request() -> None:
    from edgespec import LLM
    from edgespec.compare import speculation_lines
    from edgespec.testing import LatencyModel
    from edgespec.testing.latency import FakeClock

    clock = FakeClock()
    target = LatencyModel(TableModel(16, n_ctx=512, seed=3), 3.0, 1.0, clock=clock, sleep=clock.sleep)
    draft = LatencyModel(TableModel(16, n_ctx=512, seed=99), 1.0, 0.0, clock=clock, sleep=clock.sleep)
    llm = LLM(target, draft="model", draft_model=draft, exact=False, controller="adaptive", num_speculative_tokens=4)
    settings = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    reports, drafted = [], []
    for start in range(4):
        stats = llm.generate([start, 2, 3], settings)[0].outputs[0].stats
        reports.append(stats.to_dict()["controller"])
        drafted.append(sum(record.asked_k > 0 for record in stats.records))
    assert reports[0]["name"] == "adaptive"
    assert reports[0]["off"]["no gain"]["rounds"] > 100
    assert "of plain" in reports[0]["off"]["no gain"]["why"]
    assert reports[3]["ledger"]["tokens"] == 600, "one account over all requests"
    assert sum(drafted[1:]) <= 6
    assert any(line.startswith("no drafting in") and "no gain" in line for line in speculation_lines(stats))
    assert not any("(prompt)" in line for line in speculation_lines(stats))


@pytest.mark.parametrize("seed", range(5))
def test_the_size_of_the_draft_follows_the_difficulty_of_the_text(seed: int) -> None:
    """A small draft that is good at easy text only beside a large one at six times its cost, in one request.

    Two long proposals that failed used to empty the account, and nothing was drafted for the next hundred tokens.
    """
    world, n = make_world(0.2), 900
    dice, truth = random.Random(seed), world.truth(n)
    coins = [(dice.random(), dice.random()) for _ in truth]
    small = KnowingDrafter(truth, lambda at: coins[at][0] < (0.4 if at >= 300 else 0.95), 0.2, "tinydraft")
    large = KnowingDrafter(truth, lambda at: coins[at][1] < 0.95, 1.2, "model")
    outcome = world.run([small, large], n)
    assert outcome.tokens == truth[3:]

    def rounds_of(drafter: KnowingDrafter, first: int, last: int) -> int:
        return sum(first <= at < last for at, _ in drafter.asked)

    for first, last, right, other in ((100, 300, small, large), (600, 900, large, small)):
        assert rounds_of(right, first, last) > 4 * rounds_of(other, first, last), (first, last)
    for first in range(0, 800, 200):
        assert rounds_of(small, first, first + 200) + rounds_of(large, first, first + 200) > 10, (
            f"nobody from {first} on"
        )


class RareDrafter(KnowingDrafter):
    """Costs nothing, and offers something at some places alone."""

    def offer(self, context: DraftContext) -> Offer:
        at = len(context.tokens)
        return Offer(len(self.truth) - at, 0.9, 4, passes=0) if self.is_right(at) else Offer(0)


def test_before_anything_has_paid_what_may_be_lost_is_kept_for_what_is_surer() -> None:
    """A few tries of a doubtful model took all of the account, and a source that was right had none for 100 tokens."""
    world, n = make_world(0.4), 120
    expected = expectation(0.4, 0.2, (0.6, 0.6, 0.6))
    world.memory = Learned.expecting(dataclasses.replace(expected, buckets={("table", 4): (0.9, 0.9)}))
    truth = world.truth(n)
    wrong, right = (
        KnowingDrafter(truth, lambda _: False, 0.2),
        RareDrafter(truth, lambda at: at % 40 > 30, 0.0, "table"),
    )
    records = world.run([right, wrong], n).stats.records
    assert wrong.asked
    assert sum(record.accepted for record in records if record.source == "table") > 10
