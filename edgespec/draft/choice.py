"""How a draft's row of logits becomes drafted tokens: one for a chain, several for the children of a tree's node.

The verifier says how tokens must be drawn, the sampler which are left; this puts the two together for every draft kind,
with the reduced vocabulary between them. Knows no model, cache or tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.noise import Purpose
from edgespec.types import Candidates, DraftContext, FloatArray

__all__ = ["Choice", "choose_chain", "choose_siblings"]


class Choice(NamedTuple):
    """A drafted token. dist: what it was drawn from, None for a point mass. confidence: chance that it is accepted, as
    far as the draft can tell (1 where nobody asked). runner_up: its second choice and the chance of the first against
    it (None where nobody asked, or there is none)."""

    token: int
    dist: Candidates | None
    confidence: float = 1.0
    runner_up: tuple[int, float] | None = None


def choose_chain(
    context: DraftContext,
    vocabulary: DraftVocabulary,
    logits: FloatArray,
    history: Sequence[int],
    *,
    index: int = 0,
    wants_confidence: bool = False,
    wants_runner_up: bool = False,
) -> Choice | None:
    """The next token of a chain after `history`; None where processors leave the draft no token.

    logits: the draft's own row, over `vocabulary`. index: tells apart nodes of a tree that share a position.
    """
    if wants_runner_up:
        return _choose_pair(context, vocabulary, logits, history, index, wants_confidence)
    row = vocabulary.row(logits)
    candidates = context.sampler.row(row, history, vocabulary.ids)
    if not len(candidates.ids):
        return None
    token = context.verifier.draw_draft(context.noise, candidates, len(history), context.round, index)
    if not wants_confidence:
        return Choice(token, candidates)
    if context.sampler.params.temperature == 0.0:
        return Choice(token, candidates, context.sampler.best(row, history, 1, vocabulary.ids)[1][0])
    place = int(np.searchsorted(candidates.ids, token))
    return Choice(token, candidates, float(candidates.probs()[place]))


def _choose_pair(
    context: DraftContext,
    vocabulary: DraftVocabulary,
    logits: FloatArray,
    history: Sequence[int],
    index: int,
    wants_confidence: bool,
) -> Choice | None:
    """The same token as without a runner-up, and the runner-up."""
    pair = choose_siblings(context, vocabulary, logits, history, 2, index=index, is_ranked=False)
    if not pair:
        return None
    token, dist, confidence, _ = pair[0]
    if dist is not None:
        confidence = float(dist.probs()[int(np.searchsorted(dist.ids, token))]) if wants_confidence else 1.0
    runner_up = None
    if len(pair) == 2:
        chance, other = pair[0].confidence, pair[1].confidence
        runner_up = pair[1].token, chance / (chance + other) if chance else 0.5
    return Choice(token, dist, confidence, runner_up)


def choose_siblings(
    context: DraftContext,
    vocabulary: DraftVocabulary,
    logits: FloatArray,
    history: Sequence[int],
    n: int,
    *,
    index: int = 0,
    is_ranked: bool = True,
) -> list[Choice]:
    """At most `n` different tokens after `history`, in the order in which to list them.

    is_ranked: their confidences will decide on the tree's shape. A rule that redraws then gets the most likely tokens
    as point masses, since a drawn token may not decide whether it is proposed; else it gets a draw without replacement.
    At T = 0 they are the best tokens of the greedy row, of which the sampler names only the first.
    """
    row, sampler = vocabulary.row(logits), context.sampler
    if sampler.params.temperature == 0.0:
        best = sampler.best(row, history, n, vocabulary.ids)
        return [Choice(token, None, prob) for token, prob in zip(*best, strict=True)]
    candidates = sampler.row(row, history, vocabulary.ids)
    if not len(candidates.ids):
        return []
    position = len(history)
    if not context.verifier.uses_dists:
        drawn = context.verifier.draw_siblings(context.noise, candidates, n, position, context.round, index)
        chances = _shared_noise_chances(context, candidates, drawn, position)
        return [Choice(token, candidates, chance) for token, chance in zip(drawn, chances, strict=True)]
    probs = candidates.probs()
    if is_ranked:
        return [Choice(int(candidates.ids[place]), None, float(probs[place])) for place in _top(probs, n)]
    drawn = context.verifier.draw_siblings(context.noise, candidates, n, position, context.round, index)
    places = np.searchsorted(candidates.ids, drawn)
    return [Choice(token, candidates, float(probs[place])) for token, place in zip(drawn, places, strict=True)]


def _top(probs: FloatArray, n: int) -> list[int]:
    """Places of the n largest, best first, lowest place first among equals."""
    n = min(n, len(probs))
    cut = np.partition(probs, len(probs) - n)[len(probs) - n]
    near = np.flatnonzero(probs >= cut)
    order: list[int] = near[np.lexsort((near, -probs[near]))][:n].tolist()
    return order


def _shared_noise_chances(
    context: DraftContext, candidates: Candidates, tokens: list[int], position: int
) -> list[float]:
    """Softmax over the tokens' logits plus the noise that the target will see.

    Once the noise is known, the draft's probabilities say little: what counts is by how much the first token leads
    before the target's logits, which differ a little, are put under the same noise.
    """
    if len(tokens) == 1:
        return [1.0]
    ids = np.array(tokens, dtype=np.int64)
    noisy = candidates.logits[np.searchsorted(candidates.ids, ids)] + context.noise.gumbel(
        Purpose.TARGET, position, ids
    )
    weights = np.exp(noisy - noisy.max())
    chances: list[float] = (weights / weights.sum()).tolist()
    return chances
