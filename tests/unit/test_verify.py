"""The rules on small cases worked out by hand; that they are lossless is proven in `test_proof.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ConfigError, IncompatibleError
from edgespec.noise import Noise, Purpose
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import Candidates, Proposal, Verdict
from edgespec.verify import VERIFIERS, BlockVerifier, RejectionVerifier, TypicalVerifier, create_verifier

HISTORY = [3, 1]


class ScriptedNoise(Noise):
    """Real noise, except that coins come from a list; notes the probability of each coin and each key."""

    def __init__(self, coins=()):
        super().__init__(0)
        self.coins = list(coins)
        self.asked = []
        self.drawn = []

    def accept(self, probability, purpose, position, index=0, round=0):
        assert purpose is Purpose.ACCEPT
        self.asked.append((round, position, index, pytest.approx(probability)))
        return self.coins.pop(0)

    def draw(self, candidates, purpose, position, round=0, index=0):
        self.drawn.append(
            (purpose, position, round, dict(zip(candidates.ids.tolist(), candidates.probs(), strict=True)))
        )
        return super().draw(candidates, purpose, position, round, index)


class CountingSampler(Sampler):
    """Notes the histories of the rows that a rule asked for."""

    def __init__(self, n_vocab=4, **params):
        super().__init__(SamplingParams(**params), n_vocab=n_vocab, eos_ids=(), n_prompt=len(HISTORY))
        self.histories = []

    def row(self, logits, history):
        self.histories.append(list(history))
        return super().row(logits, history)


def logits_of(*rows):
    return np.log(np.array(rows, dtype=np.float64))


def dist(**probs):
    ids = [int(name[1:]) for name in probs]
    return Candidates(np.array(ids, dtype=np.int64), np.log(np.array(list(probs.values()))))


def verify(rule, proposal, logits, noise, sampler=None, round=5):
    sampler = sampler or CountingSampler(len(logits[0]))
    return create_verifier(rule, "typical" if rule == "typical" else None).verify(
        proposal, logits, sampler, noise, HISTORY, round
    )


P = [0.1, 0.2, 0.3, 0.4]
FLAT = [0.25] * 4


def test_rejection_accepts_at_the_ratio_and_draws_the_bonus_from_the_last_row():
    noise = ScriptedNoise([True, True])
    proposal = Proposal([0, 3], "t", dists=[dist(t0=0.5, t2=0.5), None])
    verdict = verify("rejection", proposal, logits_of(P, FLAT, P), noise)
    assert (verdict.path, verdict.kind) == ((0, 1), "bonus")
    assert noise.asked == [(5, 2, 0, 0.2), (5, 3, 1, 0.25)]
    assert noise.drawn == [(Purpose.TARGET, 4, 5, pytest.approx(dict(enumerate(P))))]


def test_rejection_takes_the_residual_and_looks_at_no_further_row():
    noise, sampler = ScriptedNoise([False]), CountingSampler()
    proposal = Proposal([0, 3], "t", dists=[dist(t0=0.5, t2=0.5), None])
    verdict = verify("rejection", proposal, logits_of(P, FLAT, P), noise, sampler)
    assert (verdict.path, verdict.kind) == ((), "correction")
    assert noise.drawn == [(Purpose.RESIDUAL, 2, 5, pytest.approx({1: 1 / 3, 3: 2 / 3}))]
    assert sampler.histories == [HISTORY]


def test_point_masses_are_accepted_at_p_and_rejected_to_the_rest():
    noise = ScriptedNoise([False])
    verify("rejection", Proposal([3], "t"), logits_of(P, P), noise)
    assert noise.asked == [(5, 2, 0, 0.4)]
    assert noise.drawn[0][3] == pytest.approx({0: 1 / 6, 1: 2 / 6, 2: 3 / 6})


def test_siblings_are_judged_against_what_is_left():
    """Two drawn without replacement from a flat draft, then a point mass, then a child of the third."""
    noise = ScriptedNoise([False, False, True, False])
    flat = dist(t0=0.25, t1=0.25, t2=0.25, t3=0.25)
    proposal = Proposal([0, 1, 3, 2], "t", parents=[-1, -1, -1, 2], dists=[flat, flat, None, None])
    verdict = verify("rejection", proposal, logits_of(P, P, P, FLAT, P), noise)
    # p = .1 .2 .3 .4: ratio .4; rest (0, 0, .05, .15) / .2; q without token 0 is 1/3: token 1 has p 0
    # then (1/4 - 1/3)+ = 0 and (3/4 - 1/3)+: only token 3 is left
    assert noise.asked[:3] == [(5, 2, 0, 0.4), (5, 2, 1, 0.0), (5, 2, 2, 1.0)]
    assert noise.asked[3] == (5, 3, 3, 0.25)
    assert (verdict.path, verdict.kind) == ((2,), "correction")


def test_block_follows_the_paper_by_hand():
    """K = 2, q flat over two tokens: P_1 = min(1, .6 / .5) = 1, then P_2 = .2 / .5."""
    rows = logits_of([0.6, 0.4], [0.8, 0.2], [0.5, 0.5])
    half = dist(t0=0.5, t1=0.5)
    noise = ScriptedNoise([False, True])
    verdict = verify("block", Proposal([0, 1], "t", dists=[half, half]), rows, noise)
    assert noise.asked == [(5, 4, 2, 0.4), (5, 3, 1, 1.0)]
    assert (verdict.path, verdict.next_token, verdict.kind) == ((0,), 0, "correction")
    assert noise.drawn == [(Purpose.RESIDUAL, 3, 5, pytest.approx({0: 1.0}))]


def test_block_weights_the_residual_by_the_prefix():
    """P_1 = .2 / .5 = .4; S_1 = (.4 * .8 - .1)+ = .22 and h_1 = .22 / (.22 + .6)."""
    rows = logits_of([0.8, 0.2], [0.8, 0.2], [0.5, 0.5])
    proposal = Proposal([1, 1], "t", dists=[dist(t0=0.5, t1=0.5), dist(t0=0.1, t1=0.9)])
    noise = ScriptedNoise([False, False, True])
    verdict = verify("block", proposal, rows, noise)
    assert noise.asked == [(5, 4, 2, 0.4 * 0.2 / 0.9), (5, 3, 1, 0.22 / 0.82), (5, 2, 0, 1.0)]
    assert (verdict.path, verdict.next_token) == ((), 0)


def test_block_keeps_the_whole_chain_with_a_bonus():
    noise = ScriptedNoise([True])
    verdict = verify("block", Proposal([1, 0], "t"), logits_of([0.8, 0.2], [0.8, 0.2], [0.5, 0.5]), noise)
    assert noise.asked == [(5, 4, 2, 0.16)]
    assert (verdict.path, verdict.kind) == ((0, 1), "bonus")
    assert noise.drawn[0][:3] == (Purpose.TARGET, 4, 5)


def test_block_ends_at_the_first_forbidden_token():
    noise, sampler = ScriptedNoise([True]), CountingSampler(bad_words_ids=[[3]])
    verdict = verify("block", Proposal([3, 1, 2], "t"), logits_of(P, P, P, P), noise, sampler)
    assert sampler.histories == [HISTORY]
    assert verdict.path == ()
    assert verdict.next_token != 3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_equal_distributions_accept_everything(rule):
    """0 / 0 in the survival of a prefix and a residual of zeros must not surface."""
    target = dist(t0=0.1, t1=0.2, t2=0.3, t3=0.4)
    for seed in range(50):
        proposal = Proposal([1, 2, 3], "t", dists=[target] * 3)
        assert verify(rule, proposal, logits_of(P, P, P, P), Noise(seed)).path == (0, 1, 2)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_an_empty_residual_falls_back_to_the_target(rule):
    """Rounding can reject a token of equal distributions; there is nothing left of p - q then."""
    target = dist(t0=0.1, t1=0.2, t2=0.3, t3=0.4)
    noise = ScriptedNoise([False, True])
    verify(rule, Proposal([1], "t", dists=[target]), logits_of(P, P), noise)
    assert noise.drawn[0][3] == pytest.approx(dict(enumerate(P)))


def test_coupled_takes_the_targets_own_tokens():
    noise, logits = Noise(4), logits_of(P, FLAT, P)
    first = noise.draw(dist(t0=0.1, t1=0.2, t2=0.3, t3=0.4), Purpose.TARGET, 2)
    second = noise.draw(dist(t0=0.25, t1=0.25, t2=0.25, t3=0.25), Purpose.TARGET, 3)
    third = noise.draw(dist(t0=0.1, t1=0.2, t2=0.3, t3=0.4), Purpose.TARGET, 4)
    other = (second + 1) % 4
    assert verify("coupled", Proposal([], "t"), logits[:1], noise) == Verdict((), first, "bonus")
    assert verify("coupled", Proposal([first, other], "t"), logits, noise) == Verdict((0,), second, "correction")
    assert verify("coupled", Proposal([first, second], "t"), logits, noise) == Verdict((0, 1), third, "bonus")
    tree = Proposal([(first + 1) % 4, first, other, second], "t", parents=[-1, -1, 1, 1])
    rows = logits_of(P, P, FLAT, P, P)
    assert verify("coupled", tree, rows, noise) == Verdict((1, 3), third, "bonus")


def test_rules_draft_with_the_noise_that_they_expect():
    c = dist(t0=0.1, t1=0.2, t2=0.3, t3=0.4)
    noise = Noise(9)
    coupled, rejection = create_verifier("coupled"), create_verifier("rejection")
    assert coupled.draw_draft(noise, c, 7, round=3) == noise.draw(c, Purpose.TARGET, 7)
    assert coupled.draw_siblings(noise, c, 3, 7, 3, index=5) == noise.draw_many(c, 3, Purpose.TARGET, 7)
    assert rejection.draw_draft(noise, c, 7, 3) == noise.draw(c, Purpose.DRAFT, 7, 3)
    assert rejection.draw_siblings(noise, c, 3, 7, 3, 5) == noise.draw_many(c, 3, Purpose.DRAFT, 7, 3, 5)


def test_typical_keeps_the_longest_plausible_path():
    rows = logits_of([0.05, 0.15, 0.7, 0.1], FLAT, FLAT, [0.97, 0.01, 0.01, 0.01], FLAT)
    proposal = Proposal([0, 1, 2, 0], "t", parents=[-1, -1, -1, 2])
    verdict = verify("typical", proposal, rows, Noise(0))
    assert (verdict.path, verdict.kind) == ((2, 3), "bonus")
    rejected = verify("typical", Proposal([0], "t"), rows[:2], Noise(0))
    assert (rejected.path, rejected.kind) == ((), "correction")


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("accepts", [True, False])
def test_penalties_at_a_row_see_committed_and_drafted_tokens(rule, accepts):
    """Penalties used to be computed once a round, from the committed tokens alone."""
    sampler = CountingSampler(temperature=0.0, frequency_penalty=10.0)
    rows = np.zeros((4, 4))
    rows[:, 2], rows[:, 0], rows[:, 1] = 4.0, 3.0, 2.0
    proposal = Proposal([2, 0, 1] if accepts else [2, 2, 0], "t")
    verdict = verify(rule, proposal, rows, Noise(1), sampler)
    assert verdict == (Verdict((0, 1, 2), 3, "bonus") if accepts else Verdict((0,), 0, "correction"))
    assert sampler.histories[:2] == [HISTORY, [*HISTORY, 2]]


@given(st.integers(0, 2**31), st.sampled_from(["coupled", "rejection", "block", "typical"]), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_a_forbidden_token_never_appears(seed, rule, k):
    """Whatever is drafted, sampled or as point masses, in float32 as in use."""
    rng = np.random.default_rng(seed)
    banned = int(rng.integers(6))
    sampler = CountingSampler(6, bad_words_ids=[[banned]], top_p=0.9, temperature=rng.choice([0.0, 0.6, 1.5]))
    logits = (3 * rng.standard_normal((k + 1, 6))).astype(np.float32)
    verifier, noise = create_verifier(rule, "typical" if rule == "typical" else None), Noise(seed)
    dists = [Candidates(np.arange(6), (2 * rng.standard_normal(6)).astype(np.float32)) for _ in range(k)]
    tokens = [verifier.draw_draft(noise, d, 2 + i, 0) for i, d in enumerate(dists)]
    proposal = Proposal(tokens, "t", dists=[d if rng.random() < 0.7 else None for d in dists])
    verdict = verifier.verify(proposal, logits, sampler, noise, HISTORY, 0)
    emitted = [*(tokens[i] for i in verdict.path), verdict.next_token]
    assert banned not in emitted
    assert HISTORY == [3, 1]


def test_draft_tokens_beyond_the_targets_candidates_are_rejected():
    noise = ScriptedNoise([False])
    verify("rejection", Proposal([9], "t", dists=[dist(t8=0.5, t9=0.5)]), logits_of(P, P), noise)
    assert noise.asked == [(5, 2, 0, 0.0)]
    assert noise.drawn[0][3] == pytest.approx(dict(enumerate(P)))


def test_block_refuses_trees_but_not_chains_written_as_trees():
    rows = logits_of(P, P, P)
    with pytest.raises(IncompatibleError, match="is a tree: use the rejection rule"):
        verify("block", Proposal([1, 2], "t", parents=[-1, -1]), rows, Noise(0))
    assert verify("block", Proposal([1, 2], "t", parents=[-1, 0]), rows, Noise(0)) == verify(
        "block", Proposal([1, 2], "t"), rows, Noise(0)
    )


@pytest.mark.parametrize(("parents", "words"), [([-1], "2 tokens has 1 parents"), ([-1, 1], "token 1 names parent 1")])
def test_malformed_trees_are_refused(parents, words):
    with pytest.raises(IncompatibleError, match=words):
        verify("coupled", Proposal([1, 2], "t", parents=parents), logits_of(P, P, P), Noise(0))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_token_outside_its_own_distribution_is_refused(rule):
    """Drafts filtered before sampling used to be judged by another distribution than the one they came from."""
    with pytest.raises(IncompatibleError, match="Draft token 1 has probability 0"):
        verify(rule, Proposal([1], "t", dists=[dist(t0=0.5, t2=0.5)]), logits_of(P, P), Noise(0))


def test_create_verifier_knows_the_rules_and_guards_the_lossy_one():
    assert set(VERIFIERS) == {"coupled", "rejection", "block", "typical"}
    assert [create_verifier(name).lossless for name in ("coupled", "rejection", "block")] == [True] * 3
    assert not create_verifier("typical", lossy="typical").lossless
    assert RejectionVerifier.uses_dists
    assert BlockVerifier.uses_dists
    assert not BlockVerifier.supports_tree
    with pytest.raises(ConfigError, match="There is no verification rule 'greedy': choose one of coupled, rejection"):
        create_verifier("greedy")
    with pytest.raises(ConfigError, match="'typical' changes the target's output and lossy is None"):
        create_verifier("typical")
    with pytest.raises(ConfigError, match="lossy is 'typical', but the rule 'coupled' is lossless"):
        create_verifier("coupled", lossy="typical")


def test_entropy_threshold_is_the_papers():
    c = dist(t0=0.9, t1=0.1)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert TypicalVerifier(epsilon=1.0, delta=0.1 * math.exp(entropy) * 0.99)._is_typical(c, 1)
    assert not TypicalVerifier(epsilon=1.0, delta=0.1 * math.exp(entropy) * 1.01)._is_typical(c, 1)
