"""The table of targets: what was wanted, what was measured, and for what was missed a sentence on what bounds it.

Every target is a function of a run's figures. A target whose rows are missing says which; it is never taken for met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec_bench.report.bounds import bandwidth_bound, plain_bound, round_bound, rows_bound
from edgespec_bench.report.figures import NATIVE, Comparison, Figures
from edgespec_bench.suite.parts import COPYING

__all__ = ["TARGETS", "Judged", "Measured", "Target", "judge"]

SAME_SPEED = 1.02  # V(1) of another export counts as no slower within what repeats vary by


@dataclass(frozen=True)
class Measured:
    """value: None where the rows lack it, and `how` then says what is missing. quartiles: of the paired ratios."""

    value: float | None
    how: str
    quartiles: tuple[float, float] | None = None
    bound: str = ""


@dataclass(frozen=True)
class Target:
    """must, stretch: the ratio wanted; lower is better where `is_lower`."""

    key: str
    what: str
    must: float
    stretch: float
    measure: Callable[[Figures], Measured]
    is_lower: bool = False
    unit: str = "x"

    def reaches(self, value: float | None, wanted: float) -> bool:
        if value is None:
            return False
        return value <= wanted if self.is_lower else value >= wanted


@dataclass(frozen=True)
class Judged:
    """A target with what was measured. verdict: stretch | met | missed | not measured."""

    target: Target
    measured: Measured

    @property
    def verdict(self) -> str:
        value, target = self.measured.value, self.target
        if value is None:
            return "not measured"
        if target.reaches(value, target.stretch):
            return "stretch"
        return "met" if target.reaches(value, target.must) else "missed"

    def to_dict(self) -> dict[str, Any]:
        value, target, quartiles = self.measured.value, self.target, self.measured.quartiles
        return {
            "key": target.key,
            "what": target.what,
            "must": target.must,
            "stretch": target.stretch,
            "measured": None if value is None else round(value, 3),
            "quartiles": None if quartiles is None else [round(q, 3) for q in quartiles],
            "verdict": self.verdict,
            "how": self.measured.how,
        }


def _of(comparison: Comparison | None, missing: str, bound: str = "", more: str = "") -> Measured:
    if comparison is None:
        return Measured(None, missing)
    c = comparison
    how = f"{c.side} {c.tok_s:.0f} tok/s, {c.other} {c.other_tok_s:.0f}{more}"
    return Measured(c.ratio.median, how, (c.ratio.quartile1, c.ratio.quartile3), bound)


def _plain_vs_peer(figures: Figures) -> Measured:
    """One row a step against the fastest plain peer of the same bits, whose KLD must be no better: `how` tells.

    On prompts of all kinds: what a step costs hardly depends on them, and ten prompts of one kind are few on a machine
    whose memory others use too.
    """
    equal = [side for side in figures.peers("sides", "plain") if _bits(figures, side) == 4]
    kinds = figures.kinds("sides")
    found = figures.compare("sides", NATIVE, figures.best("sides", equal, kinds, "t0"), kinds, "t0")
    if found is None:
        return Measured(None, "no peer of four bits ran: `python -m edgespec_bench peers --setup`")
    klds = figures.kld(found.side), figures.kld(found.other)
    more = "; KLD not measured"
    if None not in klds:
        more = f"; KLD {klds[0]:.3f} against {klds[1]:.3f}" + ("" if klds[0] <= klds[1] else ", WORSE than the peer's")
    return _of(found, "", plain_bound(figures), more)


def _bits(figures: Figures, side: str) -> int:
    """Of a side's weights: 4 unless its settings say otherwise."""
    settings = figures.sides["sides", side]["settings"]
    return 32 if settings.get("dtype") == "float32" else int(settings.get("bits", 4))


def _flat(figures: Figures) -> Measured:
    """The flattest of the exports that are as faithful and as fast at one row as the model of the run."""
    default = figures.card.get("model", "")
    base = figures.cost(default)
    if not {1, 5} <= base.keys():
        return Measured(None, "V(n) was not measured (part costs)", None)
    side = NATIVE
    limit, able = figures.kld(side), {default: base[5] / base[1]}
    for model in dict.fromkeys(row["model"] for row in figures.all("cost")):
        cost, kld = figures.cost(model), figures.kld(side, model)
        is_fair = limit is not None and kld is not None and kld <= limit and cost[1] <= SAME_SPEED * base[1]
        if is_fair:
            able[model] = cost[5] / cost[1]
    best = min(able, key=lambda model: able[model])
    cost = figures.cost(best)
    how = f"{best}: {cost[1]:.2f} -> {cost[5]:.2f} ms for 1 and 5 rows"
    return Measured(able[best], how, None, rows_bound(figures, best))


