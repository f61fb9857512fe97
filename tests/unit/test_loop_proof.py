"""Exact enumeration of the production round loop: decoder, drafter, verifier, sampler and noise keys together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from edgespec.draft.model import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.controller import create_controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.scheduler import run_serial
from edgespec.engine.stops import TokenStop
from edgespec.noise import Noise
from edgespec.proof.enumeration import Worlds, enumerate_worlds, total_variation
from edgespec.sampling import Sampler, SamplingParams
from edgespec.testing import TableModel
from edgespec.types import Drafter, ExactRows
from edgespec.verify import create_verifier

PROMPT = [1, 1, 2, 1]
EOS = 0
FILTERED = SamplingParams(temperature=1.2, top_p=0.9, repetition_penalty=1.2, max_tokens=3)
OPEN = SamplingParams(max_tokens=3)
# The coupled rule with a draft model is left out: both share noise on purpose, and token identity is its proof.
CASES = [
    *product(["rejection"], [1, 2], ["model", "ngram", "none"]),
    *product(["block"], [2], ["model", "ngram", "none"]),
    *product(["coupled"], [2], ["ngram", "none"]),
]


def model(seed: int) -> TableModel:
    return TableModel(3, seed=seed, order=3, scale=1.0, dtype=np.float64, n_ctx=32, eos_ids=(EOS,))


def own_distribution(target: TableModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Chance of every output, by the chain rule on the target alone."""
    sampler = Sampler(params, n_vocab=3, eos_ids=(EOS,), n_prompt=len(PROMPT))
    result: dict[tuple[int, ...], float] = {}
    for tokens in product(range(3), repeat=params.max_tokens):
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        if tokens in result:
            continue
        chance = 1.0
        for i, token in enumerate(tokens):
            history = [*PROMPT, *tokens[:i]]
            candidates = sampler.row(target.row(history), history)
            chance *= dict(zip(candidates.ids.tolist(), candidates.probs().tolist(), strict=True)).get(token, 0.0)
        result[tokens] = chance
    return result


def worlds_of(
    target: TableModel, drafters: Sequence[Drafter], params: SamplingParams, rule: str, k: int, exact: ExactRows | None
) -> Worlds[tuple[int, ...]]:
    def play(noise: Noise) -> tuple[int, ...]:
        for drafter in drafters:
            drafter.reset()
        sampler = Sampler(params, n_vocab=3, eos_ids=(EOS,), n_prompt=len(PROMPT))
        job = Job(list(PROMPT), sampler, create_verifier(rule), noise, TokenStop({EOS}), params.max_tokens)
        session = target.open_session()
        loop = decode(job, session, target.info, drafters, create_controller("fixed", k), exact)
        return tuple(token for committed in run_serial(loop) for token in committed.tokens)

    return enumerate_worlds(play)


@pytest.mark.parametrize("params", [OPEN, FILTERED], ids=["open", "filtered"])
@pytest.mark.parametrize(("rule", "k", "kind"), CASES)
def test_the_loop_emits_the_targets_own_distribution(rule: str, k: int, kind: str, params: SamplingParams) -> None:
    target = model(5)
    drafters: list[Drafter] = {
        "model": lambda: [ModelDrafter(model(6), 3)],
        "ngram": lambda: [NgramDrafter(min_match=1)],
        "none": lambda: [],
    }[kind]()
    worlds = worlds_of(target, drafters, params, rule, k, ExactRows(2, 16) if kind == "none" else None)
    assert total_variation(worlds.outcomes, own_distribution(target, params)) < 1e-12
    assert not worlds.reused
    assert worlds.n > 8
