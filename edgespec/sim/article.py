"""Speed-ups on paper: the estimate that tutorials print, the exact expectation, and a worked example of both.

c is the time of a draft step over that of a target step, a the chance that a drafted token is accepted; verifying any
number of tokens takes one target step here. Knows no profile: `edgespec.sim.schedules` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "WorkedExample",
    "ceiling",
    "exact_speedup",
    "expected_tokens",
    "speedup_table",
    "textbook_speedup",
    "worked_example",
]


def expected_tokens(k: int, acceptance: float) -> float:
    """Tokens a round, the target's own included: (1 - a^(k+1)) / (1 - a) (Leviathan, arXiv 2211.17192)."""
    return sum(acceptance**j for j in range(k + 1))


def textbook_speedup(k: int, cost_ratio: float) -> float:
    """k / (1 + k c): every drafted token accepted, the target's own not counted. Often printed as an upper bound."""
    return k / (1 + k * cost_ratio)


def ceiling(k: int, cost_ratio: float) -> float:
    """(k + 1) / (1 + k c): the true upper bound, every drafted token accepted."""
    return (k + 1) / (1 + k * cost_ratio)


def exact_speedup(k: int, cost_ratio: float, acceptance: float) -> float:
    """expected_tokens / (1 + k c)."""
    return expected_tokens(k, acceptance) / (1 + k * cost_ratio)


def speedup_table(
    ks: Sequence[int] = (1, 2, 3, 5, 8, 10),
    cost_ratios: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.5),
    acceptance: float = 0.8,
) -> list[dict[str, float]]:
    """A row for each k and cost ratio: the estimate that tutorials print, the true upper bound, the expectation."""
    return [
        {
            "k": k,
            "cost_ratio": c,
            "acceptance": acceptance,
            "textbook": textbook_speedup(k, c),
            "ceiling": ceiling(k, c),
            "exact": exact_speedup(k, c, acceptance),
        }
        for k in ks
        for c in cost_ratios
    ]


@dataclass(frozen=True)
class WorkedExample:
    """One set of figures counted three ways; seconds for `n_tokens` tokens.

    printed: rounds that are counted by their expected number of accepted draft tokens, sum of a^j for j = 1..k; the
    target's own token of each round is forgotten. coded: rounds that accept int(k a) tokens each, as if acceptance did
    not end at the first miss, and again without the target's own. exact: expected tokens a round, its own included.
    """

    n_tokens: int
    target_s: float
    draft_s: float
    k: int
    acceptance: float
    plain_s: float
    printed_s: float
    coded_s: float
    exact_s: float

    @property
    def printed(self) -> float:
        return self.plain_s / self.printed_s

    @property
    def coded(self) -> float:
        return self.plain_s / self.coded_s

    @property
    def exact(self) -> float:
        return self.plain_s / self.exact_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "printed": self.printed, "coded": self.coded, "exact": self.exact}


def worked_example(
    n_tokens: int = 100, target_s: float = 0.2, draft_s: float = 0.01, k: int = 5, acceptance: float = 0.8
) -> WorkedExample:
    """The tutorial's own figures by default: 20.0 s against 9.5 s as printed, 6.25 s as coded, 6.78 s in truth."""
    round_s = k * draft_s + target_s
    counted = expected_tokens(k, acceptance) - 1
    return WorkedExample(
        n_tokens=n_tokens,
        target_s=target_s,
        draft_s=draft_s,
        k=k,
        acceptance=acceptance,
        plain_s=n_tokens * target_s,
        printed_s=math.ceil(n_tokens / counted) * round_s,
        coded_s=math.ceil(n_tokens / max(1, int(k * acceptance))) * round_s,
        exact_s=n_tokens / expected_tokens(k, acceptance) * round_s,
    )