def _speculative_vs_peer(kinds: Sequence[str], setting: str) -> Callable[[Figures], Measured]:
    def measure(figures: Figures) -> Measured:
        ours = figures.best("sides", figures.own("sides", "speculative"), kinds, setting)
        theirs = figures.best("sides", figures.peers("sides"), kinds, setting)
        bound = round_bound(figures, "sides", ours, kinds, setting)
        return _of(figures.compare("sides", ours, theirs, kinds, setting), "no peer ran on these prompts", bound)

    return measure


def _speculative_vs_plain(part: str, kinds: Sequence[str], setting: str) -> Callable[[Figures], Measured]:
    def measure(figures: Figures) -> Measured:
        ours = figures.best(part, figures.own(part, "speculative"), kinds, setting)
        bound = round_bound(figures, part, ours, kinds, setting)
        return _of(
            figures.compare(part, ours, figures.native(part), kinds, setting), f"part {part} has no such answers", bound
        )

    return measure


def _scaled(figures: Figures) -> Measured:
    found = _speculative_vs_plain("scaled", ["chat"], "t0")(figures)
    if found.value is None:
        why = [row["reason"] for row in figures.all("skip") if row["part"] == "scaled"]
        return Measured(None, why[-1] if why else "part scaled was not measured")
    ours = figures.best("scaled", figures.own("scaled", "speculative"), ["chat"], "t0")
    shares = figures.acceptance("scaled", str(ours), ["chat"], "t0")
    accepted = f"; accepted at the first position {shares[0]:.2f}" if shares else ""
    return Measured(found.value, f"synthetic target: {found.how}{accepted}", found.quartiles, found.bound)


def _predicted(figures: Figures) -> Measured:
    rows = [row for row in figures.all("prediction") if "k =" in row["label"] and row["predicted_tok_s"]]
    if not rows:
        return Measured(None, "part prediction was not measured")
    best = max(rows, key=lambda row: row["predicted_tok_s"])
    how = (
        f"{best['label']}: predicted {best['predicted_tok_s']:.0f}, measured {best['measured_tok_s']:.0f} tok/s, "
        f"both over plain decoding in their own run; "
        f"as absolute speeds {best['measured_tok_s'] / best['predicted_tok_s']:.2f}"
    )
    bound = "acceptance and costs were measured on other prompts, and shares of few prompts differ by a tenth"
    return Measured(1 / (1 + best["relative_error"]), how, None, bound)


def _bandwidth(figures: Figures) -> Measured:
    bandwidth = next((row["gb_s"] for row in reversed(figures.all("bandwidth"))), None)
    model = figures.card.get("model")
    read = next((row["read_bytes"] for row in reversed(figures.all("weights")) if row["model"] == model), None)
    plain = figures.native("sides")
    if bandwidth is None or read is None or plain is None:
        return Measured(None, "needs the parts costs and sides")
    speed = figures.speed("sides", plain, ["chat"], "t0")
    if speed is None:
        return Measured(None, "no chat prompt was measured at T = 0")
    most = 1e9 * bandwidth / read
    how = f"{speed.median:.0f} of {most:.0f} tok/s: {read / 1e6:.1f} MB of weights a step at {bandwidth:.1f} GB/s"
    quartiles = speed.quartile1 / most, speed.quartile3 / most
    return Measured(speed.median / most, how, quartiles, bandwidth_bound(figures, read, bandwidth))


TARGETS = (
    Target("plain_vs_peer", "plain one-row decode vs the best peer's, equal bits, KLD no worse, all prompts", 1.05, 1.3,
           _plain_vs_peer),
    Target("flat_v5", "V(5)/V(1), KLD as int4's or better, V(1) no slower", 1.7, 1.3, _flat, is_lower=True),
    Target(
        "chat_t0_vs_peer", "best speculative vs best of any peer, chat, T = 0", 1.3, 2.0,
        _speculative_vs_peer(["chat"], "t0"),
    ),
    Target(
        "chat_t08_vs_peer", "the same, T = 0.8, top-p 0.95", 1.15, 1.5, _speculative_vs_peer(["chat"], "t08")
    ),
    Target("copy_vs_peer", "the same, copy-heavy prompts, T = 0", 1.8, 3.0, _speculative_vs_peer(COPYING, "t0")),
    Target(
        "chat_t0_vs_plain", "speculative vs own native plain, chat, T = 0", 1.3, 1.8,
        _speculative_vs_plain("sides", ["chat"], "t0"),
    ),
    Target(
        "copy_vs_plain", "the same, copy-heavy prompts", 2.0, 3.0, _speculative_vs_plain("sides", COPYING, "t0")
    ),
    Target("scaled", "1 B scaled target, acceptance 0.70 a position, vs own best plain", 1.4, 2.2, _scaled),
    Target("predicted", "measured / predicted by the cost model at its best k", 0.95, 0.98, _predicted, unit=""),
    Target("bandwidth", "plain decode vs weights / bandwidth", 0.5, 0.8, _bandwidth, unit=""),
)  # fmt: skip


def judge(figures: Figures) -> list[Judged]:
    """All targets, in the order of the table."""
    return [Judged(target, target.measure(figures)) for target in TARGETS]
