"""The round loop against plain decoding: every drafter, every k, every way to end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from loop_driver import draft_model, drafter, run

from edgespec.draft.model import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.controller import create_controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.stops import TokenStop
from edgespec.errors import NumericsError
from edgespec.noise import Noise
from edgespec.sampling import Sampler, SamplingParams
from edgespec.testing import TableModel, check_log
from edgespec.types import ExactRows
from edgespec.verify import create_verifier

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, seed=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=64, seed=1)
PROMPTS = {"one": [3], "two": [3, 5], "seventeen": [*range(12), 4, 4, 1, 0, 7], "repetitive": [1, 2, 3] * 12}
KINDS = ["ngram", "same", "noisy", "wrong"]


def target_model(**options: Any) -> TableModel:
    return TableModel(16, seed=11, **options)


def plain(params: SamplingParams, prompt: list[int], **options: Any) -> list[int]:
    return run(target_model(**options), [], prompt, params).tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_same_as_plain_for_every_k(prompt: list[int], kind: str, params: SamplingParams) -> None:
    expected = plain(params, prompt)
    for k in range(1, 9):
        target = target_model()
        outcome = run(target, drafter(kind, target), prompt, params, k=k)
        assert outcome.tokens == expected, f"k={k}"
        outcome.check_identities()
        check_log(target)


@pytest.mark.parametrize(
    "exact", [ExactRows(2, 256), ExactRows(4, 16), ExactRows(8, 8), ExactRows(2, 64, 2), ExactRows(4, 16, 4)]
)
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_exact_rows_use_only_counts_in_range_and_keep_the_text(kind: str, exact: ExactRows) -> None:
    prompt = PROMPTS["seventeen"]
    expected = plain(SAMPLED, prompt)
    target = target_model()
    outcome = run(target, drafter(kind, target), prompt, SAMPLED, k=3, exact=exact)
    assert outcome.tokens == expected
    counts = set(range(exact.min_rows, exact.max_rows + 1, exact.multiple))
    assert {len(call.tokens) for call in target.forwards} <= counts
    outcome.check_identities()


def test_rows_that_depend_on_their_number_break_native_runs_but_not_exact_ones() -> None:
    """A backend whose one-row call differs from its many-row calls: exact mode must not notice."""
    options = {"inexact_rows": (1,), "scale": 1e-3}
    exact = ExactRows(2, 64)
    reference = run(target_model(**options), [], [3, 5], GREEDY, exact=exact).tokens
    native = run(target_model(**options), [], [3, 5], GREEDY).tokens
    assert native != reference  # the negative control: this table does tell the difference
    for kind in KINDS:
        target = target_model(**options)
        assert run(target, drafter(kind, target), [3, 5], GREEDY, exact=exact).tokens == reference


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_a_perfect_draft_needs_the_fewest_target_calls(k: int) -> None:
    target = target_model()
    outcome = run(target, drafter("same", target), [1, 2], SAMPLED, k=k)
    assert len(target.forwards) == math.ceil(64 / (k + 1))
    assert outcome.stats.acceptance_rate == 1.0


def test_a_perfect_draft_stays_perfect_under_changing_k() -> None:
    """An off-by-one draft cache shows only as a slow decay after full acceptances and plain steps."""
    target = target_model(n_ctx=512)
    controller = create_controller("fixed", 3)
    schedule = iter([3, 0, 0, 3, 1, 0, 2, 5] * 100)
    drafters = drafter("same", target)
    original = controller.choose

    def choose(*args: Any) -> Any:
        controller.k = next(schedule)
        return original(*args)

    controller.choose = choose  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=4)
    outcome = run(target, drafters, [1, 2], params, controller=controller)
    assert outcome.stats.acceptance_rate == 1.0
    assert outcome.tokens == run(target_model(n_ctx=512), [], [1, 2], params).tokens


def test_a_draft_that_is_always_wrong_costs_no_target_calls_and_is_asked_in_full() -> None:
    target = target_model()
    wrong = draft_model("same", target, table=lambda seen: [50.0 if i == 15 else 0.0 for i in range(16)])
    params = SamplingParams(temperature=0.0, max_tokens=64, logit_bias={15: -100.0})
    outcome = run(target, [ModelDrafter(wrong, 16)], [1, 2], params, k=5)
    assert outcome.stats.records[0].drafted == 5
    assert len(target.forwards) <= 1.1 * 64
    assert outcome.tokens == run(target_model(), [], [1, 2], params).tokens


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_max_tokens_is_never_exceeded(max_tokens: int) -> None:
    target = target_model()
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=max_tokens, logprobs=2)
    outcome = run(target, drafter("noisy", target), [1, 2], params, k=4)
    assert len(outcome.tokens) == max_tokens == len(outcome.logprobs)
    assert outcome.finish_reason == "length"
    outcome.check_identities()
    for kind in ("same", "ngram"):
        other = run(target_model(), drafter(kind, target), [1, 2], params, k=4)
        assert other.tokens == outcome.tokens


def test_eos_accepted_in_mid_block_ends_there() -> None:
    """EOS as the second token of an accepted block of five: what follows it was never seen by the user."""
    free = run(target_model(), [], [1, 2], GREEDY).tokens
    eos = free[1]
    assert eos != free[0]
    target = target_model(eos_ids=(eos,))
    outcome = run(target, drafter("same", target), [1, 2], GREEDY, k=5)
    assert outcome.tokens == free[:2]
    assert outcome.finish_reason == "stop"
    record = outcome.stats.records[0]
    assert (record.drafted, record.accepted, record.emitted, record.cut) == (2, 2, 2, 1)
    assert outcome.session.n_past == len([1, 2]) + 1  # all of the history but its last token
    assert outcome.session.tokens == [1, 2, free[0]]
    outcome.check_identities()


def test_context_end_gives_what_fits() -> None:
    target = target_model(n_ctx=32)
    params = SamplingParams(temperature=0.0, max_tokens=10)
    outcome = run(target, drafter("same", target), [i % 16 for i in range(28)], params, k=8)
    assert len(outcome.tokens) == 4
    assert outcome.finish_reason == "length"
    exact = run(target_model(n_ctx=32), [], [i % 16 for i in range(28)], params, exact=ExactRows(2, 16))
    assert exact.tokens == outcome.tokens


@pytest.mark.parametrize("kind", ["none", "same", "ngram"])
@pytest.mark.parametrize(
    ("exact", "n_tokens"), [(ExactRows(2, 16, 2), 4), (ExactRows(4, 16, 4), 2), (ExactRows(5, 5), 1)]
)
def test_padded_rows_stay_inside_the_context(kind: str, exact: ExactRows, n_tokens: int) -> None:
    """The row that fills up a call at the very end of the context ran over it."""
    prompt = [i % 16 for i in range(28)]
    params = SamplingParams(temperature=0.0, max_tokens=10)
    target = target_model(n_ctx=32)
    outcome = run(target, drafter(kind, target), prompt, params, k=3, exact=exact)
    assert outcome.tokens == run(target_model(n_ctx=32), [], prompt, params).tokens[:n_tokens]
    assert outcome.finish_reason == "length"


def test_a_prompt_that_leaves_no_room_for_exact_rows_runs_without_them() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    outcome = run(target_model(n_ctx=32), [], [i % 16 for i in range(30)], params, exact=ExactRows(8, 8))
    assert len(outcome.tokens) == 2
    assert outcome.stats.notes == ["exact rows off: the context has no room for the 8 rows of a step"]


def test_a_draft_context_smaller_than_the_targets_ends_drafting_not_decoding() -> None:
    target = target_model()
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=200)
    drafters = drafter("noisy", target, n_ctx=64)
    outcome = run(target, drafters, [1, 2], params, k=4)
    assert outcome.tokens == run(target_model(), [], [1, 2], params).tokens
    drafted_at = [r.index for r in outcome.stats.records if r.drafted]
    assert max(drafted_at) < 64 < len(outcome.stats.records)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_refuses_to_rewind_is_refilled_and_speculation_ends(kind: str) -> None:
    """A backend said it could rewind and could not: the old cache went on with rejected tokens in it."""
    target = target_model(refuse_keep=True)
    prompt = PROMPTS["seventeen"]
    outcome = run(target, drafter(kind, target), prompt, SAMPLED, k=4)
    assert outcome.tokens == plain(SAMPLED, prompt)
    assert len([note for note in outcome.stats.notes if note.startswith("speculation off: ")]) <= 1
    if any(r.accepted < r.drafted for r in outcome.stats.records):
        assert len(outcome.stats.notes) == 1
    check_log(target)


@pytest.mark.parametrize("max_rewind", [0, 1, 3])
def test_a_window_that_cannot_rewind_far_limits_the_draft(max_rewind: int) -> None:
    """Sliding window of 8, 40 tokens, rejections: the same text, no refused rewind, k within what can be taken back."""
    options = {"window": 8, "max_rewind": max_rewind, "order": 8}
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=40)
    target = target_model(**options)
    draft = ModelDrafter(draft_model("noisy", target, max_rewind=None), 16)
    outcome = run(target, [draft], [1, 2, 3], params, k=4)
    assert outcome.tokens == run(target_model(window=8, order=8), [], [1, 2, 3], params).tokens
    assert max(r.drafted for r in outcome.stats.records) == max_rewind
    assert outcome.stats.notes == []


def test_a_target_with_one_row_a_call_decodes_plainly() -> None:
    target = target_model(max_rows=1)
    outcome = run(target, drafter("same", target), PROMPTS["seventeen"], GREEDY)
    assert outcome.tokens == plain(GREEDY, PROMPTS["seventeen"])
    assert outcome.stats.drafted == 0


def test_long_prompts_are_prefilled_in_pinned_chunks() -> None:
    prompt = [i % 16 for i in range(700)]
    target = target_model(n_ctx=1024)
    run(target, [], prompt, SamplingParams(temperature=0.0, max_tokens=2))
    assert [len(call.tokens) for call in target.forwards] == [256, 256, 188, 1]
    exact = target_model(n_ctx=1024)
    run(exact, [], prompt, SamplingParams(temperature=0.0, max_tokens=2), exact=ExactRows(2, 64))
    assert {len(call.tokens) for call in exact.forwards[:-2]} == {64}


def test_a_cached_prefix_is_not_run_again() -> None:
    target = target_model()
    session = target.open_session()
    prompt = PROMPTS["seventeen"]
    session.forward(prompt[:10])
    outcome = run(target, drafter("noisy", target), prompt, SAMPLED, session=session)
    assert outcome.tokens == plain(SAMPLED, prompt)
    assert target.forwards[1].n_past == 10


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {2: -100.0, 5: -100.0}},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "temperature": 0.8},
        {"bad_words_ids": ((2,), (5, 1)), "temperature": 0.8},
        {"min_tokens": 20, "temperature": 0.8},
        {"temperature": 0.8, "min_p": 0.1, "top_k": 5},
    ],
)
def test_processors_see_the_drafted_history(settings: dict[str, Any], k: int) -> None:
    """A penalty applied with the history of the round's start, not of the row, changed the text with k."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 48, "seed": 9, **settings})
    for kind in ("noisy", "ngram"):
        target = target_model(eos_ids=(7,))
        outcome = run(target, drafter(kind, target), [1, 2, 1], params, k=k)
        assert outcome.tokens == run(target_model(eos_ids=(7,)), [], [1, 2, 1], params).tokens


