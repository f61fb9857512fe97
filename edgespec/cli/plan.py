"""`edgespec plan`: every way to decode with its predicted speed, which one is best, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import engine_options, json_option
from edgespec.errors import ConfigError, EdgeSpecError

if TYPE_CHECKING:
    from edgespec.planner import Plan
    from edgespec.profile import Profiles

__all__ = ["command"]

SHOWN = 12


@click.command("plan")
@click.argument("model")
@click.option("--memory-budget", help="For weights and caches of both models, for instance 600MB.")
@click.option("--prefer", type=click.Choice(["speed", "energy"]), default="speed", show_default=True)
@click.option("--try-device", "try_devices", multiple=True, help="Another device to consider, for target and draft.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw it: .png, .svg or .pdf.")
@click.option("--all", "show_all", is_flag=True, help="Show every candidate, not only the best ones.")
@click.option(
    "--temperature", "--temp", type=float, default=0.0, show_default=True, help="Of the text to be predicted."
)
@engine_options
@json_option
def command(**values: Any) -> None:
    """Predict how fast MODEL decodes with each draft, length and schedule, and choose.

    What is not measured yet (see `edgespec profile`) is measured first. Energy is reckoned from assumed shares of
    reading, computing and time, and not measured.
    """
    from edgespec.cli.profile import asked_by
    from edgespec.planner import make_plan

    asked = asked_by(values)
    budget = _bytes(values["memory_budget"])
    if values["plot"] is not None:
        _check_plot(values["plot"])
    with console.progress(plain=values["as_json"]) as report:
        profiles, impossible = _profiles(values, report)
    plan = make_plan(profiles, memory_budget=budget, prefer=values["prefer"], asked=asked)
    if values["plot"] is not None:
        from edgespec.plan_plot import plot_plan

        plot_plan(values["plot"], plan, profiles[0].target)
    if values["as_json"]:
        console.print_json({**plan.to_dict(), "impossible": impossible})
    else:
        _print(plan, impossible, values["show_all"])


def _profiles(values: dict[str, Any], report: console.Reporter) -> tuple[list[Profiles], dict[str, str]]:
    """A profile for each pair of devices that works, and why the others do not; the named devices have to work."""
    from edgespec.cli.profile import profile_model
    from edgespec.profile import QUICK

    first = (values["device"], values["draft_device"])
    pairs = [
        first,
        *(
            (target, draft)
            for target in dict.fromkeys([first[0], *values["try_devices"]])
            for draft in dict.fromkeys([first[1], *values["try_devices"]])
            if (target, draft) != first
        ),
    ]
    found, impossible = [], {}
    for target, draft in pairs:
        try:
            found.append(profile_model({**values, "device": target, "draft_device": draft}, QUICK, progress=report))
        except EdgeSpecError as error:
            if (target, draft) == first:
                raise
            impossible[f"{draft} -> {target}"] = str(error)
    return found, impossible


def _check_plot(path: Path) -> None:
    from edgespec.sim.plots import PLOT_SUFFIXES

    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist")


def _bytes(text: str | None) -> int | None:
    """Bytes from "600MB", "1.5 GB" or a plain number."""
    if text is None:
        return None
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.strip().rstrip("BKMGIbkmgi ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--memory-budget {text}: give a size such as 600MB, 1.5GB or a number of bytes")
    return int(value)


def _print(plan: Plan, impossible: dict[str, str], show_all: bool) -> None:
    from rich.table import Table

    from edgespec.planner import ENERGY_SHARES

    out = console.out()
    table = Table(show_edge=False)
    for column in ("", "tok/s", "of plain", "tokens a round", "memory", "energy"):
        table.add_column(column, justify="left" if not column else "right")
    shown: Sequence[Any] = plan.candidates if show_all else _best_of_each(plan)
    for c in shown:
        name = c.label if c.obstacle is None else f"{c.label} [{c.obstacle}]"
        table.add_row(
            name,
            f"{c.tok_s:.1f}",
            f"{c.speedup:.2f}x",
            f"{c.tokens_per_round:.2f}",
            console.format_bytes(c.bytes),
            f"{c.energy:.2f}",
        )
    out.print(table)
    out.print(f"chosen: {plan.chosen.label}: {plan.reason}")
    if plan.runner_up is not None:
        out.print(f"runner-up: {plan.runner_up.label}, {plan.runner_up.tok_s:.1f} tok/s")
    out.print(f"native plain decoding, one row a step: {plan.native_tok_s:.1f} tok/s; all figures are predictions")
    shares = ", ".join(f"{what} {share:.0%}" for what, share in ENERGY_SHARES.items())
    out.print(f"energy is not measured: a plain step's is assumed to be {shares}, and the rest reckoned from that")
    for devices, why in impossible.items():
        out.print(f"not possible: {devices}: {why}")


def _best_of_each(plan: Plan) -> list[Any]:
    """The best length of each draft, controller, schedule and pair of devices."""
    seen, found = set(), []
    for c in plan.candidates:
        key = (c.draft, c.controller, c.schedule, c.target_device, c.draft_device, c.obstacle is None)
        if key not in seen:
            seen.add(key)
            found.append(c)
    return found[:SHOWN]
