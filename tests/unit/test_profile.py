"""What is measured of target and drafts, on table models with a cost; what is kept, and when it is measured again."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgespec import LLM, SamplingParams
from edgespec.calibration import CalibrationRun
from edgespec.cli import main
from edgespec.contention import compare_rounds
from edgespec.draft_records import chances, choice_s, draft_costs, in_place, token_s
from edgespec.engine.costs import CostTable, DraftCosts, MeasuredCosts, Spread
from edgespec.errors import ConfigError
from edgespec.machine import Profile
from edgespec.planner import make_plan
from edgespec.profile import DraftProfile, Effort, TargetProfile, _load, measure_target, profile_llm
from edgespec.testing import LatencyModel, TableModel
from edgespec.testing.latency import FakeClock
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec
from edgespec.types import ExactRows, RoundRecord

SMALL = Effort(repeats=3, budget_s=60.0, n_tokens=16, n_prompts=2, depths=(1, 3), texts_s=1e6)


def slow_table(step_s: float, row_s: float, device: str | None = None, **options: Any) -> LatencyModel:
    clock = FakeClock()
    table = TableModel(16, **{"n_ctx": 512, "seed": 4, **options})
    return LatencyModel(table, step_s, row_s, device=device, clock=clock, sleep=clock.sleep)


def test_every_row_count_is_measured_as_it_is() -> None:
    model = slow_table(10.0, 1.0)
    found = measure_target(model, None, SMALL)
    (rows,) = found.values()
    assert sorted(rows) == [*range(1, 17), 24, 32]
    assert {n: s.median for n, s in rows.items()} == {n: pytest.approx(10.0 + n) for n in rows}
    assert {s.n for s in rows.values()} == {3}


def test_only_row_counts_that_exact_mode_runs_are_measured() -> None:
    model = slow_table(10.0, 1.0, max_rows=16)
    (rows,) = measure_target(model, ExactRows(4, 16, 4), SMALL).values()
    assert sorted(rows) == [1, 4, 8, 12, 16]
    assert {n for n, count in model.rows.items() if count > 2} <= {1, 4, 8, 12, 16, 480, 256, 224, 240, 15}


def test_no_more_is_planned_than_exact_rows_hold(tmp_path: Path) -> None:
    """In a short context they hold fewer tokens than V(n) is measured for; `run` refuses what is over that."""
    llm = LLM(slow_table(10.0, 1.0, n_ctx=12), draft="ngram")
    assert llm.exact is not None
    assert llm.exact.max_rows == 6
    found = profile_llm(llm, effort=SMALL, store=Profile(tmp_path / "machine.json")).target
    assert max(found.costs.target[min(found.costs.target)]) > 6
    assert found.most_k == 5


def test_a_profile_holds_costs_acceptance_and_contention(tmp_path: Path) -> None:
    target, draft = slow_table(10.0, 1.0), slow_table(2.0, 0.0, noise=1.0)
    llm = LLM(target, draft="ngram,model", draft_model=draft, exact=False)
    found = profile_llm(llm, effort=SMALL, store=Profile(tmp_path / "machine.json"))
    model = found.drafts["model"]
    assert model.costs.steps[3].median == pytest.approx(6.0, rel=0.01)
    assert model.costs.seconds(2) == pytest.approx(4.0, rel=0.01)
    assert 0.0 <= model.chances[0] <= 1.0
    assert model.contention[0] == 1.0  # a call on a clock of its own takes what it takes
    assert model.contention[1] > 0.0
    assert found.expected.costs.seconds(5, 100) == pytest.approx(15.0)
    assert found.expected.chances == {"model": model.chances}
    assert {source for source, _bucket in found.expected.buckets} <= {"ngram"}
    assert len(found.target.texts) == 2
    assert all(len(text) == 16 for _, text in found.target.texts)
    assert set(found.drafts) == {"model"}


@pytest.mark.parametrize(("step_s", "n_tokens"), [(0.01, 16), (0.19, 10), (30.0, 8)])
def test_a_slow_target_writes_shorter_texts_at_first_use(
    step_s: float, n_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a first use takes seconds: 12 s for 2 texts, 2 lengths and all places are 10 tokens at 0.19 s a step."""
    swept: list[int] = []
    sweep = CalibrationRun.sweep
    monkeypatch.setattr(CalibrationRun, "sweep", lambda self, k: (swept.append(k), sweep(self, k))[1])
    effort = dataclasses.replace(SMALL, rows=(1, 2, 3, 4, 5), texts_s=12.0)
    llm = LLM(slow_table(step_s, 0.0), draft="ngram", exact=False)
    found = profile_llm(llm, effort=effort, store=Profile(tmp_path / "machine.json")).target
    assert [len(text) for _, text in found.texts] == [n_tokens] * 2
    assert sorted(found.costs.target[64]) == [1, 2, 3, 4, 5]
    assert len(swept) == (n_tokens >= 10)  # a slow target is not run once more for the sake of the host's time


