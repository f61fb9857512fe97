"""The hash noise behaves as independent standard Gumbel noise, and draws follow the softmax.

Fixed seeds; every assertion has alpha 1e-6 and each kind of test a negative control that must fail.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from chi_square import chi_square_pvalue

from edgespec.noise import Noise, Purpose
from edgespec.proof.goodness import ks_pvalue
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import Candidates

pytestmark = pytest.mark.statistical
ALPHA = 1e-6
N_DRAWS = 100_000


def to_uniform(gumbels):
    return np.exp(-np.exp(-gumbels))


@functools.cache
def streams(n=200_000):
    """The same noise read along each part of its key: name -> [n] values."""
    tokens = np.arange(n // 400)
    one = Noise(11)
    return {
        "tokens": one.gumbel(Purpose.TARGET, 0, np.arange(n)),
        "positions": np.concatenate([one.gumbel(Purpose.TARGET, i, tokens) for i in range(400)]),
        "rounds": np.concatenate([one.gumbel(Purpose.DRAFT, 9, tokens, round=i) for i in range(400)]),
        "indices": np.concatenate([one.gumbel(Purpose.DRAFT, 9, tokens, index=i) for i in range(400)]),
        "seeds": np.concatenate([Noise(i).gumbel(Purpose.TARGET, 9, tokens) for i in range(400)]),
        "samples": np.concatenate([Noise(11, i).gumbel(Purpose.TARGET, 9, tokens) for i in range(400)]),
    }


STREAMS = ("tokens", "positions", "rounds", "indices", "seeds", "samples")


@pytest.mark.parametrize("name", STREAMS)
def test_values_are_standard_gumbel(name):
    uniforms = to_uniform(streams()[name])
    assert ks_pvalue(uniforms) > ALPHA
    assert chi_square_pvalue(np.histogram(uniforms, 1000, (0, 1))[0], np.full(1000, 1e-3)) > ALPHA


def test_goodness_notices_noise_of_another_scale():
    uniforms = to_uniform(1.04 * streams()["tokens"])
    assert ks_pvalue(uniforms) < ALPHA
    assert chi_square_pvalue(np.histogram(uniforms, 1000, (0, 1))[0], np.full(1000, 1e-3)) < ALPHA


def correlation_z(a, b):
    """z-score of the correlation of two sequences that should be independent and uniform."""
    return float(np.mean((a - 0.5) * (b - 0.5)) * 12 * np.sqrt(len(a)))


@pytest.mark.parametrize("name", STREAMS)
def test_neighbouring_keys_are_uncorrelated(name):
    """Lag 1 along tokens, and each block against the next, which differs in one part of the key by one."""
    uniforms = to_uniform(streams()[name])
    assert abs(correlation_z(uniforms[:-1], uniforms[1:])) < 5
    blocks = uniforms.reshape(400, -1)
    for lag in (1, 2, 8, 64):
        assert abs(correlation_z(blocks[:-lag].ravel(), blocks[lag:].ravel())) < 5


def test_purposes_and_swapped_keys_are_uncorrelated():
    noise, tokens = Noise(11), np.arange(100_000)
    base = to_uniform(noise.gumbel(Purpose.TARGET, 3, tokens, round=4))
    others = [noise.gumbel(purpose, 3, tokens, round=4) for purpose in list(Purpose)[1:]]
    others += [noise.gumbel(Purpose.TARGET, 4, tokens, round=3), noise.gumbel(Purpose.TARGET, 3, tokens, 0, 4)]
    assert all(abs(correlation_z(base, to_uniform(other))) < 5 for other in others)
    assert abs(correlation_z(base, 0.99 * base)) > 5


def test_pairs_of_neighbours_fill_the_square():
    """Serial test: (value, next value) over a 32 x 32 grid, for coins as rules flip them."""
    coins = np.array(
        [
            Noise(s).uniform(Purpose.ACCEPT, p, i, r)
            for s in range(5)
            for p in range(20)
            for i in range(10)
            for r in range(60)
        ]
    )
    assert ks_pvalue(coins) > ALPHA
    grid = np.histogram2d(coins[:-1], coins[1:], 32, ((0, 1), (0, 1)))[0]
    assert chi_square_pvalue(grid.ravel(), np.full(1024, 1 / 1024)) > ALPHA


def test_single_bits_are_fair_and_flip_with_every_key_bit():
    """Avalanche: one more position or round changes each of the top 32 bits half of the time."""
    tokens = np.arange(20_000)
    base = to_bits(Noise(1).gumbel(Purpose.TARGET, 64, tokens))
    assert np.abs(base.mean(axis=1) - 0.5).max() < 5 * 0.5 / np.sqrt(20_000)
    for other in (Noise(1).gumbel(Purpose.TARGET, 65, tokens), Noise(1).gumbel(Purpose.TARGET, 64, tokens, round=1)):
        assert np.abs((base ^ to_bits(other)).mean(axis=1) - 0.5).max() < 5 * 0.5 / np.sqrt(20_000)


def to_bits(gumbels):
    whole = (to_uniform(gumbels) * 2**32).astype(np.uint64)
    return np.array([(whole >> np.uint64(i)) & np.uint64(1) for i in range(8, 32)])


def filtered(n_vocab, is_filtered):
    """Candidates of a random row of `n_vocab` logits, in float32 as in use."""
    logits = (1.5 * np.random.default_rng(n_vocab).standard_normal(n_vocab)).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_p=0.9) if is_filtered else SamplingParams()
    return Sampler(params, n_vocab=n_vocab, eos_ids=(), n_prompt=0).row(logits, [])


@pytest.mark.parametrize("is_filtered", [False, True], ids=["all", "filtered"])
@pytest.mark.parametrize("n_vocab", [2, 5, 50, 1000])
def test_draws_follow_the_softmax(n_vocab, is_filtered):
    """100,000 positions; the same counts must not fit a distribution that is slightly off."""
    candidates, noise = filtered(n_vocab, is_filtered), Noise(n_vocab)
    drawn = [noise.draw(candidates, Purpose.TARGET, position) for position in range(N_DRAWS)]
    counts = np.bincount(drawn, minlength=n_vocab)[candidates.ids]
    assert counts.sum() == N_DRAWS
    assert chi_square_pvalue(counts, candidates.probs()) > ALPHA
    if len(candidates.ids) > 1:
        cooler = Candidates(candidates.ids, candidates.logits * 1.1)
        assert chi_square_pvalue(counts, cooler.probs()) < ALPHA


def test_draws_without_replacement_follow_the_successive_softmax():
    candidates, noise = filtered(5, False), Noise(3)
    probs = candidates.probs().astype(float)
    counts = np.zeros((5, 5))
    for position in range(30_000):
        first, second = noise.draw_many(candidates, 2, Purpose.DRAFT, position)
        counts[first, second] += 1
    expected = probs[:, None] * probs[None, :] / (1 - probs[:, None])
    np.fill_diagonal(expected, 0.0)
    assert chi_square_pvalue(counts.ravel(), expected.ravel()) > ALPHA
    assert chi_square_pvalue(counts.ravel(), expected.T.ravel()) < ALPHA
