"""Plans from made-up profiles: predictions against arithmetic, the budget, linear machines, texts that repeat."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_world import COPIED_TEXT, draft, plan, table, target

from edgespec.contention import shared_place
from edgespec.engine.costs import MeasuredCosts
from edgespec.errors import ConfigError
from edgespec.planner import Asked, _choose, make_plan
from edgespec.profile import DraftProfile, Profiles, TargetProfile
from edgespec.replay import Mix, replay


def test_a_fixed_length_is_predicted_by_the_formula() -> None:
    found = plan(target(0.1), draft((0.8,), 0.05))
    for c in found.candidates:
        if (c.draft, c.controller, c.schedule) == ("model", "fixed", "serial"):
            tokens = sum(0.8**j for j in range(c.k + 1))
            assert c.tokens_per_round == pytest.approx(tokens)
            assert c.tok_s == pytest.approx(tokens / (1 + 0.1 * c.k + 0.05 * c.k))
    assert found.chosen.draft.endswith("model")
    assert found.runner_up.draft != found.chosen.draft or found.runner_up.schedule != found.chosen.schedule


def test_linear_costs_advise_off() -> None:
    """CASES row 48: where every row costs a whole step there is nothing to gain."""
    found = plan(target(1.0), draft((0.9,), 0.1))
    assert found.chosen.draft == "none"
    assert "plain" in found.reason
    assert found.chosen.speedup == 1.0
    assert {c.draft for c in found.candidates} >= {"none", "ngram", "model", "ngram,model"}


def test_a_text_that_copies_itself_is_for_n_grams() -> None:
    assert plan(target(0.1, COPIED_TEXT), draft((0.3,), 0.2)).chosen.draft in ("ngram", "ngram,model")
    assert plan(target(0.1), draft((0.3,), 0.2)).chosen.tok_s < 1.1


def test_a_draft_with_weights_must_gain_more_than_estimates_are_out() -> None:
    """One token in ten is right, and drafting is free: 4 % are gained where a row costs 0.058, 7 % where 0.028."""
    chance = 0.1
    for a_row, chosen in ((0.058, "none"), (0.028, "model")):
        found = plan(target(a_row), draft((chance, 0.0), 0.0))
        assert found.candidates[0].draft == "model"
        assert found.candidates[0].speedup == pytest.approx((1 + chance) / (1 + a_row))
        assert found.chosen.draft == chosen
    assert "1.04x the speed of plain" in plan(target(0.058), draft((chance, 0.0), 0.0)).reason


def test_n_grams_that_are_not_worth_it_do_not_cost_a_draft_that_is() -> None:
    """A model 6 % over plain decoding and 4 % over n-grams that gain 2 %: without n-grams it would be chosen."""
    free = next(c for c in plan(target(0.1)).candidates if c.draft == "ngram")
    plain = next(c for c in plan(target(0.1)).candidates if c.draft == "none")
    light = dataclasses.replace(free, tok_s=1.02 * plain.tok_s)
    for gain, expected in ((1.06, "model"), (1.04, "none")):
        model = dataclasses.replace(free, draft="model", draft_device="cpu", tok_s=gain * plain.tok_s)
        assert _choose([model, light, plain], plain, "speed").draft == expected
    assert _choose([dataclasses.replace(light, tok_s=2.0), plain], plain, "speed").draft == "ngram"


def test_n_grams_are_kept_where_a_model_hardly_gains_on_them() -> None:
    copied, model = target(0.1, COPIED_TEXT), draft((0.6,) * 8, 0.1, contention=(9.0, 9.0))
    found = plan(copied, model)
    free = max((c for c in found.candidates if c.draft == "ngram"), key=lambda c: c.tok_s)
    assert free.tok_s < found.candidates[0].tok_s < 1.05 * free.tok_s
    assert found.chosen == free
    assert found.reason.endswith(f"; {found.candidates[0].label} is not predicted to gain what its weights are worth")


def test_steps_are_kept() -> None:
    """Rows 2 to 4 cost the same: k = 3 is best although acceptance falls; a fitted line would say k = 1."""
    rows = table(n1=1.0, n2=1.5, n3=1.5, n4=1.5, n5=3.0, n6=3.0, n7=3.0, n8=3.0)
    t = target(0, costs=MeasuredCosts({64: rows}))
    fixed = [c for c in plan(t, draft((0.6,), 0.0)).candidates if c.draft == "model" and c.controller == "fixed"]
    assert max(fixed, key=lambda c: c.tok_s).k == 3


def test_exact_rows_are_priced_as_they_run() -> None:
    t = target(0.1, exact=(2, 256, 2), guess=0.25)
    pure = replay(t, Mix())
    assert pure.seconds / pure.rounds == pytest.approx(1.1)
    assert pure.tokens_per_round == pytest.approx(1.25, abs=0.12)
    one = next(
        c for c in plan(t, draft((0.8,), 0.0)).candidates if (c.draft, c.k, c.schedule) == ("model", 1, "serial")
    )
    assert one.tok_s == pytest.approx(1.8 / 1.1)


def test_the_budget_excludes_and_says_why() -> None:
    found = plan(target(0.1), draft((0.8,), 0.05), memory_budget=1050)
    assert found.chosen.draft in ("none", "ngram")
    assert {c.obstacle is None for c in found.candidates if "model" in c.draft} == {False}
    with pytest.raises(ConfigError, match=r"memory_budget=1e-05 MB.*allow more"):
        plan(target(0.1), memory_budget=10)


def test_overlap_is_for_machines_without_contention() -> None:
    good = draft((0.8,), 0.35)
    calm, crowded = plan(target(0.05), good), plan(target(0.05), dataclasses.replace(good, contention=(2.0, 2.0)))

    def best(found: Any, schedule: str) -> float:
        return max(c.tok_s for c in found.candidates if (c.draft, c.schedule) == ("model", schedule))

    assert best(calm, "overlapped") > best(calm, "serial")
    assert best(crowded, "overlapped") < best(crowded, "serial")
    assert (calm.chosen.schedule, crowded.chosen.schedule) == ("overlapped", "serial")


def test_the_schedule_that_is_asked_for_is_the_only_one() -> None:
    good = draft((0.8,), 0.35)
    busy = dataclasses.replace(good, contention=(1.5, 1.5))
    assert plan(target(0.05), busy).chosen.schedule == "serial"
    for schedule in ("serial", "overlapped"):
        for one in (good, busy):
            found = plan(target(0.05), one, asked=Asked(schedule=schedule))
            assert (found.chosen.draft, found.chosen.schedule) != ("none", "serial")
            assert found.chosen.schedule == schedule
            assert {c.schedule for c in found.candidates if c.obstacle is None and c.draft != "none"} == {schedule}


@pytest.mark.parametrize(
    ("asked", "kinds", "controllers", "lengths"),
    [
        (Asked(drafts=()), {"none"}, {"fixed"}, {0}),
        (Asked(drafts=("model",)), {"none", "model"}, {"fixed", "adaptive"}, set(range(9))),
        (Asked(drafts=("ngram",), most=2), {"none", "ngram"}, {"fixed", "adaptive"}, {0, 1, 2}),
        (
            Asked(most=2, controller="adaptive"),
            {"none", "ngram", "model", "ngram,model"},
            {"fixed", "adaptive"},
            {0, 2},
        ),
        (Asked(drafts=("model", "ngram"), most=12, controller="fixed"), {"none", "ngram", "model"}, {"fixed"}, {0, 8}),
        (Asked(most=3, controller="fixed"), {"none", "ngram", "model"}, {"fixed"}, {0, 3}),
        (Asked(least=6), {"none", "ngram", "model", "ngram,model"}, {"fixed", "adaptive"}, {0, 6, 7, 8}),
        (Asked(controller="window"), {"none", "ngram", "model", "ngram,model"}, {"fixed", "window"}, {0, 8}),
    ],
    ids=str,
)
def test_what_was_asked_for_is_not_up_to_the_plan(
    asked: Asked, kinds: set[str], controllers: set[str], lengths: set[int]
) -> None:
    found = plan(target(0.05), draft((0.8,), 0.05), asked=asked)
    able = [c for c in found.candidates if c.obstacle is None]
    assert {c.draft for c in able} == kinds
    assert {c.controller for c in able} == controllers
    assert {c.k for c in able} == lengths
    assert all("is asked for" in c.obstacle for c in found.candidates if c.obstacle)


def test_a_least_length_holds_in_the_prediction_too() -> None:
    """The controller of a replay drafts by the same rule: at 4 or none, it drafts less often than at 1."""
    t, d = target(0.3), draft((0.6,), 0.2)
    mixes = [Mix({"model": d}, (), 8, "adaptive", least) for least in (0, 4)]
    free, bound = (replay(t, mix) for mix in mixes)
    assert free.seconds_per_token < bound.seconds_per_token
    assert free.steps > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "x"}, "schedule='x' is not known: use serial, overlapped"),
        ({"controller": "x"}, "controller='x' is not known: use fixed"),
        ({"drafts": ("ngram", "x")}, "drafts='x' is not known: use ngram"),
        ({"most": 0}, "most=0"),
        ({"least": 9}, "min_speculative_tokens=9: a plan drafts up to 8 tokens a round"),
        ({"least": 4, "most": 3}, "min_speculative_tokens=4: a plan drafts up to 3"),
        ({"least": 9, "most": 12}, "min_speculative_tokens=9: a plan drafts up to 8"),
    ],
)
def test_what_nobody_can_ask_for(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Asked(**fields)


def test_a_reason_names_what_leaves_no_draft() -> None:
    for asked, words in (
        (Asked(drafts=()), "draft='none' is asked for"),
        (Asked(drafts=("eagle",)), "draft='eagle' is asked"),
    ):
        found = plan(target(0.05), draft((0.8,), 0.05), asked=asked)
        assert found.chosen.draft == "none"
        assert f"no draft can be used: {words}" in found.reason


def test_there_is_no_plan_of_nothing() -> None:
    with pytest.raises(ConfigError, match="profiles: there is nothing to plan with"):
        make_plan([])


def test_a_draft_that_shares_the_targets_cores_is_overlapped_only_if_asked() -> None:
    known = Profiles(target(0.05), {"model": draft((0.8,), 0.35)}, {"model": "they share 2 cores"})
    assert make_plan([known]).chosen.schedule == "serial"
    why = {c.obstacle for c in make_plan([known]).candidates if c.schedule == "overlapped"}
    assert why == {"they share 2 cores"}
    assert make_plan([known], asked=Asked(schedule="overlapped")).chosen.schedule == "overlapped"


@pytest.mark.parametrize(
    ("target_device", "draft_device", "threads", "message"),
    [
        ("cpu", "cpu", None, "share 4 cores with 4 threads each; --threads 2"),
        ("cpu", "cpu", 3, "share 4 cores with 3 threads each"),
        ("cpu", "cpu", 2, None),
        ("cpu", "llamacpp:cpu", None, "share 4 cores"),
        ("cpu", "qnn:htp", None, None),
        ("qnn:htp", "qnn:htp", 1, "share qnn:htp"),
    ],
)
def test_who_has_cores_or_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, target_device: str, draft_device: str, threads: int | None, message: str | None
) -> None:
    monkeypatch.setattr("edgespec.contention.default_threads", lambda: 4)
    found = shared_place(target_device, draft_device, threads)
    assert found is None if message is None else message in (found or "")


def test_energy_prefers_fewer_wasted_rows() -> None:
    t, d = target(0.02), draft((0.55,), 0.02)
    speed, energy = plan(t, d), plan(t, d, prefer="energy")
    assert energy.prefer == "energy"
    assert energy.chosen.energy <= speed.chosen.energy
    with pytest.raises(ConfigError, match="speed or energy"):
        plan(t, d, prefer="heat")


def test_a_replay_of_n_grams_is_what_the_loop_does() -> None:
    """The same rounds as the production loop with a fixed k, on a text known in advance."""
    from adaptive_world import make_world
    from loop_driver import run

    from edgespec.draft.ngram import NgramDrafter
    from edgespec.sampling import SamplingParams

    world = make_world(1.0, order=1, seed=9)
    settings = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    looped = run(world.target.model, [NgramDrafter()], [1, 2, 3], settings, k=3)  # type: ignore[arg-type]
    t = target(0.1, texts=(((1, 2, 3), tuple(looped.tokens)),))
    again = replay(t, Mix({}, (NgramDrafter,), 3))
    assert again.rounds == looped.stats.rounds - 1  # the first one comes with the prompt


def test_a_profile_is_a_scenario_of_the_simulator() -> None:
    from edgespec.planner import scenario_json
    from edgespec.sim import Scenario, predict

    t, d = target(0.1), draft((0.5, 0.4), 0.1, contention=(1.2, 1.3))
    scenario = Scenario.from_json(scenario_json(t, d))
    assert (scenario.target_slowdown, scenario.draft_slowdown) == (1.2, 1.3)
    found = next(c for c in plan(t, d).candidates if (c.draft, c.k, c.schedule) == ("model", 2, "serial"))
    assert predict(scenario, 2).speedup == pytest.approx(found.speedup)


def test_plans_and_profiles_are_plain_data() -> None:
    import json

    t, d = target(0.1, exact=(2, 256, 1)), draft((0.5, 0.4), 0.1)
    assert TargetProfile.from_json(json.loads(json.dumps(t.to_json()))) == t
    assert DraftProfile.from_json(json.loads(json.dumps(d.to_json()))) == d
    text = json.dumps(plan(t, d).to_dict(), allow_nan=False)
    assert {"candidates", "chosen", "runner_up", "reason"} <= set(json.loads(text))
