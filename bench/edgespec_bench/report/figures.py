"""Figures of a run, from its rows: speeds, paired ratios, the best of several sides, costs.

A figure that the rows do not have is None. Ratios are of answers to the same prompt in the same turn, medians are over
prompts and turns. Knows no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec_bench.prompts import KINDS
from edgespec_bench.spread import Spread, spread

__all__ = ["EDGESPEC", "Comparison", "Figures", "per_token", "tok_s", "tpot_s"]

EDGESPEC = "edgespec"
NATIVE = "edgespec/plain"
EXACT = "edgespec/exact-plain"
Row = dict[str, Any]


def _timed(row: Row) -> int:
    """Tokens that came after the first arrival."""
    return int(row["n_tokens"] - row.get("first_tokens", 1))


def tok_s(row: Row) -> float:
    """Tokens a second after the first arrival."""
    return float(_timed(row) / row["seconds"])


def tpot_s(row: Row) -> float:
    """Seconds a token after the first arrival."""
    return float(row["seconds"] / _timed(row))


def per_token(name: str) -> Callable[[Row], float | None]:
    """Of a field that covers the time after the first arrival, its share of a token."""
    return lambda row: row[name] / _timed(row) if row.get(name) is not None else None


@dataclass(frozen=True)
class Comparison:
    """One side over another on the same prompts. ratio: of neighbours."""

    side: str
    other: str
    ratio: Spread
    tok_s: float
    other_tok_s: float


class Figures:
    """The rows of one run. Of answers to the same request the last one counts: a part may have been begun again."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.card: Row = next((row for row in rows if row["row"] == "card"), {})
        self.sides: dict[tuple[str, str], Row] = {(r["part"], r["side"]): r for r in self.all("side")}
        found: dict[tuple[Any, ...], Row] = {}
        for row in self.all("run"):
            found[row["part"], row["side"], row["kind"], row["setting"], row["prompt"], row["turn"]] = row
        self._runs = found

    def all(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["row"] == kind]

    def names(self, part: str, keep: Callable[[Row], bool] = lambda row: True) -> list[str]:
        """Sides of a part, in the order in which they were started."""
        return [side for (own, side), row in self.sides.items() if own == part and keep(row)]

    def kinds(self, part: str) -> list[str]:
        measured = {key[2] for key in self._runs if key[0] == part}
        return [kind for kind in KINDS if kind in measured]

    def settings(self, part: str) -> list[str]:
        return sorted({key[3] for key in self._runs if key[0] == part})

    def runs(self, part: str, side: str, kinds: Iterable[str] | None = None, setting: str | None = None) -> list[Row]:
        """Answers of one side; None takes all kinds, all settings."""
        wanted = None if kinds is None else set(kinds)
        return [
            row
            for (own, name, kind, how, _, _), row in self._runs.items()
            if (own, name) == (part, side) and (wanted is None or kind in wanted) and setting in (None, how)
        ]

    def spread_of(self, rows: Iterable[Row], value: Callable[[Row], float | None]) -> Spread | None:
        """Over the rows that have the value."""
        values = [found for row in rows if (found := value(row)) is not None]
        return spread(values) if values else None

    def speed(self, part: str, side: str, kinds: Iterable[str] | None, setting: str) -> Spread | None:
        """Tokens a second."""
        return self.spread_of(self.runs(part, side, kinds, setting), tok_s)

    def best(self, part: str, sides: Iterable[str], kinds: Sequence[str], setting: str) -> str | None:
        """The side with the highest median speed on all of these kinds; one that lacks a kind is out."""
        able = [s for s in sides if all(self.runs(part, s, [kind], setting) for kind in kinds)]
        speeds = {side: self.speed(part, side, kinds, setting) for side in able}
        return max(able, key=lambda side: speeds[side].median) if able else None  # type: ignore[union-attr]

    def compare(self, part: str, side: str | None, other: str | None, kinds: Sequence[str], setting: str) -> Any:
        """A Comparison, or None where one of them is None or they share no prompt."""
        if side is None or other is None:
            return None
        pairs = []
        for row in self.runs(part, side, kinds, setting):
            partner = self._runs.get((part, other, row["kind"], setting, row["prompt"], row["turn"]))
            if partner is not None:
                pairs.append((tok_s(row), tok_s(partner)))
        if not pairs:
            return None
        ours, theirs = zip(*pairs, strict=True)
        ratios = spread([a / b for a, b in pairs])
        return Comparison(side, other, ratios, spread(ours).median, spread(theirs).median)

    def native(self, part: str) -> str | None:
        """edgespec's native plain decoding, one row a step."""
        return NATIVE if (part, NATIVE) in self.sides else None

    def same_texts(self, part: str) -> tuple[int, int]:
        """(same, all) answers of edgespec's speculative sides beside plain decoding on the same rows, same seed."""
        pairs = [
            (row["text"], partner["text"])
            for side in self.own(part, "speculative")
            for row in self.runs(part, side)
            if (partner := self._runs.get((part, EXACT, *(row[k] for k in ("kind", "setting", "prompt", "turn")))))
        ]
        return sum(a == b for a, b in pairs), len(pairs)

    def own(self, part: str, what: str) -> list[str]:
        return self.names(part, lambda row: row["engine"] == EDGESPEC and row["what"] == what)

    def peers(self, part: str, what: str | None = None) -> list[str]:
        return self.names(part, lambda row: row["engine"] != EDGESPEC and what in (None, row["what"]))

    def kld(self, side: str, model: str | None = None) -> float | None:
        """KLD from the float weights, of the model of the run unless another is named."""
        model = model or self.card.get("model")
        found = [r["kld"] for r in self.all("fidelity") if (r["side"], r["model"]) == (side, model)]
        return found[-1] if found else None

    def cost(self, model: str) -> dict[int, float]:
        """Rows -> median milliseconds of a call in the runtime."""
        return {row["rows"]: row["ms"]["median"] for row in self.all("cost") if row["model"] == model}

    def profile(self, model: str) -> dict[int, dict[str, float]]:
        """Rows -> part -> milliseconds of a call."""
        return {row["rows"]: row["ms"] for row in self.all("profile") if row["model"] == model}

    def gops(self, model: str) -> dict[int, float]:
        """Rows -> what the products of a call compute a second, in 10^9 operations."""
        return {r["rows"]: r["gops"] for r in self.all("profile") if r["model"] == model and r.get("gops")}

    def products(self, model: str) -> list[str]:
        """The parts of a call that are matrix products with weights."""
        return next((row["products"] for row in self.all("profile") if row["model"] == model), [])

    def acceptance(self, part: str, side: str, kinds: Iterable[str] | None, setting: str) -> list[float]:
        """By position: of the rounds that offered a token there, the share that accepted it; weighted by rounds."""
        rows = [row for row in self.runs(part, side, kinds, setting) if row.get("by_position") and row.get("rounds")]
        shares = []
        for place in range(max((len(row["by_position"]) for row in rows), default=0)):
            have = [row for row in rows if len(row["by_position"]) > place]
            weight = sum(row["rounds"] for row in have)
            shares.append(sum(row["by_position"][place] * row["rounds"] for row in have) / weight)
        return shares

    def tokens_a_round(self, part: str, side: str, kinds: Iterable[str] | None, setting: str) -> float | None:
        """Mean acceptance length: tokens after the first arrival over the rounds that made them."""
        rows = [row for row in self.runs(part, side, kinds, setting) if row.get("rounds")]
        return sum(map(_timed, rows)) / sum(row["rounds"] for row in rows) if rows else None

    def round_ms(self, part: str, side: str, kinds: Iterable[str] | None, setting: str | None) -> dict[str, float]:
        """Mean milliseconds of a round: `seconds` the whole, and host_s, target_s, draft_s as far as the engine tells.

        Empty where it does not count rounds.
        """
        rows = [row for row in self.runs(part, side, kinds, setting) if row.get("rounds")]
        rounds = sum(row["rounds"] for row in rows)
        told = [name for name in ("seconds", "target_s", "draft_s", "host_s") if all(name in row for row in rows)]
        return {name: 1e3 * sum(row[name] for row in rows) / rounds for name in told} if rounds else {}
