"""`--draft auto`: what it loads and chooses, what is left to the user, and lengths that nobody set."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from table_world import write_table_of
from test_profile import SMALL, slow_table

from edgespec import LLM, SamplingParams, zoo
from edgespec.errors import ConfigError
from edgespec.planner import make_plan
from edgespec.profile import profile_llm


def test_auto_decodes_the_same_text_and_says_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr("edgespec.auto.QUICK", SMALL)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    texts, chosen = [], []
    for row_s, noise in ((0.1, 0.0), (10.0, 50.0)):
        target, draft = slow_table(10.0, row_s), slow_table(0.5, 0.0, noise=noise)
        for kind in ("none", "auto"):
            extra = {"draft_model": draft} if kind == "auto" else {}
            with LLM(target, draft=kind, exact=False, **extra) as llm:
                output = llm.generate([1, 2, 3], params)[0].outputs[0]
                texts.append(output.token_ids)
        chosen.append(llm.options.draft)
        plan = output.stats.controller.get("plan") if llm.options.draft != "none" else llm.loaded.plan
        assert plan is not None
        assert plan["chosen"]
        assert plan["reason"]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert "model" in chosen[0]
    assert chosen[1] == "none"


@pytest.mark.parametrize(
    ("device", "schedule", "expected"),
    [
        ("npu", None, "overlapped"),
        ("cpu", None, "serial"),
        ("npu", "serial", "serial"),
        ("cpu", "overlapped", "overlapped"),
    ],
)
def test_auto_overlaps_where_the_two_have_devices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, schedule: str | None, expected: str
) -> None:
    """Devices on clocks of their own: the draft is right and takes a quarter of a target call, which lets it work.

    What they would cost each other is given: a busy machine would measure its other work.
    """
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr("edgespec.profile.measure_contention", lambda *_: (1.0, 1.0))
    monkeypatch.setattr("edgespec.auto.QUICK", SMALL)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    target, draft = slow_table(8.0, 0.0), slow_table(2.0, 0.0, device=device)
    tick = target._sleep
    target._sleep = lambda seconds: (tick(seconds), time.sleep(2e-3))[0]
    with LLM(target, draft="none", exact=False) as llm:
        plain = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    with LLM(target, draft="auto", draft_model=draft, exact=False, schedule=schedule) as llm:
        output = llm.generate([1, 2, 3], params)[0].outputs[0]
    assert output.token_ids == plain
    assert (llm.options.draft, llm.options.schedule) == ("ngram,model", expected)
    assert f", {expected}, on " in output.stats.controller["plan"]["chosen"]
    ahead = sum(record.ahead for record in output.stats.records)
    assert (ahead > 0) == (expected == "overlapped")


def test_a_target_that_is_no_bundle_has_the_zoos_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GGUF file: which tokenizer it has is known only once it is loaded."""
    monkeypatch.setattr(zoo, "zoo_dir", lambda: tmp_path / "zoo")
    monkeypatch.setattr("edgespec.auto.QUICK", SMALL)
    target, params = slow_table(10.0, 0.1, tokenizer_hash="a" * 64), SamplingParams(temperature=0.0, max_tokens=60)
    text = LLM(target, draft="none").generate([3, 1, 4], params)[0].outputs[0].token_ids
    (tmp_path / "zoo" / "pair").mkdir(parents=True)
    write_table_of(tmp_path / "zoo" / "pair" / "table", [3, 1, 4, *text], 16, tokenizer_hash="a" * 64)
    with LLM(target, draft="auto", exact=False) as llm:
        assert llm.options.draft == "ngram,table"
        output = llm.generate([3, 1, 4], params)[0].outputs[0]
    assert output.token_ids == text
    assert output.stats.to_dict()["sources"]["table"]["accepted"] > 0
    with LLM(slow_table(10.0, 0.1, tokenizer_hash="b" * 64), draft="auto", exact=False) as other:
        assert "table" not in other.options.draft
    (tmp_path / "zoo" / "pair" / "table" / "table.npy").write_bytes(b"broken")
    with LLM(target, draft="auto", exact=False) as llm:
        assert "table" not in llm.options.draft
        assert llm.generate([3, 1, 4], params)[0].outputs[0].token_ids == text


def test_a_draft_of_one_row_a_call_is_measured_like_any_other(tmp_path: Path) -> None:
    """It made auto fail with a refusal of lengths that nobody had set."""
    target, draft = slow_table(10.0, 1.0), slow_table(1.0, 0.0, max_rows=1)
    with LLM(target, draft="auto", draft_model=draft) as llm:
        assert llm.loaded.plan["chosen"]
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 9


