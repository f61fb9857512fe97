"""The pooled test is calibrated on sound rules and notices faulty ones within a few hundred tokens."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.noise import Noise
from edgespec.proof.faults import NoResidualVerifier
from edgespec.proof.goodness import Emission, RecordingVerifier, ks_pvalue, pit_pvalue, pit_values
from edgespec.proof.rules import Draft, Toy, play_round
from edgespec.types import Candidates, Proposal
from edgespec.verify import create_verifier

VOCAB = 200


def record(rule, draft, n_tokens=700, seed=0, toy_seed=1):
    """Emissions of one rule on a wide random pair, played round by round with real noise."""
    toy = Toy(toy_seed, VOCAB, 10_000, scale=1.5)
    recorder, noise, emitted = RecordingVerifier(rule), Noise(seed), ()
    round = 0
    while len(recorder.emissions) < n_tokens:
        emitted = (*emitted, *(token or 1 for token in play_round(toy, recorder, draft.propose, noise, emitted, round)))
        round += 1
    return recorder.emissions


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("coupled", Draft.chain(3)),
        ("rejection", Draft.chain(3)),
        ("rejection", Draft("tree", (-1, -1, 0, 0))),
        ("rejection", Draft.chain(2, points=(0, 1))),
        ("block", Draft.chain(3)),
    ],
)
def test_sound_rules_pass(name, draft):
    emissions = record(create_verifier(name), draft)
    assert len(emissions) >= 700
    assert pit_pvalue(emissions) > 1e-6


def test_a_rule_without_residual_fails():
    assert pit_pvalue(record(NoResidualVerifier(), Draft.chain(3))) < 1e-6


def test_a_drafted_point_mass_is_ordered_first():
    """Without the drafted token in front, a rule that keeps too many n-gram drafts went unnoticed."""
    emissions = record(create_verifier("rejection"), Draft.chain(1, points=(0,)), n_tokens=50)
    assert {len(emission.draft.ids) for emission in emissions if emission.draft is not None} == {1}
    assert pit_values(emissions).min() > 0.0
    target = Candidates(np.arange(4), np.zeros(4))
    too_often = [
        Emission(target, Candidates(np.array([t]), np.zeros(1)), t if i % 8 else (t + 1) % 4)
        for i, t in enumerate([0, 1, 2, 3] * 100)
    ]
    assert pit_pvalue(too_often) < 1e-6
    assert pit_pvalue([Emission(target, None, emission.token) for emission in too_often]) > 1e-6


def test_recording_changes_nothing():
    toy, rule, draft = Toy(2, 5), create_verifier("rejection"), Draft("tree", (-1, -1, 0, 0))
    recorder = RecordingVerifier(rule)
    assert (recorder.name, recorder.lossless, recorder.supports_tree, recorder.uses_dists) == (
        "rejection",
        True,
        True,
        True,
    )
    for seed in range(20):
        tokens = play_round(toy, rule, draft.propose, Noise(seed), (), 0)
        before = len(recorder.emissions)
        assert play_round(toy, recorder, draft.propose, Noise(seed), (), 0) == tokens
        assert tuple(e.token for e in recorder.emissions[before:])[: len(tokens)] == tokens


def test_the_block_rule_is_ordered_without_the_draft():
    emissions = record(create_verifier("block"), Draft.chain(2), n_tokens=20)
    assert {emission.draft for emission in emissions} == {None}
    proposal = Proposal([1], "t")
    assert RecordingVerifier(create_verifier("block"))._draft_at(proposal, -1) is None
    drafted = RecordingVerifier(create_verifier("rejection"))._draft_at(proposal, -1)
    assert drafted is not None
    assert drafted.ids.tolist() == [1]


def test_values_lie_within_the_tokens_own_mass_in_the_order_of_the_ratio():
    target = Candidates(np.array([2, 5, 7]), np.log([0.5, 0.3, 0.2]))
    draft = Candidates(np.array([2, 5]), np.log([0.2, 0.8]))
    values = [pit_values([Emission(target, draft, token)])[0] for token in (5, 2, 7, 3, 9)]
    assert 0.0 < values[0] < 0.3 < values[1] < 0.8 < values[2] < 1.0
    assert values[3:] == [0.0, 0.0]


def test_ks_pvalue_matches_the_known_distribution():
    assert ks_pvalue(np.array([])) == 1.0
    assert ks_pvalue((np.arange(100) + 0.5) / 100) == 1.0
    assert ks_pvalue(np.linspace(0, 0.5, 100)) < 1e-9
    # critical values of the Kolmogorov distribution: 1.3581 at 5 %, 1.6276 at 1 %
    n = 10_000
    for critical, level in ((1.3581, 0.05), (1.6276, 0.01)):
        shift = critical / (np.sqrt(n) + 0.12 + 0.11 / np.sqrt(n))
        values = np.clip((np.arange(n) + 0.5) / n + shift - 0.5 / n, 0, 1)
        assert ks_pvalue(values) == pytest.approx(level, rel=0.02)


def test_ks_pvalues_of_uniform_samples_are_uniform():
    rng = np.random.default_rng(0)
    pvalues = np.array([ks_pvalue(rng.random(300)) for _ in range(400)])
    assert ks_pvalue(pvalues) > 1e-4
