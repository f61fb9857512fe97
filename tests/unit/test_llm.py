"""The Python API over table models: options, caches between requests, samples, streams."""

from __future__ import annotations

from typing import Any

import pytest
from loop_driver import draft_model, run

from edgespec import LLM, SamplingParams
from edgespec.draft.model import ModelDrafter
from edgespec.errors import ConfigError, IncompatibleError, NumericsError
from edgespec.testing import TableModel, check_log

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def target_model(**options: Any) -> TableModel:
    return TableModel(16, seed=3, **options)


def pair(k: int = 4, **options: Any) -> LLM:
    target = target_model(**options)
    return LLM(target, draft_model=draft_model("noisy", target), num_speculative_tokens=k)


def test_speculative_text_equals_plain_over_drafts() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    plain = LLM(target_model(), draft="none").generate([1, 2], params)[0].outputs[0]
    for llm in (pair(), LLM(target_model()), LLM(target_model(), draft="ngram", prompt_lookup_min=1)):
        output = llm.generate([1, 2], params)[0].outputs[0]
        assert output.token_ids == plain.token_ids
        assert output.finish_reason == "length"


def test_seeds_samples_and_unseeded_requests() -> None:
    llm = pair()
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    unseeded = SamplingParams(temperature=1.0, max_tokens=24)
    first = llm.generate([1, 2], seeded)[0].outputs[0].token_ids
    free = [llm.generate([1, 2], unseeded)[0].outputs[0] for _ in range(2)]
    assert llm.generate([1, 2], seeded)[0].outputs[0].token_ids == first
    assert free[0].token_ids != free[1].token_ids
    again = SamplingParams(temperature=1.0, seed=free[0].stats.seed, max_tokens=24)
    assert llm.generate([1, 2], again)[0].outputs[0].token_ids == free[0].token_ids
    samples = llm.generate([1, 2], SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=24))[0].outputs
    assert samples[0].token_ids == first
    assert len({tuple(s.token_ids) for s in samples}) == 3


def test_interleaved_streams_are_each_as_alone() -> None:
    llm = pair()
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=30) for s in (1, 2)]
    alone = [llm.generate([1, 2], p)[0].outputs[0].token_ids for p in params]
    streams = [llm.stream([1, 2], p) for p in params]
    got: list[list[int]] = [[], []]
    live = {0, 1}
    while live:
        for i in sorted(live):
            delta = next(streams[i], None)
            if delta is None:
                live.discard(i)
            else:
                got[i] += delta.token_ids
    assert got == alone


def test_the_next_turn_reuses_the_whole_history_after_an_accepted_eos() -> None:
    """EOS accepted in mid-block left rejected tokens in the cache, and the next turn started from them."""
    free = LLM(target_model(), draft="none").generate([1, 2], GREEDY)[0].outputs[0].token_ids
    eos = next(t for i, t in enumerate(free) if i >= 5 and t not in free[:i])
    target = target_model(eos_ids=(eos,))
    llm = LLM(target, draft_model=draft_model("same", target), num_speculative_tokens=4)
    first = llm.generate([1, 2], GREEDY)[0].outputs[0]
    assert first.finish_reason == "stop"
    assert first.token_ids[-1] == eos
    history = [1, 2, *first.token_ids]
    n_calls = len(target.forwards)
    second = llm.generate([*history, 4, 5], GREEDY)[0].outputs[0]
    assert second.stats.cached_tokens == len(history) - 1
    assert target.forwards[n_calls].n_past == len(history) - 1
    fresh = LLM(target_model(eos_ids=(eos,)), draft="none").generate([*history, 4, 5], GREEDY)[0].outputs[0]
    assert second.token_ids == fresh.token_ids
    check_log(target)


def test_a_closed_stream_frees_its_cache_for_the_next_request() -> None:
    target = target_model()
    llm = LLM(target, draft_model=draft_model("noisy", target))
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    stream.close()
    n_calls = len(target.forwards)
    output = llm.generate([1, 2, 3], GREEDY)[0].outputs[0]
    assert output.token_ids == LLM(target_model(), draft="none").generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    assert {call.session for call in target.forwards[n_calls:]} == {target.forwards[n_calls - 1].session}


@pytest.mark.parametrize("name", ["n_ctx", "draft_n_ctx"])
@pytest.mark.parametrize("value", [0, 1, -5])
def test_contexts_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value}: .*from 2 up"):
        LLM(target_model(), **{name: value})


@pytest.mark.parametrize("k", [0, -1])
def test_draft_lengths_out_of_range_are_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens={k}: .*from 1 up.*--draft none"):
        LLM(target_model(), num_speculative_tokens=k)


