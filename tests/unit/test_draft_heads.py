"""Every kind of trained head through the production loop: the text of plain decoding, and acceptance that never decays.

The heads are right only where features, tokens and places are exactly right (`edgespec.testing.heads`).
"""

from __future__ import annotations

from typing import Any

import pytest
from draft_driver import HEADS, make_world, plain
from loop_driver import run

from edgespec.draft import DraftSetup, EarlyStop, TreePlan, create_drafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.controller import create_controller
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.sampling import SamplingParams
from edgespec.testing import check_log
from edgespec.testing.heads import EagleHead, ExitHead, MedusaHead, feature_target
from edgespec.types import ExactRows

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, seed=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=48, seed=1)
PENALISED = SamplingParams(temperature=0.8, frequency_penalty=1.0, min_tokens=20, max_tokens=48, seed=2)
PROMPTS = {"one": [3], "two": [3, 5], "seventeen": [*range(12), 4, 4, 1, 0, 7]}
BASE = [0, 1, 2, 4, 5, 7, 8, 10, 11, 13]  # a reduced vocabulary; the context's other tokens come as extras
TREE = TreePlan(rows=8, width=3, depth=4)
TREE_KINDS = ["tinydraft", "eagle", "medusa"]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("vocabulary", [None, BASE], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_same_as_plain_for_every_k(
    prompt: list[int], kind: str, vocabulary: list[int] | None, params: SamplingParams
) -> None:
    expected = plain(prompt, params)
    for k in range(1, 9):
        world = make_world(kind, "noisy", vocabulary=vocabulary, n_extra=2)
        outcome = world.run(prompt, params, k=k)
        assert outcome.tokens == expected, f"k={k}"
        assert outcome.stats.drafted > 0
        check_log(world.target)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("vocabulary", [None, BASE], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_trees_say_what_plain_decoding_says(
    kind: str, vocabulary: list[int] | None, params: SamplingParams, rule: str
) -> None:
    expected = plain([1, 2], params)
    for k in (1, 2, 3, 5, 8):
        world = make_world(kind, "noisy", vocabulary=vocabulary, tree=TREE)
        outcome = world.run([1, 2], params, k=k, rule=rule)
        if rule == "coupled" or params is GREEDY:
            assert outcome.tokens == expected, f"k={k}"
        assert max(r.drafted for r in outcome.stats.records) <= k
        check_log(world.target)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_tree_is_worth_more_than_a_chain_of_its_depth(kind: str, temperature: float) -> None:
    """Over several targets, as greedy text soon runs in circles."""
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=1)
    chain, tree = 0, 0
    for seed in range(12):
        chain += make_world(kind, "noisy", seed=seed).run([1, 2], params, k=3).stats.rounds
        world = make_world(kind, "noisy", seed=seed, tree=TreePlan(12, 3, 3))
        tree += world.run([1, 2], params, k=12).stats.rounds
    assert tree < 0.95 * chain


@pytest.mark.parametrize("schedule", [[3], [3, 0, 0, 3], [1, 0, 2, 5, 0, 0, 0, 3]], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_perfect_head_stays_perfect_for_200_tokens(kind: str, params: SamplingParams, schedule: list[int]) -> None:
    """A cache or feature off by one shows only as slow decay, after full acceptances and plain steps."""
    if kind == "medusa" and params is SAMPLED:
        pytest.skip("heads that do not see the tokens between cannot be perfect under sampling")
    params = SamplingParams(**{**vars(params), "max_tokens": 200})
    world = make_world(kind, "same", n_ctx=512)
    outcome = world.run([1, 2], params, controller=scheduled(schedule))
    assert outcome.tokens == plain([1, 2], params, n_ctx=512)
    assert outcome.stats.acceptance_rate == 1.0
    assert outcome.stats.drafted > 60
    assert getattr(world.head, "mistakes", []) == []


def scheduled(schedule: list[int]) -> Any:
    """A controller that asks for these k in turn."""
    controller = create_controller("fixed", max(schedule))
    original, steps = controller.choose, iter(schedule * 200)

    def choose(*args: Any) -> Any:
        controller.k = next(steps)
        return original(*args)

    controller.choose = choose  # type: ignore[method-assign]
    return controller


@pytest.mark.parametrize("kind", HEADS)
def test_rejections_every_other_round_leave_no_trace(kind: str) -> None:
    """Rounds whose draft is spoilt in between; the others must stay perfect."""
    world = make_world(kind, "same", n_ctx=512)
    propose, rounds = world.drafter.propose, []

    def spoil(context: Any, k: int) -> Any:
        proposal = propose(context, k)
        rounds.append(len(proposal))
        if len(rounds) % 2 and proposal.tokens:
            at = len(rounds) % len(proposal)
            proposal.tokens[at] = (proposal.tokens[at] + 1) % 16
        return proposal

    if kind == "early-exit":
        pytest.skip("its drafted rows are the target's own, so a changed token is another draft")
    world.drafter.propose = spoil  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=200)
    outcome = world.run([1, 2], params, k=3)
    assert outcome.tokens == plain([1, 2], params, n_ctx=512)
    drafted = [r for r in outcome.stats.records if r.drafted]
    assert all(r.accepted == r.drafted for r in drafted[1::2])
    assert not any(r.accepted == r.drafted for r in drafted[0::2])
    assert getattr(world.head, "mistakes", []) == []


@pytest.mark.parametrize("kind", HEADS)
def test_a_slot_serves_one_request_after_another(kind: str) -> None:
    """Same prefix, another token right after it, a shorter prompt, the same prompt again: features and pairs of the
    old text that were taken for those of the new one made drafts worse and nothing else."""
    world = make_world(kind, "same", n_ctx=512)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    first = [1, 2, 3, 4, 5, 6, 7, 8]
    for prompt in (first, [*first[:5], 9, 9, 2], first, first[:4], [7], [*first, 3, 3], first):
        outcome = world.run(prompt, params, k=3)
        assert outcome.tokens == plain(prompt, params, n_ctx=512)
        assert outcome.stats.acceptance_rate == 1.0
        assert outcome.stats.drafted > 20
        assert getattr(world.head, "mistakes", []) == []


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("exact", [ExactRows(2, 256), ExactRows(2, 64, 2), ExactRows(4, 16, 4)])
def test_rows_that_fill_up_a_call_are_no_features(kind: str, exact: ExactRows) -> None:
    world = make_world(kind, "same", n_ctx=512)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    outcome = world.run([i % 16 for i in range(70)], params, k=3, exact=exact)
    assert outcome.tokens == plain([i % 16 for i in range(70)], params, n_ctx=512)
    assert all(r.accepted == r.drafted for r in outcome.stats.records if r.source == world.drafter.source)
    assert getattr(world.head, "mistakes", []) == []


@pytest.mark.parametrize("kind", HEADS)
def test_the_context_ends_drafting_in_time(kind: str) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=100)
    prompt = [i % 16 for i in range(10)]
    for tree in [None, TREE] if kind in TREE_KINDS else [None]:
        world = make_world(kind, "noisy", n_ctx=48, tree=tree)
        outcome = world.run(prompt, params, k=8)
        assert outcome.tokens == plain(prompt, params, n_ctx=48)
        assert len(outcome.tokens) == 38


