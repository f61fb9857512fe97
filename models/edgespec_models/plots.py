"""Pictures of a training run: the loss, and what was accepted. Draws with matplotlib, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import MissingDependencyError

__all__ = ["plot_acceptance", "plot_loss"]

SMOOTH = 0.95  # of the running mean drawn over the single steps


def plot_loss(path: Path, steps: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Loss by step, its parts and a running mean, to `path` (.png or .svg). steps: {"step", "loss", "parts"} each."""
    figure, axes = _figure(title, "step", "loss")
    x = [entry["step"] for entry in steps]
    axes.plot(x, [entry["loss"] for entry in steps], color="0.8", linewidth=0.8, label="loss of a step")
    axes.plot(x, _smoothed([entry["loss"] for entry in steps]), color="C0", label="running mean")
    names = list(dict.fromkeys(name for entry in steps for name in entry["parts"]))
    for i, name in enumerate(names if len(names) > 1 else []):
        values = [entry["parts"].get(name, float("nan")) for entry in steps]
        axes.plot(x, _smoothed(values), color=f"C{i + 1}", linewidth=0.9, label=name)
    return _saved(figure, axes, path)


def plot_acceptance(path: Path, history: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Survival by depth and the production decoder's mean acceptance length, by step, to `path`.

    history: {"step", "survival": [...], "acceptance": {"mean_acceptance_length"} or missing} for each evaluation.
    """
    figure, axes = _figure(title, "step", "tokens a round")
    x = [entry["step"] for entry in history]
    lengths = [1.0 + sum(entry["survival"]) for entry in history]
    axes.plot(x, lengths, color="C0", marker=".", label="teacher forced, whole text")
    measured = [entry for entry in history if entry.get("acceptance")]
    if measured:
        y = [entry["acceptance"]["mean_acceptance_length"] for entry in measured]
        axes.plot([entry["step"] for entry in measured], y, color="C1", marker="o", label="production decoder")
    shares = axes.twinx()
    shares.set_ylabel("share of drafts right up to a depth")
    shares.set_ylim(0, 1)
    for depth in range(max((len(entry["survival"]) for entry in history), default=0)):
        y = [entry["survival"][depth] for entry in history]
        shares.plot(x, y, color="0.6", linewidth=0.8, linestyle=":")
        shares.annotate(str(depth + 1), (x[-1], y[-1]), color="0.4", fontsize=8)
    return _saved(figure, axes, path)


def _figure(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'edgespec[train]'") from error
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    return figure, axes


def _saved(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(fontsize=8)
    is_svg = path.suffix == ".svg"
    figure.savefig(path, dpi=110, metadata={"Date": None} if is_svg else {"Software": None})
    return path


def _smoothed(values: Sequence[float]) -> list[float]:
    """Running mean with bias correction, as Adam's."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + 1 - SMOOTH
        result.append(mean / weight)
    return result
