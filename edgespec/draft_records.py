"""What the rounds of calibration runs say of a draft: the cost of proposals and of catching up, and its acceptance.

Arithmetic on round records; who runs the rounds, and where the figures are kept, is for `edgespec.profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.engine.costs import DraftCosts, Spread, spread
from edgespec.types import RoundRecord

__all__ = ["chances", "draft_costs"]


def draft_costs(runs: Mapping[int, Sequence[RoundRecord]], kind: str, n_prompts: Sequence[int]) -> DraftCosts:
    """runs: k -> the rounds of one request a prompt. n_prompts: their lengths in tokens."""
    steps: dict[int, Spread] = {}
    catch_up: dict[int, list[float]] = {}
    for records in runs.values():
        first = _first_proposals(records, kind)
        by_k: dict[int, list[float]] = {}
        for record in records:
            if record.source == kind and not record.cut and not any(record is one for one in first):
                by_k.setdefault(record.drafted, []).append(_seconds(record))
        steps.update({n: spread(values) for n, values in by_k.items() if n not in steps or len(values) > steps[n].n})
        for one, n_tokens in zip(first, n_prompts, strict=True):
            if one is not None and one.drafted in steps:
                catch_up.setdefault(n_tokens, []).append(max(0.0, _seconds(one) - steps[one.drafted].median))
    known = {n: spread(values) for n, values in catch_up.items()}
    return DraftCosts(steps or {1: Spread(0.0, 0.0, 0.0, 0)}, known)


def chances(records: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Of the rounds that reached a position with a drafted token, the share that accepted it; at least one entry."""
    found: list[float] = []
    for place in range(max((r.drafted for r in records), default=0)):
        reached = [r for r in records if r.drafted > place and r.accepted >= place]
        if len(reached) < 3 and found:
            break
        found.append(sum(r.accepted > place for r in reached) / max(1, len(reached)))
    return tuple(found) or (0.0,)


def _seconds(record: RoundRecord) -> float:
    return max(record.propose_s, record.draft_s)  # a test's clock may be slower than the real one


def _first_proposals(records: Sequence[RoundRecord], kind: str) -> list[RoundRecord | None]:
    """The round of each request in which the draft proposed first, and caught up with the prompt.

    Not always round 0: drafts that need the target's features have none before it.
    """
    found: list[RoundRecord | None] = []
    for record in records:
        if record.index == 0:
            found.append(None)
        if found[-1] is None and record.source == kind:
            found[-1] = record
    return found
