"""Trees and features through the production loop: the caches follow the accepted path, drafters see true features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from loop_driver import draft_model, run

from edgespec.sampling import SamplingParams
from edgespec.testing import TableModel, check_log
from edgespec.types import Candidates, DraftContext, ExactRows, FloatArray, Offer, Proposal

PARAMS = SamplingParams(temperature=0.9, top_p=0.95, seed=6, max_tokens=48)
LONG_PROMPT = [i % 16 for i in range(300)]


class TreeDrafter:
    """Two siblings after every node, `depth` levels deep, from a table model; remembers the features it was shown."""

    source = "tree"
    taps = ("final",)

    def __init__(self, model: TableModel, depth: int = 2) -> None:
        self.model = model
        self.depth = depth
        self.features: dict[int, np.ndarray] = {}

    def reset(self) -> None:
        self.features.clear()

    def offer(self, context: DraftContext) -> Offer:
        assert sorted(self.features) == list(range(len(self.features)))  # every position once, in order
        return Offer(max_k=6)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        dists: list[Candidates | None] = []
        waiting: list[tuple[int, list[int]]] = [(-1, list(context.tokens))]
        while waiting and len(tokens) + 2 <= k:
            node, history = waiting.pop(0)
            candidates = context.sampler.row(self.model.row(history), history)
            for token in context.verifier.draw_siblings(
                context.noise, candidates, 2, len(history), context.round, node + 1
            ):
                tokens.append(token)
                parents.append(node)
                dists.append(candidates)
                waiting.append((len(tokens) - 1, [*history, token]))
        return Proposal(tokens, self.source, parents, dists)

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        assert len(hidden["final"]) == len(tokens)
        for i, feature in enumerate(hidden["final"]):
            assert start + i not in self.features
            self.features[start + i] = feature.copy()

    def close(self) -> None:
        self.features.clear()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 1], LONG_PROMPT], ids=["one", "three", "long"])
@pytest.mark.parametrize("kind", ["same", "noisy", "wrong"])
def test_trees_keep_caches_and_features_true(kind: str, prompt: list[int], rule: str) -> None:
    target = TableModel(16, seed=11, n_ctx=512)
    drafter = TreeDrafter(draft_model(kind, target))
    outcome = run(target, [drafter], prompt, PARAMS, k=6, rule=rule)
    outcome.check_identities()
    check_log(target)
    history = prompt + outcome.tokens
    assert outcome.session.tokens == history[:-1]
    assert sorted(drafter.features) == list(range(len(history) - 1))
    for position, feature in drafter.features.items():
        np.testing.assert_array_equal(feature, target.feature(history[: position + 1], "final"))
    if rule == "coupled":
        assert outcome.tokens == run(TableModel(16, seed=11, n_ctx=512), [], prompt, PARAMS).tokens
    if kind == "same":
        assert outcome.stats.mean_acceptance_length > 2.4  # two levels and the bonus, but for the ends


def test_a_stop_inside_an_accepted_tree_path_leaves_a_true_cache() -> None:
    free = run(TableModel(16, seed=11), [], [1, 2], PARAMS).tokens
    target = TableModel(16, seed=11, eos_ids=(free[4],))
    drafter = TreeDrafter(draft_model("same", target))
    outcome = run(target, [drafter], [1, 2], PARAMS, k=6)
    end = free.index(free[4]) + 1
    assert outcome.tokens == free[:end]
    assert outcome.session.tokens == [1, 2, *free[: end - 1]]
    outcome.check_identities()


def test_features_of_filler_rows_are_not_shown() -> None:
    target = TableModel(16, seed=11)
    drafter = TreeDrafter(draft_model("noisy", target))
    drafter.offer = lambda context: Offer(max_k=0)  # type: ignore[method-assign]
    outcome = run(target, [drafter], [1, 2], PARAMS, exact=ExactRows(2, 64))
    assert sorted(drafter.features) == list(range(2 + len(outcome.tokens) - 1))


def test_a_lost_cache_is_not_observed_twice() -> None:
    """After a refused rewind the whole history runs again; a feature cache that grew by it was out of step."""
    target = TableModel(16, seed=11, refuse_keep=True)
    drafter = TreeDrafter(draft_model("wrong", target))
    outcome = run(target, [drafter], [1, 2], PARAMS, k=6)
    assert outcome.tokens == run(TableModel(16, seed=11), [], [1, 2], PARAMS).tokens
    assert len(outcome.stats.notes) == 1
