"""Trees of drafted tokens: growing one by confidence, cutting it to a budget, merging sequences, fixed shapes.

A tree is a list of nodes in which parents come before their children and siblings stand in the order in which they were
chosen, as `Proposal` wants it. Knows tokens and scores; which tokens follow a node is for the drafter to say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from edgespec.draft.choice import Choice
from edgespec.types import Candidates, Proposal

__all__ = ["DraftTree", "merge_sequences", "rank_tree"]

_LEAST = 1e-30  # confidence below which logarithms stop


class DraftTree:
    """A tree that grows by its most promising nodes (EAGLE-2, arXiv 2406.16858).

    A node's score is the logarithm of its joint confidence, the product along its path; it never exceeds its parent's.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.dists: list[Candidates | None] = []
        self.expanded: set[int] = set()

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, choices: Iterable[Choice]) -> list[int]:
        """Make the choices children of `parent` (-1: the root); their nodes."""
        base = 0.0 if parent < 0 else self.scores[parent]
        depth = 1 if parent < 0 else self.depths[parent] + 1
        first = len(self.tokens)
        for choice in choices:
            self.tokens.append(choice.token)
            self.parents.append(parent)
            self.scores.append(base + math.log(min(1.0, max(choice.confidence, _LEAST))))
            self.depths.append(depth)
            self.dists.append(choice.dist)
        return list(range(first, len(self.tokens)))

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, n: int) -> list[int]:
        """The `n` nodes of highest joint confidence, ascending; every node's parent is among them."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        return sorted(order[:n])

    def promising(self, n_rows: int, n: int, max_depth: int) -> list[int]:
        """At most `n` nodes that are worth children: unexpanded, among the best `n_rows`, above the last level.

        Children of any other node could not come among the best `n_rows` themselves.
        """
        best = self.best(n_rows)
        leaves = [i for i in best if i not in self.expanded and self.depths[i] < max_depth]
        if len(self.tokens) >= n_rows:  # the worst of the best has no room for a child
            worst = min(self.scores[i] for i in best)
            leaves = [i for i in leaves if self.scores[i] > worst]
        return sorted(sorted(leaves, key=lambda node: (-self.scores[node], node))[:n])

    def proposal(self, n_rows: int, source: str, run_s: float = 0.0) -> Proposal:
        """The best `n_rows` nodes as a proposal; a chain where they are one."""
        kept = self.best(n_rows)
        place = {node: i for i, node in enumerate(kept)}
        return as_proposal(
            [self.tokens[node] for node in kept],
            [place.get(self.parents[node], -1) for node in kept],
            [self.dists[node] for node in kept],
            source,
            run_s,
        )


def as_proposal(
    tokens: list[int], parents: list[int], dists: list[Candidates | None] | None, source: str, run_s: float = 0.0
) -> Proposal:
    """A proposal that says `parents` only where it is no chain."""
    is_chain = parents == list(range(-1, len(tokens) - 1))
    return Proposal(tokens, source, None if is_chain else parents, dists, run_s=run_s)


def merge_sequences(sequences: Iterable[Sequence[int]], source: str, n_rows: int) -> Proposal:
    """Several candidate continuations as one trie of point masses, shared prefixes once, at most `n_rows` nodes.

    Earlier sequences go first, whole, as long as there is room; siblings stand in the order of their sequences.
    """
    tokens: list[int] = []
    parents: list[int] = []
    node_at: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = -1
        for token in sequence:
            known = node_at.get((node, token))
            if known is None:
                if len(tokens) == n_rows:
                    break
                known = node_at[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known
    return as_proposal(tokens, parents, None, source)


def rank_tree(rates: Sequence[Sequence[float]], n_rows: int) -> list[tuple[int, ...]]:
    """The `n_rows` most valuable paths of ranks: (0, 2) is the third choice of level 2 after the first of level 1.

    rates: chance of each rank at each level, [levels][ranks], falling with the rank. A path's value is the product of
    its rates, the expected gain of its node (Medusa, arXiv 2401.10774). Parents come before their children.
    """
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rates[0][0], (0,))] if rates and rates[0] else []
    while waiting and len(paths) < n_rows:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < len(rates[level]):
            ratio = min(1.0, rates[level][rank + 1] / max(rates[level][rank], _LEAST))
            heapq.heappush(waiting, (value * ratio, (*path[:-1], rank + 1)))
        if level + 1 < len(rates) and rates[level + 1]:
            heapq.heappush(waiting, (value * min(1.0, rates[level + 1][0]), (*path, 0)))
    return paths