def test_the_sweep_has_as_many_plain_steps_as_others() -> None:
    """The machine slowed down between texts of plain steps and the sweep, and a row looked 20 % dearer than it was."""
    run = CalibrationRun(LLM(slow_table(1.0, 0.1), draft="ngram", exact=False), None, SMALL, 0.0)
    asked = [record.asked_k for record in run.sweep(3)]
    counts = Counter(k for k in asked if k in (0, 1, 2, 3))
    assert counts[0] >= max(counts[k] for k in (1, 2, 3))
    assert counts[1]


def pair(tmp_path: Path, **options: Any) -> tuple[LLM, Profile]:
    target, draft = slow_table(10.0, 1.0), slow_table(1.0, 0.1, **options)
    target.content_key, draft.content_key = "this table", "that table"  # type: ignore[attr-defined]
    return LLM(target, draft="model", draft_model=draft, exact=False), Profile(tmp_path / "machine.json")


def test_a_draft_is_measured_on_the_texts_of_the_target_that_is_kept(tmp_path: Path) -> None:
    """A thorough profile of the target has more texts than a quick one; the plan ran past the draft's last one."""
    llm, store = pair(tmp_path)
    profile_llm(llm, effort=SMALL, store=store)
    longer = dataclasses.replace(SMALL, n_prompts=3)
    profile_llm(llm.variant(draft="ngram"), effort=longer, store=store, fresh=True)
    found = profile_llm(llm, effort=SMALL, store=store)
    assert len(found.target.texts) == len(found.drafts["model"].places) == 3
    assert make_plan([found]).chosen


@pytest.mark.parametrize(
    "path",
    ["measured_at", "guess", "texts", "costs", "costs/target", "costs/target/64/1/0", "costs/host_s", "choice_s",
     "bytes", "places", "places/0", "chances", "most", "costs/steps", "contention"],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, "x", {}, [], [[[]]], -0.5, float("nan"), float("inf")])
def test_a_damaged_profile_is_measured_again(path: str, value: Any, tmp_path: Path) -> None:
    llm, store = pair(tmp_path)
    first = profile_llm(llm, effort=SMALL, store=store)
    for key in ("target", "draft"):
        fields = (first.target if key == "target" else first.drafts["model"]).to_json()
        fields = json.loads(json.dumps(fields))
        place, names = fields, path.split("/")
        try:
            for name in names[:-1]:
                place = place[int(name) if isinstance(place, list) else name]
            place[int(names[-1]) if isinstance(place, list) else names[-1]] = value
        except (KeyError, IndexError):
            continue
        parse = TargetProfile.from_json if key == "target" else DraftProfile.from_json
        store.put("costs", "damaged", fields)
        found = _load(store, "damaged", parse)
        if found is not None:  # what is left makes sense: a plan can be made of it
            changes = {"target": found} if key == "target" else {"drafts": {"model": found}}
            assert make_plan([dataclasses.replace(first, **changes)]).chosen.tok_s > 0


def test_a_draft_that_fails_while_it_is_measured_leaves_no_figures(tmp_path: Path) -> None:
    llm, store = pair(tmp_path, fail_at=range(3, 4000))
    assert profile_llm(llm, effort=SMALL, store=store).drafts == {}
    healthy, _ = pair(tmp_path)
    assert profile_llm(healthy, effort=SMALL, store=store).drafts["model"].chances[0] == 1.0


