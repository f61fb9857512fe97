"""The tables of a report, as plain data: a title, a remark, columns and rows of text. Knows no Markdown and no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec_bench.report.figures import Figures, per_token, tpot_s
from edgespec_bench.report.targets import Judged
from edgespec_bench.spread import Spread
from edgespec_bench.suite.parts import SETTING_LABELS

__all__ = ["Table", "all_tables", "machine_line", "target_table"]


@dataclass(frozen=True)
class Table:
    """title: a heading. remark: a sentence above it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    remark: str = ""


def all_tables(figures: Figures, judged: Sequence[Judged]) -> list[Table]:
    """Every table that has rows, in the order of the report."""
    tables = [target_table(judged), _bounds_table(judged)]
    for part in dict.fromkeys(row["part"] for row in figures.all("side")):
        tables += [_speed_table(figures, part, setting) for setting in figures.settings(part)]
        tables += [_acceptance_table(figures, part), _latency_table(figures, part)]
    tables += [_cost_table(figures), _profile_table(figures), _prediction_table(figures), _fidelity_table(figures)]
    tables += [_settings_table(figures), _skip_table(figures)]
    return [table for table in tables if table.rows]


def machine_line(figures: Figures) -> str:
    """Machine, versions and commit in a sentence."""
    card = figures.card
    machine = card.get("machine", {})
    versions = ", ".join(f"{name} {version}" for name, version in card.get("versions", {}).items() if version)
    note = f" Note: {card['note']}." if card.get("note") else ""
    return (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {card.get('threads')} threads, governor "
        f"{machine.get('governor') or 'unknown'}, {machine.get('memory_mb')} MB, {machine.get('system')}, load "
        f"{machine.get('load')} at the start; {versions}; commit {card.get('commit')}, {card.get('started')}, "
        f"`{card.get('size')}` on {card.get('model')}.{note}"
    )


def target_table(judged: Sequence[Judged]) -> Table:
    """The table of targets with measured values."""
    rows = []
    for one in judged:
        target, measured = one.target, one.measured
        sign = "<= " if target.is_lower else ""
        value = "-" if measured.value is None else f"{measured.value:.2f}{target.unit}"
        if measured.quartiles:
            value += f" ({measured.quartiles[0]:.2f} to {measured.quartiles[1]:.2f})"
        wanted = (f"{sign}{target.must:g}{target.unit}", f"{sign}{target.stretch:g}{target.unit}")
        rows.append((target.what, *wanted, value, one.verdict, measured.how))
    remark = "Medians with quartiles; ratios of neighbours on the same prompt."
    return Table("Targets", ("what", "must", "stretch", "measured", "verdict", "how"), rows, remark)


def _bounds_table(judged: Sequence[Judged]) -> Table:
    rows = [(one.target.what, one.measured.bound) for one in judged if one.verdict == "missed" and one.measured.bound]
    return Table("What bounds the missed ones", ("what", "profile"), rows)


def _median(found: Spread | None, scale: float = 1.0, digits: int = 1) -> str:
    if found is None:
        return "-"
    low, high = scale * found.quartile1, scale * found.quartile3
    return f"{scale * found.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _speed_table(figures: Figures, part: str, setting: str) -> Table:
    kinds = figures.kinds(part)
    rows = []
    for side in figures.names(part):
        cells = []
        for kind in kinds:
            found = figures.speed(part, side, [kind], setting)
            versus = figures.compare(part, side, figures.native(part), [kind], setting)
            ratio = f", {versus.ratio.median:.2f}x" if versus else ""
            cells.append("-" if found is None else f"{_median(found, digits=0)}{ratio}")
        if any(cell != "-" for cell in cells):
            rows.append((side, *cells))
    title = f"Tokens a second, {SETTING_LABELS[setting]}, {_model(figures, part)}"
    return Table(
        title, ("side", *kinds), rows, "Median (quartiles), and the ratio to edgespec's native plain decoding."
    )


def _model(figures: Figures, part: str) -> str:
    return next((row["model"] for row in figures.all("side") if row["part"] == part), part)


