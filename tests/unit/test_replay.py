"""Texts decoded again without models: stand-ins for trained drafts, the real controllers, and production beside it."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any, cast

import pytest
from plan_world import COPIED_TEXT, draft, plan, target
from test_profile import SMALL, slow_table

from edgespec import LLM, SamplingParams
from edgespec.draft.ngram import NgramDrafter
from edgespec.judged import Judged
from edgespec.machine import Profile
from edgespec.profile import MOST_K, profile_llm
from edgespec.replay import Mix, chances_at, replay
from edgespec.stand_in import WRONG, StandIn
from edgespec.types import DraftContext, ExactRows

PROMPT = (1, 2, 3)
NGRAM = (NgramDrafter,)
MIXED_TEXT = tuple((i * i * 31 + i // 3) % 97 + 100 for i in range(120)) + COPIED_TEXT[:120]


def context(tokens: list[int], min_survival: float = 0.0) -> DraftContext:
    none = cast(Any, None)
    return DraftContext(tokens, none, none, none, 1, min_survival)


def stand_in(places: tuple[Judged, ...], exact: ExactRows | None = None, **changes: Any) -> StandIn:
    return StandIn(draft((1.0,), 0.1, places=(places,), **changes), PROMPT, range(10, 20), 0, random.Random(1), exact)


def test_a_draft_that_is_right_where_n_grams_are_helps_no_mix() -> None:
    """Acceptance was drawn from overall chances, so the mix was promised tokens where the draft never had any."""
    ngram, places = NgramDrafter(), []
    for at in range(len(MIXED_TEXT)):
        has_match = ngram.offer(context([*PROMPT, *MIXED_TEXT[:at]])).max_k > 0
        places.append(Judged(MOST_K, MOST_K if has_match else 0))
    share = sum(place.accepted > 0 for place in places) / len(places)
    assert 0.4 < share < 0.6
    t, d = target(0.1, MIXED_TEXT), draft((share,) * MOST_K, 0.05, places=(tuple(places),))

    def rate(has_ngram: bool, *drafts: Any) -> float:
        mix = functools.partial(Mix, k=MOST_K, controller="adaptive")
        return 1 / replay(t, mix({one.kind: one for one in drafts}, NGRAM if has_ngram else ())).seconds_per_token

    assert rate(False, d) > 1.1 * rate(False)
    assert rate(True, d) < 1.01 * rate(True)
    luckier = draft((share,) * MOST_K, 0.05)  # as often right, nobody knows where
    assert rate(True, luckier) > 1.1 * rate(True)


def test_the_real_controller_in_a_replay_decides_as_it_does_in_production(tmp_path: Path) -> None:
    """Round for round, on calls of a known price: an oracle in its place promised a mix 17-35 % too much."""
    real, noisy = slow_table(10.0, 1.0), slow_table(1.0, 0.0, noise=0.6)
    llm = LLM(real, draft="ngram,model", draft_model=noisy, exact=False)
    effort, prompts = dataclasses.replace(SMALL, n_tokens=150), [[1, 2, 3], [4, 5, 4, 5, 6]]
    found = profile_llm(llm, effort=effort, prompts=prompts, store=Profile(tmp_path / "machine.json"))
    llm.loaded.expected = found.expected
    side = llm.variant(controller="adaptive", num_speculative_tokens=MOST_K, schedule="serial")
    params = SamplingParams(temperature=0.0, max_tokens=effort.n_tokens, seed=1)
    records = []
    for prompt in prompts:
        side.forget()
        records += side.generate(prompt, params)[0].outputs[0].stats.records
    later = [record for record in records if record.index]
    again = replay(found.target, Mix(found.drafts, NGRAM, MOST_K, "adaptive", expected=found.expected))
    assert {record.source for record in later} == {"ngram", "model", "none"}
    assert (again.rounds, again.tokens) == (len(later), sum(record.emitted for record in later))
    assert again.rows == sum(record.n_rows for record in later)


def test_a_stand_in_is_right_as_far_as_its_draft_was() -> None:
    one = stand_in((Judged(0, 0), Judged(2, 1), Judged(2, 2), Judged(2, 2), Judged(2, 0), Judged(2, 0)))
    assert one.offer(context([*PROMPT])).max_k == 0  # it had nothing to propose
    assert one.propose(context([*PROMPT, 10]), 4).tokens == [11, WRONG, WRONG, WRONG]
    assert one.propose(context([*PROMPT, 10, 11]), 2).tokens == [12, 13]
    assert one.propose(context([*PROMPT, 10, 11]), 4).tokens == [12, 13, WRONG, WRONG]  # as two places further on
    assert one.propose(context([*PROMPT, 10, 11, 12]), 4).tokens == [13, 14, WRONG, WRONG]
    beyond = one.propose(context([*PROMPT, *range(10, 16)]), 3)
    assert beyond.tokens == [16, 17, 18], "elsewhere by its chances"


def test_a_stand_in_ends_a_chain_where_its_draft_was_unsure() -> None:
    places = (Judged(4, 4, (0.9, 0.5, 0.5, 0.5)), *(Judged(4, 0, (0.9, 0.9, 0.9, 0.9)),) * 9)
    assert stand_in(places).propose(context([*PROMPT], 0.4), 8).tokens == [10, 11, 12]
    assert stand_in(places).propose(context([*PROMPT], 0.4), 8).scores == [0.9, 0.5, 0.5]
    assert len(stand_in(places).propose(context([*PROMPT]), 8)) == 8
    assert len(stand_in(places, ExactRows(4, 256, 4)).propose(context([*PROMPT], 0.5), 8)) == 3  # the call is full


def test_acceptance_depends_on_where_the_rounds_of_a_length_begin() -> None:
    """Chances from the longest proposals stood for all lengths: short ones were predicted 5 % too slow."""
    places = (Judged(4, 4), Judged(4, 3), Judged(4, 2), Judged(4, 1), Judged(4, 0)) * 24
    t, d = target(0.1, MIXED_TEXT[:120]), draft((0.5,), 0.1, places=(places,))
    assert chances_at(t, draft((0.5, 0.25), 0.1), 1) == (0.5, 0.25), "not known by place"
    rates = {k: replay(t, Mix({"model": d}, k=k)).tokens_per_round for k in (1, 4)}
    for k, rate in rates.items():
        found, survival, tokens = chances_at(t, d, k), 1.0, 1.0
        for place in range(k):
            survival *= found[min(place, len(found) - 1)]
            tokens += survival
        assert tokens == pytest.approx(rate, rel=0.05)
    assert chances_at(t, d, 1)[0] == pytest.approx(2 / 3, abs=0.02)
    assert chances_at(t, d, 4)[0] > 0.95


def test_a_draft_of_few_tokens_is_planned_for_no_more() -> None:
    found = plan(target(0.1), draft((0.8,), 0.05, most=3, passes=1))
    assert {c.k for c in found.candidates if (c.draft, c.controller) == ("model", "fixed")} == {1, 2, 3}


def test_accepted_tokens_and_weighing_cost_host_time() -> None:
    """At T = 0.8 each accepted token is drawn, 0.4 ms of a 5 ms round, and drafts were promised them for nothing."""
    cheap = target(0.1, COPIED_TEXT)
    dear = dataclasses.replace(cheap, costs=dataclasses.replace(cheap.costs, token_s=0.5), choice_s=(0.25, 0.25))
    runs = [replay(t, Mix({}, NGRAM, 4)) for t in (cheap, dear)]
    assert runs[0].rounds == runs[1].rounds
    assert runs[1].seconds - runs[0].seconds == pytest.approx(0.5 * (runs[0].tokens - runs[0].rounds))
    plain = replay(dear, Mix())
    assert plain.seconds == pytest.approx(plain.rounds)
    fixed = next(
        c for c in plan(dear, draft((0.5,), 0.0)).candidates if (c.draft, c.k, c.schedule) == ("model", 1, "serial")
    )
    assert fixed.tok_s == pytest.approx(1.5 / (1.1 + 0.25))


def test_a_controller_takes_longer_where_it_drafts() -> None:
    """Too little to change a decision, so that what it adds can be counted."""
    free = target(0.1, MIXED_TEXT)
    (still, drafting, both) = (
        replay(dataclasses.replace(free, choice_s=s), Mix({}, NGRAM, 4, "adaptive"))
        for s in ((0.0, 0.0), (1e-6, 0.0), (1e-6, 1e-6))
    )
    assert still.rounds == drafting.rounds == both.rounds
    n_drafting = (drafting.seconds - still.seconds) / 1e-6
    assert 1 < n_drafting < still.rounds - 1
    assert both.seconds - still.seconds == pytest.approx(1e-6 * still.rounds, rel=1e-3)