def test_a_target_that_takes_nothing_back_is_measured_in_single_rows() -> None:
    (rows,) = measure_target(slow_table(10.0, 1.0, max_rewind=0), None, SMALL).values()
    assert {n: spread.median for n, spread in rows.items()} == {1: pytest.approx(11.0)}


def test_a_profile_is_measured_once_and_again_when_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Profile(tmp_path / "machine.json")
    target = slow_table(10.0, 1.0)
    target.content_key = "this table"  # type: ignore[attr-defined]
    llm = LLM(target, draft="ngram", exact=False)
    first = profile_llm(llm, effort=SMALL, store=store)
    calls = target.n_calls
    assert profile_llm(llm, effort=SMALL, store=store) == first
    assert target.n_calls == calls
    monkeypatch.setattr("edgespec.profile.time.time", lambda: first.target.measured_at + 40 * 86400)
    profile_llm(llm, effort=SMALL, store=store)
    assert target.n_calls > calls
    calls = target.n_calls
    profile_llm(llm, effort=SMALL, store=store, fresh=True)
    assert target.n_calls > calls
    fields = json.loads((tmp_path / "machine.json").read_text())
    for entry in fields["sections"]["costs"].values():
        del entry["texts"]
    (tmp_path / "machine.json").write_text(json.dumps(fields))
    calls = target.n_calls
    profile_llm(llm, effort=SMALL, store=store)
    assert target.n_calls > calls, "a damaged entry is measured again"


