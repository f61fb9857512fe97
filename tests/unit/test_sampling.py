"""Parameters are refused with full sentences, and the processors equal a plain reference, in the documented order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ConfigError, IncompatibleError, NumericsError
from edgespec.sampling import Sampler, SamplingParams

INF = float("inf")


def sampler(n_vocab=8, n_prompt=2, eos_ids=(0,), processors=(), **params):
    built = SamplingParams(**params)
    return Sampler(built, n_vocab=n_vocab, eos_ids=eos_ids, n_prompt=n_prompt, processors=processors)


def row(logits, history=(1, 2), dtype=np.float64, **options):
    logits = np.array(logits, dtype=dtype)
    return sampler(len(logits), **options).row(logits, list(history))


def reference_logits(logits, history, n_prompt, params, eos_ids):
    """Everything before the temperature, one step after another."""
    x = {token: float(value) for token, value in enumerate(logits)}
    for token, value in params.logit_bias.items():
        x[token] += value
    for word in params.bad_words_ids:
        if list(word[:-1]) == list(history[len(history) - len(word) + 1 :]):
            x[word[-1]] = -INF
    output = history[n_prompt:]
    if len(output) < params.min_tokens:
        x.update(dict.fromkeys((*eos_ids, *params.stop_token_ids), -INF))
    for token in set(history):
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def reference(logits, history, n_prompt, params, eos_ids=(0,)):
    """Token -> probability, written for clarity: full sorts, float64."""
    x = reference_logits(logits, history, n_prompt, params, eos_ids)
    order = sorted((token for token in x if x[token] > -INF), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = {token: float(np.exp((x[token] - x[order[0]]) / params.temperature)) for token in order}
    if params.top_p < 1.0:
        masses = np.cumsum([weights[token] for token in order])
        order = order[: int(np.searchsorted(masses, params.top_p * masses[-1])) + 1]
    kept = [token for token in order if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


settings_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 5, 100]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.97]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -0.4]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.dictionaries(st.integers(1, 7), st.sampled_from([-INF, -2.0, 0.3, 4.0]), max_size=3),
        "bad_words_ids": st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), max_size=2),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(1, 3), max_size=1),
    },
)


@given(settings_strategy, st.integers(0, 2**31), st.lists(st.integers(0, 7), min_size=2, max_size=7))
@settings(max_examples=400, deadline=None)
def test_rows_equal_the_reference_and_inputs_stay_as_they_were(params, seed, history):
    logits = 3 * np.random.default_rng(seed).standard_normal(8)
    logits[7] = 4.0  # never forbidden alone: rows without tokens are tested elsewhere
    built = SamplingParams(**{**params, "bad_words_ids": [w for w in params.get("bad_words_ids", []) if w[-1] != 7]})
    if built.logit_bias.get(7) == -INF:
        return
    before, seen = logits.copy(), list(history)
    result = Sampler(built, n_vocab=8, eos_ids=(0,), n_prompt=2).row(logits, history)
    expected = reference(logits, history, 2, built)
    assert result.ids.tolist() == sorted(expected)
    assert result.probs() == pytest.approx([expected[token] for token in sorted(expected)], rel=1e-9)
    assert logits.tolist() == before.tolist()
    assert history == seen


@given(
    st.integers(0, 2**31), st.floats(0.01, 0.9999), st.sampled_from([1, 2, 50, 3000]), st.sampled_from([0.0, 1.0, 4.0])
)
@settings(max_examples=200, deadline=None)
def test_top_p_keeps_the_smallest_sufficient_prefix(seed, p, n, scale):
    """Flat, peaked and tied rows; no prefix of the sorted tokens that is shorter holds the mass."""
    logits = np.round(scale * np.random.default_rng(seed).standard_normal(n), 1)
    kept = sampler(n, top_p=p).row(logits, [1, 2]).ids
    weights = np.exp(logits - logits.max())
    order = np.lexsort((np.arange(n), -weights))
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    slack = 1e-12 * weights.sum()
    assert weights[kept].sum() >= p * weights.sum() - slack
    assert weights[order[: len(kept) - 1]].sum() < p * weights.sum() + slack


def test_top_p_of_a_row_flatter_than_any_guess():
    logits = np.zeros(80_000)
    logits[5] = 0.1
    kept = sampler(80_000, top_p=0.5).row(logits, [1, 2]).ids
    assert kept.tolist() == list(range(40_000))


@given(st.integers(0, 2**31), st.integers(1, 300), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
@settings(max_examples=100, deadline=None)
def test_top_k_keeps_the_k_best_lowest_ids_first(seed, k, scale):
    logits = np.round(scale * np.random.default_rng(seed).standard_normal(300), 1)
    order = np.lexsort((np.arange(300), -logits))
    assert sampler(300, top_k=k).row(logits, [1, 2]).ids.tolist() == sorted(order[:k].tolist())


def test_greedy_takes_the_lowest_id_at_ties():
    assert row([1.0, 3.0, 2.0, 3.0], temperature=0.0).ids.tolist() == [1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_dtype_of_the_row_is_kept(dtype, temperature):
    params = {"top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "logit_bias": {1: 0.5}}
    result = row([0.3, 2.0, 1.0, -1.0], dtype=dtype, temperature=temperature, **params)
    assert result.logits.dtype == dtype
    assert result.ids.dtype == np.int64


def test_repetition_counts_the_prompt_frequency_and_presence_do_not():
    logits = [1.0, 1.0, -1.0, 1.0]
    result = row(logits, history=[1, 2, 3, 3], repetition_penalty=2.0)
    assert (result.logits + 1.0).tolist() == [1.0, 0.5, -2.0, 0.5]
    result = row(logits, history=[1, 2, 3, 3], frequency_penalty=0.25, presence_penalty=1.0)
    assert (result.logits + 1.0).tolist() == [1.0, 1.0, -1.0, -0.5]


def test_penalties_follow_the_history_wherever_it_jumps():
    """One sampler serves drafts, rows and other branches in any order: each answer depends on its own history."""
    logits = np.random.default_rng(0).standard_normal(50)
    options = {"n_vocab": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.4}
    shared = sampler(**options)
    base = np.random.default_rng(1).integers(0, 50, 60).tolist()
    histories = [base[:9], base[:12], base[:10], [*base[:10], 3, 3], base, base[:4], [7, 8], [9, *base], base[:2], base]
    for history in histories:
        fresh = sampler(**options).row(logits, tuple(history))
        assert shared.row(logits, history).logits.tolist() == fresh.logits.tolist()


def test_bad_words_of_several_tokens_need_their_beginning():
    assert row([0.0] * 4, history=[1, 2], bad_words_ids=[[2, 3], [3, 1], [0]]).ids.tolist() == [1, 2]
    assert row([0.0] * 4, history=[2], bad_words_ids=[[1, 2, 3]]).ids.tolist() == [0, 1, 2, 3]


def test_min_tokens_holds_back_every_end():
    ends = {"min_tokens": 2, "eos_ids": (0, 3), "stop_token_ids": (1,), "n_prompt": 2}
    assert row([0.0] * 5, history=[1, 2, 4], **ends).ids.tolist() == [2, 4]
    assert row([0.0] * 5, history=[1, 2, 4, 4], **ends).ids.tolist() == [0, 1, 2, 3, 4]


def test_processors_see_the_history_and_a_private_copy():
    def allow_last(history, logits):
        logits[[token for token in range(len(logits)) if token != history[-1]]] = -INF

    logits = np.zeros(4)
    assert row(logits, history=[1, 2], processors=[allow_last]).ids.tolist() == [2]
    assert logits.tolist() == [0.0] * 4


def test_masked_logits_are_never_candidates():
    assert row([0.0, -INF, 1.0]).ids.tolist() == [0, 2]
    assert row([0.0, -INF, 1.0], top_k=3).ids.tolist() == [0, 2]
    lowest = float(np.finfo(np.float32).min)
    assert row([5.0, lowest, 1.0], dtype=np.float32, temperature=0.5).ids.tolist() == [0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([0.0, float("nan"), 1.0], "1 of 3 logits are NaN"),
        ([0.0, INF, 1.0], "1 of 3 logits are NaN or [+]inf"),
        ([-INF, -INF, -INF], "the model gave -inf everywhere"),
    ],
)
def test_unusable_rows_raise(temperature, logits, words):
    """NaN logits used to give token 0 for ever."""
    with pytest.raises(NumericsError, match=words):
        row(logits, temperature=temperature)


def test_a_row_whose_every_token_is_forbidden_raises():
    with pytest.raises(NumericsError, match="forbid every token"):
        row([0.0, 1.0], bad_words_ids=[[0], [1]])


def test_a_row_of_another_size_raises():
    with pytest.raises(IncompatibleError, match=r"\(5,\).*\(8,\)"):
        sampler().row(np.zeros(5), [1, 2])


@pytest.mark.parametrize("field", ["logit_bias", "bad_words_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(field):
    value = {"logit_bias": {8: 1.0}, "bad_words_ids": [[1, 8]], "stop_token_ids": [8]}[field]
    with pytest.raises(ConfigError, match=rf"{field} names token 8, .* 0\.\.7"):
        sampler(**{field: value})


WRONG = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("temperature", float("nan")),
    ("temperature", -0.1),
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", INF),
    ("temperature", 1e-9),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("seed", "x"),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 300),
    ("presence_penalty", INF),
    ("frequency_penalty", None),
    ("repetition_penalty", 0.0),
    ("logprobs", -1),
    ("ignore_eos", "yes"),
    ("stop", 5),
    ("stop", [""]),
    ("stop", [3]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [-1]),
    ("bad_words_ids", 5),
    ("bad_words_ids", [[]]),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: INF}),
    ("logit_bias", {1: True}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_parameters_name_field_value_and_range(field, value):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"{field} is {value!r}, but it must be ")


def test_ranges_are_spelled_out():
    with pytest.raises(ConfigError, match="bad_words_ids is 5, but it must be a list of token ids"):
        SamplingParams(bad_words_ids=[5])
    with pytest.raises(ConfigError, match=r"top_p is 0, but it must be a finite number, above 0 and at most 1\."):
        SamplingParams(top_p=0)
    with pytest.raises(ConfigError, match=r"seed is 0\.5, but it must be a whole number\."):
        SamplingParams(seed=0.5)


def test_parameters_are_normalised():
    params = SamplingParams(
        temperature=np.float32(0.5),
        seed=np.int64(3),
        stop="END",
        stop_token_ids=[np.int64(4)],
        bad_words_ids=[[1, 2]],
        logit_bias={"5": 1},
        logprobs=0,
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (4,)
    assert params.bad_words_ids == ((1, 2),)
    assert params.logit_bias == {5: 1.0}
    assert type(params.seed) is int
    assert type(params.temperature) is float


REDUCED = np.array([0, 3, 4, 7, 8, 15, 16, 23, 42, 108])
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "open": {},
    "top_k": {"top_k": 4},
    "top_k_beyond": {"top_k": 40},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "bias": {"logit_bias": {3: 2.0, 9: 50.0, 15: -100.0}},
    "bad": {"bad_words_ids": ((4,), (7, 23)), "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.2, "top_k": 5},
    "held_back": {"min_tokens": 5, "stop_token_ids": (42,)},
    "greedy_penalties": {"temperature": 0.0, "frequency_penalty": 3.0},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_reduced_row_is_the_full_row_with_nothing_elsewhere(settings, dtype):
    rng = np.random.default_rng(8)
    history = [7, 3, 108, 3, 16]
    sampler = Sampler(SamplingParams(**settings), n_vocab=120, eos_ids=(23,), n_prompt=2)
    for _ in range(50):
        logits = (3 * rng.standard_normal(len(REDUCED))).astype(dtype)
        full = np.full(120, -np.inf, dtype)
        full[REDUCED] = logits
        before = logits.copy()
        reduced, expected = sampler.row(logits, history, REDUCED), sampler.row(full, history)
        assert reduced.ids.tolist() == expected.ids.tolist()
        np.testing.assert_array_equal(reduced.logits, expected.logits)
        assert reduced.logits.dtype == dtype
        np.testing.assert_array_equal(logits, before)
        tokens, probs = sampler.best(logits, history, 3, REDUCED)
        expected_tokens, expected_probs = sampler.best(full, history, 3)
        assert tokens == expected_tokens
        assert probs == pytest.approx(expected_probs, rel=1e-5)


@pytest.mark.parametrize("n", [1, 3, 8, 9, 40])
def test_the_best_tokens_come_in_order_lowest_id_first_among_equals(n):
    rng = np.random.default_rng(n)
    sampler = Sampler(SamplingParams(), n_vocab=30, eos_ids=(), n_prompt=1)
    for _ in range(20):
        logits = rng.integers(0, 12, 30).astype(np.float32)
        logits[rng.integers(0, 30, 3)] = -np.inf
        tokens, probs = sampler.best(logits, [0], n)
        wanted = [token for token in sorted(range(30), key=lambda token: (-logits[token], token)) if logits[token] >= 0]
        assert tokens == wanted[:n]
        weights = np.exp(logits - logits.max())
        assert probs == pytest.approx((weights / weights.sum())[tokens].tolist(), rel=1e-5)


def test_the_best_tokens_are_those_that_processors_leave():
    sampler = Sampler(SamplingParams(temperature=0.0, logit_bias={2: -np.inf}), n_vocab=4, eos_ids=(), n_prompt=1)
    tokens, probs = sampler.best(np.array([1.0, 2.0, 9.0, 2.0]), [0], 9)
    assert tokens == [1, 3, 0]
    assert probs == pytest.approx([1 / (2 + np.exp(-1))] * 2 + [np.exp(-1) / (2 + np.exp(-1))])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_row_without_a_token_left_is_empty(temperature):
    """The full row raises, as the target has then nothing to say; a draft just ends."""
    params = SamplingParams(temperature=temperature, logit_bias={1: -np.inf, 2: -np.inf})
    sampler = Sampler(params, n_vocab=4, eos_ids=(), n_prompt=1)
    ids = np.array([1, 2])
    assert len(sampler.row(np.zeros(2), [0], ids).ids) == 0
    assert sampler.best(np.zeros(2), [0], 2, ids) == ([], [])
    with pytest.raises(IncompatibleError, match=r"shape \(3,\), the sampler expects \(2,\)"):
        sampler.row(np.zeros(3), [0], ids)
    with pytest.raises(NumericsError):
        sampler.row(np.array([np.nan, 0.0]), [0], np.array([0, 3]))