def test_a_draft_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=300: .*256 tokens, so use 1 to 255"):
        LLM(target_model(), num_speculative_tokens=300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "magic"}, "draft='magic'"),
        ({"controller": "magic"}, "controller='magic'"),
        ({"verifier": "magic"}, "magic"),
        ({"verifier": "typical"}, "typical"),
        ({"draft": "model"}, "needs a draft model"),
        ({"speculative_tokens": 3}, "unknown option 'speculative_tokens'"),
        ({"num_speculative_tokens": 3, "min_speculative_tokens": 5}, "min_speculative_tokens=5 is over"),
        ({"threads": 0}, "threads=0"),
        ({"tree": True}, r"tree=True \(--tree\) with exact=True.*use exact=False \(--fast\), or drop the tree"),
        (
            {"tree": True, "exact": False, "verifier": "block"},
            "verifier='block'.*use one of coupled, rejection, or drop",
        ),
        ({"tree": True, "exact": False, "draft": "early-exit"}, "draft='early-exit': .*use draft='eagle'"),
        ({"tree": True, "exact": False, "controller": "window"}, "controller='window'.*use controller='fixed'"),
        ({"tree": True, "exact": False, "draft": "none"}, "no effect, as draft='none'"),
        ({"tree": 1}, "tree=1: it must be a bool"),
        ({"tree": True, "exact": False, "tree_rows": 0}, "tree_rows=0: .*from 1 up"),
        ({"tree": True, "exact": False, "tree_width": 1.5}, "tree_width=1.5: .*from 1 up"),
        ({"tree": True, "exact": False, "tree_rows": 256}, "tree_rows=256: .*256 tokens, so use 1 to 255"),
        ({"draft_p_min": 1}, "draft_p_min=1: it is a probability"),
        ({"draft_p_min": True}, "draft_p_min=True"),
        ({"draft": "eagle"}, "'eagle' is made for one bundle, and the loaded model is none"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(target_model(), **options)


def test_a_draft_model_that_would_not_be_used_is_refused() -> None:
    target = target_model()
    with pytest.raises(ConfigError, match="does not use it"):
        LLM(target, draft="ngram", draft_model=draft_model("same", target))


def test_a_draft_of_another_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(IncompatibleError, match=r"target has 16 tokens, draft has 12"):
        LLM(target_model(), draft_model=TableModel(12))


def test_prompts_are_checked() -> None:
    llm = LLM(target_model())
    for prompt, message in (([], "empty"), ([99], "token id 99"), ([1] * 256, "256 tokens, the context holds 256")):
        with pytest.raises(ConfigError, match=message):
            llm.encode(prompt)
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ConfigError, match="one sample"):
        llm.stream([1], SamplingParams(n=2))


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("draft", ["model", "ngram", "ngram,model"])
def test_trees_of_drafted_tokens_give_the_same_text(draft: str, verifier: str) -> None:
    target, prompt = target_model(), [1, 2, 3, 1, 2, 4, 2, 1, 5, 1, 2]
    options: dict[str, Any] = {} if draft == "ngram" else {"draft_model": draft_model("noisy", target)}
    if "ngram" in draft:
        options["prompt_lookup_min"] = 1
    llm = LLM(target, draft=draft, tree=True, exact=False, tree_rows=7, tree_width=3, verifier=verifier, **options)
    output = llm.generate(prompt, GREEDY)[0].outputs[0]
    assert output.token_ids == LLM(target_model(), draft="none").generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert any(call.parents is not None for call in target.forwards)
    assert max(record.drafted for record in output.stats.records) <= 7
    check_log(target)
    plain = llm.variant(draft="none")
    assert plain.options.tree is False
    with pytest.raises(ConfigError, match="with exact=True"):
        llm.variant(exact=True)


def test_a_target_without_trees_refuses_them() -> None:
    with pytest.raises(IncompatibleError, match="runs no trees on this backend: drop the tree"):
        LLM(target_model(tree=False), tree=True, exact=False)


def test_a_confidence_limit_cuts_drafts_short() -> None:
    target = target_model()
    llm = LLM(target, draft_model=draft_model("noisy", target), num_speculative_tokens=6, draft_p_min=0.9)
    free = LLM(target_model(), draft_model=draft_model("noisy", target), num_speculative_tokens=6)
    cut, full = (each.generate([1, 2], GREEDY)[0].outputs[0] for each in (llm, free))
    assert cut.token_ids == full.token_ids
    assert cut.stats.drafted / cut.stats.rounds < full.stats.drafted / full.stats.rounds


def test_more_tokens_than_the_context_holds_are_said() -> None:
    """`-n 4000` ended at the context's end without a word."""
    llm = LLM(target_model(n_ctx=64))
    notes = llm.generate([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=61))[0].stats.notes
    assert any("max_tokens is 61, but the context of 64 tokens has room for 60" in note for note in notes)
    assert not llm.generate([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=60))[0].stats.notes