def test_logprobs_come_from_the_target_one_a_token() -> None:
    params = SamplingParams(temperature=0.9, seed=8, max_tokens=30, logprobs=3)
    expected = run(target_model(), [], [1, 2], params)
    target = target_model()
    outcome = run(target, drafter("noisy", target), [1, 2], params)
    assert [entry.token for entry in outcome.logprobs] == outcome.tokens
    assert outcome.logprobs == expected.logprobs
    history = [1, 2]
    for entry in outcome.logprobs:
        row = target.row(history).astype("float64")
        total = math.log(sum(math.exp(x) for x in row))
        assert entry.logprob == pytest.approx(row[entry.token] - total, abs=1e-4)
        assert len(entry.top) == 3
        history.append(entry.token)


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_nan_row_is_an_error_not_token_zero(kind: str) -> None:
    for guard in (True, False):
        target = target_model(nan_at=(20,), guard=guard)
        with pytest.raises(NumericsError):
            run(target, drafter(kind, target), [1, 2], GREEDY)


def test_closing_the_loop_cancels_within_the_round() -> None:
    target = target_model()
    outcome = run(target, drafter("noisy", target), [1, 2], GREEDY, max_rounds=3)
    assert len(target.forwards) == outcome.stats.rounds == 3


def test_giving_up_in_mid_loop_closes_what_is_open() -> None:
    """The loop is a generator: dropping it at any of its requests must not run anything more."""
    target = target_model()
    job = Job(
        [1, 2],
        Sampler(GREEDY, n_vocab=16, eos_ids=(), n_prompt=2),
        create_verifier("coupled"),
        Noise(0),
        TokenStop(()),
        8,
    )
    loop = decode(job, target.open_session(), target.info, [], create_controller("fixed", 2))
    assert next(loop) is not None
    loop.close()
    assert target.forwards == []


