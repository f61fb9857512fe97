"""The picture of a plan: predicted speed over k for each draft, and the target's time over rows, steps and all."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import MissingDependencyError
from edgespec.planner import Plan
from edgespec.profile import TargetProfile

__all__ = ["plot_plan"]


def plot_plan(path: Path, plan: Plan, target: TargetProfile) -> Path:
    """Draw into `path`, whose ending says the format; raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'edgespec[bench]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    speeds, rows = figure.subplots(1, 2)
    lines: dict[str, dict[int, float]] = {}
    for c in plan.candidates:
        if c.controller == "fixed" and c.draft != "none":
            lines.setdefault(f"{c.draft}, {c.schedule}", {})[c.k] = c.tok_s
    for label, by_k in lines.items():
        ks = sorted(by_k)
        speeds.plot(
            ks, [by_k[k] for k in ks], marker=".", linestyle="--" if "overlapped" in label else "-", label=label
        )
    for c in plan.candidates:
        if c.controller != "fixed":
            speeds.axhline(c.tok_s, linewidth=0.8, color="grey")
            speeds.annotate(f"{c.draft}, adaptive", (1, c.tok_s), fontsize="x-small", va="bottom")
    plain = next(c for c in plan.candidates if c.draft == "none")
    speeds.axhline(plain.tok_s, color="black", linewidth=1)
    speeds.annotate("no speculation", (1, plain.tok_s), fontsize="x-small", va="bottom")
    speeds.set(xlabel="drafted tokens a round (k)", ylabel="tokens a second, predicted", title=plan.model)
    speeds.legend(fontsize="x-small")
    for at, table in target.costs.target.items():
        ns = sorted(table)
        rows.step(ns, [1e3 * table[n].median for n in ns], where="pre", marker=".", label=f"{at} tokens cached")
    rows.set(xlabel="rows of a call", ylabel="ms, measured", ylim=(0, None), title=f"target on {target.device}")
    rows.legend(fontsize="x-small")
    figure.savefig(path)
    return path
