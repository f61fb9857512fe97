"""Speeds at standard costs: every round takes what its kind took at the median over all ways to decode of a run.

What is left is what was decided and what was accepted: the same call that took 4 ms for one and 6 ms for another, as
the machine had other work, costs both the same. Knows round records and no models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from edgespec.stats import RunStats
from edgespec.types import FILLER, RoundRecord

__all__ = ["Pace", "standard_paces", "together"]

UNDRAFTED = ("none", FILLER)
Answers = Mapping[str, Sequence[Sequence[RoundRecord]]]


class Pace(NamedTuple):
    """Of an answer without its first round: tokens, and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, stats: RunStats) -> Pace:
        """Nothing where all came in one round."""
        tokens = sum(record.emitted for record in stats.records[1:])
        return cls(tokens, tokens / stats.decode_tok_s) if stats.decode_tok_s else cls(0, 0.0)


def together(paces: Sequence[Pace]) -> float:
    """Tokens a second over all answers, one after the other."""
    return sum(pace.tokens for pace in paces) / sum(pace.seconds for pace in paces)


def standard_paces(answers: Answers) -> dict[str, list[Pace]]:
    """Label -> pace of each answer. answers: label -> records of each prompt.

    A call costs the median of its row count, a proposal that of its source and length, both over all labels; the rest
    of a round the median of its label. A proposal after rounds without one also catches up: it costs what it did.
    """
    calls: defaultdict[int, list[float]] = defaultdict(list)
    proposals: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    hosts: defaultdict[str, list[float]] = defaultdict(list)
    for label, texts in answers.items():
        for record, is_usual in (pair for text in texts for pair in _rounds(text)):
            calls[record.n_rows].append(record.target_s)
            hosts[label].append(record.loop_s)
            if is_usual:
                proposals[record.source, record.drafted].append(record.propose_s)
    call_s = {rows: median(values) for rows, values in calls.items()}
    proposal_s = {key: median(values) for key, values in proposals.items()}
    paces: dict[str, list[Pace]] = {}
    for label, texts in answers.items():
        host_s = median(hosts[label]) if hosts[label] else 0.0
        paces[label] = []
        for text in texts:
            tokens, seconds = 0, 0.0
            for record, is_usual in _rounds(text):
                drafting_s = proposal_s[record.source, record.drafted] if is_usual else record.propose_s
                seconds += call_s[record.n_rows] + drafting_s + host_s
                tokens += record.emitted
            paces[label].append(Pace(tokens, seconds))
    return paces


def _rounds(text: Sequence[RoundRecord]) -> list[tuple[RoundRecord, bool]]:
    """All rounds but the first, and whether each holds a proposal of a source that drafted in the round before too."""
    return [
        (record, record.source not in UNDRAFTED and record.source == before.source) for before, record in pairwise(text)
    ]
