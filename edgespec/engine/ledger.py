"""The account that bounds what speculation may lose against plain decoding, by counting.

Two balances, in plain steps (time) and in rows and draft runs (counts). A round may draft only what both can pay if
nothing at all is accepted, so a draft that never agrees loses at most the opening balances and the trickle: over the
first 200 tokens 8 + 2 rows and runs (5 %) and 2 + 2 plain steps (2 %), after that 1 % of the tokens. Gains refill the
balances up to a ceiling, so that after any success the loss of what follows is bounded again: MOST_STEPS + 1 % and
MOST_COUNT + 1 %.
Knows no clock, and of sources the name alone: rows given back to one that would have paid are for it alone.
"""

from __future__ import annotations

__all__ = ["Ledger"]

OPEN_STEPS, MOST_STEPS = 2.0, 4.0
OPEN_COUNT, MOST_COUNT = 8.0, 64.0
LEAST_COUNT = 4.0  # of one round, where the balance has as much
TRICKLE = 0.01  # of both, with every emitted token


class Ledger:
    """Balances of one LLM; they outlive requests, so that a thousand short requests lose no more than a long one."""

    def __init__(self) -> None:
        self.steps = OPEN_STEPS
        self.count = OPEN_COUNT
        self.credit: dict[str, float] = {}  # source -> rows that it may run whatever the count says
        self.spent_count = 0  # rows beyond a plain step's and draft runs, ever
        self.lost_steps = 0.0  # of rounds that lost, ever
        self.won_steps = 0.0
        self.tokens = 0

    def caution(self, count: int, source: str = "") -> float:
        """The chance that a proposal of so many rows and runs should have: the higher the less of the opening count it
        leaves. 0 once one has paid."""
        left = max(self.count, self.credit.get(source, 0.0)) - count
        return 0.0 if self.won_steps else max(0.0, 1.0 - left / OPEN_COUNT)

    def affords(self, steps: float, count: int, source: str = "") -> bool:
        """Whether a round of `source` may lose so much; of the counts half of what is left at most, once one has lost.

        One long proposal after another would empty the balance before an estimate has noticed.
        """
        most = max(self.count / 2, min(self.count, LEAST_COUNT)) if self.lost_steps else self.count
        return steps <= self.steps and count <= max(most, self.credit.get(source, 0.0))

    def vindicate(self, source: str) -> None:
        """A proposal that was not run would have paid: its source may try rows again, time is as scarce as before."""
        self.credit[source] = OPEN_COUNT

    def settle(self, emitted: int, gained_steps: float = 0.0, count: int = 0, source: str = "") -> None:
        """Book one round. gained_steps: plain steps that it saved, negative where it lost; count: rows and runs."""
        self.tokens += emitted
        self.spent_count += count
        if gained_steps >= 0:
            self.won_steps += gained_steps
        else:
            self.lost_steps -= gained_steps
        trickle = TRICKLE * emitted
        # What is over the opening balance was earned: the trickle alone never lifts a balance above it.
        self.steps = max(self.steps, min(self.steps + trickle, OPEN_STEPS))
        self.count = max(self.count, min(self.count + trickle, OPEN_COUNT))
        self.steps = min(self.steps + gained_steps, MOST_STEPS)
        lent = min(float(count), self.credit.get(source, 0.0))
        if lent:
            self.credit[source] -= lent
        self.count -= count - lent
        if gained_steps > 0:  # what has just paid is not useless: from here on time is the tighter bound
            self.count = MOST_COUNT

    def to_dict(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "extra_rows_and_draft_runs": self.spent_count,
            "plain_steps_lost": round(self.lost_steps, 3),
            "plain_steps_won": round(self.won_steps, 3),
            "balance_steps": round(self.steps, 3),
            "balance_count": round(self.count, 3),
        }