def test_half_a_character_in_a_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stop holds half of a surrogate pair \(U\+D800\)"):
        LLM(target_model()).stream([1], SamplingParams(stop=("a\ud800",)))


def test_logprobs_hold_the_token_and_the_alternatives() -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=12, logprobs=2)
    output = pair().generate([1, 2], params)[0].outputs[0]
    plain = LLM(target_model(), draft="none").generate([1, 2], params)[0].outputs[0]
    assert output.logprobs is not None
    assert plain.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, entry, reference in zip(output.token_ids, output.logprobs, plain.logprobs, strict=True):
        assert token in entry
        assert 2 <= len(entry) <= 3
        assert entry.keys() == reference.keys()
        assert all(abs(entry[t].logprob - reference[t].logprob) < 1e-4 for t in entry)


def test_a_variant_shares_the_models_and_not_the_caches() -> None:
    llm = pair()
    plain = llm.variant(draft="none", exact=False)
    assert plain.target is llm.target
    assert (
        plain.generate([1, 2], GREEDY)[0].outputs[0].token_ids == llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids
    )
    assert plain.generate([1, 2], GREEDY)[0].stats.drafted == 0


def test_min_speculative_tokens_leaves_short_drafts_alone() -> None:
    target = target_model()
    llm = LLM(target, draft_model=draft_model("same", target), num_speculative_tokens=4, min_speculative_tokens=4)
    records = llm.generate([1, 2], SamplingParams(temperature=0.0, max_tokens=23))[0].stats.records
    assert {r.drafted for r in records if r.source == "model"} == {4}


def test_limits_of_the_target_are_said() -> None:
    llm = LLM(target_model(max_rewind=0))
    assert any("cannot be rewound" in note for note in llm.generate([1, 2, 1, 2], GREEDY)[0].stats.notes)


@pytest.mark.parametrize(
    "options", [{"refuse_keep": True}, {"max_rewind": 0}, {"max_rewind": 3, "window": 8, "order": 8}, {"max_rewind": 8}]
)
@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_later_requests_on_a_cache_that_cannot_rewind_far(options: dict[str, Any], draft: str) -> None:
    """The second request crashed on the cache that the first had left, or left one more cache behind each time."""
    llm = LLM(target_model(**options), draft=draft, prompt_lookup_min=1)
    for prompt in ([1, 2, 1, 2], [1, 2, 3], [1, 2, 1, 2], [5]):
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
        fresh = LLM(target_model(**options), draft="none", exact=False).generate(prompt, params)[0].outputs[0]
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == fresh.token_ids
    assert len(llm.slots.idle) == 1


def test_exact_rows_are_not_claimed_where_they_could_not_be_taken_back() -> None:
    llm = LLM(target_model(max_rewind=0, inexact_rows=(1,)), draft="ngram")
    output = llm.generate([1, 2, 1, 2], GREEDY)[0].outputs[0]
    assert llm.exact is None
    assert output.stats.exact is False
    assert any(note.startswith("exact rows") for note in output.stats.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 32}, "n_ctx=32 would have no effect, as the model is loaded already"),
        ({"threads": 7}, "threads=7 would have no effect"),
        ({"draft_n_ctx": 7}, "draft_n_ctx=7 would have no effect, as there is no draft model"),
        ({"draft_p_min": 0.5}, "draft_p_min=0.5 would have no effect, as draft='ngram' has no probabilities"),
        ({"tree_rows": 4}, r"tree_rows=4 would have no effect, as tree is off \(--tree\)"),
        ({"tree_width": 4}, "tree_width=4 would have no effect"),
        ({"exact": "no"}, "exact='no'"),
        ({"device": 3}, "device=3"),
        ({"draft": ""}, "draft=''"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(target_model(), **options)


def test_a_variant_is_checked_like_the_rest() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        LLM(target_model()).variant(draft="model")


def test_more_logprobs_than_tokens_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="logprobs is 20, but the vocabulary has 16"):
        LLM(target_model()).stream([1], SamplingParams(logprobs=20))


def test_a_nan_that_a_ban_hides_does_not_reach_the_logprobs() -> None:
    rows = TableModel(4, table=lambda seen: [1.0, 2.0, 3.0, float("nan")])
    params = SamplingParams(temperature=0.0, max_tokens=2, bad_words_ids=((3,),), logprobs=1)
    with pytest.raises(NumericsError):
        LLM(rows, draft="none", exact=False).generate([1], params)


def test_a_draft_that_does_not_know_a_token_stops_drafting() -> None:
    """A target's token beyond the draft's smaller vocabulary ended the request with an error."""
    target = TableModel(20, seed=3)
    drafter = ModelDrafter(TableModel(16, seed=3), 20)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60)
    outcome = run(target, [drafter], [1, 2], params)
    assert outcome.tokens == run(TableModel(20, seed=3), [], [1, 2], params).tokens
    assert max(outcome.tokens) >= 16
