"""Medusa heads: several tokens at once from one target feature, each head guessing one place further.

One run of a small graph on the taps of the position before the last committed token, and that token, gives the logits
of all heads; no cache, nothing to rewind. Chains take each head's own choice, trees combine the heads' best choices in
a fixed sparse shape (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgespec.draft.base import DraftSetup, EarlyStop, TreePlan
from edgespec.draft.choice import Choice, choose_chain, choose_siblings
from edgespec.draft.heads import LoadedHead, check_taps, kind_of
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.tree import as_proposal, rank_tree
from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.types import Candidates, DraftContext, FloatArray, Offer, Proposal

__all__ = ["MedusaDrafter", "create"]

# Chance of each rank of the first head, and what a further head keeps of it, where the bundle has measured none.
DEFAULT_RATES = (0.5, 0.16, 0.08, 0.05, 0.03)
DEFAULT_DECAY = 0.6


class MedusaDrafter:
    """Drafts a chain of at most `n_heads` tokens, or a fixed tree of the heads' best ranks where `tree` is given."""

    source = "medusa"

    def __init__(
        self,
        head: LoadedHead,
        n_vocab: int,
        taps: tuple[str, ...],
        tree: TreePlan | None = None,
        stop: EarlyStop | None = None,
    ) -> None:
        entry = kind_of(head)
        self.head = head
        self.taps = taps
        self.stop = stop or EarlyStop()
        self.tree = tree
        self.n_heads = int(entry["n_heads"])
        self.vocabulary = DraftVocabulary(head.vocabulary, n_vocab, int(entry.get("n_extra", 0)))
        self._rates = None if tree is None else head_rates(entry, self.n_heads, tree)
        self._track = AcceptanceTrack()
        self.reset()

    def reset(self) -> None:
        self._track.reset()
        self.vocabulary.reset()
        self._position = -1  # of the last observed feature
        self._features: FloatArray = np.empty((1, 0), np.float32)

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        self._position = start + len(tokens) - 1
        self._features = np.concatenate([hidden[tap][-1:] for tap in self.taps], axis=1, dtype=np.float32)

    def offer(self, context: DraftContext) -> Offer:
        """Nothing without the feature of the last token but one."""
        self._track.learn(context.tokens)
        if not self._is_ready(context.tokens):
            return Offer(max_k=0)
        return Offer(self.n_heads if self.tree is None else self.tree.rows, self._track.rate(), passes=1)

    def _is_ready(self, tokens: list[int]) -> bool:
        return 0 <= self._position == len(tokens) - 2

    def propose(self, context: DraftContext, k: int) -> Proposal:
        return self._track.ask(self._draft(context, k), len(context.tokens))

    def _draft(self, context: DraftContext, k: int) -> Proposal:
        if not self._is_ready(context.tokens):
            return Proposal([], self.source)
        self.vocabulary.update(context.tokens)
        feeds = {"input_ids": np.array([context.tokens[-1:]], dtype=np.int64), "features": self._features}
        if self.vocabulary.base is not None:
            feeds["extra_ids"] = self.vocabulary.feed()
        logits = self.head.run(feeds)["logits"]
        if self._rates is None:
            return self._chain(context, logits, k)
        return self._tree(context, logits, rank_tree(self._rates, k))

    def _chain(self, context: DraftContext, logits: FloatArray, k: int) -> Proposal:
        tokens: list[int] = []
        dists: list[Candidates | None] = []
        scores: list[float] = []
        stop = self.stop.chain(context.min_survival)
        for row in logits[: min(k, self.n_heads)]:
            history = [*context.tokens, *tokens]
            choice = choose_chain(context, self.vocabulary, row, history, wants_confidence=stop.wants_confidence)
            if choice is None:
                break
            tokens.append(choice.token)
            dists.append(choice.dist)
            scores.append(choice.confidence)
            if stop.after(choice.confidence, len(tokens)):
                break
        return Proposal(tokens, self.source, None, dists, scores if context.min_survival else None, self.head.run_s)

    def _tree(self, context: DraftContext, logits: FloatArray, paths: list[tuple[int, ...]]) -> Proposal:
        """Each path of ranks as a node; a head ranks its tokens once, after the first choices of the heads before."""
        ranked: list[list[Choice]] = []
        history = list(context.tokens)
        for level, row in enumerate(logits[: max(map(len, paths))]):
            n = 1 + max(path[level] for path in paths if len(path) > level)
            choices = choose_siblings(context, self.vocabulary, row, history, n)
            if not choices:
                break
            ranked.append(choices)
            history.append(choices[0].token)
        nodes: dict[tuple[int, ...], int] = {(): -1}
        tokens: list[int] = []
        for path in paths:
            level, rank = len(path) - 1, path[-1]
            if path[:-1] in nodes and level < len(ranked) and rank < len(ranked[level]):
                nodes[path] = len(tokens)
                tokens.append(ranked[level][rank].token)
        parents = [nodes[path[:-1]] for path in nodes if path]
        return as_proposal(tokens, parents, None, self.source, self.head.run_s)

    def close(self) -> None:
        """Holds no cache."""


def head_rates(entry: Mapping[str, Any], n_heads: int, tree: TreePlan) -> list[list[float]]:
    """[heads][ranks] chances that a head's choice of that rank is right: measured (`acceptance.ranks`) or assumed."""
    measured = (entry.get("acceptance") or {}).get("ranks")
    if measured:
        return [list(map(float, ranks[: tree.width])) for ranks in measured[:n_heads]][: tree.depth]
    ranks = DEFAULT_RATES[: tree.width]
    return [[rate * DEFAULT_DECAY**level for rate in ranks] for level in range(min(n_heads, tree.depth))]


def create(setup: DraftSetup) -> MedusaDrafter:
    """The drafter for `setup.head("medusa")`; raises IncompatibleError where the target lacks its taps."""
    head: LoadedHead = setup.head("medusa")
    taps = check_taps("Medusa", kind_of(head)["taps"], setup.target)
    return MedusaDrafter(head, setup.n_vocab, taps, setup.tree, setup.stop)
