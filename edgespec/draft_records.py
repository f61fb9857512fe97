"""What the rounds of calibration runs say: costs of proposals and of catching up, acceptance, the host's share.

Arithmetic on round records; who runs the rounds, and where the figures are kept, is for `edgespec.profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from edgespec.engine.costs import DraftCosts, MeasuredCosts, Spread, spread, typical
from edgespec.types import RoundRecord

if TYPE_CHECKING:
    from edgespec.judged import Judged

__all__ = ["chances", "choice_s", "draft_costs", "in_place", "token_s"]

LEAST_ROUNDS = 3  # of a row count, to say how long its calls take
NEAR = 2  # row counts that ran


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


def chances(records: Sequence[RoundRecord] | Sequence[Judged]) -> tuple[float, ...]:
    """Of rounds or places that reached a position with a drafted token, the share that accepted it; at least one."""
    found: list[float] = []
    for place in range(max((r.drafted for r in records), default=0)):
        reached = [r for r in records if r.drafted > place and r.accepted >= place]
        if len(reached) < 3 and found:
            break
        found.append(sum(r.accepted > place for r in reached) / max(1, len(reached)))
    return tuple(found) or (0.0,)


def token_s(records: Sequence[RoundRecord]) -> float:
    """Host seconds of a further accepted token: its row is drawn from as well."""
    return typical([record.verify_s / (record.accepted + 1) for record in records if record.index])


def choice_s(records: Sequence[RoundRecord], costs: MeasuredCosts) -> tuple[float, float]:
    """What a controller adds to the host's seconds of a round that drafts, and of one that does not."""
    extra: tuple[list[float], list[float]] = [], []
    for record in records:
        if record.index:
            extra[not record.asked_k].append(record.loop_s - costs.host_s - costs.token_s * record.accepted)
    return typical(extra[0]), typical(extra[1])


def in_place(
    costs: MeasuredCosts, plain: Sequence[RoundRecord], swept: Sequence[RoundRecord], n_prompts: Sequence[int]
) -> MeasuredCosts:
    """`costs` with the target's calls as long as they took between the other work of a round.

    By themselves, the same row count over and over, small calls were up to 10 % slower and large ones 30 % faster. The
    length of a plain step is that of the rounds of `plain`; `swept`, with all row counts, says how much longer others
    are than its own plain rounds, as the machine may run slower than before. Every row count beyond a plain step's is
    corrected like its neighbours: what the other work costs a call changes little from one count to the next, and a
    dozen calls of each say it to 5 %, which is more than a further row costs. Steps stay. n_prompts: tokens of each
    request's prompt, in both.
    """
    step, shares = _shares(costs, plain, n_prompts), _shares(costs, swept, n_prompts)
    if not step or not shares:
        return costs
    level = step[min(step)] / shares.get(min(step), step[min(step)])
    known = _smooth({n: share * level for n, share in shares.items() if n not in step}) | step
    target = {
        at: {n: _scaled(entry, _between(known, n)) for n, entry in rows.items()} for at, rows in costs.target.items()
    }
    return replace(costs, target=target)


def _shares(costs: MeasuredCosts, records: Sequence[RoundRecord], n_prompts: Sequence[int]) -> dict[int, float]:
    """Row count -> how long its calls took, over what `costs` says; of those that were run often enough."""
    found: dict[int, list[float]] = {}
    lengths, n_past = iter(n_prompts), 0
    for record in records:
        if record.index == 0:
            n_past = next(lengths)
        else:
            share = record.target_s / (costs.seconds(record.n_rows, n_past) or 1.0)
            found.setdefault(record.n_rows, []).append(share)
        n_past += record.emitted
    return {n: median(values) for n, values in sorted(found.items()) if len(values) >= LEAST_ROUNDS}


def _smooth(shares: Mapping[int, float]) -> dict[int, float]:
    """The median of each entry and the NEAR before and after it. shares: by ascending row count."""
    values = [*shares.values()]
    return {n: median(values[max(0, i - NEAR) : i + NEAR + 1]) for i, n in enumerate(shares)}


def _between(table: Mapping[int, float], n: int) -> float:
    """The entry of `n`, or its share of the way between the entries around it."""
    below, above = max((m for m in table if m <= n), default=None), min((m for m in table if m >= n), default=None)
    if below is None or above is None:
        return table[min(table) if below is None else max(table)]
    return table[below] + (table[above] - table[below]) * ((n - below) / (above - below) if above > below else 0.0)


def _scaled(entry: Spread, by: float) -> Spread:
    return Spread(entry.median * by, entry.low * by, entry.high * by, entry.n)


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
