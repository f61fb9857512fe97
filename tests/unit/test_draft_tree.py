"""Trees: growth by confidence, merged sequences, fixed shapes, siblings under every rule."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.draft import TreePlan
from edgespec.draft.choice import Choice, choose_chain, choose_siblings
from edgespec.draft.model import _lengths
from edgespec.draft.ngram import NgramDrafter, SuffixAutomaton
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.tree import DraftTree, merge_sequences, rank_tree
from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.engine.controller import create_controller
from edgespec.noise import Noise, Purpose
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import DraftContext, Offer, Proposal
from edgespec.verify import create_verifier


def context(tokens: list[int], rule: str = "coupled", seed: int = 0, **params: float) -> DraftContext:
    sampler = Sampler(SamplingParams(**params), n_vocab=100, eos_ids=(), n_prompt=len(tokens))
    return DraftContext(tokens, sampler, Noise(seed), create_verifier(rule), 0)


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    parents = proposal.parents or range(-1, len(proposal) - 1)
    for token, parent in zip(proposal.tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found), "a node twice"
    return set(found)


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), st.integers(0, 12))
@settings(deadline=None)
def test_merged_sequences_are_their_prefixes_once_in_order(sequences: list[list[int]], n_rows: int) -> None:
    wanted: list[tuple[int, ...]] = []
    for sequence in sequences:
        for n in range(1, len(sequence) + 1):
            prefix = tuple(sequence[:n])
            if prefix not in wanted:
                if len(wanted) == n_rows:
                    break
                wanted.append(prefix)
    proposal = merge_sequences(sequences, "test", n_rows)
    assert paths(proposal) == set(wanted)
    assert proposal.tokens == [prefix[-1] for prefix in wanted]
    assert (proposal.parents is None) == (proposal.parents is None or len(sequences) == 1)


def test_one_sequence_is_a_chain() -> None:
    assert merge_sequences([[1, 2, 3]], "test", 8).parents is None
    assert merge_sequences([[1, 2], [1, 2, 3]], "test", 8).parents is None
    assert merge_sequences([[1, 2], [1, 3]], "test", 8).parents == [-1, 0, 0]


@given(st.integers(1, 10), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_growth_by_promise_finds_the_best_nodes_of_the_whole_tree(n_rows: int, width: int, random) -> None:
    """Against all nodes of a full tree: as good as if every node had been expanded."""
    depth = 4
    chances = {
        path: sorted((random.random() * 0.6 for _ in range(width)), reverse=True)
        for n in range(depth)
        for path in product(range(width), repeat=n)
    }
    tree = DraftTree()
    tree.add(-1, [Choice(i, None, p) for i, p in enumerate(chances[()])])
    while chosen := tree.promising(n_rows, width, depth):
        tree.expanded.update(chosen)
        for node in chosen:
            tree.add(node, [Choice(i, None, p) for i, p in enumerate(chances[tuple(tree.path(node))])])
    proposal = tree.proposal(n_rows, "test")
    full = {}
    for n in range(1, depth + 1):
        for path in product(range(width), repeat=n):
            full[path] = np.prod([chances[path[:i]][path[i]] for i in range(n)])
    best = sorted(full, key=lambda path: -full[path])[: len(proposal)]
    assert sum(full[path] for path in paths(proposal)) == pytest.approx(sum(full[path] for path in best))
    assert len(proposal) == min(n_rows, len(full))


def test_fixed_shapes_hold_the_most_valuable_paths() -> None:
    rates = [[0.6, 0.2, 0.1], [0.5, 0.1], [0.4]]
    values = {}
    for n in (1, 2, 3):
        for path in product(*(range(len(ranks)) for ranks in rates[:n])):
            values[path] = np.prod([rates[level][rank] for level, rank in enumerate(path)])
    for n_rows in range(1, len(values) + 3):
        tree = rank_tree(rates, n_rows)
        assert len(tree) == min(n_rows, len(values))
        assert all(path[:-1] in tree[:i] for i, path in enumerate(tree) if len(path) > 1)
        best = sorted(values.values(), reverse=True)[: len(tree)]
        assert sorted((values[path] for path in tree), reverse=True) == pytest.approx(best)
    assert rank_tree([], 4) == rank_tree([[]], 4) == []


@pytest.mark.parametrize(("n_rows", "n"), [(n_rows, n) for n_rows in range(1, 12) for n in range(1, n_rows + 1)])
def test_branches_share_the_rows(n_rows: int, n: int) -> None:
    lengths = _lengths(n_rows, n, 20)
    assert sum(lengths) == n_rows
    assert min(lengths) >= 1
    assert lengths == sorted(lengths, reverse=True)
    assert max(_lengths(n_rows, n, 2)) <= 2


LOGITS = np.array([0.5, 3.0, 2.9, -1.0, 1.0], np.float32)
IDS = np.array([2, 5, 40, 41, 90])


def test_siblings_at_temperature_zero_are_the_runners_up() -> None:
    vocabulary = DraftVocabulary(IDS, 100, 0)
    for rule in ("coupled", "rejection"):
        choices = choose_siblings(context([1], rule, temperature=0.0), vocabulary, LOGITS, [1], 3)
        assert [choice.token for choice in choices] == [5, 40, 90]
        assert all(choice.dist is None for choice in choices)
        weights = np.exp(LOGITS - 3)
        assert [c.confidence for c in choices] == pytest.approx((weights / weights.sum())[[1, 2, 4]], rel=1e-5)


def test_siblings_under_shared_noise_are_those_the_target_would_draw() -> None:
    vocabulary = DraftVocabulary(IDS, 100, 0)
    for seed in range(20):
        ctx = context([1, 2], seed=seed)
        choices = choose_siblings(ctx, vocabulary, LOGITS, [1, 2], 3)
        noisy = LOGITS + ctx.noise.gumbel(Purpose.TARGET, 2, IDS)
        assert [choice.token for choice in choices] == IDS[np.argsort(-noisy)[:3]].tolist()
        assert sum(choice.confidence for choice in choices) == pytest.approx(1)
        assert [choice.confidence for choice in choices] == sorted((c.confidence for c in choices), reverse=True)


def test_siblings_for_a_rule_that_redraws_are_drawn_or_ranked_never_both() -> None:
    vocabulary = DraftVocabulary(IDS, 100, 0)
    ctx = context([1], "rejection", temperature=1.0)
    ranked = choose_siblings(ctx, vocabulary, LOGITS, [1], 3)
    assert [choice.token for choice in ranked] == [5, 40, 90]
    assert all(choice.dist is None for choice in ranked)
    drawn = choose_siblings(ctx, vocabulary, LOGITS, [1], 9, is_ranked=False)
    assert sorted(choice.token for choice in drawn) == IDS.tolist()
    assert all(choice.dist is not None for choice in drawn)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_is_the_drafts_own_probability(temperature: float) -> None:
    vocabulary = DraftVocabulary(IDS, 100, 0)
    ctx = context([1], temperature=temperature)
    choice = choose_chain(ctx, vocabulary, LOGITS, [1], wants_confidence=True)
    assert choice is not None
    weights = np.exp(LOGITS)
    expected = (weights / weights.sum())[IDS.tolist().index(choice.token)]
    assert choice.confidence == pytest.approx(expected, rel=1e-5)
    other = choose_chain(ctx, vocabulary, LOGITS, [1])
    assert other is not None
    assert (other.token, other.confidence) == (choice.token, 1.0)


def test_ngram_trees_merge_what_followed_several_matches() -> None:
    tokens = [1, 2, 9, 4, 4, 2, 7, 3, 3, 8, 1, 2]
    drafter = NgramDrafter(1, TreePlan(rows=6, width=2, depth=3))
    proposal = drafter.propose(context(tokens), 6)
    assert paths(proposal) >= {(9,), (9, 4), (9, 4, 4), (7,)}
    assert len(proposal) == 6
    chain = NgramDrafter(2, TreePlan(rows=6, width=2, depth=3)).propose(context(tokens), 6)
    assert (chain.tokens, chain.parents) == ([9, 4, 4, 2, 7, 3], None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
@settings(deadline=None)
def test_every_match_is_a_real_one_and_they_grow_shorter(tokens: list[int]) -> None:
    index = SuffixAutomaton()
    for token in tokens:
        index.append(token)
    matches = index.matches()
    assert [length for length, _ in matches] == sorted({length for length, _ in matches}, reverse=True)
    assert matches[:1] == ([(index.match_length, index.match_end)] if index.match_length else [])
    for length, end in matches:
        assert end < len(tokens) - 1
        assert tokens[end - length + 1 : end + 1] == tokens[len(tokens) - length :]


def test_offers_name_what_matches_of_this_length_were_worth() -> None:
    drafter = NgramDrafter(1)
    tokens = [1, 2, 3, 1, 2, 3, 1]
    first = drafter.offer(context(tokens)).acceptance
    for token in (2, 3, 1, 2, 3, 1, 2, 3):
        tokens = [*tokens, token]
        last = drafter.offer(context(tokens)).acceptance
    assert first is not None
    assert last is not None
    assert last > first
    for token in (9, 1, 8, 1, 7, 1, 6, 1):  # matches of one token that never hold
        tokens = [*tokens, token]
        offer = drafter.offer(context(tokens))
    assert offer.acceptance is not None
    assert offer.acceptance < 0.3
    drafter.reset()
    assert drafter.offer(context([1, 2, 3, 1, 2, 3, 1])).acceptance == first


def test_a_track_judges_up_to_the_first_wrong_token() -> None:
    track = AcceptanceTrack([(0.0, 1.0)])
    track.ask(Proposal([5, 6, 7], "test"), 3)
    track.learn([1, 2, 3])  # nothing new yet
    track.learn([1, 2, 3, 5, 9, 7])
    assert track.rate() == 1 / 3
    track.learn([1, 2, 3, 5, 9, 7, 7])  # judged once
    assert track.rate() == 1 / 3
    track.ask(Proposal([4, 8, 5, 6], "test", parents=[-1, -1, 0, 2]), 6)
    track.learn([1, 2, 3, 5, 9, 7, 4, 5, 6])
    assert track.rate() == 4 / 6


class Fixed:
    """A drafter that offers the same each round."""

    def __init__(self, max_k: int, acceptance: float | None) -> None:
        self.answer = Offer(max_k, acceptance)

    def offer(self, context: DraftContext) -> Offer:
        return self.answer


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([(4, None), (4, 0.9)], 0),
        ([(4, 0.5), (4, 0.55)], 0),  # within the margin the earlier one goes first
        ([(4, 0.3), (4, 0.55)], 1),
        ([(4, 0.3), (0, 0.9)], 0),
        ([(0, 0.9), (4, 0.2), (4, 0.8)], 2),
        ([(0, None), (0, None)], None),
    ],
)
def test_the_first_drafter_goes_unless_a_later_one_is_clearly_better(offers, chosen: int | None) -> None:
    drafters = [Fixed(*offer) for offer in offers]
    drafter, k = create_controller("fixed", 3).choose(drafters, context([1]), 8)
    assert drafter is (None if chosen is None else drafters[chosen])
    assert k == (0 if chosen is None else 3)