@pytest.mark.parametrize("kind", HEADS)
def test_a_stop_inside_a_draft_leaves_the_slot_usable(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    free = plain([1, 2], params)
    stop = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(free[9],))
    world = make_world(kind, "same")
    assert world.run([1, 2], stop, k=5).tokens == free[: free.index(free[9]) + 1]
    again = world.run([1, 2, *free[:5]], params, k=3)
    assert again.tokens == plain([1, 2, *free[:5]], params)
    assert again.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("kind", HEADS)
def test_a_draft_ends_after_a_token_it_does_not_believe_in(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    always = make_world(kind, "noisy", scale=1.0).run([1, 2], params, k=4)
    wary = make_world(kind, "noisy", scale=1.0, p_min=0.3).run([1, 2], params, k=4)
    assert wary.tokens == always.tokens == plain([1, 2], params, scale=1.0)
    assert wary.stats.acceptance_rate > always.stats.acceptance_rate
    assert min(r.drafted for r in wary.stats.records[1:-1]) == 1  # the doubtful token itself is kept


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_grammar_that_allows_no_token_of_the_vocabulary_ends_the_draft(kind: str, tree: TreePlan | None) -> None:
    """A reduced row with every token forbidden raised, though the target had tokens left."""
    if tree is not None and kind == "early-exit":
        return
    bias = {token: -float("inf") for token in BASE}
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias=bias)
    world = make_world(kind, "noisy", vocabulary=BASE, n_extra=0, tree=tree)
    outcome = world.run([1, 2], params, k=3)
    assert outcome.tokens == plain([1, 2], params)
    assert outcome.stats.drafted == 0


