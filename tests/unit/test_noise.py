"""Noise is a pure function of its key, exact at the edges, and the shortcuts give what the full evaluation gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import noise as noise_module
from edgespec.noise import Noise, Purpose, log
from edgespec.types import Candidates

GOLDEN_GUMBELS = ["0x1.95cc8b97f21c0p-1", "0x1.59f03260466bep-2", "0x1.6779de9dc4295p-1"]
GOLDEN_UNIFORM = "0x1.79d5eabfaa697p-1"
GOLDEN_NEGATIVE = "0x1.8d6e4bdf1494bp-1"


def candidates(logits, dtype=np.float32, step=1):
    logits = np.asarray(logits, dtype=dtype)
    return Candidates(np.arange(len(logits), dtype=np.int64) * step, logits)


def full_order(noise, c, purpose, position, **key):
    """Every token's noise evaluated: best first, lowest id among equals."""
    scores = noise.gumbel(purpose, position, c.ids, **key) + c.logits
    return c.ids[np.lexsort((c.ids, -scores))].tolist()


def test_golden_values_hold_on_every_platform():
    noise = Noise(7, sample=1)
    gumbels = noise.gumbel(Purpose.TARGET, 5, np.array([0, 1, 49151]), round=2).tolist()
    assert [value.hex() for value in gumbels] == GOLDEN_GUMBELS
    assert noise.uniform(Purpose.ACCEPT, 5, 3, 2).hex() == GOLDEN_UNIFORM
    assert Noise(-1).uniform(Purpose.ACCEPT, 0).hex() == GOLDEN_NEGATIVE


def test_log_is_within_half_a_part_in_1e15():
    x = np.concatenate([10.0 ** np.linspace(-16, 2, 5001), 1 - 10.0 ** np.linspace(-15, -0.01, 5001)])
    true = np.array([math.log(value) for value in x])
    assert np.max(np.abs(log(x) - true) / np.abs(true)) < 5e-16


def test_log_of_one_float_equals_the_vectorised_log():
    x = np.concatenate([10.0 ** np.linspace(-16, 2, 3001), 1 - 10.0 ** np.linspace(-15, -0.01, 3001)])
    assert [noise_module._log_one(value) for value in x.tolist()] == log(x).tolist()


def test_extreme_hashes_give_finite_noise():
    """24-bit midpoints used to round up to 1, which made the noise infinite."""
    edges = np.array([0, 1, 2**52 - 2, 2**52 - 1], dtype=np.uint64)
    values = noise_module._gumbel(edges)
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()
    assert 36.7 < values[-1] < 36.8


KEYS = [
    {},
    {"seed": 8},
    {"seed": -7},
    {"seed": 7 + 2**64},
    {"sample": 1},
    {"purpose": Purpose.DRAFT},
    {"position": 4},
    {"position": 5, "round": 3},
    {"position": 3, "round": 5},
    {"round": 1},
    {"index": 1},
]


def values_of(key):
    key = {"seed": 7, "sample": 0, "purpose": Purpose.TARGET, "position": 3, "round": 0, "index": 0, **key}
    noise = Noise(key["seed"], key["sample"])
    gumbels = noise.gumbel(key["purpose"], key["position"], np.arange(4), key["round"], key["index"])
    return [*gumbels.tolist(), noise.uniform(key["purpose"], key["position"], key["index"], key["round"])]


def test_every_part_of_the_key_changes_every_value():
    values = [value for key in KEYS for value in values_of(key)]
    assert len(set(values)) == len(values)
    assert [value for key in KEYS for value in values_of(key)] == values


@pytest.mark.parametrize("seed", [0, -1, -(2**64), 2**64 - 1, 2**64, 2**200, -(2**200)])
def test_any_integer_is_a_seed_of_its_own(seed):
    others = [s for s in (0, -1, -(2**64), 2**64 - 1, 2**64, 2**200, -(2**200)) if s != seed]
    own = Noise(seed).uniform(Purpose.ACCEPT, 0)
    assert own not in [Noise(other).uniform(Purpose.ACCEPT, 0) for other in others]


def test_a_subset_of_tokens_has_the_same_noise_as_all():
    noise = Noise(3)
    everything = noise.gumbel(Purpose.TARGET, 9, np.arange(1000))
    some = np.array([0, 17, 999])
    assert noise.gumbel(Purpose.TARGET, 9, some).tolist() == everything[some].tolist()


def test_accept_never_at_zero_always_at_one():
    noise = Noise(0)
    assert not any(noise.accept(0.0, Purpose.ACCEPT, i) for i in range(200))
    assert all(noise.accept(1.0, Purpose.ACCEPT, i) for i in range(200))
    assert 60 < sum(noise.accept(0.5, Purpose.ACCEPT, i) for i in range(200)) < 140


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 8, 9, 60, 2048, 2049, 5000]),
    st.floats(0.0, 20.0),
    st.sampled_from([np.float32, np.float64]),
    st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_draws_equal_the_full_evaluation(seed, m, scale, dtype, n):
    c = candidates(scale * np.random.default_rng(seed).standard_normal(m), dtype, step=3)
    noise = Noise(seed)
    expected = full_order(noise, c, Purpose.DRAFT, 11, round=4, index=2)
    assert noise.draw_many(c, n, Purpose.DRAFT, 11, round=4, index=2) == expected[:n]
    assert noise.draw(c, Purpose.DRAFT, 11, round=4, index=2) == expected[0]


def test_huge_sets_with_few_tokens_on_top_fall_back_to_the_full_evaluation():
    c = candidates(np.where(np.arange(5000) < 2, 30.0, 0.0))
    noise = Noise(1)
    assert noise.draw_many(c, 4, Purpose.DRAFT, 0) == full_order(noise, c, Purpose.DRAFT, 0)[:4]


def test_huge_sets_need_few_logarithms(monkeypatch):
    sizes = []
    evaluate = noise_module._gumbel
    monkeypatch.setattr(noise_module, "_gumbel", lambda bits: sizes.append(len(bits)) or evaluate(bits))
    Noise(2).draw(candidates(3 * np.random.default_rng(0).standard_normal(49152)), Purpose.TARGET, 0)
    assert sum(sizes) < 2500


@pytest.mark.parametrize("m", [2, 8, 9, 100, 3000])
def test_ties_go_to_the_lowest_id(m):
    c = candidates(np.full(m, 1e20), step=5)
    assert Noise(4).draw(c, Purpose.TARGET, 0) == 0
    assert Noise(4).draw_many(c, 3, Purpose.TARGET, 0) == [0, 5, 10][:m]


def test_without_replacement_ends_when_nothing_is_left():
    drawn = Noise(5).draw_many(candidates([0.0, 1.0, 2.0]), 9, Purpose.DRAFT, 0)
    assert sorted(drawn) == [0, 1, 2]
