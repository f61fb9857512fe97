"""`edgespec simulate`: what speculation would bring on devices whose figures are typed in or read from a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import print_json, say
from edgespec.cli.options import json_option
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.sim import Scenario

__all__ = ["command"]

TYPED = ("target_ms", "draft_ms", "acceptance", "runner_up", "host_ms", "jitter", "contention")


@click.command("simulate")
@click.option("--profile", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON with the figures.")
@click.option("--target-ms", help="Target's time for 1, 2, ... rows, comma-separated; one number: any count.  [200]")
@click.option("--draft-ms", type=float, help="A draft step.  [10]")
@click.option("--acceptance", help="Chance that a drafted token is accepted, by position, comma-separated.  [0.8]")
@click.option("--runner-up", type=float, help="Chance that the draft's second choice is right where it errs.  [0.5]")
@click.option("--host-ms", type=float, help="Work of a round outside the devices.  [0]")
@click.option("--jitter", type=float, help="Times vary by this share, up and down.  [0]")
@click.option("--contention", help="How much longer target and draft take beside each other, as 1.1,1.2.  [1,1]")
@click.option(
    "--num-speculative-tokens", "--draft-max", type=int, default=5, show_default=True, help="Drafted tokens a round."
)
@click.option(
    "-n", "--max-tokens", "--predict", type=int, default=10_000, show_default=True, help="Tokens to simulate."
)
@click.option("-s", "--seed", type=int, default=0, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Pictures to this file.")
@json_option
def command(**values: Any) -> None:
    """Simulate serial and overlapped speculation on two devices.

    Without figures: the worked example of tutorials, a target step of 200 ms and a draft step of 10 ms, counted the
    three ways in which one finds it.
    """
    from edgespec.sim import SCHEDULES, predict, simulate, speedup_table, worked_example
    from edgespec.sim.plots import plot_schedules

    k, n_tokens = values["num_speculative_tokens"], values["max_tokens"]
    for name, lowest in (("num_speculative_tokens", 0), ("max_tokens", 1)):
        if values[name] < lowest:
            raise ConfigError(f"{name}={values[name]}: it must be a whole number from {lowest} up")
    scenario = _scenario(values)
    if values["plot"] is not None:
        plot_schedules(values["plot"], scenario, k, values["seed"])
    runs = [simulate(scenario, k, schedule, n_tokens=n_tokens, seed=values["seed"]) for schedule in SCHEDULES]
    best = {
        schedule: max(range(min(16, scenario.most_k) + 1), key=lambda k: predict(scenario, k, schedule).speedup)
        for schedule in SCHEDULES
    }
    result = {
        "article": worked_example().to_dict(),
        "table": speedup_table(),
        "runs": [{**run.to_dict(), "predicted": predict(scenario, k, run.schedule)._asdict()} for run in runs],
        "best": {s: {"k": k, **predict(scenario, k, s)._asdict()} for s, k in best.items()},
    }
    if values["as_json"]:
        print_json(result)
    else:
        _print(result)
        if values["plot"] is not None:
            say(f"pictures: {values['plot']}")


def _scenario(values: dict[str, Any]) -> Scenario:
    """The figures typed in, those of the profile, or both: what is typed in counts."""
    from edgespec.sim import Scenario
    from edgespec.sim.scenario import read_profile

    defaults: dict[str, Any] = {"target_ms": 200.0, "draft_ms": 10.0, "acceptance": 0.8}
    data = dict(read_profile(values["profile"])) if values["profile"] is not None else defaults
    for name in TYPED:
        if values[name] is not None:
            data[name] = _typed(name, values[name])
    return Scenario.from_json(data, "the profile" if values["profile"] is None else str(values["profile"]))


def _typed(name: str, value: Any) -> Any:
    """The profile's form of an option's value."""
    if not isinstance(value, str):
        return value
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: give numbers, comma-separated") from error
    if name == "contention":
        if len(numbers) != 2:
            raise ConfigError(f"--contention {value}: give two numbers, for the target and the draft, as 1.1,1.2")
        return dict(zip(("target", "draft"), numbers, strict=True))
    if name == "target_ms" and len(numbers) > 1:
        return {str(rows): number for rows, number in enumerate(numbers, start=1)}
    return numbers[0] if len(numbers) == 1 else numbers


def _print(result: dict[str, Any]) -> None:
    article = result["article"]
    click.echo(
        f"Worked example: {article['n_tokens']} tokens, target {1e3 * article['target_s']:.0f} ms, draft "
        f"{1e3 * article['draft_s']:.0f} ms, k = {article['k']}, acceptance {article['acceptance']}; plain "
        f"{article['plain_s']:.1f} s"
    )
    for name, why in (
        ("printed", "counts accepted draft tokens only; the target's own token of each round is forgotten"),
        ("coded", "accepts int(k a) = 4 tokens in every round, again without the target's own"),
        ("exact", "(1 - a^(k+1)) / (1 - a) tokens a round, the target's own included"),
    ):
        click.echo(f"  as {name:8} {article[f'{name}_s']:5.2f} s  {article[name]:.2f}x  {why}")
    click.echo("\nSpeed-up at acceptance 0.8, c = draft step / target step: textbook k / (1 + k c), ceiling, exact")
    for row in result["table"]:
        click.echo(
            f"  k = {row['k']:<3} c = {row['cost_ratio']:<5} {row['textbook']:5.2f} {row['ceiling']:6.2f} "
            f"{row['exact']:6.2f}"
        )
    click.echo(f"\nSimulated, {result['runs'][0]['tokens']} tokens at k = {result['runs'][0]['k']}:")
    for run in result["runs"]:
        hits = f", {run['hits'] / run['rounds']:.0%} of outcomes prepared" if run["schedule"] == "overlapped" else ""
        click.echo(
            f"  {run['schedule']:10} {run['seconds']:.2f} s against {run['plain_seconds']:.2f} s plain, "
            f"{run['speedup']:.2f}x (expected {run['predicted']['speedup']:.2f}x){hits}"
        )
    for schedule, best in result["best"].items():
        click.echo(f"  best {schedule}: k = {best['k']}, {best['speedup']:.2f}x")