def test_several_kinds_share_a_run() -> None:
    """Rounds of another drafter in between: features queue up and the head stays right."""
    world = make_world("eagle", "same", n_ctx=512)
    params = SamplingParams(temperature=0.0, max_tokens=150)
    prompt = [1, 2, 3] * 6
    outcome = run(world.target, [NgramDrafter(2), world.drafter], prompt, params, k=3)
    assert outcome.tokens == plain(prompt, params, n_ctx=512)
    assert {"ngram", "eagle"} <= set(outcome.stats.sources)
    eagle = outcome.stats.sources["eagle"]
    assert eagle.accepted == eagle.drafted > 0
    assert world.head.mistakes == []


def test_what_does_not_fit_is_refused_when_the_drafter_is_made() -> None:
    target, draft = feature_target(16), feature_target(16)
    session = target.open_session()
    setup = DraftSetup(16, draft_models={"eagle": EagleHead(draft, tree=False)}, target=target, tree=TREE)
    with pytest.raises(IncompatibleError, match="was loaded without tree inputs"):
        create_drafter("eagle", setup)
    for kind, head in (("eagle", EagleHead(draft, taps=["mid"])), ("medusa", MedusaHead(draft, taps=["mid"]))):
        with pytest.raises(IncompatibleError, match=r"reads the target's features \['mid'\]"):
            create_drafter(kind, DraftSetup(16, draft_models={kind: head}, target=target))
    setup = DraftSetup(16, draft_models={"early-exit": ExitHead(draft)}, target=target, session=session)
    with pytest.raises(IncompatibleError, match="was loaded whole"):
        create_drafter("early-exit", setup)
    with pytest.raises(IncompatibleError, match="drafts chains"):
        create_drafter("early-exit", DraftSetup(16, tree=TREE))
    with pytest.raises(ConfigError, match="has no trained head here"):
        create_drafter("medusa", DraftSetup(16))


def test_the_block_rule_refuses_a_tree() -> None:
    world = make_world("eagle", "noisy", tree=TREE)
    with pytest.raises(IncompatibleError, match="judges chains"):
        world.run([1, 2], SAMPLED, k=8, rule="block")


def test_a_chain_ends_early_only_where_the_call_is_full() -> None:
    """An unsure draft used to stop at two tokens, and exact rows then ran four rows for the price of three drafts."""
    stop = EarlyStop(0.5, multiple=2).chain()
    assert [stop.after(0.1, n) for n in (1, 2, 3, 4)] == [True, False, True, False]
    assert not stop.after(0.5, 1)
    assert [EarlyStop(0.5).chain().after(0.1, n) for n in (1, 2)] == [True, True]
    assert not EarlyStop().chain().wants_confidence
