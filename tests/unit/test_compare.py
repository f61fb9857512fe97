"""Plain against speculative, on table models whose one-row calls differ."""

from __future__ import annotations

from loop_driver import draft_model

from edgespec import LLM, SamplingParams
from edgespec.compare import compare, speculation_lines
from edgespec.stats import RunStats
from edgespec.testing import TableModel
from edgespec.types import FILLER, RoundRecord


def llm(**options: object) -> LLM:
    target = TableModel(16, seed=3, scale=1e-3, inexact_rows=(1,), n_ctx=256)
    return LLM(target, draft_model=draft_model("noisy", target, scale=1e-3, noise=0.0), **options)


GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def test_exact_runs_agree_and_the_native_difference_is_reported_with_its_gap() -> None:
    result = compare(llm(), [1, 2], GREEDY)
    assert result.identical
    assert result.native_difference is not None
    assert result.native_difference.top2_gap is not None
    assert 0 <= result.native_difference.top2_gap < 1e-2
    data = result.to_dict()
    assert data["identical"] is True
    accepted = data["accepted"] + data["accepted_fillers"]
    assert data["completion_tokens"] == accepted + data["rounds"] - data["cut"]
    assert any("first differs from native" in line for line in result.summary())


def test_fast_runs_report_where_they_part_from_native_plain() -> None:
    result = compare(llm(exact=False), [1, 2], GREEDY)
    assert not result.identical
    assert result.exact_plain is None
    assert result.difference is not None
    assert result.difference.top2_gap is not None
    assert "identical to native plain: NO" in result.summary()


def test_trees_report_the_first_difference_and_sources() -> None:
    result = compare(llm(exact=False, tree=True), [1, 2], GREEDY)
    assert result.difference is not None
    assert result.difference.top2_gap is not None
    data = result.to_dict()
    assert data["sources"]["model"]["drafted"] > 0
    assert 0 < len(data["acceptance_by_position"]) <= 8
    assert data["graphs"] == {"plain": "the loaded model", "speculative": "the loaded model"}
    assert any(line.startswith("accepted by source: model ") for line in result.summary())


def test_acceptance_by_position_counts_what_was_offered() -> None:
    """Chains of 3, 2 and 1 tokens; free guesses stay out, and a tree counts for every place."""
    counts = [(3, 3, "model"), (2, 1, "model"), (1, 0, "ngram"), (1, 1, FILLER), (0, 0, "none")]
    records = [
        RoundRecord(i, source, drafted, drafted, accepted, accepted + 1, 0, drafted + 1, "bonus")
        for i, (drafted, accepted, source) in enumerate(counts)
    ]
    assert RunStats(records=records).acceptance_by_position() == [2 / 3, 1 / 2, 1.0]
    assert RunStats(records=records, tree=True).acceptance_by_position() == [2 / 3, 1 / 3, 1 / 3]
    assert RunStats(records=records[3:]).acceptance_by_position() == []
    lines = speculation_lines(RunStats(records=records))
    assert lines == [
        "accepted by position: 67%, 50%, 100%",
        "accepted by source: model 4 of 5, ngram 0 of 1, filler 1 of 1",
    ]


def test_rules_that_redraw_say_that_tokens_may_differ() -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20)
    assert any("distribution, not its tokens" in note for note in compare(llm(verifier="block"), [1, 2], params).notes)