@pytest.mark.parametrize(
    "changes",
    [
        {"verifier": "rejection"},
        {"draft_p_min": 0.5},
        {"draft_draft": "ngram"},
        {"draft_n_ctx": 80},
        {"n_ctx": 80},
    ],
    ids=str,
)
def test_figures_of_other_options_are_not_taken_for_these(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key named the models alone: a draft that stops early was planned with the figures of one that does not."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    folders = [write_bundle(tmp_path / str(n), TinySpec(eos_ids=(), n_layers=n), bits=4) for n in (2, 1)]
    entries = []
    for options in ({}, {}, changes, changes):
        with LLM(folders[0], draft_model=folders[1], exact=False, **options) as llm:
            profile_llm(llm, effort=dataclasses.replace(SMALL, rows=(1, 2, 4), depths=(2,)))
        entries.append(len(json.loads((tmp_path / "machine.json").read_text())["sections"]["costs"]))
    assert entries[0] == entries[1] < entries[2] == entries[3]


def test_memory_is_that_of_the_context_which_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that of the context in which a model was first profiled."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    folder = write_bundle(tmp_path / "model", TinySpec(eos_ids=(), n_ctx=4096), bits=4)
    found, tables = {}, []
    for n_ctx in (2048, 4096):
        with LLM(folder, draft_model=folder, n_ctx=n_ctx, draft_n_ctx=n_ctx, exact=False) as llm:
            profiles = profile_llm(llm, effort=dataclasses.replace(SMALL, rows=(1, 2, 4), depths=(2,)))
            cache = llm.target.info.kv_bytes_per_token * n_ctx
        found[n_ctx] = (profiles.target.bytes, profiles.drafts["model"].bytes)
        tables.append(profiles.target.costs)
        assert found[n_ctx] == (llm.target.info.weight_bytes + cache,) * 2
    assert tables[0] == tables[1], "measured once"


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_there_is_no_calibration_on_nothing(prompts: list[list[int]]) -> None:
    llm = LLM(slow_table(10.0, 1.0), draft="ngram", exact=False)
    with pytest.raises(ConfigError, match="at least one prompt to calibrate on, and no empty one"):
        profile_llm(llm, effort=SMALL, prompts=prompts)


@pytest.mark.parametrize("fields", [{"rows": ()}, {"contexts": (0,)}, {"depths": ()}, {"repeats": 0}, {"n_prompts": 0}])
def test_an_effort_of_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Effort(**fields)


def test_trees_are_not_profiled(tmp_path: Path) -> None:
    llm = LLM(slow_table(10.0, 1.0), draft="ngram", exact=False, tree=True)
    with pytest.raises(ConfigError, match="what is profiled and planned are chains"):
        profile_llm(llm, effort=SMALL)


def test_acceptance_is_that_of_the_temperature_asked_for(tmp_path: Path) -> None:
    """Figures of T = 0 promised sampled texts what only greedy ones get."""
    store = Profile(tmp_path / "machine.json")
    target, draft = slow_table(10.0, 1.0), slow_table(2.0, 0.0, noise=0.7)
    target.content_key, draft.content_key = "this table", "that table"  # type: ignore[attr-defined]
    llm = LLM(target, draft="model", draft_model=draft, exact=False)
    effort = dataclasses.replace(SMALL, n_tokens=60)
    found = {t: profile_llm(llm, effort=effort, store=store, temperature=t) for t in (0.0, 2.0)}
    assert found[2.0].target.texts != found[0.0].target.texts
    assert found[2.0].drafts["model"].chances[0] != found[0.0].drafts["model"].chances[0]
    calls = target.n_calls
    assert {t: profile_llm(llm, effort=effort, store=store, temperature=t) for t in (0.0, 2.0)} == found
    assert target.n_calls == calls, "both are kept"
    with pytest.raises(ConfigError, match="temperature"):
        profile_llm(llm, effort=effort, store=store, temperature=-1.0)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_what_a_draft_gets_right_at_every_place_is_what_its_rounds_accept(tmp_path: Path, temperature: float) -> None:
    """Overall chances said nothing of where: a mix was promised that the draft is right where n-grams are at a loss."""
    target, draft = slow_table(10.0, 1.0), slow_table(2.0, 0.0, noise=0.7)
    llm = LLM(target, draft="model", draft_model=draft, exact=False)
    found = profile_llm(llm, effort=SMALL, temperature=temperature, store=Profile(tmp_path / "machine.json"))
    model, accepted = found.drafts["model"], set()
    assert (model.most, model.passes) == (501, None)  # the room after a prompt of 12 tokens
    params = SamplingParams(temperature=temperature, max_tokens=SMALL.n_tokens, seed=1)
    sides = {k: llm.variant(num_speculative_tokens=k, schedule="serial") for k in (1, 2, 3)}
    for (prompt, text), places in zip(found.target.texts, model.places, strict=True):
        assert len(places) == len(text)
        for k, side in sides.items():
            output = side.generate([[*prompt]], params)[0].outputs[0]
            assert tuple(output.token_ids) == text
            at = 0
            for record in output.stats.records:
                if not record.cut:
                    assert min(k, places[at].accepted) == record.accepted
                    accepted.add(record.accepted)
                at += record.emitted
        assert all(len(place.scores) == (place.drafted if temperature == 0.0 else 0) for place in places)
    assert len(accepted) > 1


def proposal(index: int, seconds: float, source: str = "eagle", **counts: Any) -> RoundRecord:
    fields = {"asked_k": 2, "drafted": 2, "accepted": 1, "emitted": 2, "cut": 0, "n_rows": 3, **counts}
    return RoundRecord(index=index, source=source, kind="correction", propose_s=seconds, **fields)


def test_catching_up_is_what_the_first_proposal_of_a_request_takes_more() -> None:
    """Drafts that need features propose first in round 1; that was taken for a step, and catching up for 0."""
    requests = [
        [proposal(0, 0.0, "none", drafted=0), proposal(1, 1.0), *(proposal(i, 0.1) for i in range(2, 6))],
        [proposal(0, 0.6), *(proposal(i, 0.1) for i in range(1, 6)), proposal(6, 9.0, cut=1)],
        [proposal(0, 0.0, "none", drafted=0)],  # never proposed
    ]
    costs = draft_costs({2: [record for request in requests for record in request]}, "eagle", [90, 50, 7])
    assert costs.steps == {2: Spread(0.1, 0.1, 0.1, 9)}
    assert costs.catch_up == {90: Spread(0.9, 0.9, 0.9, 1), 50: Spread(0.5, 0.5, 0.5, 1)}
    assert costs.catch_up_token_s == pytest.approx(0.01)


def test_calls_cost_what_they_do_between_the_other_work_of_a_round() -> None:
    """Timed one after the other, small calls were dearer and large ones cheaper than decoding finds them."""
    costs = MeasuredCosts({64: spreads(n1=1.0, n2=1.0, n3=4.0, n5=5.0), 1064: spreads(n1=2.0, n2=2.0, n3=5.0, n5=6.0)})
    plain = [proposal(0, 0.0, target_s=99.0), *(proposal(i, 0.0, n_rows=1, target_s=0.9) for i in (1, 2, 3))]
    swept = [proposal(0, 0.0, target_s=99.0), *(proposal(i, 0.0, n_rows=3, target_s=6.6) for i in (1, 2, 3))]
    swept += [proposal(4, 0.0, n_rows=5, target_s=99.0)]  # one round says nothing
    rise = 6.6 / costs.seconds(3, 503)
    found = in_place(costs, plain, swept, [501])
    assert {n: s.median for n, s in found.target[64].items()} == {
        1: pytest.approx(0.9 / costs.seconds(1, 503), abs=2e-3),
        2: pytest.approx((0.9 / costs.seconds(1, 503) + rise) / 2, abs=2e-3),
        3: pytest.approx(4 * rise, abs=0.02),
        5: pytest.approx(5 * rise, abs=0.03),
    }
    assert found.target[1064][3].median == pytest.approx(5 * rise, abs=0.03)
    swept += [proposal(i, 0.0, n_rows=1, target_s=1.8) for i in range(5, 8)]  # the machine had become half as fast
    again = in_place(costs, plain, swept, [501])
    assert again.target[64][3].median == pytest.approx(2 * rise, abs=0.02)
    assert again.target[64][1] == found.target[64][1]
    assert in_place(costs, [], swept, [501]) == in_place(costs, plain, [], [501]) == costs


def test_one_row_count_that_other_work_held_up_is_corrected_like_its_neighbours() -> None:
    """A further row costs less than a dozen calls are out: controllers left out such counts for good."""
    alone = {"n1": 1.0, "n2": 1.0, "n3": 1.1, "n4": 1.2, "n5": 2.0, "n6": 2.1}
    costs = MeasuredCosts({64: spreads(**alone)})
    shares = {1: 1.0, 2: 1.1, 3: 1.1, 4: 1.5, 5: 1.1, 6: 1.1}
    rounds = [(n, 1 + i) for i, n in enumerate([*shares] * 3)]
    swept = [proposal(0, 0.0, target_s=9.0)]
    swept += [proposal(i, 0.0, n_rows=n, target_s=shares[n] * costs.seconds(n, 64)) for n, i in rounds]
    plain = [swept[0], *(record for record in swept[1:] if record.n_rows == 1)]
    found = in_place(costs, plain, swept, [10]).target[64]
    assert {n: s.median for n, s in found.items()} == {
        n: pytest.approx(alone[f"n{n}"] * (1.0 if n == 1 else 1.1)) for n in shares
    }


def test_the_hosts_share_grows_with_accepted_tokens_and_with_weighing() -> None:
    rounds = [proposal(0, 0.0, host_s=9.0, accepted=5)]
    for i in range(1, 10):
        rounds.append(proposal(i, 0.0, host_s=0.3 + 0.2 * (i % 3), verify_s=0.2 * (1 + i % 3), accepted=i % 3))
    assert token_s(rounds) == pytest.approx(0.2)
    rounds += [proposal(i, 0.0, "none", asked_k=0, host_s=0.15, accepted=0) for i in range(10, 14)]
    assert choice_s(rounds, MeasuredCosts({}, 0.1, token_s=0.2)) == (pytest.approx(0.2), pytest.approx(0.05))
    assert token_s(rounds[:1]) == 0.0
    assert choice_s(rounds[:1], MeasuredCosts({})) == (0.0, 0.0)


def test_contention_is_judged_round_against_round() -> None:
    """Overlapped calls of other row counts, prompts, and rounds with the draft at rest say nothing of it."""
    serial = [proposal(i, 0.6, target_s=10.0 + i) for i in range(6)]
    overlapped = [proposal(i, 0.0, target_s=1.2 * (10.0 + i), ahead=4, ahead_s=1.0) for i in range(6)]
    overlapped[0].target_s = 99.0  # holds the prompt
    overlapped[1].ahead, overlapped[1].target_s = 0, 99.0
    overlapped[2].n_rows, overlapped[2].target_s = 9, 99.0
    overlapped[3].target_s = 500.0  # one slow call
    assert compare_rounds(serial, overlapped) == (pytest.approx(1.2), pytest.approx(0.25 / 0.3))
    assert compare_rounds(serial, serial) == (1.0, 1.0), "nothing ran beside the target"
    assert compare_rounds([], overlapped) == (1.0, 1.0)


def test_a_draft_that_never_proposed_costs_nothing_known() -> None:
    assert draft_costs({1: []}, "eagle", []).steps == {1: Spread(0.0, 0.0, 0.0, 0)}
    assert chances([]) == (0.0,)
    rounds = [proposal(1, 0.1), proposal(2, 0.1, accepted=2, emitted=3), proposal(3, 0.1, accepted=0, emitted=1)]
    assert chances(rounds) == (pytest.approx(2 / 3),)  # two rounds reached the second place: too few


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-budget", "much"], "--memory-budget much: give a size such as 600MB"),
        (["--memory-budget", "-5MB"], "give a size such as 600MB"),
        (["--plot", "plan.doc"], "--plot plan.doc: the name must end in .png, .svg, .pdf"),
        (["--prefer", "heat"], "Invalid value for '--prefer'"),
    ],
)
def test_bad_input_of_plan_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", "smollm2-135m", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# --- tables of costs --------------------------------------------------------------------------------------------------