def test_seeds_and_samples_decide_the_text() -> None:
    def tokens(seed: int, sample: int = 0, kind: str = "noisy") -> list[int]:
        target = target_model()
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=32)
        return run(target, drafter(kind, target), [1, 2], params, sample=sample).tokens

    assert tokens(1) == tokens(1) == tokens(1, kind="none")
    assert tokens(1) != tokens(2)
    assert tokens(1) != tokens(1, sample=1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["same", "noisy", "ngram"])
def test_other_rules_keep_the_counts_and_accept_an_equal_draft(rule: str, kind: str) -> None:
    target = target_model()
    outcome = run(target, drafter(kind, target), [1, 2], SAMPLED, rule=rule)
    outcome.check_identities()
    check_log(target)
    if kind == "same":
        assert outcome.stats.acceptance_rate == 1.0
    greedy = run(target_model(), drafter(kind, target), [1, 2], GREEDY, rule=rule)
    assert greedy.tokens == plain(GREEDY, [1, 2])


def test_drafters_are_asked_in_order_of_priority() -> None:
    target = target_model()
    drafters = [NgramDrafter(min_match=3), *drafter("noisy", target)]
    outcome = run(target, drafters, PROMPTS["repetitive"], GREEDY)
    assert set(outcome.stats.sources) == {"ngram", "model"}
    assert outcome.tokens == plain(GREEDY, PROMPTS["repetitive"])
