"""The plots of a run as SVG: speed-up by kind of prompt, V(n), acceptance by position, decoding against bandwidth.

Drawn from figures alone; the same rows give the same bytes. matplotlib is imported on use. Knows no report.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

from edgespec.errors import MissingDependencyError
from edgespec_bench.report.figures import Figures
from edgespec_bench.suite.parts import SETTING_LABELS

__all__ = ["PLOTS", "draw_all"]

_MOST_SIDES = 8


def draw_all(figures: Figures) -> dict[str, tuple[str, str]]:
    """File name -> (caption, SVG text), of the plots that the rows have something for.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'edgespec[bench]'") from error
    found = {}
    settings = {
        "svg.hashsalt": "edgespec",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(settings):
        for name, (caption, draw) in PLOTS.items():
            svg = _draw(draw, figures)
            if svg is not None:
                found[name] = (caption, svg)
    return found


def _draw(draw: Callable[[Any, Figures], bool], figures: Figures) -> str | None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    if not draw(figure.subplots(), figures):
        return None
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _speedups(axes: Any, figures: Figures) -> bool:
    """Bars: the best sides over edgespec's own plain decoding, by kind, T = 0."""
    kinds = figures.kinds("sides")
    plain = figures.native("sides")
    if plain is None or not kinds:
        return False
    found: dict[str, list[tuple[float, float, float]]] = {}
    for side in figures.names("sides", lambda row: row["what"] == "speculative" or row["engine"] != "edgespec"):
        bars = [figures.compare("sides", side, plain, [kind], "t0") for kind in kinds]
        if all(bars):
            found[side] = [(bar.ratio.median, bar.ratio.quartile1, bar.ratio.quartile3) for bar in bars]
    ranked = sorted(found, key=lambda side: -sum(bar[0] for bar in found[side]))[:_MOST_SIDES]
    width = 0.8 / max(1, len(ranked))
    for number, side in enumerate(ranked):
        at = [place + width * (number - (len(ranked) - 1) / 2) for place in range(len(kinds))]
        medians = [bar[0] for bar in found[side]]
        errors = [[bar[0] - bar[1] for bar in found[side]], [bar[2] - bar[0] for bar in found[side]]]
        axes.bar(at, medians, width, yerr=errors, label=side, error_kw={"lw": 0.7})
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # the legend's place
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel(f"speed over {plain}, T = 0")
    axes.legend(fontsize=7, ncols=2)
    return bool(ranked)


def _row_costs(axes: Any, figures: Figures) -> bool:
    """Lines: V(n)/V(1) of every bundle that was measured."""
    models = list(dict.fromkeys(row["model"] for row in figures.all("cost")))
    for model in models:
        cost = figures.cost(model)
        counts = sorted(cost)
        label = f"{model} (V(1) = {cost[1]:.2f} ms)"
        axes.plot(counts, [cost[n] / cost[1] for n in counts], marker="o", ms=3, label=label)
    axes.set_xlabel("rows of a call, n")
    axes.set_ylabel("V(n) / V(1)")
    axes.set_ylim(bottom=0)
    if models:
        axes.legend(fontsize=7)
    return bool(models)


def _acceptance(axes: Any, figures: Figures) -> bool:
    """Lines: share accepted by position, over all kinds."""
    drawn = False
    for part in dict.fromkeys(row["part"] for row in figures.all("side")):
        for side in figures.names(part, lambda row: row["what"] == "speculative"):
            for setting, style in (("t0", "-"), ("t08", "--")):
                shares = figures.acceptance(part, side, None, setting)
                if shares:
                    drawn = True
                    places = range(1, len(shares) + 1)
                    label = f"{side}, {SETTING_LABELS[setting]}" + ("" if part == "sides" else f" ({part})")
                    axes.plot(places, shares, style, marker="o", ms=3, label=label)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share accepted of the rounds that drafted it")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if drawn:
        axes.legend(fontsize=6, ncols=2)
    return drawn


def _roofline(axes: Any, figures: Figures) -> bool:
    """Points: tokens a second over the weights that a step reads; the line is what the bandwidth allows."""
    bandwidth = next((row["gb_s"] for row in reversed(figures.all("bandwidth"))), None)
    read = {row["model"]: row["read_bytes"] / 1e6 for row in figures.all("weights")}
    if bandwidth is None or not read:
        return False
    sizes = [min(read.values()) * 0.7, max(read.values()) * 1.4]
    axes.plot(
        sizes, [1e3 * bandwidth / size for size in sizes], color="black", label=f"{bandwidth:.1f} GB/s, a pass a token"
    )
    for part, model in {row["part"]: row["model"] for row in figures.all("side")}.items():
        for what, marker in (("plain", "o"), ("speculative", "^")):
            side = figures.best(part, figures.own(part, what), ["chat"], "t0")
            found = figures.speed(part, side, ["chat"], "t0") if side else None
            if found is not None and model in read:
                axes.plot([read[model]], [found.median], marker, label=f"{model}, {side}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MB of weights that a step reads")
    axes.set_ylabel("tokens a second, chat, T = 0")
    axes.legend(fontsize=7)
    return True


PLOTS: dict[str, tuple[str, Callable[[Any, Figures], bool]]] = {
    "speedup.svg": ("Speed-up by kind of prompt", _speedups),
    "rows.svg": ("V(n): what further rows cost", _row_costs),
    "acceptance.svg": ("Acceptance by position", _acceptance),
    "roofline.svg": ("Decoding against memory bandwidth", _roofline),
}
