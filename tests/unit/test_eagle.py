"""The EAGLE drafter alone: whatever happened before, its state is that of a fresh one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_driver import draft_model

from edgespec.draft import TreePlan
from edgespec.draft.eagle import EagleDrafter
from edgespec.draft.features import FUSE_ROWS, FeatureStore
from edgespec.noise import Noise
from edgespec.sampling import Sampler, SamplingParams
from edgespec.testing.heads import EagleHead, FuseHead, encode_feature, feature_target
from edgespec.types import DraftContext
from edgespec.verify import create_verifier

TAPS = ("low", "final")
TARGET = feature_target(8, seed=3, n_ctx=64)
DRAFT = draft_model("same", TARGET, feature=None)


def taps_of(tokens: Sequence[int], start: int, stop: int) -> dict[str, np.ndarray]:
    return {tap: np.stack([encode_feature(tokens[: i + 1], tap) for i in range(start, stop)]) for tap in TAPS}


def context(tokens: list[int], temperature: float = 0.0) -> DraftContext:
    params = SamplingParams(temperature=temperature)
    sampler = Sampler(params, n_vocab=8, eos_ids=(), n_prompt=len(tokens))
    return DraftContext(tokens, sampler, Noise(1), create_verifier("coupled"), 0)


def make(tree: TreePlan | None = None, **options: object) -> tuple[EagleDrafter, EagleHead]:
    head = EagleHead(DRAFT, n_ctx=64, **options)
    return EagleDrafter(head, 8, TAPS, tree), head


# A request: prompt length that it shares with the one before, new tokens, then rounds of (k, tokens committed).
ROUNDS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=4)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 7), min_size=1, max_size=6), ROUNDS), min_size=1, max_size=3
)


@given(REQUESTS, st.sampled_from([None, TreePlan(5, 2, 3)]), st.booleans(), st.randoms())
@settings(max_examples=30, deadline=None)
def test_any_history_leaves_the_state_of_a_fresh_drafter(requests, tree, refuse_keep, random) -> None:
    """Prefixes reused, rounds without a draft, accepted and rejected tokens: the same drafts, and nothing fed wrongly.

    Committed tokens follow the head's draft for a while and then go elsewhere.
    """
    drafter, head = make(tree, refuse_keep=refuse_keep)
    committed: list[int] = []
    cached = 0
    for shared, new, rounds in requests:
        shared = min(shared, len(committed), cached)
        committed = [*committed[:shared], *new]
        drafter.reset()
        cached = min(shared, len(committed) - 1)  # what the target kept
        for k, n_new in rounds:
            proposal = []
            if k and drafter.offer(context(committed)).max_k:
                proposal = drafter.propose(context(committed), k).tokens
                assert len(proposal) <= k
                fresh, _ = make(tree, refuse_keep=refuse_keep)
                fresh.observe(0, committed[:-1], taps_of(committed, 0, len(committed) - 1))
                assert fresh.propose(context(committed), k).tokens == proposal
            n_right = random.randint(0, min(len(proposal), n_new - 1)) if proposal and tree is None else 0
            after = [*committed, *proposal[:n_right], *(random.randrange(8) for _ in range(n_new - n_right))]
            if len(after) > 60:
                return
            drafter.observe(cached, after[cached:-1], taps_of(after, cached, len(after) - 1))
            cached, committed = len(after) - 1, after
        assert head.mistakes == []


def test_one_pass_catches_up_whatever_the_rounds_in_between() -> None:
    drafter, head = make()
    tokens = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    for n in range(1, 10):
        drafter.observe(n - 1, tokens[n - 1 : n], taps_of(tokens, n - 1, n))
    assert head.fuse.rows == []
    drafter.propose(context(tokens), 3)
    assert head.fuse.rows == [9]
    assert [len(call.tokens) for call in head.inner.forwards] == [9, 1, 1]
    drafter.observe(9, [2, 6], taps_of([*tokens, 6], 9, 11))
    drafter.propose(context([*tokens, 6, 4]), 2)
    assert [len(call.tokens) for call in head.inner.forwards] == [9, 1, 1, 2, 1]


def test_a_tree_reruns_what_it_has_and_keeps_the_true_pairs() -> None:
    drafter, head = make(TreePlan(6, 3, 3))
    tokens = [1, 2, 3, 4]
    drafter.observe(0, tokens[:3], taps_of(tokens, 0, 3))
    proposal = drafter.propose(context(tokens), 6)
    assert 1 <= len(proposal) <= 6
    calls = head.inner.forwards
    assert len(calls[0].tokens) == 3
    for before, after in pairwise(calls[1:]):
        assert len(before.tokens) < len(after.tokens)
        assert after.n_past == 3
    assert drafter.session.n_past == 3


def test_there_is_no_offer_without_all_features() -> None:
    drafter, _ = make()
    assert drafter.offer(context([1])).max_k == 0
    tokens = [1, 2, 3, 4]
    drafter.observe(0, tokens[:2], taps_of(tokens, 0, 2))
    assert drafter.offer(context(tokens)).max_k == 0
    assert len(drafter.propose(context(tokens), 2)) == 0
    drafter.observe(5, [1], taps_of([*tokens, 1, 1], 5, 6))  # after a gap: a target that lost its cache
    assert drafter.store.n_observed == 2
    drafter.observe(2, [3], taps_of(tokens, 2, 3))
    assert drafter.offer(context(tokens)).max_k == 64 - 4 + 2
    drafter.reset()
    assert drafter.offer(context([1, 2, 7, 4])).max_k == 0
    drafter.close()


def test_long_queues_are_fused_before_they_pile_up() -> None:
    fuse = FuseHead(TAPS)
    store = FeatureStore(fuse, TAPS)
    tokens = [i % 7 for i in range(3 * FUSE_ROWS)]
    for start in range(0, len(tokens), 100):
        stop = min(start + 100, len(tokens))
        store.observe(start, tokens[start:stop], taps_of(tokens, start, stop))
    store.fuse_queue()
    assert sum(fuse.rows) == len(tokens)
    assert max(fuse.rows) <= FUSE_ROWS
    expected = np.stack([encode_feature(tokens[: i + 1], "low") for i in range(len(tokens))])
    np.testing.assert_array_equal(store.features(0, len(tokens))[:, :6], expected[:, :6])


@pytest.mark.parametrize("n_kept", [0, 3, 5, 7, 9])
def test_a_shorter_prefix_cuts_fused_and_queued_features_alike(n_kept: int) -> None:
    store = FeatureStore(FuseHead(TAPS), TAPS)
    tokens = [1, 2, 3, 4, 5, 6, 7, 0, 1]
    store.observe(0, tokens[:5], taps_of(tokens, 0, 5))
    store.fuse_queue()
    store.observe(5, tokens[5:7], taps_of(tokens, 5, 7))
    store.observe(7, tokens[7:], taps_of(tokens, 7, 9))
    other = [*tokens[:n_kept], 6, 6]
    store.observe(n_kept, other[n_kept:], taps_of(other, n_kept, len(other)))
    assert store.agree(other) == store.n_observed == len(other)
    store.fuse_queue()
    expected = np.stack([encode_feature(other[: i + 1], "low") for i in range(len(other))])
    np.testing.assert_array_equal(store.features(0, len(other))[:, :6], expected[:, :6])


@pytest.mark.parametrize("fault", ["place", "token", "unfused", "late"])
def test_the_head_of_these_tests_notices_what_is_fed_wrongly(fault: str) -> None:
    """The control: without it every test above could pass on a head that is always right."""
    head = EagleHead(DRAFT, n_ctx=64)
    session = head.open_session()
    tokens = [1, 2, 3, 4]
    taps = taps_of(tokens, 0, 3)
    fused = head.fuse.run({"features": np.concatenate([taps["low"], taps["final"]], axis=1)})["hidden.fused"]
    features, fed = fused.copy(), tokens[1:]
    if fault == "place":
        features = fused[[0, 0, 2]]
    elif fault == "token":
        fed = [2, 2, 4]
    elif fault == "unfused":
        features = taps["low"]
    else:
        own = session.forward(fed[:1], features=fused[:1], taps=["own"]).hidden["own"]
        session.keep(1)
        features = np.concatenate([fused[:1], own, fused[2:]])
        session.keep(0)
    session.forward(fed, features=features)
    assert len(head.mistakes) >= 1
