"""The overlapped schedule beside the serial one: the same rounds and text, what it prepares, how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from draft_driver import World, make_world
from loop_driver import Outcome, draft_model, run

from edgespec.draft.base import finish
from edgespec.draft.model import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.adaptive import AdaptiveController, Learned
from edgespec.engine.controller import Controller
from edgespec.engine.lookahead import PROBE_EVERY
from edgespec.engine.scheduler import run_overlapped, run_schedule, run_serial
from edgespec.errors import BackendError, ConfigError
from edgespec.sampling import SamplingParams
from edgespec.sim import Scenario, predict, simulate
from edgespec.testing import LatencyModel, TableModel, check_log, coin_pair
from edgespec.testing.latency import FakeClock, VirtualWorker
from edgespec.types import AheadDrafter, DraftContext, Drafter, Model, Proposal

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, seed=1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=60, seed=1)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, max_tokens=40, seed=2, min_tokens=3)


def pair(kind: str, drafter: str, cost: float, **options: Any) -> tuple[Model, list[Drafter], FakeClock, TableModel]:
    """A target of one second a call and a draft of `cost` seconds, on one virtual clock."""
    clock, target = FakeClock(), TableModel(16, seed=11, **options)
    draft = draft_model(kind, target)
    slow = [LatencyModel(model, s, clock=clock, sleep=clock.sleep) for model, s in ((target, 1.0), (draft, cost))]
    model = ModelDrafter(slow[1], 16, ahead=True)
    drafters: list[Drafter] = {"model": [model], "ngram": [NgramDrafter()], "both": [NgramDrafter(), model]}[drafter]
    return slow[0], drafters, clock, draft


def overlapped(drafters: list[Drafter], clock: FakeClock) -> Callable[..., Any]:
    return partial(run_overlapped, drafters=drafters, start_worker=lambda: VirtualWorker(clock), clock=clock)


def rounds(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(r.source, r.drafted, r.accepted, r.emitted, r.cut, r.kind) for r in outcome.stats.records]


def rate(drafter: Any, text: list[int]) -> float:
    """The acceptance that its next offer would name."""
    drafter._track.learn(text)
    return float(drafter._track.rate())


@pytest.fixture(autouse=True)
def no_thread_outlives_a_run() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-target")]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("kind", ["same", "noisy", "wrong"])
@pytest.mark.parametrize("drafter", ["model", "ngram", "both"])
def test_rounds_and_text_are_those_of_the_serial_schedule(drafter: str, kind: str, params: SamplingParams) -> None:
    plain = run(TableModel(16, seed=11), [], [1, 2, 3, 1, 2], params).tokens
    for k in (1, 4, 7):
        serial, drafters, _, _ = pair(kind, drafter, 0.1)
        expected = run(serial, drafters, [1, 2, 3, 1, 2], params, k=k)  # type: ignore[arg-type]
        assert expected.tokens == plain
        rates = [rate(one, [1, 2, 3, 1, 2, *plain]) for one in drafters]
        for cost in (0.06, 0.23, 1.3):
            target, drafters, clock, draft = pair(kind, drafter, cost)
            outcome = run(target, drafters, [1, 2, 3, 1, 2], params, k=k, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
            assert rounds(outcome) == rounds(expected), (k, cost)
            assert [rate(one, [1, 2, 3, 1, 2, *plain]) for one in drafters] == rates, (
                "offers name the acceptance of adopted proposals too"
            )
            assert outcome.tokens == plain
            outcome.check_identities()
            check_log(draft)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_rules_that_redraw_see_the_same_proposals(kind: str, rule: str) -> None:
    """What is prepared for the next round is drawn with that round's noise, so even these rules take the same turns."""
    serial, drafters, _, _ = pair(kind, "model", 0.1)
    expected = run(serial, drafters, [3, 5], SAMPLED, k=3, rule=rule)  # type: ignore[arg-type]
    target, drafters, clock, _ = pair(kind, "model", 0.1)
    outcome = run(target, drafters, [3, 5], SAMPLED, k=3, rule=rule, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
    assert outcome.tokens == expected.tokens
    assert rounds(outcome) == rounds(expected)
    assert kind == "noisy" or sum(r.hit is True for r in outcome.stats.records) > 3


@pytest.mark.parametrize("options", [{"refuse_keep": True}, {"max_rewind": 3}, {"n_ctx": 30}], ids=str)
def test_drafts_whose_cache_is_hard_to_cut_or_small(options: dict[str, Any]) -> None:
    for params in (GREEDY, SAMPLED):
        runs = []
        for cost in (None, 0.1):
            clock, target = FakeClock(), TableModel(16, seed=11)
            draft = draft_model("noisy", target, **options)
            slow = [
                LatencyModel(model, s, clock=clock, sleep=clock.sleep)
                for model, s in ((target, 1.0), (draft, cost or 0.0))
            ]
            drafters: list[Drafter] = [ModelDrafter(slow[1], 16, ahead=True)]
            schedule = None if cost is None else overlapped(drafters, clock)
            runs.append(run(slow[0], drafters, [1, 2], params, k=4, schedule=schedule))  # type: ignore[arg-type]
            check_log(draft)
        assert runs[0].tokens == runs[1].tokens
        assert rounds(runs[0]) == rounds(runs[1])


class Turns(Controller):
    """k as in a list, over and over."""

    def __init__(self, ks: list[int]) -> None:
        super().__init__(max(ks))
        self.ks = ks

    def update(self, record: Any) -> None:
        self.k = self.ks[(record.index + 1) % len(self.ks)]


@pytest.mark.parametrize("ks", [[3], [3, 0, 0, 3], [1, 5, 2]])
def test_a_perfect_draft_is_always_right_whatever_was_prepared(ks: list[int]) -> None:
    for params in (GREEDY, SAMPLED):
        target, drafters, clock, draft = pair("same", "model", 0.13, n_ctx=512)
        many = SamplingParams(temperature=params.temperature, seed=4, max_tokens=300)
        outcome = run(
            target,  # type: ignore[arg-type]
            drafters,
            [1, 2],
            many,
            controller=Turns(ks),
            schedule=overlapped(drafters, clock),
        )
        assert outcome.stats.acceptance_rate == 1.0
        assert len(outcome.tokens) == 300
        check_log(draft)


def test_what_drafting_costs_is_not_learnt_from_hits() -> None:
    """A median over hits and misses made drafting look free, also where nothing would be ready."""
    target, drafters, clock, _ = pair("same", "model", 0.13, n_ctx=512)
    memory = Learned()
    many = SamplingParams(temperature=0.0, max_tokens=300)
    controller = AdaptiveController(3, memory=memory)
    outcome = run(target, drafters, [1, 2], many, controller=controller, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
    hits = [r for r in outcome.stats.records if r.hit]
    assert len(hits) > 0.6 * outcome.stats.rounds
    assert all(r.draft_s < 0.13 for r in hits)
    for k in memory.costs._drafts["model"].medians:
        assert memory.costs.draft_s("model", k, None, 1.0) == pytest.approx(0.13 * k, rel=0.3)
    assert 0.5 < memory.costs.saved("model") <= 1.0
    assert Learned().costs.saved("model") == 0.0


@pytest.mark.parametrize("vocabulary", [None, range(0, 16, 2)], ids=["whole", "reduced"])
def test_tinydraft_with_a_reduced_vocabulary(vocabulary: Any) -> None:
    """Rare tokens of the text take places of the reduced vocabulary; guesses must not."""

    def world() -> World:
        made = make_world("tinydraft", "noisy", vocabulary=vocabulary)
        made.drafter.ahead = True  # type: ignore[attr-defined]
        return made

    for params in (GREEDY, SAMPLED):
        expected = world().run([1, 2, 3], params, k=4)
        other = world()
        outcome = other.run(
            [1, 2, 3],
            params,
            k=4,
            schedule=partial(run_overlapped, drafters=[other.drafter], start_worker=Lazy, clock=FakeClock()),
        )
        assert rounds(outcome) == rounds(expected)
        assert outcome.tokens == expected.tokens
        assert sum(r.ahead for r in outcome.stats.records) > 50


class Lazy:
    """A worker whose call is done when it was asked for the eighth time: passes are counted without a clock."""

    def submit(self, call: Callable[[], Any]) -> Lazy:
        self.call, self.n_asked = call, 0
        return self

    def done(self) -> bool:
        self.n_asked += 1
        return self.n_asked > 8

    def result(self) -> Any:
        return self.call()

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("acceptance", "runner_up", "cost", "k", "jitter"),
    [(0.8, 1.0, 0.05, 5, 0.0), (0.8, 0.5, 0.05, 5, 0.2), (0.6, 0.5, 0.1, 3, 0.1), (0.9, 0.3, 0.35, 2, 0.1)],
)
def test_virtual_devices_take_what_the_simulator_says(
    acceptance: float, runner_up: float, cost: float, k: int, jitter: float
) -> None:
    scenario = Scenario.flat(1.0, cost, acceptance, runner_up=runner_up, target_jitter=jitter, draft_jitter=jitter)
    for schedule in ("serial", "overlapped"):
        clock = FakeClock()
        models = [
            LatencyModel(model, seconds, jitter=jitter, seed=i, clock=clock, sleep=clock.sleep)
            for i, (model, seconds) in enumerate(
                zip(coin_pair(acceptance, runner_up, seed=1), (1.0, cost), strict=True)
            )
        ]
        drafters: list[Drafter] = [ModelDrafter(models[1], 32, ahead=True)]
        chosen = overlapped(drafters, clock) if schedule == "overlapped" else run_serial
        params = SamplingParams(temperature=0.0, max_tokens=1200)
        outcome = run(models[0], drafters, [1, 2], params, k=k, schedule=chosen)  # type: ignore[arg-type]
        outcome.check_identities()
        speedup = len(outcome.tokens) / clock.now_s
        assert speedup == pytest.approx(predict(scenario, k, schedule).speedup, rel=0.05)
        simulated = simulate(scenario, k, schedule, n_tokens=10_000, seed=1)
        assert speedup == pytest.approx(simulated.speedup, rel=0.05)
        hits = sum(r.hit is True for r in outcome.stats.records) / outcome.stats.rounds
        assert hits == pytest.approx(simulated.hits / simulated.rounds, abs=0.08)


def test_a_hit_saves_drafting_and_a_miss_costs_a_pass_at_most() -> None:
    target, drafters, clock, _ = pair("noisy", "model", 0.07)
    outcome = run(target, drafters, [1, 2], SAMPLED, k=4, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
    records = outcome.stats.records
    assert {r.hit for r in records} == {True, False, None}
    assert records[0].hit is None
    assert all(r.late_s <= 0.07 + 1e-9 for r in records)
    assert all(r.late_s < 1e-9 for r in records[1:] if r.drafted == 4)  # once the target's time is known, it rests
    assert all(r.ahead <= 15 for r in records)  # of 0.07 s each, beside one second
    assert all(r.ahead_s == pytest.approx(0.07 * r.ahead) for r in records)
    summary = outcome.stats.overlap()
    assert summary is not None
    assert (summary["hits"], summary["misses"]) == (
        sum(r.hit is True for r in records),
        sum(r.hit is False for r in records),
    )
    assert summary["passes_ahead"] == sum(r.ahead for r in records)
    took = 1.0 * len(records) + 0.07 * sum(r.drafted for r in records if r.hit is not True)
    took += sum(r.late_s for r in records) + sum(r.draft_s for r in records if r.hit)
    assert clock.now_s == pytest.approx(took)


def test_some_rounds_are_verified_with_the_draft_at_rest() -> None:
    """So that the report can say how much the two slow each other down."""
    target, drafters, clock, _ = pair("wrong", "model", 0.1)
    params = SamplingParams(temperature=0.0, max_tokens=3 * PROBE_EVERY)
    outcome = run(target, drafters, [1, 2], params, k=2, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
    resting = [r.index for r in outcome.stats.records if not r.ahead and r.drafted]
    assert resting[0] == PROBE_EVERY - 1
    assert outcome.stats.overlap()["target_slowdown"] == pytest.approx(1.0)  # type: ignore[index]


def test_only_drafts_that_need_nothing_of_the_round_can_draft_ahead() -> None:
    able = {kind: isinstance(make_world(kind).drafter, AheadDrafter) for kind in ("tinydraft", "eagle", "medusa")}
    assert able == {"tinydraft": True, "eagle": False, "medusa": False}
    target = TableModel(16, seed=11)
    assert not isinstance(NgramDrafter(), AheadDrafter)
    with pytest.raises(ConfigError, match="schedule='sideways' is not known"):
        run(target, [], [1], GREEDY, schedule=lambda events: run_schedule("sideways", events, []))


def test_steps_pause_between_passes_and_can_be_left_and_resumed() -> None:
    target = TableModel(16, seed=11)
    draft = draft_model("noisy", target)
    drafter = ModelDrafter(draft, 16)
    asked: list[tuple[DraftContext, int]] = []
    propose = drafter.propose
    drafter.propose = lambda context, k: (asked.append((context, k)), propose(context, k))[1]  # type: ignore[method-assign]
    run(target, [drafter], [1, 2], SAMPLED, k=4, max_rounds=1)
    context = asked[0][0]
    n_before = len(draft.forwards)
    steps = drafter.steps(context, 3)
    next(steps)
    assert len(draft.forwards) == n_before + 1
    next(steps)
    whole = finish(steps)
    assert len(draft.forwards) == n_before + 3
    assert whole.tokens == finish(drafter.steps(context, 3)).tokens == drafter.propose(context, 3).tokens


class Failing(ModelDrafter):
    """Raises while it prepares."""

    error: BaseException = BackendError("the draft's device is gone")

    def steps(self, context: DraftContext, k: int) -> Any:
        if context.n_ahead and context.round > 3:
            raise self.error
        return super().steps(context, k)


def test_a_fault_while_preparing_counts_where_the_draft_is_asked_next() -> None:
    """The round in flight is finished; then decoding goes on without the draft, or ends where that is asked for."""
    expected = run(TableModel(16, seed=11), [], [1, 2], GREEDY).tokens
    for strict in (False, True):
        target = TableModel(16, seed=11)
        drafter = Failing(draft_model("noisy", target), 16, ahead=True)
        schedule = partial(run_overlapped, drafters=[drafter], start_worker=Lazy, clock=FakeClock())
        if strict:
            with pytest.raises(BackendError, match="the draft's device is gone"):
                run(target, [drafter], [1, 2], GREEDY, schedule=schedule, strict=True)
            assert len(target.forwards) == 4
            continue
        outcome = run(target, [drafter], [1, 2], GREEDY, schedule=schedule)
        assert outcome.tokens == expected
        assert outcome.stats.notes == ["speculation off: the draft's device is gone"]
        assert [r.index for r in outcome.stats.records if r.drafted] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["ctrl-c", "memory"])
def test_other_errors_while_preparing_end_the_run_and_the_thread(error: BaseException) -> None:
    target = TableModel(16, seed=11)
    slow = LatencyModel(target, 0.002)
    drafter = Failing(draft_model("noisy", target), 16, ahead=True)
    drafter.error = error
    with pytest.raises(type(error)):
        run(slow, [drafter], [1, 2], GREEDY, schedule=partial(run_overlapped, drafters=[drafter]))  # type: ignore[arg-type]
    assert target.forwards


def test_an_error_of_the_target_comes_through_its_thread() -> None:
    target = TableModel(16, seed=11, nan_at=(9,))
    drafter = ModelDrafter(draft_model("noisy", TableModel(16, seed=11)), 16, ahead=True)
    with pytest.raises(BackendError, match="after position 9"):
        run(target, [drafter], [1, 2], GREEDY, schedule=partial(run_overlapped, drafters=[drafter]))


def test_closing_waits_for_the_target_and_leaves_no_thread() -> None:
    target = LatencyModel(TableModel(16, seed=11), 0.002)
    drafter = ModelDrafter(draft_model("noisy", target.model), 16, ahead=True)  # type: ignore[arg-type]
    started: list[Any] = []

    def schedule(events: Any) -> Any:
        started.append(run_overlapped(events, [drafter]))
        return started[0]

    run(target, [drafter], [1, 2], GREEDY, schedule=schedule, max_rounds=3)  # type: ignore[arg-type]
    assert any(thread.name.startswith("edgespec-target") for thread in threading.enumerate())
    started[0].close()
    n_calls = target.n_calls
    assert list(started[0]) == []
    assert target.n_calls == n_calls


def test_a_proposal_is_cut_to_what_the_round_has_room_for() -> None:
    target, drafters, clock, _ = pair("same", "model", 0.01)
    params = SamplingParams(temperature=0.0, max_tokens=14)
    outcome = run(target, drafters, [1, 2], params, k=5, schedule=overlapped(drafters, clock))  # type: ignore[arg-type]
    assert [r.drafted for r in outcome.stats.records] == [5, 5, 1]
    assert [r.hit for r in outcome.stats.records] == [None, True, True]


@pytest.mark.parametrize("ahead", [False, True])
def test_proposals_name_runners_up_only_where_somebody_asks(ahead: bool) -> None:
    target = TableModel(16, seed=11)
    drafter = ModelDrafter(draft_model("noisy", target), 16, ahead=ahead)
    proposals: list[Proposal] = []
    adopt = drafter.adopt
    drafter.adopt = lambda context, proposal: proposals.append(proposal) or adopt(context, proposal)  # type: ignore
    for params in (GREEDY, SAMPLED):
        drafter.reset()
        run(target, [drafter], [1, 2], params, k=3, max_rounds=4)
    assert len(proposals) == 8
    for proposal in proposals:
        assert (proposal.runners_up is not None) == ahead
        for token, second in zip(proposal.tokens, proposal.runners_up or proposal.tokens, strict=True):
            assert not isinstance(second, tuple) or (second[0] != token and 0.5 <= second[1] <= 1)
