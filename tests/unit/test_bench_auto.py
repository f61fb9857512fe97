"""The measurement of auto: which ways to decode are compared, and how predictions are judged."""

from __future__ import annotations

import math

import pytest
from edgespec_bench import auto
from edgespec_bench.standard import Pace, standard_paces
from plan_world import draft, plan, target

from edgespec.errors import ConfigError
from edgespec.planner import Asked
from edgespec.types import RoundRecord


def test_predictions_are_judged_by_all_answers_together() -> None:
    found = plan(target(0.1), draft((0.8,), 0.05), asked=Asked(schedule="serial"))
    labels = [c.label for c in auto._wanted(found, (1, 3))]
    assert not any("overlapped" in label for label in labels)
    lengths = {c.k for c in auto._wanted(found, (1, 3)) if (c.draft, c.controller) == ("model", "fixed")}
    assert lengths - {found.chosen.k} == {1, 3} - {found.chosen.k}
    measured = {label: [Pace(10, 10.0), Pace(10, 5.0)] for label in labels}
    measured[found.chosen.label] = [Pace(10, 20.0), Pace(10, 10.0)]
    judged = auto._predictions(found, {"chat": measured, "code": measured})
    assert judged["chosen_vs_best"] == 0.5
    row = next(row for row in judged["rows"] if row["label"] == found.chosen.label)
    assert row["error"] == pytest.approx(found.chosen.tok_s / (2 / 3) - 1, abs=0.01)
    plain_row = next(row for row in judged["rows"] if row["label"].startswith("no speculation"))
    assert plain_row["relative_error"] == 0.0
    assert judged["worst_error"] >= abs(row["error"])


def test_auto_is_held_against_the_best_fixed_length_of_a_kind() -> None:
    speeds = {
        "plain": [10.0, 10.0],
        "auto": [11.0, 12.0],
        "ngram, k = 1, serial, on cpu": [12.0, 12.0],
        "ngram, k = 3, serial, on cpu": [9.0, 9.0],
        "ngram, k <= 8, serial, on cpu": [30.0, 30.0],
    }
    paces = {label: [Pace(int(30 * value), 30.0) for value in values] for label, values in speeds.items()}
    standard = {label: [Pace(pace.tokens, 15.0) for pace in own] for label, own in paces.items()}
    row = auto._row("chat", paces, standard)
    assert row["auto_vs_plain_at_standard_costs"] == row["auto_vs_plain"]
    assert row["tok_s_at_standard_costs"]["plain"] == 20.0
    assert row["best_fixed"] == "ngram, k = 1, serial, on cpu"
    assert row["auto_vs_plain"]["median"] == row["auto_vs_plain"]["together"] == pytest.approx(1.15)
    assert row["auto_vs_best_fixed"]["together"] == pytest.approx(0.958, abs=0.01)


def test_a_long_answer_weighs_as_much_as_it_takes() -> None:
    """Of three answers of ten tokens and one of a thousand the long one is what a user waits for."""
    plain = [Pace(10, 10.0)] * 3 + [Pace(1000, 1000.0)]
    ratio = auto._ratio([Pace(10, 20.0)] * 3 + [Pace(1000, 500.0)], plain)
    assert ratio["median"] == 0.5
    assert ratio["together"] == pytest.approx(1030 / 560, abs=1e-3)


def record(index: int, source: str, drafted: int, emitted: int, target_s: float, propose_s: float = 0.0) -> RoundRecord:
    return RoundRecord(index, source, drafted, drafted, emitted - 1, emitted, 0, drafted + 1, "bonus", propose_s,
                       target_s, 0.5, propose_s)  # fmt: skip


def test_standard_costs_leave_what_was_decided_and_accepted() -> None:
    """A machine that was slow for one of two ways to decode changes nothing; a catch-up costs what it did."""
    drafted = [record(0, "none", 0, 1, 9.0), record(1, "eagle", 1, 2, 4.0, 7.0), record(2, "eagle", 1, 2, 4.0, 1.0)]
    slow = [record(0, "none", 0, 1, 9.0), record(1, "eagle", 1, 2, 8.0, 7.0), record(2, "eagle", 1, 2, 8.0, 3.0)]
    found = standard_paces({"one": [drafted], "other": [slow]})
    assert found["one"] == found["other"] == [Pace(4, 6.0 + 7.0 + 0.5 + 6.0 + 2.0 + 0.5)]
    plain = [record(0, "none", 0, 1, 9.0), record(1, "none", 0, 1, 3.0)]
    assert standard_paces({"plain": [plain]}) == {"plain": [Pace(1, 3.5)]}


def test_what_the_plan_chose_is_measured_whatever_its_length() -> None:
    """A chosen length that is not among those asked for had no figure: a run of ten minutes ended in a traceback."""
    found = plan(
        target(0.05), draft((0.9,) * 8, 0.0), asked=Asked(drafts=("model",), controller="fixed", schedule="serial")
    )
    assert found.chosen.controller == "fixed"
    assert found.chosen.k > 2
    assert found.chosen in auto._wanted(found, (1, 2))


def test_one_prompt_cannot_both_calibrate_and_judge() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        auto.AutoOptions(n_prompts=1)
    assert auto.AutoOptions(n_prompts=1, calibrate="first-use").n_prompts == 1, "other texts calibrate"


def test_an_unknown_way_to_calibrate_is_refused() -> None:
    with pytest.raises(ConfigError, match="half, first-use"):
        auto.AutoOptions(calibrate="quarter")


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused_before_anything_is_loaded(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        auto.AutoOptions(temperature=temperature)
