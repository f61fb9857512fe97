"""Pictures of simulated schedules: speed-up over k, over acceptance and over the cost of a draft step, and the lanes of
both devices. Draws with matplotlib, without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, MissingDependencyError
from edgespec.sim.scenario import Scenario
from edgespec.sim.schedules import SCHEDULES, Simulation, predict, simulate

__all__ = ["PLOT_SUFFIXES", "plot_schedules"]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
STYLES = {"serial": {"color": "C0"}, "overlapped": {"color": "C1"}}
SPAN_COLOURS = {"verify": "C0", "draft": "C2", "ahead": "C1"}
GANTT_ROUNDS = 4


def plot_schedules(path: Path, scenario: Scenario, k: int, seed: int = 0) -> Path:
    """Four pictures of `scenario` around `k` in one file (.png, .svg or .pdf).

    Raises ConfigError for another ending or a folder that is not there, MissingDependencyError without matplotlib.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist")
    figure = _figure()
    over_k, over_acceptance, over_cost, lanes = figure.subplots(2, 2).flatten()
    ks = range(0, min(16, scenario.most_k) + 1)
    _curves(over_k, "drafted tokens a round (k)", ks, [(scenario, k) for k in ks])
    shares = [i / 20 for i in range(1, 20)]
    _curves(over_acceptance, f"acceptance (k = {k})", shares, [(replace(scenario, acceptance=(a,)), k) for a in shares])
    ratios = [i / 40 for i in range(0, 41)]
    _curves(
        over_cost, f"draft step / target step (k = {k})", ratios, [(scenario.with_cost_ratio(c), k) for c in ratios]
    )
    _lanes(lanes, [simulate(scenario, k, schedule, seed=seed, n_tokens=200, n_spans=400) for schedule in SCHEDULES])
    figure.savefig(path, dpi=110)
    return path


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'edgespec[bench]'") from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _curves(axes: Any, label: str, x: Sequence[float], cases: Sequence[tuple[Scenario, int]]) -> None:
    for schedule in SCHEDULES:
        axes.plot(
            x, [predict(scenario, k, schedule).speedup for scenario, k in cases], label=schedule, **STYLES[schedule]
        )
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over plain")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _lanes(axes: Any, runs: Sequence[Simulation]) -> None:
    """The first rounds of each schedule: a lane for each device."""
    names: list[str] = []
    end_s = 0.0
    for run in runs:
        verified = [span.end_s for span in run.spans if span.what == "verify"]
        end_s = max(end_s, verified[min(GANTT_ROUNDS, len(verified)) - 1])
        for lane in ("target", "draft"):
            y = len(names)
            names.append(f"{run.schedule}: {lane}")
            for span in run.spans:
                if span.lane == lane:
                    axes.barh(
                        y, 1e3 * (span.end_s - span.start_s), left=1e3 * span.start_s, height=0.7,
                        color=SPAN_COLOURS[span.what], edgecolor="white", linewidth=0.5,
                    )  # fmt: skip
    axes.set_xlim(0, 1e3 * end_s)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms; blue verifies, green drafts, orange drafts ahead")
