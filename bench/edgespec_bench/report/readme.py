"""The README's measured line and its section of figures, made from the newest committed run.

The parts stand between marker comments; what is outside of them is never touched. Knows no measurement.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec_bench.report.figures import EDGESPEC, Figures
from edgespec_bench.report.markdown import markdown_table
from edgespec_bench.report.tables import Table, machine_line, target_table
from edgespec_bench.report.targets import Judged, judge
from edgespec_bench.report.write import load_figures
from edgespec_bench.suite.parts import SETTING_LABELS
from edgespec_bench.suite.rows import read_rows
from edgespec_bench.suite.runner import ROWS_FILE

__all__ = ["MARKERS", "newest_run", "renew"]

MARKERS = ("measured-line", "measured-section")


def newest_run(results: Path) -> Path:
    """The folder of the run that was started last. Raises ConfigError where there is none."""
    runs = {}
    for path in sorted(results.glob(f"*/{ROWS_FILE}")):
        card = next((row for row in read_rows(path) if row["row"] == "card"), None)
        if card is not None:
            runs[card["started"], path.parent.name] = path.parent
    if not runs:
        raise ConfigError(f"{results} holds no run: measure one with `make bench-quick`")
    return runs[max(runs)]


def renew(text: str, results: Path) -> str:
    """The README's text with both parts made anew. Raises ConfigError where a marker is missing."""
    folder = newest_run(results)
    figures = load_figures(folder)
    judged = judge(figures)
    parts = {"measured-line": _line(figures, judged), "measured-section": _section(figures, judged, folder.name)}
    for name in MARKERS:
        pattern = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ConfigError(f"the README needs one pair of comments <!-- {name}: ... --> and <!-- /{name} -->")
        text = pattern.sub(lambda found, name=name: found[1] + parts[name] + "\n" + found[2], text)  # type: ignore[misc]
    return text


def _line(figures: Figures, judged: list[Judged]) -> str:
    """One quotation: plain speed, against the best peer, speculation over plain and over the best peer."""
    found = {one.target.key: one.measured for one in judged}
    card = figures.card
    plain = figures.native("sides")
    speed = figures.speed("sides", plain, figures.kinds("sides"), "t0") if plain else None
    claims = []
    if speed is not None:
        versus = found["plain_vs_peer"].value
        beside = f", {versus:.2f}x the fastest 4-bit peer" if versus else ""
        claims.append(f"plain decoding at **{speed.median:.0f} tok/s{beside}**")
    gains = [
        f"**{found[key].value:.2f}x** {what}"
        for key, what in (("chat_t0_vs_plain", "on chat"), ("copy_vs_plain", "on summaries, edits and JSON"))
        if found[key].value is not None
    ]
    if gains:
        claims.append("speculation over plain decoding " + ", ".join(gains))
    peers = [
        f"{found[key].value:.2f}x ({what})"
        for key, what in (("chat_t0_vs_peer", "chat"), ("copy_vs_peer", "copying"))
        if found[key].value is not None
    ]
    if peers:
        claims.append(f"{' and '.join(peers)} of the best setting of any peer")
    same, n_texts = figures.same_texts("sides")
    if n_texts:
        claims.append(f"{same} of {n_texts} texts the same as without drafts, token for token")
    machine = f"{card['machine']['cpu']}, {card['threads']} threads"
    text = f"{card['model']} on {machine}, T = 0: " + "; ".join(claims)
    return "\n".join("> " + line for line in _wrap(f"{text}. (Commit {card['commit']}; all figures below.)"))


def _wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 116, break_long_words=False, break_on_hyphens=False)


def _section(figures: Figures, judged: list[Judged], name: str) -> str:
    head = _wrap(f"{machine_line(figures)} Everything, with quartiles, acceptance, memory and settings: "
                 f"[the report](bench/results/{name}/report.md).")  # fmt: skip
    targets = target_table(judged)
    short = Table(targets.title, targets.columns[:5], [row[:5] for row in targets.rows])
    lines = [*head, "", markdown_table(short)]
    for setting in figures.settings("sides"):
        table = _speeds(figures, setting)
        if table.rows:
            lines += ["", f"Tokens a second, {SETTING_LABELS[setting]} (medians; over native plain decoding):", ""]
            lines += [markdown_table(table)]
    return "\n".join(lines)


def _speeds(figures: Figures, setting: str) -> Table:
    """edgespec's sides, and of every peer the one that is fastest on chat."""
    kinds = [kind for kind in figures.kinds("sides") if figures.best("sides", figures.names("sides"), [kind], setting)]
    engines = dict.fromkeys(figures.sides["sides", side]["engine"] for side in figures.names("sides"))
    chosen = []
    for engine in engines:
        sides = figures.names("sides", lambda row, engine=engine: row["engine"] == engine)  # type: ignore[misc]
        best = figures.best("sides", sides, kinds[:1], setting) if kinds else None
        chosen += sides if engine == EDGESPEC else [best] if best else []
    rows = []
    for side in chosen:
        cells = []
        for kind in kinds:
            found = figures.speed("sides", side, [kind], setting)
            versus = figures.compare("sides", side, figures.native("sides"), [kind], setting)
            cells.append("-" if found is None or versus is None else f"{found.median:.0f}, {versus.ratio.median:.2f}x")
        if any(cell != "-" for cell in cells):
            rows.append((side, *cells))
    return Table("", ("side", *kinds), rows)
