"""Counts and times of a run, derived from its round records; every rate has one definition, given here.

acceptance_rate = accepted / drafted. mean_acceptance_length = emitted tokens a round, the target's own token included.
emitted = accepted + accepted_fillers + rounds - cut. The free guesses in the filler rows of exact mode are a source of
their own: they stay out of `drafted`, `accepted` and the acceptance rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from edgespec.types import FILLER, RoundRecord

__all__ = ["RunStats", "SourceStats"]


@dataclass
class SourceStats:
    """Drafted and accepted tokens of one proposal source."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class RunStats:
    """Statistics of one generated sequence; times in seconds."""

    seed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, already in the target's cache
    exact: bool = False
    tree: bool = False  # proposals were trees
    ttft_s: float = 0.0
    total_s: float = 0.0
    records: list[RoundRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    devices: dict[str, Any] = field(default_factory=dict)  # what `edgespec.device_report.devices_json` makes
    controller: dict[str, Any] = field(default_factory=dict)  # what an adaptive one chose, and why it drafted nothing

    def add(self, record: RoundRecord) -> None:
        self.records.append(record)

    @property
    def rounds(self) -> int:
        return len(self.records)

    @property
    def emitted(self) -> int:
        return sum(r.emitted for r in self.records)

    @property
    def cut(self) -> int:
        return sum(r.cut for r in self.records)

    @property
    def sources(self) -> dict[str, SourceStats]:
        table: dict[str, SourceStats] = {}
        for record in self.records:
            if record.drafted:
                row = table.setdefault(record.source, SourceStats())
                row.drafted += record.drafted
                row.accepted += record.accepted
        return table

    @property
    def drafted(self) -> int:
        return sum(s.drafted for name, s in self.sources.items() if name != FILLER)

    @property
    def accepted(self) -> int:
        return sum(s.accepted for name, s in self.sources.items() if name != FILLER)

    @property
    def accepted_fillers(self) -> int:
        return self.sources.get(FILLER, SourceStats()).accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None

    def acceptance_by_position(self) -> list[float]:
        """Entry j: of the rounds that offered a token for place j, the share that accepted one there.

        A chain of n tokens offers places 0..n; a tree counts for every place, as its depth is not recorded.
        """
        rounds = [r for r in self.records if r.drafted and r.source != FILLER]
        most = max((r.accepted if self.tree else r.drafted for r in rounds), default=0)
        shares = []
        for j in range(most):
            offered = [r for r in rounds if self.tree or r.drafted > j]
            shares.append(sum(r.accepted > j for r in offered) / len(offered))
        return shares

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first round, which holds the prompt."""
        n = self.emitted - (self.records[0].emitted if self.records else 0)
        elapsed = self.total_s - self.ttft_s
        return n / elapsed if n > 0 and elapsed > 0 else None

    def overlap(self) -> dict[str, Any] | None:
        """What preparing ahead did; None where no draft pass ever ran beside the target.

        hits, misses: rounds whose outcome had been prepared, wholly or in part, or not. late_ms: total time that
        verdicts waited for a draft pass in flight. target_slowdown, draft_slowdown: how much longer each took beside
        the other than alone (medians of equal row counts, and of passes), None where it was never alone.
        """
        rounds = [r for r in self.records if r.ahead]
        if not rounds:
            return None
        alone = [r.propose_s / r.drafted for r in self.records if r.drafted and r.hit is not True and r.propose_s]
        beside = [r.ahead_s / r.ahead for r in rounds]
        return {
            "hits": sum(r.hit is True for r in self.records),
            "misses": sum(r.hit is False for r in self.records),
            "passes_ahead": sum(r.ahead for r in rounds),
            "late_ms": 1e3 * sum(r.late_s for r in rounds),
            "target_slowdown": self._target_slowdown(),
            "draft_slowdown": median(beside) / median(alone) if alone and median(alone) else None,
        }

    def _target_slowdown(self) -> float | None:
        """Over row counts that ran both beside the draft and alone, the first round (it holds the prompt) left out."""
        ratios = []
        for n_rows in {r.n_rows for r in self.records}:
            beside, alone = (
                [r.target_s for r in self.records[1:] if r.n_rows == n_rows and bool(r.ahead) == busy]
                for busy in (True, False)
            )
            if beside and alone and median(alone):
                ratios.append(median(beside) / median(alone))
        return median(ratios) if ratios else None

    @property
    def host_ms_per_round(self) -> float | None:
        """Median milliseconds a round outside the runtimes, the first round left out."""
        times = sorted(r.host_s for r in self.records[1:])
        return 1e3 * times[len(times) // 2] if times else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.emitted,
            "exact": self.exact,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_fillers": self.accepted_fillers,
            "cut": self.cut,
            "sources": {n: {"drafted": s.drafted, "accepted": s.accepted} for n, s in self.sources.items()},
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position(),
            "mean_acceptance_length": self.mean_acceptance_length,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "tok_s": self.decode_tok_s,
            "host_ms_per_round": self.host_ms_per_round,
            "devices": self.devices,
            "controller": self.controller,
            "overlap": self.overlap(),
            "notes": list(self.notes),
        }
