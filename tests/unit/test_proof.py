"""The verifiers are lossless by exact enumeration, and the enumeration notices every broken one.

The last part plays the real round loop with the real draft model drafter under the same enumeration.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.draft.model import ModelDrafter
from edgespec.engine.controller import Controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.scheduler import run_serial
from edgespec.engine.stops import TokenStop
from edgespec.noise import Noise, Purpose
from edgespec.proof.enumeration import EnumeratingNoise, emitted_distribution, enumerate_worlds, total_variation
from edgespec.proof.faults import enumerate_faults
from edgespec.proof.rules import DRAFTS, TREES, Draft, Toy, coupled_mismatches, enumerate_rules, play_round, prove
from edgespec.sampling import Sampler, SamplingParams
from edgespec.testing import TableModel
from edgespec.types import Candidates, ExactRows
from edgespec.verify import create_verifier


def test_every_redrawing_rule_emits_the_targets_distribution():
    proofs = enumerate_rules()
    assert [proof for proof in proofs if not proof.passed] == []
    assert max(proof.total_variation for proof in proofs) < 1e-12
    assert len(proofs) == 2 * (2 * len(DRAFTS) + len(TREES))
    assert {proof.name for proof in proofs} == {"rejection", "block"}


@pytest.mark.parametrize("seed", [0, 1])
def test_every_fault_is_detected(seed):
    faults = enumerate_faults(seed)
    assert len(faults) == 9
    for fault in faults:
        assert not fault.passed, fault
        if fault.name == "noise without the round":
            assert fault.n_reused_keys > 0
        else:
            assert fault.total_variation > 1e-4
            assert fault.n_reused_keys == 0


def test_two_rounds_and_more_are_played():
    """A chain of 2 under a limit of 4 tokens: the first round alone never ends a sequence without an EOS."""
    rounds = []
    toy, rule, draft = Toy(0), create_verifier("rejection"), Draft.chain(2)

    def play(noise, emitted, round):
        rounds.append((round, emitted))
        return play_round(toy, rule, draft.propose, noise, emitted, round)

    worlds = emitted_distribution(play, toy.is_final)
    assert {round for round, _ in rounds} == {0, 1, 2, 3}
    assert sum(worlds.outcomes.values()) == pytest.approx(1.0, abs=1e-14)
    assert {len(tokens) for tokens in worlds.outcomes} == {1, 2, 3, 4}
    assert all(tokens[-1] == 0 or len(tokens) == 4 for tokens in worlds.outcomes)


def test_greedy_targets_are_deterministic_under_every_rule():
    toy = Toy(4, params=SamplingParams(temperature=0.0))
    assert len(toy.own_distribution()) == 1
    for name in ("rejection", "block"):
        assert prove(toy, create_verifier(name), Draft.chain(3)).passed


def test_coupled_tokens_are_those_of_plain_sampling():
    assert coupled_mismatches(300, seed=123_456) == 0


def test_coupled_mismatches_notices_a_rule_that_redraws(monkeypatch):
    monkeypatch.setattr("edgespec.proof.rules.create_verifier", lambda name: create_verifier("rejection"))
    assert coupled_mismatches(60) > 20


def test_worlds_are_all_outcomes_with_their_probabilities():
    candidates = Candidates(np.arange(3), np.log(np.array([0.5, 0.3, 0.2])))

    def play(noise):
        if not noise.accept(0.25, Purpose.ACCEPT, 0):
            return ()
        return tuple(noise.draw_many(candidates, 2, Purpose.DRAFT, 1))

    worlds = enumerate_worlds(play)
    assert worlds.n == 7
    assert worlds.outcomes[()] == 0.75
    assert worlds.outcomes[(2, 0)] == pytest.approx(0.25 * 0.2 * 0.5 / 0.8)
    assert worlds.reused == set()


def test_certain_decisions_do_not_branch_and_shared_keys_are_noticed():
    noise = EnumeratingNoise([])
    assert noise.accept(1.5, Purpose.ACCEPT, 0)
    assert not noise.accept(0.0, Purpose.ACCEPT, 1)
    assert noise.draw(Candidates(np.array([4]), np.zeros(1)), Purpose.TARGET, 0) == 4
    assert noise.sizes == []
    noise.draw(Candidates(np.array([5]), np.zeros(1)), Purpose.TARGET, 0)
    assert noise.reused == set()
    noise.accept(0.5, Purpose.ACCEPT, 1)
    noise.draw(Candidates(np.array([3, 4]), np.zeros(2)), Purpose.TARGET, 0)
    assert noise.reused == {("accept", Purpose.ACCEPT, 1, 0, 0), ("draw", Purpose.TARGET, 0, 0, 0, 4)}


def test_real_numbers_cannot_be_enumerated():
    noise = EnumeratingNoise([])
    with pytest.raises(TypeError, match="accept, draw and draw_many"):
        noise.uniform(Purpose.ACCEPT, 0)
    with pytest.raises(TypeError, match="accept, draw and draw_many"):
        noise.gumbel(Purpose.TARGET, 0, np.arange(2))


def test_total_variation_counts_what_only_one_side_has():
    assert total_variation({"a": 0.5, "b": 0.5}, {"b": 0.75, "c": 0.25}) == 0.5


class LoopToy(Toy):
    """Rows of a table model, so that plain sampling and the loop see the same target."""

    def logits(self, tokens, stream=0):
        return TARGET.row(tokens)


TARGET = TableModel(3, seed=5, order=8, scale=1.0, dtype=np.float64, eos_ids=(0,), n_ctx=16)
DRAFT = TableModel(3, seed=6, order=8, scale=1.0, dtype=np.float64, eos_ids=(0,), n_ctx=16)
PENALISED = SamplingParams(top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.2)


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["plain", "filtered"])
@pytest.mark.parametrize("exact", [None, ExactRows(2, 8)], ids=["fast", "exact"])
def test_the_real_round_loop_is_lossless(name, params, exact):
    """Whole generations, all rounds in one world: draft model, verifier, loop, EOS and length limit as shipped."""
    toy = LoopToy(n_tokens=3, params=params)

    def play(noise: Noise):
        sampler = Sampler(params, n_vocab=3, eos_ids=(0,), n_prompt=2)
        job = Job([1, 1], sampler, create_verifier(name), noise, TokenStop((0,)), max_tokens=3)
        drafters = [ModelDrafter(DRAFT, 3)]
        events = decode(job, TARGET.open_session(), TARGET.info, drafters, Controller(2), exact)
        return tuple(token for committed in run_serial(events) for token in committed.tokens)

    worlds = enumerate_worlds(play)
    assert total_variation(worlds.outcomes, toy.own_distribution()) < 1e-12
    assert worlds.reused == set()
    assert worlds.n > 50
