"""`edgespec profile`: what calls cost on this machine, kept for `plan` and for `--draft auto`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import engine_kwargs, engine_options, json_option
from edgespec.errors import ConfigError
from edgespec.loading import kind_of

if TYPE_CHECKING:
    from edgespec.planner import Asked
    from edgespec.profile import Effort, Profiles

__all__ = ["asked_by", "command", "profile_model"]


@click.command("profile")
@click.argument("model")
@click.option("--quick", is_flag=True, help="As short as the measurement at first use.")
@click.option(
    "--scenario",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write what `edgespec simulate --profile` reads, of the first draft with weights.",
)
@click.option("--temperature", "--temp", type=float, default=0.0, show_default=True, help="Of the calibration.")
@engine_options
@json_option
def command(**values: Any) -> None:
    """Measure MODEL and its drafts: the time of 1 to 32 rows, of draft steps, and of both at once.

    By default with every trained draft that fits and needs no other graph of the target; --draft names others.
    """
    from edgespec.profile import QUICK, Effort

    with console.progress(plain=values["as_json"]) as report:
        profiles = profile_model(values, QUICK if values["quick"] else Effort(), fresh=True, progress=report)
    if values["scenario"] is not None:
        _write_scenario(values["scenario"], profiles)
    if values["as_json"]:
        console.print_json(
            {
                "target": profiles.target.to_json(),
                "drafts": {kind: draft.to_json() for kind, draft in profiles.drafts.items()},
            }
        )
    else:
        _print(profiles)


def profile_model(
    values: dict[str, Any], effort: Effort, *, fresh: bool = False, progress: console.Reporter | None = None
) -> Profiles:
    """The profile of the model that a command's options name, with all candidate drafts where it names none."""
    from edgespec.auto import PLANNED, add_table, candidate_kinds
    from edgespec.devices import Device
    from edgespec.llm import LLM
    from edgespec.options import AUTO
    from edgespec.pairs import ensure
    from edgespec.profile import profile_llm

    asked_by(values)  # mistakes are said before anything is loaded
    kwargs = {name: value for name, value in engine_kwargs(values).items() if name not in PLANNED}
    draft, draft_model = kwargs.pop("draft"), kwargs.pop("draft_model")
    folder = ensure(values["model"], progress, Device.parse(values["device"]).runtime)
    is_open = draft in (None, AUTO)
    if is_open:
        kinds = candidate_kinds(Path(folder))
        draft = ",".join(kinds if draft_model is None else dict.fromkeys((*kinds, kind_of(draft_model))))
    load_s = _load_seconds(folder, kwargs) if fresh else 0.0
    with LLM(folder, draft=draft, draft_model=draft_model, progress=progress, **kwargs) as llm:
        if is_open:
            add_table(llm, llm.options.drafts)
        return profile_llm(
            llm, effort=effort, fresh=fresh, temperature=values["temperature"], load_s=load_s, progress=progress
        )


def asked_by(values: dict[str, Any]) -> Asked:
    """What a command's options do not leave to a plan; raises ConfigError where they contradict each other."""
    from edgespec.loading import resolve_options
    from edgespec.options import AUTO
    from edgespec.planner import Asked

    kwargs = engine_kwargs(values)
    draft, draft_model = kwargs.pop("draft") or AUTO, kwargs.pop("draft_model")
    return Asked.by(resolve_options(draft, draft_model, kwargs, values["model"]))


def _load_seconds(folder: Path, kwargs: dict[str, Any]) -> float:
    """How long the target takes to load by itself."""
    from edgespec.backends import load_model
    from edgespec.options import EngineOptions

    place = EngineOptions(
        draft="none",
        device=kwargs["device"],
        device_options=kwargs["device_options"],
        n_ctx=kwargs["n_ctx"],
        threads=kwargs["threads"],
    ).target_place
    began = time.perf_counter()
    load_model(folder, **place).close()
    return time.perf_counter() - began


def _write_scenario(path: Path, profiles: Profiles) -> None:
    """The first draft's figures as a scenario's JSON; raises ConfigError where no draft has weights."""
    from edgespec.machine import write_atomic
    from edgespec.planner import scenario_json

    if not profiles.drafts:
        raise ConfigError("--scenario: no draft with weights was measured; name one with --draft")
    write_atomic(path, json.dumps(scenario_json(profiles.target, next(iter(profiles.drafts.values()))), indent=1))


def _print(profiles: Profiles) -> None:
    from rich.table import Table

    target, out = profiles.target, console.out()
    exact = "any row count" if target.exact is None else f"exact rows, {target.exact[0]} and up by {target.exact[2]}"
    out.print(
        f"{target.name} on {target.device}: {console.format_bytes(target.bytes)}, {exact}, "
        f"loaded in {target.load_s:.1f} s, host {1e3 * target.costs.host_s:.2f} ms a round, power: {target.power}"
    )
    table = Table(show_edge=False)
    table.add_column("rows", justify="right")
    for at in target.costs.target:
        table.add_column(f"ms at {at} cached", justify="right")
    for n in sorted({n for rows in target.costs.target.values() for n in rows}):
        cells = [rows[n] for rows in target.costs.target.values() if n in rows]
        table.add_row(str(n), *(f"{1e3 * s.median:.2f} ({1e3 * s.low:.2f}-{1e3 * s.high:.2f})" for s in cells))
    out.print(table)
    for draft in profiles.drafts.values():
        steps = ", ".join(f"{n}: {1e3 * s.median:.2f}" for n, s in sorted(draft.costs.steps.items()))
        chances = ", ".join(f"{chance:.0%}" for chance in draft.chances)
        out.print(
            f"{draft.kind} on {draft.device}: {console.format_bytes(draft.bytes)}, loaded in {draft.load_s:.1f} s; "
            f"ms by tokens {steps}; catching up {1e3 * draft.costs.catch_up_token_s:.3f} ms a token; "
            f"accepted {chances}; side by side the target takes {draft.contention[0]:.2f}x, "
            f"the draft {draft.contention[1]:.2f}x"
        )