def spreads(**values: float) -> dict[int, Spread]:
    return {int(key[1:]): Spread(value, value, value, 3) for key, value in values.items()}


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = MeasuredCosts({100: spreads(n1=1.0, n2=1.5, n4=2.0), 500: spreads(n1=2.0, n2=2.5, n4=3.0)})
    assert costs.seconds(3, 100) == 2.0  # the next larger count: a step is a step
    assert costs.seconds(8, 100) == 4.0
    assert costs.seconds(1, 300) == 1.5
    assert costs.seconds(1, 900) == 3.0
    assert costs.seconds(1, 10) == 1.0
    draft = DraftCosts(spreads(n1=1.0, n4=2.5), spreads(n10=0.5, n100=20.0))
    assert draft.seconds(2) == 1.5
    assert draft.seconds(8) == 5.0
    assert draft.catch_up_token_s == 0.2
    assert MeasuredCosts.from_json(
        json.loads(json.dumps(dataclasses.replace(costs, drafts={"m": draft}).to_json()))
    ) == (dataclasses.replace(costs, drafts={"m": draft}))


def test_a_table_follows_a_machine_that_slows_down() -> None:
    """Row counts that are not run any more become slower with those that are."""
    table = CostTable(MeasuredCosts({64: spreads(n1=1.0, n2=1.2, n4=1.6)}))
    for _ in range(200):
        table.learn_target(1, 64, 2.0)
    assert table.target_s(1, 64) == pytest.approx(2.0, rel=0.02)
    assert table.target_s(4, 64) == pytest.approx(3.2, rel=0.1)


def test_one_slow_call_moves_nothing() -> None:
    table = CostTable()
    for n, seconds in [(1, 1.0), (2, 1.2)] * 10:
        table.learn_target(n, 64, seconds)
    table.learn_target(1, 64, 50.0)
    assert table.target_s(1, 64) == pytest.approx(1.0, rel=0.1)
    assert table.target_s(2, 64) == pytest.approx(1.2, rel=0.1)
    assert table.target_s(3, 64) == pytest.approx(1.4, rel=0.1)  # not run yet: as much more as the last row
