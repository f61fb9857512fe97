"""How often drafts that run no model are right on texts that the target wrote: at every place, without the target.

A controller that starts from nothing gives a new source single tokens for a request or two, and decodes plainly where
these fail. Knows no costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from edgespec.draft_records import chances
from edgespec.judged import Judged
from edgespec.types import DraftContext, Drafter

__all__ = ["rehearse"]

MOST = 8  # tokens of a proposal
LEAST_PLACES = 3  # of a bucket, to say anything


def rehearse(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]], drafters: Iterable[Callable[[], Drafter]]
) -> dict[tuple[str, int], tuple[float, ...]]:
    """(source, bucket of its offers) -> acceptance of each position, given that those before it were right.

    texts: (prompt, answer). Drafters must need neither features nor a model's session.
    """
    found: defaultdict[tuple[str, int], list[Judged]] = defaultdict(list)
    texts = [(list(prompt), list(text)) for prompt, text in texts]
    for make in drafters:
        for prompt, text in texts:
            drafter, tokens = make(), list(prompt)
            for at, token in enumerate(text):
                bucket, judged = _ask(drafter, tokens, text[at : at + MOST])
                if judged.drafted:
                    found[drafter.source, bucket].append(judged)
                tokens.append(token)
    return {key: chances(places) for key, places in found.items() if len(places) >= LEAST_PLACES}


def _ask(drafter: Drafter, tokens: list[int], truth: Sequence[int]) -> tuple[int, Judged]:
    """The bucket of what it offers after `tokens`, and how much of that is right."""
    context = DraftContext(tokens, cast(Any, None), cast(Any, None), cast(Any, None), 1)
    offer = drafter.offer(context)
    k = min(offer.max_k, len(truth))
    proposal = drafter.propose(context, k).tokens if k else []
    accepted = 0
    while accepted < len(proposal) and proposal[accepted] == truth[accepted]:
        accepted += 1
    return offer.bucket, Judged(len(proposal), accepted)
