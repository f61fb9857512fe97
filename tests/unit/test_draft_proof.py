"""Exact enumeration of the round loop with every kind of head: chains and trees, full and reduced vocabularies.

Loop, drafter, head, verifier, sampler and noise keys are the production ones. Under the coupled rule draft and target
share noise on purpose, so that identity with plain decoding is its proof (see the tests of heads).
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from table_world import table_after

from edgespec.draft import DraftSetup, TreePlan, create_drafter
from edgespec.draft.base import FREE_DRAFTS
from edgespec.engine.controller import create_controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.scheduler import run_serial
from edgespec.engine.stops import TokenStop
from edgespec.noise import Noise
from edgespec.proof.enumeration import enumerate_worlds, total_variation
from edgespec.sampling import Sampler, SamplingParams
from edgespec.testing import TableModel
from edgespec.testing.heads import EagleHead, ExitHead, MedusaHead, ReducedTable, SplitTable, encode_feature
from edgespec.types import Proposal
from edgespec.verify import create_verifier

PROMPT = [2, 1, 2, 1, 1, 2, 1]
EOS = 0
PARAMS = {
    "open": SamplingParams(),
    "filtered": SamplingParams(temperature=1.2, top_p=0.9, repetition_penalty=1.2),
}
TREE = TreePlan(rows=4, width=2, depth=2)
KINDS = ["ngram", "tinydraft", "eagle", "medusa", "early-exit", "table"]
CASES = [
    *((rule, kind, None) for rule, kind in product(["rejection", "block"], KINDS)),
    *(("rejection", kind, TREE) for kind in KINDS[:4]),
    ("coupled", "ngram", TREE),
]


def models() -> tuple[TableModel, TableModel]:
    options: dict[str, Any] = {"order": 3, "scale": 1.0, "dtype": np.float64, "n_ctx": 32}
    target = SplitTable(3, seed=5, eos_ids=(EOS,), taps=("low", "final"), feature=encode_feature, **options)
    return target, TableModel(3, seed=6, **options)


def own_distribution(target: TableModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Chance of every output, by the chain rule on the target alone."""
    sampler = Sampler(params, n_vocab=3, eos_ids=(EOS,), n_prompt=len(PROMPT))
    result: dict[tuple[int, ...], float] = {}
    states: dict[tuple[int, ...], float] = {(): 1.0}
    while states:
        following: dict[tuple[int, ...], float] = {}
        for tokens, chance in states.items():
            history = [*PROMPT, *tokens]
            candidates = sampler.row(target.row(history), history)
            for token, share in zip(candidates.ids.tolist(), candidates.probs().tolist(), strict=True):
                after = (*tokens, token)
                is_final = token == EOS or len(after) == params.max_tokens
                (result if is_final else following)[after] = chance * share
        states = following
    return result


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("vocabulary", [None, [0, 2]], ids=["full", "reduced"])
@pytest.mark.parametrize(("rule", "kind", "tree"), CASES, ids=lambda case: getattr(case, "rows", case))
def test_the_loop_emits_the_targets_own_distribution(
    rule: str, kind: str, tree: TreePlan | None, vocabulary: list[int] | None, params: SamplingParams
) -> None:
    if kind in FREE_DRAFTS and vocabulary is not None:
        return  # they have none
    params = dataclasses.replace(params, max_tokens=3 if tree is None else 4)
    target, draft = models()
    session = target.open_session()
    head: Any = {
        "tinydraft": lambda: ReducedTable(draft, vocabulary, 1),
        "eagle": lambda: EagleHead(draft, vocabulary, 1, n_ctx=32),
        "medusa": lambda: MedusaHead(draft, 2, vocabulary, 1),
        "early-exit": lambda: ExitHead(draft, vocabulary, 1),
        "ngram": lambda: None,
        "table": lambda: None,
    }[kind]()
    setup = DraftSetup(
        3, 1, table_after({1: 2, 2: 1, 0: 1}), draft_models={kind: head}, target=target, session=session, tree=tree
    )
    drafter = create_drafter(kind, setup)
    shapes: set[bool] = set()

    def play(noise: Noise) -> tuple[int, ...]:
        session.keep(0)
        drafter.reset()
        sampler = Sampler(params, n_vocab=3, eos_ids=(EOS,), n_prompt=len(PROMPT))
        job = Job(list(PROMPT), sampler, create_verifier(rule), noise, TokenStop({EOS}), params.max_tokens)
        controller = create_controller("fixed", 3 if tree else 2)
        return tuple(t for c in run_serial(decode(job, session, target.info, [drafter], controller)) for t in c.tokens)

    propose = drafter.propose

    def watched(*arguments: Any) -> Proposal:
        proposal = propose(*arguments)
        if len(proposal):
            shapes.add(proposal.parents is not None)
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    play(Noise(0))  # features of the prompt are kept from one request to the next: from here on plays are alike
    worlds = enumerate_worlds(play)
    assert total_variation(worlds.outcomes, own_distribution(target, params)) < 1e-12
    assert not worlds.reused
    assert worlds.n > 8
    assert (tree is not None) in shapes
    assert getattr(head, "mistakes", []) == []


def test_siblings_listed_by_confidence_after_they_were_drawn_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the rule takes siblings in the order in which they were drawn; a tree may not reorder them."""
    from edgespec.draft import choice

    def biased(*arguments: Any, **options: Any) -> Any:
        choices = choice.choose_siblings(*arguments, is_ranked=False, **options)
        return sorted(choices, key=lambda one: -one.confidence)

    monkeypatch.setattr("edgespec.draft.eagle.choose_siblings", biased)
    target, draft = models()
    session = target.open_session()
    head = EagleHead(draft, n_ctx=32)
    drafter = create_drafter("eagle", DraftSetup(3, draft_models={"eagle": head}, target=target, tree=TREE))
    params = SamplingParams(max_tokens=3)

    def play(noise: Noise) -> tuple[int, ...]:
        session.keep(0)
        drafter.reset()
        sampler = Sampler(params, n_vocab=3, eos_ids=(EOS,), n_prompt=len(PROMPT))
        job = Job(list(PROMPT), sampler, create_verifier("rejection"), noise, TokenStop({EOS}), params.max_tokens)
        loop = decode(job, session, target.info, [drafter], create_controller("fixed", 4))
        return tuple(token for committed in run_serial(loop) for token in committed.tokens)

    play(Noise(0))
    worlds = enumerate_worlds(play)
    assert total_variation(worlds.outcomes, own_distribution(target, params)) > 1e-4
