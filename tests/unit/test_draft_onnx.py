"""Every kind of head as the exporter writes it, on a small random target: production graphs, sessions and drafters.

The heads are random, so that they are hardly ever right; what is judged is the text, and that an EAGLE head draws from
the distribution that its formulas give for the true features of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.contract_cases import exported
from edgespec_export.drafts import export_draft
from edgespec_export.target_tables import TargetTables
from export.draft_reference import DraftReference, tensors, write_zoo

from edgespec import LLM, SamplingParams
from edgespec.bundle import Bundle
from edgespec.types import DraftContext, Proposal

KINDS = {"tinydraft": "tinydraft", "eagle": "eagle", "medusa": "medusa", "early-exit": "exit"}
VOCABULARY = np.arange(0, 264, 2)
PROMPT = [5, 8, 8, 13, 200, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=40, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    tokenizer_hash = Bundle.open(target).info.tokenizer_hash
    result = {}
    for draft, kind in KINDS.items():
        changes: dict[str, Any] = {"exit_layer": 2} if kind == "exit" else {}
        changes["tokenizer_hash"] = tokenizer_hash
        write_zoo(folder / f"{kind}-zoo", kind, tensors(kind), VOCABULARY, **changes)
        result[draft] = export_draft(folder / f"{kind}-zoo", target, folder / kind, bits=32)
    return result


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chains(kind: str, target: Path, drafts: dict[str, Path]) -> Iterator[LLM]:
    with LLM(target, draft=kind, draft_model=drafts[kind], threads=1) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_chains_give_the_text_of_plain_decoding(chains: LLM, kind: str, params: SamplingParams) -> None:
    expected = chains.variant(draft="none").generate(PROMPT, params)[0].outputs[0].token_ids
    for prompt_length in (len(PROMPT), 3, len(PROMPT)):  # the second request shares a prefix of the first
        output = chains.generate(PROMPT[:prompt_length], params)[0].outputs[0]
        if prompt_length == len(PROMPT):
            assert output.token_ids == expected
        assert output.stats.sources[kind].drafted > 20


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("draft", ["tinydraft", "eagle", "medusa"])
def test_trees_give_the_text_of_plain_decoding(
    draft: str, target: Path, drafts: dict[str, Path], verifier: str
) -> None:
    options: dict[str, Any] = {"exact": False, "tree": True, "tree_rows": 7, "verifier": verifier, "threads": 1}
    with LLM(target, draft=draft, draft_model=drafts[draft], **options) as llm:
        plain = llm.variant(draft="none")
        for params in (GREEDY, SAMPLED):
            output = llm.generate(PROMPT, params)[0].outputs[0]
            if verifier == "coupled" or params is GREEDY:
                assert output.token_ids == plain.generate(PROMPT, params)[0].outputs[0].token_ids
            assert output.stats.sources[draft].drafted > 60


class Watch:
    """Keeps what a drafter was asked with what it answered."""

    def __init__(self, drafter: Any) -> None:
        self.calls: list[tuple[list[int], Proposal]] = []
        self.propose = drafter.propose
        drafter.propose = self

    def __call__(self, context: DraftContext, k: int) -> Proposal:
        proposal = self.propose(context, k)
        self.calls.append((list(context.tokens), proposal))
        return proposal


def test_eagle_draws_from_what_its_formulas_give(target: Path, drafts: dict[str, Path]) -> None:
    """Each drafted token's distribution, against numpy on the target's true features and the head's own ones."""
    with LLM(target, draft="eagle", draft_model=drafts["eagle"], threads=1) as llm:
        llm.generate(PROMPT, SAMPLED)
        watch = Watch(llm.slots.idle[0].drafters[0])
        llm.generate([*PROMPT, 9, 11], SamplingParams(temperature=1.0, max_tokens=12, seed=4, ignore_eos=True))
        session = llm.target.open_session()
        tables, everything = TargetTables.read(Bundle.open(target)), np.arange(264)
        embedding, head = tables.embedding.rows(everything), tables.head.rows(everything)
        checked = 0
        for tokens, proposal in watch.calls:
            session.keep(0)
            taps = session.forward(tokens[:-1], logits_rows=(), taps=("layer.0", "final")).hidden
            for step, dist in enumerate(proposal.dists or []):
                assert dist is not None
                ids = dist.ids
                reference = DraftReference(tensors("eagle"), embedding, head, ids)
                features = reference.fuse([taps["layer.0"], taps["final"]])
                text = [*tokens, *proposal.tokens[:step]]
                for _ in range(step):  # the features of drafted tokens are the head's own
                    _, own = reference.eagle(np.array(text[1 : len(features) + 1]), features)
                    features = np.concatenate([features, own[-1:]])
                logits, _ = reference.eagle(np.array(text[1:]), features)
                expected = np.exp(logits[-1] - logits[-1].max())
                np.testing.assert_allclose(dist.probs(), expected / expected.sum(), atol=2e-3)
                outside = {token for token in tokens if token % 2}
                assert outside <= set(ids.tolist())
                checked += 1
        assert checked > 15


def test_rows_that_an_early_exit_ran_are_not_run_again(target: Path, drafts: dict[str, Path]) -> None:
    with LLM(target, draft="early-exit", draft_model=drafts["early-exit"], threads=1) as llm:
        llm.generate(PROMPT, GREEDY)
        session: Any = llm.slots.idle[0].session
        counts, texts = [], []
        for reuse in (True, False):
            session.reuse = reuse
            before = session.n_lower_rows_run
            texts.append(llm.generate(PROMPT, GREEDY)[0].outputs[0])
            counts.append(session.n_lower_rows_run - before)
        assert texts[0].token_ids == texts[1].token_ids
        assert counts[1] - counts[0] >= texts[0].stats.sources["early-exit"].drafted // 2
