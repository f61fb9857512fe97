"""The simulator: formulas of the literature, rounds by expectation and by events, profiles, and its command."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgespec.cli import main
from edgespec.engine.ahead import LEAST_CHANCE, rank_outcomes
from edgespec.errors import ConfigError, FormatError
from edgespec.sim import SCHEDULES, Scenario, predict, simulate, speedup_table, worked_example
from edgespec.sim.article import expected_tokens

EXAMPLE = Scenario.flat(0.2, 0.01, 0.8)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(main, ["simulate", *args])


def test_the_worked_example_counted_three_ways() -> None:
    example = worked_example()
    assert (example.plain_s, example.printed_s, example.coded_s) == pytest.approx((20.0, 9.5, 6.25))
    assert [round(value, 2) for value in (example.printed, example.coded, example.exact)] == [2.11, 3.2, 2.95]


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(5, 0.8) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert expected_tokens(3, 1.0) == 4
    for row in speedup_table():
        assert row["exact"] < row["ceiling"]
        assert row["textbook"] < row["ceiling"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("scenario", "k"),
    [
        (EXAMPLE, 5),
        (Scenario.flat(0.2, 0.06, 0.6), 3),
        (Scenario({1: 5.0, 2: 7.0, 4: 8.0, 8: 15.0}, 1.1, (0.9, 0.7, 0.4), host_s=0.2), 4),
        (Scenario.flat(1.0, 0.3, 0.7, runner_up=0.9, target_slowdown=1.3, draft_slowdown=1.2), 2),
        (Scenario.flat(1.0, 0.0, 0.5), 4),
        (Scenario.flat(1.0, 5.0, 0.5), 2),
        (Scenario.flat(1.0, 0.1, 1.0), 3),
        (Scenario.flat(1.0, 0.1, 0.0), 3),
    ],
)
def test_events_agree_with_the_expectation(scenario: Scenario, k: int, schedule: str) -> None:
    expected = predict(scenario, k, schedule)
    run = simulate(scenario, k, schedule, n_tokens=20_000, seed=3)
    assert run.speedup == pytest.approx(expected.speedup, rel=0.03)
    assert run.tokens / run.rounds == pytest.approx(expected.tokens_per_round, rel=0.03)
    assert run.hits / run.rounds == pytest.approx(expected.hit_rate, abs=0.03)


def test_serial_is_the_exact_formula() -> None:
    assert predict(EXAMPLE, 5).speedup == pytest.approx(worked_example().exact)
    assert predict(EXAMPLE, 0).speedup == predict(EXAMPLE, 0, "overlapped").speedup == 1.0
    steps = Scenario({1: 5.0, 2: 7.0, 4: 8.0}, 1.0, (0.5, 0.25), host_s=0.5)
    assert predict(steps, 2).round_s == pytest.approx(2 * 1.0 + 8.0 + 0.5)  # three rows cost what four do
    assert predict(steps, 2).tokens_per_round == pytest.approx(1 + 0.5 + 0.125)


def test_overlap_by_hand() -> None:
    """Everything accepted: after the guess and two more steps, the proposal is there before the verdict."""
    sure = Scenario.flat(1.0, 0.1, 1.0)
    assert predict(sure, 2, "overlapped").round_s == pytest.approx(1.0)
    tight = Scenario.flat(1.0, 0.4, 1.0)  # three steps end at 1.2, the third of them 0.2 after the verdict
    assert predict(tight, 2, "overlapped").round_s == pytest.approx(1.2)
    rare = Scenario.flat(1.0, 0.4, 0.3, runner_up=1.0)  # outcome (0, second choice) at 0.4, the next would end at 1.2
    assert predict(rare, 1, "overlapped").round_s == pytest.approx(1.0 + 0.4 * (1 - 0.7))
    slow = Scenario.flat(1.0, 0.4, 1.0, target_slowdown=1.5, draft_slowdown=2.0)
    # Steps of 0.8 give the target 0.533 each: the verdict comes at 1.5, the step in flight needs 0.125 * 0.4 more.
    assert predict(slow, 2, "overlapped").round_s == pytest.approx(1.5 + 0.05 + 0.4)


def test_contention_can_cost_more_than_overlap_gains() -> None:
    contended = Scenario.flat(0.2, 0.01, 0.8, target_slowdown=1.5, draft_slowdown=1.5)
    assert predict(EXAMPLE, 5, "overlapped").speedup > predict(EXAMPLE, 5).speedup
    assert predict(contended, 5, "overlapped").speedup < predict(contended, 5).speedup


def test_taking_turns_may_cost_more_than_contention() -> None:
    """Each evicts the other from the caches: beside each other both were measured faster than in turn."""
    friendly = Scenario.flat(0.2, 0.04, 0.5, runner_up=0.0, draft_slowdown=0.5)
    # Steps of 0.02: a quarter of the rounds accepts the token and the guess after it, and finds its token ready.
    assert predict(friendly, 1, "overlapped").round_s == pytest.approx(0.2 + 0.75 * 0.02)
    assert predict(friendly, 1).round_s == pytest.approx(0.24)
    run = simulate(friendly, 1, "overlapped", n_tokens=20_000)
    assert run.seconds / run.rounds == pytest.approx(0.215, rel=0.02)
    faster = Scenario.flat(0.2, 0.04, 0.5, runner_up=0.0, draft_slowdown=0.5, target_slowdown=0.9)
    assert predict(faster, 1, "overlapped").round_s < predict(friendly, 1, "overlapped").round_s


def test_a_seed_decides_everything() -> None:
    jittery = Scenario.flat(0.2, 0.01, 0.8, target_jitter=0.3, draft_jitter=0.3)
    runs = [simulate(jittery, 4, "overlapped", n_tokens=500, seed=seed, n_spans=50) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].seconds != runs[2].seconds
    assert len(runs[0].spans) == 50


def test_lanes_do_not_overlap_and_serial_ones_take_turns() -> None:
    for schedule in SCHEDULES:
        run = simulate(EXAMPLE, 5, schedule, n_tokens=100, n_spans=10_000)
        for lane in ("target", "draft"):
            spans = sorted((s for s in run.spans if s.lane == lane), key=lambda span: span.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))
        together = sum(
            max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
            for a in run.spans
            for b in run.spans
            if (a.lane, b.lane) == ("target", "draft")
        )
        assert (together > 0.1 * run.seconds) == (schedule == "overlapped")


def test_outcomes_are_prepared_likeliest_first() -> None:
    good = rank_outcomes([0.9] * 4)
    assert good[0][:2] == (3, 0)
    assert [outcome.accepted for outcome in good[1:4]] == [0, 1, 2]
    poor = rank_outcomes([0.3, 0.3, 0.3])
    assert [outcome[:2] for outcome in poor[:2]] == [(0, 1), (1, 1)]
    for chances in ([0.9] * 4, [0.3] * 3, [0.0, 1.0], [1.0, 1.0], [0.5]):
        outcomes = rank_outcomes(chances)
        assert sum(outcome.chance for outcome in outcomes) <= 1
        assert all(outcome.chance >= LEAST_CHANCE for outcome in outcomes)
        keys = [outcome[:2] for outcome in outcomes]
        k = len(chances) - 1
        assert (k, 1) not in keys or keys.index((k, 0)) < keys.index((k, 1))  # the runner-up is known with the guess


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"target_ms": 5, "draft_ms": 1}, "'acceptance' is missing"),
        ({"target_ms": 5, "draft_ms": 1, "acceptance": 0.5, "colour": 1}, "'colour' is not known"),
        ({"target_ms": {"2": 5}, "draft_ms": 1, "acceptance": 0.5}, "one row is needed"),
        ({"target_ms": {"one": 5}, "draft_ms": 1, "acceptance": 0.5}, "'one' rows"),
        ({"target_ms": 0, "draft_ms": 1, "acceptance": 0.5}, "over 0"),
        ({"target_ms": 5, "draft_ms": "x", "acceptance": 0.5}, "'x', which is no number"),
        ({"target_ms": 5, "draft_ms": 1, "acceptance": [0.5, 1.5]}, "from 0 to 1"),
        ({"target_ms": 5, "draft_ms": 1, "acceptance": []}, "acceptance is empty"),
        ({"target_ms": 5, "draft_ms": 1, "acceptance": 0.5, "contention": 0}, "over 0"),
        ({"target_ms": 5, "draft_ms": 1, "acceptance": 0.5, "jitter": {"npu": 0.1}}, "names 'npu'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=message):
        Scenario.from_json(data)


def test_more_rows_than_were_measured_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 rows in a call, but target times go up to 4 rows"):
        predict(Scenario({1: 1.0, 4: 1.0}, 0.1, (0.5,)), 4)


def test_the_command_shows_all_three_figures() -> None:
    result = invoke("-n", "500")
    assert result.exit_code == 0, result.stderr
    for figure in ("2.11x", "3.20x", "2.95x"):
        assert figure in result.stdout


def test_the_command_reads_profiles_and_typed_figures_win(tmp_path: Path) -> None:
    path = tmp_path / "phone.json"
    path.write_text(json.dumps({"target_ms": {"1": 100, "8": 130}, "draft_ms": 20, "acceptance": [0.7, 0.6]}))
    args = ("--profile", str(path), "--draft-max", "2", "-n", "300", "--json")
    plain, cheap = (json.loads(invoke(*args, *more).stdout) for more in ((), ("--draft-ms", "0")))
    expected = predict(Scenario({1: 0.1, 8: 0.13}, 0.02, (0.7, 0.6)), 2)
    assert plain["runs"][0]["predicted"]["speedup"] == pytest.approx(expected.speedup)
    assert cheap["runs"][0]["speedup"] > plain["runs"][0]["speedup"]
    assert json.loads(invoke(*args).stdout) == plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--target-ms", "5,x"), "--target-ms 5,x: give numbers"),
        (("--contention", "1.1"), "give two numbers"),
        (("--acceptance", "1.2"), "acceptance is 1.2"),
        (("--draft-max", "-1"), "num_speculative_tokens=-1"),
        (("--draft-max", "40"), "41 rows in a call"),
        (("--plot", "x.gif"), "must end in .png"),
        (("--plot", "nowhere/x.png"), "the folder nowhere does not exist"),
    ],
)
def test_the_command_refuses_in_one_line(args: tuple[str, ...], message: str) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert message in result.stderr


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sim.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("--plot", str(path))
    assert result.exit_code == 2
    assert "pip install 'edgespec[bench]'" in result.stderr
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert invoke("--plot", str(path), "-n", "100", "--json").exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
