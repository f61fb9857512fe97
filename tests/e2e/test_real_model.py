"""The real pair, end to end through the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import LLM, SamplingParams, zoo
from edgespec.compare import compare

pytestmark = pytest.mark.real_model

PROMPTS = [
    "Write a short story about a fox who learns to swim.",
    "List the numbers from 1 to 12, one a line.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=64)


@pytest.fixture(scope="module")
def llm(real_bundle: Path, real_draft: Path) -> Iterator[LLM]:
    with LLM(real_bundle, draft="ngram,model", draft_model=real_draft, threads=2) as loaded:
        yield loaded


def ask(llm: LLM, text: str) -> list[int]:
    return llm.encode_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["ngram", "model", "ngram,model"])
def test_speculative_equals_plain_with_exact_rows(llm: LLM, draft: str, params: SamplingParams) -> None:
    plain = llm.variant(draft="none")
    for text in PROMPTS:
        expected = plain.generate(ask(llm, text), params)[0].outputs[0]
        for k in (1, 4, 7):
            output = llm.variant(draft=draft, num_speculative_tokens=k).generate(ask(llm, text), params)[0].outputs[0]
            assert output.token_ids == expected.token_ids
            assert output.text == expected.text
            accepted = sum(s.accepted for s in output.stats.sources.values())
            assert output.stats.emitted == accepted + output.stats.rounds - output.stats.cut


@pytest.mark.parametrize("draft", [draft.kind for draft in zoo.list_drafts("smollm2-135m")])
def test_every_shipped_draft_equals_plain_and_pays_in_tokens(real_bundle: Path, draft: str) -> None:
    """Same text at both temperatures, and more than one token a round: a head with mixed-up features gives one."""
    with LLM(real_bundle, draft=draft, threads=2) as llm:
        plain = llm.variant(draft="none")
        for params in (GREEDY, SAMPLED):
            expected = plain.generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
            for k in (1, 4):
                variant = llm.variant(num_speculative_tokens=k)
                output = variant.generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
                assert output.token_ids == expected.token_ids
            if params is GREEDY:
                assert (output.stats.mean_acceptance_length or 0) > 1.3


def test_exact_rows_are_found_here_or_reported(llm: LLM) -> None:
    assert llm.probe is not None
    if llm.exact is None:
        notes = llm.generate(ask(llm, PROMPTS[0]), GREEDY)[0].stats.notes
        assert any(note.startswith("exact rows") for note in notes)
    else:
        assert llm.exact.min_rows <= 8 <= llm.exact.max_rows


def test_a_prompt_answered_from_a_warm_cache_is_the_same(llm: LLM) -> None:
    """A second turn on the reused cache equals the same conversation run from nothing."""
    first = llm.chat([{"role": "user", "content": PROMPTS[1]}], GREEDY).outputs[0]
    turn = [
        {"role": "user", "content": PROMPTS[1]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now backwards."},
    ]
    warm = llm.chat(turn, GREEDY).outputs[0]
    assert warm.stats.cached_tokens > 20
    llm.forget()
    cold = llm.chat(turn, GREEDY).outputs[0]
    assert cold.stats.cached_tokens == 0
    assert warm.token_ids == cold.token_ids


def test_stop_strings_cut_at_the_same_character_as_plain(llm: LLM) -> None:
    plain = llm.variant(draft="none")
    free = plain.generate(ask(llm, PROMPTS[0]), GREEDY)[0].outputs[0].text
    for start in (20, 57, 90):
        stop = free[start : start + 6]
        params = SamplingParams(temperature=0.0, max_tokens=64, stop=(stop,))
        expected = plain.generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
        output = llm.generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert output.text == free[: free.index(stop)]
        assert output.finish_reason == "stop"
        assert output.stop_reason == stop


def test_joined_deltas_are_the_text(llm: LLM) -> None:
    prompt = ask(llm, "Repeat: é 한글 👍🏽 👨‍👩‍👧 naïve")
    deltas = list(llm.stream(prompt, SAMPLED))
    output = deltas[-1].output
    assert output is not None
    assert "".join(d.text for d in deltas) == output.text
    assert [t for d in deltas for t in d.token_ids] == output.token_ids


def test_logprobs_are_those_of_plain(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=24, logprobs=3)
    ours = llm.generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
    plain = llm.variant(draft="none").generate(ask(llm, PROMPTS[0]), params)[0].outputs[0]
    assert ours.logprobs is not None
    assert plain.logprobs is not None
    assert len(ours.logprobs) == len(ours.token_ids)
    for a, b in zip(ours.logprobs, plain.logprobs, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def test_compare_reports_all_three_runs(llm: LLM) -> None:
    result = compare(llm, ask(llm, PROMPTS[0]), GREEDY).to_dict()
    keys = "identical plain_tok_s exact_plain_tok_s spec_tok_s speedup acceptance_rate mean_acceptance_length"
    assert set(keys.split()) | {"host_ms_per_round"} <= set(result)
    assert result["identical"] is True
    assert result["plain_tok_s"] > 0
    assert result["completion_tokens"] == 64


def test_fast_mode_reports_the_first_difference_with_its_gap(llm: LLM) -> None:
    result = compare(llm.variant(exact=False), ask(llm, PROMPTS[0]), SamplingParams(temperature=0.0, max_tokens=160))
    assert result.exact_plain is None
    if not result.identical:
        assert result.difference is not None
        assert result.difference.top2_gap is not None
        assert result.difference.top2_gap < 2.0