@pytest.mark.parametrize("n_ctx", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("draft", ["auto", "ngram"])
def test_a_length_that_nobody_set_is_what_the_context_holds(n_ctx: int, draft: str) -> None:
    with LLM(slow_table(10.0, 0.1, n_ctx=n_ctx), draft=draft, exact=False) as llm:
        assert 1 <= (llm.options.num_speculative_tokens or 0) < n_ctx
        assert llm.generate([1], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_auto_on_a_target_of_one_row_a_call_decodes_plainly() -> None:
    with LLM(slow_table(10.0, 0.1, max_rows=1), draft="auto") as llm:
        assert llm.options.draft == "none"
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=5))[0].outputs[0].token_ids) == 5


def test_a_fixed_length_under_auto_is_the_plans(tmp_path: Path) -> None:
    target, draft = slow_table(10.0, 0.1), slow_table(0.1, 0.0, noise=0.7)
    with LLM(target, draft="auto", draft_model=draft, controller="fixed", exact=False) as llm:
        k = llm.options.num_speculative_tokens
        assert (llm.options.draft, llm.options.controller) == ("model", "fixed")
        assert f"k = {k}," in llm.loaded.plan["chosen"]
    with LLM(target, draft="auto", draft_model=draft, controller="fixed", exact=False, num_speculative_tokens=2) as llm:
        assert "k = 2," in llm.loaded.plan["chosen"]
    with LLM(target, draft="auto", draft_model=draft, exact=False, min_speculative_tokens=5) as llm:
        records = llm.generate([1, 2, 3], SamplingParams(max_tokens=60))[0].outputs[0].stats.records
        assert {record.asked_k for record in records if record.source == "model"} <= {0, 5, 6, 7, 8}
    with pytest.raises(ConfigError, match="min_speculative_tokens=9: a plan drafts up to 8"):
        LLM(target, draft="auto", draft_model=draft, exact=False, min_speculative_tokens=9)


def test_a_variant_begins_without_a_length_again() -> None:
    with LLM(slow_table(10.0, 0.1), draft="ngram") as llm:
        assert llm.options.num_speculative_tokens == 3
        assert llm.variant(min_speculative_tokens=5).options.num_speculative_tokens == 5
        assert llm.variant(num_speculative_tokens=2).variant(exact=False).options.num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="min_speculative_tokens=5: a round here holds up to 1 drafted tokens"):
        LLM(slow_table(10.0, 0.1, n_ctx=4), draft="ngram", min_speculative_tokens=5)


def test_a_fixed_length_of_auto_is_no_less_than_the_fewest() -> None:
    with LLM(slow_table(1.0, 5.0), draft="auto", controller="fixed", min_speculative_tokens=2, exact=False) as llm:
        assert llm.options.draft == "none"


def test_auto_is_for_making_an_llm() -> None:
    with pytest.raises(ConfigError, match="when the LLM is made"):
        LLM(slow_table(1.0, 0.1), draft="ngram", exact=False).variant(draft="auto")


def test_auto_keeps_what_the_user_set() -> None:
    from edgespec.auto import auto_options
    from edgespec.options import EngineOptions
    from edgespec.profile import Profiles

    llm = LLM(slow_table(10.0, 0.1), draft="ngram", exact=False)
    found = profile_llm(llm, effort=SMALL, prompts=[[1, 2, 3]])
    plan = make_plan([Profiles(found.target)])
    mine = auto_options(EngineOptions(draft="auto", num_speculative_tokens=2, controller="window"), plan)
    assert (mine.num_speculative_tokens, mine.controller) == (2, "window")
    narrow = auto_options(EngineOptions(draft="auto"), plan, 2)  # fewer than the default of 3 fit a round here
    assert narrow.num_speculative_tokens == 2
    theirs = auto_options(EngineOptions(draft="auto"), plan)
    assert (theirs.num_speculative_tokens, theirs.controller) == (8, "adaptive")


def test_auto_drafts_no_more_than_exact_rows_of_a_short_context_hold() -> None:
    with LLM(slow_table(10.0, 0.1, n_ctx=16), draft="auto") as llm:
        assert llm.exact is not None
        assert llm.options.num_speculative_tokens == llm.exact.max_rows - 1 == 7
