"""With real noise, over thousands of rounds, emitted tokens have the target's frequencies whatever drafts them."""

from __future__ import annotations

import numpy as np
import pytest
from chi_square import chi_square_pvalue

from edgespec.draft.ngram import NgramDrafter
from edgespec.noise import Noise
from edgespec.proof.faults import NoResidualVerifier, RoundlessVerifier
from edgespec.proof.rules import Draft, Toy, play_round
from edgespec.types import DraftContext
from edgespec.verify import create_verifier

pytestmark = pytest.mark.statistical
ALPHA = 1e-6
EIGHT_TARGET = np.array([0.02, 0.28, 0.2, 0.15, 0.14, 0.11, 0.07, 0.03])
EIGHT_DRAFT = np.array([0.05, 0.05, 0.1, 0.3, 0.3, 0.1, 0.05, 0.05])


class FixedToy(Toy):
    """The same target and draft row after any prefix; no token ends the sequence."""

    target = (0.6, 0.4)
    draft = (0.8, 0.2)

    def logits(self, tokens, stream=0):
        return np.log(np.array(self.draft if stream else self.target))

    def is_final(self, emitted):
        return len(emitted) >= self.n_tokens


class EightToy(FixedToy):
    target = tuple(EIGHT_TARGET)
    draft = tuple(EIGHT_DRAFT)


class Ngram:
    """The shipped n-gram drafter, fed by the round's history."""

    def __init__(self):
        self.drafter = NgramDrafter(min_match=1)

    def propose(self, toy, rule, noise, history, round):
        if round == 0:
            self.drafter.reset()
        context = DraftContext(list(history), toy.sampler, noise, rule, round)
        k = min(3, self.drafter.offer(context).max_k)
        return self.drafter.propose(context, k) if k else Draft("none", ()).propose(toy, rule, noise, history, round)


def frequencies(toy, rule, draft, n_sequences=40):
    """[n_vocab] counts over sequences of `toy.n_tokens`."""
    counts = np.zeros(toy.n_vocab)
    for seed in range(n_sequences):
        noise, emitted, round = Noise(seed), (), 0
        while not toy.is_final(emitted):
            emitted += play_round(toy, rule, draft.propose, noise, emitted, round)
            round += 1
        counts += np.bincount(emitted, minlength=toy.n_vocab)
    return counts


DRAFTERS = {
    "sampled": Draft.chain(3),
    "greedy": Draft.chain(3, points=(0, 1, 2)),
    "ngram": Ngram(),
    "siblings": Draft("tree", (-1, -1, 0, 0)),
}


PAIRS = [(rule, drafter) for rule in ("coupled", "rejection", "block") for drafter in DRAFTERS]
PAIRS.remove(("block", "siblings"))  # refused


@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_two_tokens(rule, drafter):
    counts = frequencies(FixedToy(n_vocab=2, n_tokens=60), create_verifier(rule), DRAFTERS[drafter])
    assert chi_square_pvalue(counts, FixedToy.target) > ALPHA
    assert chi_square_pvalue(counts, FixedToy.draft) < ALPHA


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_eight_tokens_with_a_draft_that_samples_its_best_two(rule):
    toy = EightToy(n_vocab=8, n_tokens=60)
    counts = frequencies(toy, create_verifier(rule), Draft.chain(3, keep=2))
    assert chi_square_pvalue(counts, EIGHT_TARGET) > ALPHA
    assert chi_square_pvalue(counts, EIGHT_DRAFT) < ALPHA


def test_frequencies_show_a_missing_residual():
    toy = EightToy(n_vocab=8, n_tokens=60)
    assert chi_square_pvalue(frequencies(toy, NoResidualVerifier(), Draft.chain(3, keep=2)), EIGHT_TARGET) < ALPHA


def first_three(rule, n=5_000):
    """Counts of the first three tokens of a prefix-dependent pair, one seed a sequence, and their probabilities."""
    toy = Toy(7, 3, 3, scale=1.5)
    own = toy.own_distribution()
    places = {tokens: place for place, tokens in enumerate(own)}
    counts = np.zeros(len(own))
    draft = Draft.chain(2)
    for seed in range(n):
        noise, emitted, round = Noise(seed), (), 0
        while not toy.is_final(emitted):
            emitted += play_round(toy, rule, draft.propose, noise, emitted, round)
            round += 1
        counts[places[emitted]] += 1
    return counts, np.array(list(own.values()))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_joint_frequencies_with_the_round_in_the_noise(rule):
    counts, probs = first_three(create_verifier(rule))
    assert chi_square_pvalue(counts, probs) > ALPHA


def neighbour_counts(rule, n=16_000):
    """Counts of (token, next token) in one long sequence of the two-token pair: independent draws, if all is well."""
    toy, draft = FixedToy(n_vocab=2, n_tokens=n), Draft.chain(3)
    noise, emitted, round = Noise(1), [], 0
    sampler, rows = toy.sampler, np.tile(toy.logits([]), (4, 1))
    while len(emitted) < n:
        proposal = draft.propose(toy, rule, noise, emitted, round)
        verdict = rule.verify(proposal, rows, sampler, noise, emitted, round)
        emitted += [*(proposal.tokens[i] for i in verdict.path), verdict.next_token]
        round += 1
    return np.histogram2d(emitted[:-1], emitted[1:], 2)[0].ravel()


@pytest.mark.parametrize(("rule", "is_sound"), [(create_verifier("block"), True), (RoundlessVerifier(), False)])
def test_block_needs_the_round_in_its_noise(rule, is_sound):
    """Positions redrawn with the drafts of the rejected round used to pull the text a few percent towards the draft."""
    pvalue = chi_square_pvalue(neighbour_counts(rule), np.outer(FixedToy.target, FixedToy.target).ravel())
    assert (pvalue > ALPHA) is is_sound
