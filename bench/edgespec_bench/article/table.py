"""The article's tables as Markdown, made of the rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec_bench.article.cases import A100, Case
from edgespec_bench.article.phone import PLAIN_TOK_S, WANTED_TOK_S

__all__ = ["article_table", "phone_table", "scaled_table"]

Row = dict[str, Any]


def article_table(cases: Sequence[Case], rows: Sequence[Row]) -> str:
    """The tutorial's configurations, its figures beside those of here. Rows of several kinds of prompt: the first's."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["case"], row)
    lines = [
        *_heading(rows),
        "| configuration | A100, 7 B: tok/s | first token | speed-up | here, 1 B: tok/s | first token | speed-up "
        "| accepted a position |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    plain = next(iter(found.values()), None)
    for case in cases:
        lines.append(f"| {case.label} | {_quoted(case)} | {_here(case, found.get(case.key), plain)} |")
    if plain is not None:
        options = ", ".join(plain["device_options"]) or "onnxruntime's kernels"
        lines += ["", f"Here: {plain['n_prompts']} prompts ({plain['kind']}) x {plain['n_tokens']} tokens, {options}."]
    lines += ["", "The A100's figures are quoted from the tutorial; it is another machine with another model."]
    return "\n".join(lines) + "\n"


def _heading(rows: Sequence[Row]) -> list[str]:
    """What all rows share, from the first."""
    if not rows:
        return ["Nothing was measured."]
    row = rows[0]
    return [
        f"Target: {row['target']}, SYNTHETIC ({row['synthetic']}). {row['machine']['cpu']}, {row['threads']} threads, "
        f"T = {row['temperature']:g}, commit {row['commit']}.",
        "",
    ]


def _quoted(case: Case) -> str:
    if case.quoted is None:
        return "- | - | -"
    quoted = A100[case.quoted]
    return f"{quoted.tok_s} | {quoted.ttft_ms:.0f} ms | {quoted.tok_s / A100['plain'].tok_s:.2f}x"


def _here(case: Case, row: Row | None, plain: Row | None) -> str:
    if case.draft == "none":
        if plain is None:
            return "not measured | | | "
        return f"{plain['plain_tok_s']['median']} | {plain['plain_ttft_ms']:.0f} ms | 1.00x | -"
    if row is None:
        return "not measured | | | "
    accepted = "-" if row["acceptance_a_position"] is None else f"{row['acceptance_a_position']:.2f}"
    return f"{row['tok_s']['median']} | {row['ttft_ms']:.0f} ms | {row['speedup']['median']:.2f}x | {accepted}"


def scaled_table(rows: Sequence[Row]) -> str:
    """Every way to use the draft, best first."""
    lines = [
        *_heading(rows),
        "| draft | options | prompts | tok/s | plain | speed-up (quartiles) | predicted | tokens a round "
        "| accepted a position |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: -row["speedup"]["median"]):
        speed, accepted = row["speedup"], row["acceptance_a_position"]
        lines.append(
            f"| {row['label']} | {', '.join(row['device_options']) or '-'} | {row['n_prompts']} {row['kind']} x "
            f"{row['n_tokens']} | {row['tok_s']['median']} | {row['plain_tok_s']['median']} | "
            f"{speed['median']:.2f}x ({speed['quartile1']:.2f} to {speed['quartile3']:.2f}) | "
            f"{_number(row['predicted_speedup'])}x | {row['mean_acceptance_length']:.2f} | {_number(accepted)} |"
        )
    return "\n".join(lines) + "\n"


def phone_table(rows: Sequence[Row]) -> str:
    """The simulator's answer to the tutorial's phone figure."""
    low, high = WANTED_TOK_S
    lines = [
        f"Snapdragon 8 Gen 3, 7 B, SIMULATED (`edgespec simulate`), no phone measured. Plain: {PLAIN_TOK_S:g} tok/s; "
        f"the tutorial says {low:g} to {high:g} with drafts. Inputs are in each row.",
        "",
        "| draft | step | accepted a position | verifying several rows | schedule | k | tok/s | best k | tok/s "
        "| in the tutorial's range |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        reached = "yes" if row["best_tok_s"] >= low else "no"
        lines.append(
            f"| {row['draft']} | {row['draft_ms']:g} ms | {row['acceptance']} | {row['verifying']} | "
            f"{row['schedule']} | {row['k']} | {row['tok_s']} | {row['best_k']} | {row['best_tok_s']} | {reached} |"
        )
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
