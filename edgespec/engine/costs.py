"""What calls cost: measured figures as they are stored, and the running table that a controller keeps while decoding.

Steps in the cost of row counts are kept: no line is ever fitted. A count that was not measured costs what the next
larger one does; beyond the largest, as much again for every row as its own average. Seconds everywhere.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["KEPT", "CostTable", "DraftCosts", "MeasuredCosts", "Spread", "spread", "typical"]

FIRST_GUESS = 0.25  # of a plain step: an extra row, or a draft run, before either was seen
KEPT = 31  # samples of which the median is taken
SEEDS = 8, 4  # samples that a profile's figure counts for, and a guess from other row counts
PACE, MOST_CHANGE = 0.25, 1.25  # how fast the table follows a machine that slows down or a context that grows
HOST_PACE = 0.1
SAVED_PACE = 0.1
CONTEXT_STEP = 32  # cached tokens that a call's cost is taken not to change over


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` measurements."""

    median: float
    low: float
    high: float
    n: int

    def to_json(self) -> list[float]:
        return [self.median, self.low, self.high, self.n]

    @classmethod
    def from_json(cls, values: Sequence[float]) -> Spread:
        median, low, high, n = values
        return cls(float(median), float(low), float(high), int(n))


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    ordered = sorted(values)
    n = len(ordered)
    return Spread(statistics.median(ordered), ordered[n // 4], ordered[min(n - 1, (3 * n) // 4)], n)


def typical(seconds: Sequence[float]) -> float:
    """The median of durations, 0 where there are none."""
    return max(0.0, statistics.median(seconds)) if seconds else 0.0


@dataclass(frozen=True)
class DraftCosts:
    """A drafter. steps: k -> seconds of a proposal right after a commit; catch_up: missed tokens -> seconds more."""

    steps: Mapping[int, Spread]
    catch_up: Mapping[int, Spread] = field(default_factory=dict)

    @property
    def catch_up_token_s(self) -> float:
        """Seconds for each token that the drafter has missed, from the longest stretch measured."""
        if not self.catch_up:
            return 0.0
        longest = max(self.catch_up)
        return max(0.0, self.catch_up[longest].median) / longest

    @cached_property
    def _medians(self) -> dict[int, float]:
        return {n: entry.median for n, entry in self.steps.items()}

    def seconds(self, k: int) -> float:
        """A proposal of k tokens: between two lengths that were measured its share of the steps between them."""
        medians = self._medians
        below = max((n for n in medians if n < k), default=None)
        above = min((n for n in medians if n > k), default=None)
        if k in medians or below is None or above is None:
            return at_or_above(medians, k)
        return medians[below] + (medians[above] - medians[below]) * (k - below) / (above - below)

    def to_json(self) -> dict[str, Any]:
        return {"steps": _to_json(self.steps), "catch_up": _to_json(self.catch_up)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DraftCosts:
        return cls(_from_json(fields["steps"]), _from_json(fields["catch_up"]))


@dataclass(frozen=True)
class MeasuredCosts:
    """target: cached tokens -> rows -> seconds of a call. host_s: of a round outside the runtimes. drafts: by kind.

    token_s: of that, what a further accepted token adds: its row is drawn from as well.
    """

    target: Mapping[int, Mapping[int, Spread]]
    host_s: float = 0.0
    drafts: Mapping[str, DraftCosts] = field(default_factory=dict)
    token_s: float = 0.0

    @cached_property
    def _medians(self) -> dict[int, dict[int, float]]:
        return {at: {n: entry.median for n, entry in rows.items()} for at, rows in self.target.items()}

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """The shortest and the longest context that was measured."""
        return min(self.target), max(self.target)

    def seconds(self, n_rows: int, n_past: int) -> float:
        """A target call of `n_rows` rows on `n_past` cached tokens, between the context lengths that were measured."""
        shortest, longest = self._ends
        least = at_or_above(self._medians[shortest], n_rows)
        if shortest == longest or n_past <= shortest:
            return least
        share = min((n_past - shortest) / (longest - shortest), 4.0)
        return max(least + share * (at_or_above(self._medians[longest], n_rows) - least), 0.5 * least)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": {str(at): _to_json(rows) for at, rows in self.target.items()},
            "host_s": self.host_s,
            "token_s": self.token_s,
            "drafts": {source: costs.to_json() for source, costs in self.drafts.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> MeasuredCosts:
        """What `to_json` wrote; raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        return cls(
            {int(at): _from_json(rows) for at, rows in fields["target"].items()},
            float(fields["host_s"]),
            {source: DraftCosts.from_json(entry) for source, entry in fields["drafts"].items()},
            float(fields["token_s"]),
        )


def at_or_above(table: Mapping[int, float], n: int) -> float:
    """The entry of `n`, or of the next larger key; beyond the largest its average for every unit more."""
    if n in table:
        return table[n]
    above = [key for key in table if key > n]
    if above:
        return table[min(above)]
    largest = max(table)
    return table[largest] * n / largest


def _to_json(table: Mapping[int, Spread]) -> dict[str, list[float]]:
    return {str(n): entry.to_json() for n, entry in table.items()}


def _from_json(fields: Mapping[str, Sequence[float]]) -> dict[int, Spread]:
    return {int(n): Spread.from_json(values) for n, values in fields.items()}


class _Running:
    """Medians of the latest samples by key."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {}

    def add(self, key: int, value: float) -> None:
        samples = self._samples.setdefault(key, deque(maxlen=KEPT))
        samples.append(value)
        self.medians[key] = statistics.median(samples)


class CostTable:
    """Costs as this process has seen them, on top of `measured` where a profile is there; outlives requests.

    `pace` is how much slower than the table the machine runs now (heat, other work, a longer context), learnt from
    every call, so that row counts that were not run lately follow the others.
    """

    def __init__(self, measured: MeasuredCosts | None = None) -> None:
        self.measured = measured
        self.pace = 1.0
        self.host_s = measured.host_s if measured else 0.0
        self.token_s = measured.token_s if measured else 0.0
        self._rows = _Running()
        self._seen: Counter[int] = Counter()
        self._drafts: dict[str, _Running] = {}
        self._catch_up: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._context = -1  # in steps, of what is remembered
        self._bases: dict[int, float] = {}  # rows -> seconds at the usual pace, until something new is learnt

    def knows(self, n_rows: int) -> bool:
        """Whether a call of so many rows was measured here or in the profile."""
        return n_rows in self._rows.medians or self.measured is not None

    def samples(self, n_rows: int) -> int:
        """How often a call of so many rows was seen, a profile's figure counting for several."""
        return self._seen[n_rows] + (SEEDS[0] if self.measured is not None else 0)

    def target_s(self, n_rows: int, n_past: int, least: int = 1) -> float | None:
        """A target call; None while nothing at all is known. No less than one of `least` rows, whatever noise says."""
        base = self._known(n_rows, n_past)
        if base is None:
            return None
        if least < n_rows:
            base = max(base, self._known(least, n_past) or 0.0)
        return base * self.pace

    def _known(self, n_rows: int, n_past: int) -> float | None:
        """`_base`, remembered: a controller asks the same again, round after round."""
        if n_past // CONTEXT_STEP != self._context:
            self._context = n_past // CONTEXT_STEP
            self._bases.clear()
        base = self._bases.get(n_rows)
        if base is None:
            base = self._base(n_rows, n_past)
            if base is not None:
                self._bases[n_rows] = base
        return base

    def _base(self, n_rows: int, n_past: int) -> float | None:
        medians = self._rows.medians
        if n_rows in medians:
            return medians[n_rows]
        if self.measured is not None:
            return self.measured.seconds(n_rows, n_past)
        if not medians:
            return None
        above = [n for n in medians if n > n_rows]
        below = [n for n in medians if n < n_rows]
        if not below:
            return medians[min(above)]
        nearest, least = max(below), min(medians)
        a_row = FIRST_GUESS * medians[least]
        if nearest > least:
            a_row = max(0.0, (medians[nearest] - medians[least]) / (nearest - least))
        guess = medians[nearest] + (n_rows - nearest) * a_row
        return min(guess, medians[min(above)]) if above else guess

    def learn_target(self, n_rows: int, n_past: int, seconds: float) -> None:
        """Take in one call of a round."""
        base = self._base(n_rows, n_past) if self.knows(n_rows) else None
        if base:
            self.pace *= min(max(seconds / (base * self.pace), 1 / MOST_CHANGE), MOST_CHANGE) ** PACE
        self._seen[n_rows] += 1
        is_settled = self.measured is not None or self._seen[n_rows] > KEPT
        if is_settled and n_rows == min(self._seen):
            return  # the yardstick: what changes with it is the pace
        if self.measured is None:
            self._bases.clear()  # guesses lean on other row counts
        self._bases.pop(n_rows, None)
        if self._seen[n_rows] == 1 and (guess := self._base(n_rows, n_past)):
            for _ in range(SEEDS[self.measured is None]):
                self._rows.add(n_rows, guess)
        self._rows.add(n_rows, seconds / self.pace)

    def learn_host(self, seconds: float, verify_s: float, n_judged: int) -> None:
        """Host time of one round, drafting left out; what of it was verifying, and how many rows that looked at."""
        token_s = verify_s / n_judged
        self.token_s += HOST_PACE * (min(token_s, 4 * self.token_s + 1e-3) - self.token_s)
        seconds -= verify_s - token_s
        self.host_s += HOST_PACE * (min(max(seconds, 0.0), 4 * self.host_s + 1e-3) - self.host_s)

    def draft_s(self, source: str, k: int, passes: int | None, plain_s: float) -> float:
        """A proposal of k tokens by a source that has missed none. plain_s: what a plain step costs."""
        if source in self._drafts:
            return at_or_above(self._drafts[source].medians, k) * self.pace
        if self.measured is not None and source in self.measured.drafts:
            return self.measured.drafts[source].seconds(k) * self.pace
        return (k if passes is None else passes) * FIRST_GUESS * plain_s

    def saved(self, source: str) -> float:
        """The share of drafting that was lately there when it was asked for; 0 under the serial schedule."""
        return self._saved.get(source, 0.0)

    def catch_up_s(self, source: str, n_missed: int) -> float:
        """What a source needs more because it has sat out while `n_missed` tokens were committed."""
        if source in self._catch_up:
            return self._catch_up[source] * n_missed
        if self.measured is not None and source in self.measured.drafts:
            return self.measured.drafts[source].catch_up_token_s * n_missed
        return 0.0

    def learn_draft(self, source: str, k: int, seconds: float) -> None:
        """Take in a proposal of k tokens, the source having missed none."""
        self._drafts.setdefault(source, _Running()).add(k, seconds / self.pace)

    def learn_saved(self, source: str, share: float) -> None:
        """Take in how much of one proposal had been drafted ahead."""
        self._saved[source] = self.saved(source) + SAVED_PACE * (min(max(share, 0.0), 1.0) - self.saved(source))

    def learn_catch_up(self, source: str, n_missed: int, seconds: float) -> None:
        """Take in what catching up `n_missed` tokens took beyond the proposal itself."""
        rate = max(seconds, 0.0) / n_missed
        self._catch_up[source] = 0.5 * (rate + self._catch_up[source]) if source in self._catch_up else rate