def _acceptance_table(figures: Figures, part: str) -> Table:
    rows = []
    for side in figures.names(part, lambda row: row["what"] == "speculative"):
        for setting in figures.settings(part):
            length = figures.tokens_a_round(part, side, None, setting)
            shares = figures.acceptance(part, side, None, setting)
            runs = figures.runs(part, side, None, setting)
            drafted = sum(row.get("drafted") or 0 for row in runs)
            accepted = sum(row.get("accepted") or 0 for row in runs)
            if length is None and not drafted:
                continue
            rate = f"{accepted / drafted:.2f}" if drafted else "-"
            places = ", ".join(f"{share:.2f}" for share in shares) or "-"
            rows.append((side, SETTING_LABELS[setting], f"{length:.2f}" if length else "-", rate, places))
    columns = ("side", "setting", "tokens a round", "accepted / drafted", "accepted by position")
    same, n_texts = figures.same_texts(part)
    remark = f"{same} of edgespec's {n_texts} texts are those of plain decoding on the same rows." if n_texts else ""
    return Table(f"Acceptance, all kinds, {_model(figures, part)}", columns, rows, remark)


def _latency_table(figures: Figures, part: str) -> Table:
    rows = []
    for side in figures.names(part):
        info, runs = figures.sides[part, side], figures.runs(part, side)
        times = figures.round_ms(part, side, None, None)
        rows.append(
            (
                side,
                _number(info.get("load_s"), 2),
                _number(info.get("cold_ttft_s"), 0, 1e3),
                _median(figures.spread_of(runs, lambda row: row["ttft_s"]), 1e3, 0),
                _median(figures.spread_of(runs, tpot_s), 1e3, 2),
                f"{times['host_s']:.2f}" if "host_s" in times else "-",
                _median(figures.spread_of(runs, per_token("cpu_s")), 1e3, 2),
                _number(info.get("peak_rss_mb"), 0),
            )
        )
    columns = (
        "side", "load, s", "TTFT cold, ms", "TTFT warm, ms", "TPOT, ms", "host a round, ms", "CPU a token, ms",
        "peak memory, MB",
    )  # fmt: skip
    remark = "Load, cold first token and memory: the side alone in a process; the rest over all answers."
    return Table(f"Latency, processor time and memory, {_model(figures, part)}", columns, rows, remark)


def _number(value: Any, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def _cost_table(figures: Figures) -> Table:
    models = list(dict.fromkeys(row["model"] for row in figures.all("cost")))
    costs = {model: figures.cost(model) for model in models}
    counts = sorted({n for cost in costs.values() for n in cost})
    rows = []
    for n in counts:
        cells = [f"{cost[n]:.2f}, {cost[n] / cost[1]:.2f}x" if n in cost else "-" for cost in costs.values()]
        rows.append((str(n), *cells))
    return Table("V(n): milliseconds of a call, over one row's", ("rows", *models), rows)


def _profile_table(figures: Figures) -> Table:
    rows = []
    for row in figures.all("profile"):
        whole = sum(row["ms"].values())
        parts = ", ".join(f"{part} {ms:.2f} ({ms / whole:.0%})" for part, ms in row["ms"].items())
        rows.append((row["model"], str(row["rows"]), f"{whole:.2f}", parts))
    return Table("A call of the target by parts", ("model", "rows", "ms", "of which"), rows)


def _prediction_table(figures: Figures) -> Table:
    rows = [
        (
            row["label"],
            f"{row['predicted_tok_s']:.0f}",
            f"{row['measured_tok_s']:.0f}",
            f"{1 / (1 + row['relative_error']):.2f}",
        )
        for row in figures.all("prediction")
    ]
    columns = ("way to decode", "predicted tok/s", "measured tok/s", "measured / predicted, both over plain")
    return Table("The cost model against measurements", columns, rows)


def _fidelity_table(figures: Figures) -> Table:
    rows = [
        (r["model"], r["side"], f"{r['kld']:.3f}", f"{r['top1']:.3f}", str(r["rows"])) for r in figures.all("fidelity")
    ]
    remark = "From the float weights of the same source, teacher-forced on text that these wrote at T = 1."
    return Table("Fidelity", ("model", "side", "KLD, nats", "same best token", "rows"), rows, remark)


def _settings_table(figures: Figures) -> Table:
    rows = []
    for (part, side), row in figures.sides.items():
        settings = ", ".join(f"{key}={value}" for key, value in sorted(row["settings"].items()))
        rows.append((part, side, str(row.get("version")), settings, row.get("note", "")))
    return Table("Settings", ("part", "side", "version", "settings", "why"), rows)


def _skip_table(figures: Figures) -> Table:
    rows = [(row["part"], row["side"] or "-", row["reason"]) for row in figures.all("skip")]
    return Table("Left out", ("part", "side", "why"), rows)
