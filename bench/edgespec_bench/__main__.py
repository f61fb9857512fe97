"""Command line of the measurements: progress on stderr, the result on stdout, one JSON object as the last line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError
from edgespec.pairs import ensure
from edgespec.zoo import prepare
from edgespec_bench.article.command import article, scaled
from edgespec_bench.auto import CALIBRATE, AutoOptions, measure_auto
from edgespec_bench.console import errors, say
from edgespec_bench.contention import measure_contention
from edgespec_bench.devices import DeviceCase, measure_devices
from edgespec_bench.drafts import DRAFTS, DraftCase, measure_drafts
from edgespec_bench.kernels import DEFAULT_ROWS, profile_round, table
from edgespec_bench.machine_card import commit, machine_card, versions
from edgespec_bench.peers import PEERS, Peer, find_peer, set_up
from edgespec_bench.suite.commands import COMMANDS as SUITE
from edgespec_bench.widen.command import command as widen_command

__all__ = ["main"]

MODEL, THREADS = "smollm2-135m", 2
DRAFT_KINDS = ("chat", "code", "summarise", "json")


@click.group()
def main() -> None:
    """Measure edgespec on this machine, beside other engines in the same run."""


@main.command()
@click.option("-m", "--model", default=MODEL, show_default=True, help="A known pair.")
@click.option("-t", "--threads", default=THREADS, show_default=True, type=click.IntRange(1))
@click.option("-n", "--n-tokens", default=160, show_default=True, type=click.IntRange(2))
@click.option("--prompts", "n_prompts", default=8, show_default=True, type=click.IntRange(1), help="Of each kind.")
@click.option("--kind", "kinds", multiple=True, default=DRAFT_KINDS, show_default=True, help="Kinds of prompt.")
@click.option("--draft", "drafts", multiple=True, help="Only these drafts.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def drafts(
    model: str,
    threads: int,
    n_tokens: int,
    n_prompts: int,
    kinds: tuple[str, ...],
    drafts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Acceptance by position and cost of the drafts that ship, each by itself at a fixed number of drafted tokens."""
    with errors():
        cases = _chosen_drafts(drafts)
        # one that is missing is said before hours of measuring
        prepare(sorted({case.draft for case in cases}), Bundle.open(ensure(model)))
        rows = measure_drafts(model, threads, n_tokens, n_prompts, kinds, cases, say)
    if not as_json:
        _print_drafts(rows)
    click.echo(
        json.dumps({"model": model, "threads": threads, "n_tokens": n_tokens, "commit": commit(), "drafts": rows})
    )


def _chosen_drafts(names: tuple[str, ...]) -> list[DraftCase]:
    known = {case.draft: case for case in DRAFTS}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no draft {name!r} to measure: use one of {', '.join(known)}")
    return [case for case in DRAFTS if not names or case.draft in names]


def _print_drafts(rows: list[dict[str, Any]]) -> None:
    wanted = {case.draft: case for case in DRAFTS}
    for row in rows:
        case = wanted[row["draft"]]
        goal = ""
        if case.wanted_length and (row["kind"], row["setting"]) == ("chat", "T = 0"):
            goal = f"   (wanted {case.wanted_length} a round, cost {case.wanted_cost})"
        positions = " ".join(f"{value:.2f}" for value in row["acceptance_by_position"])
        click.echo(f"{row['draft']:10} k={row['k']} {row['kind']:10} {row['setting']:20} "
                   f"{row['mean_acceptance_length']:.2f} a round, by position {positions}, "
                   f"cost {row['draft_cost']} V(1){goal}")  # fmt: skip


@main.command()
@click.option("-m", "--model", default=MODEL, show_default=True, help="A known pair, or a bundle.")
@click.option("-md", "--draft-model", help="TinyDraft of that bundle.  [default: of the zoo]")
@click.option("--draft-max", "k", default=3, show_default=True, type=click.IntRange(1))
@click.option("-t", "--threads", default=1, show_default=True, type=click.IntRange(1), help="Of each session.")
@click.option("-n", "--n-tokens", default=100, show_default=True, type=click.IntRange(20))
@click.option("--prompts", "n_prompts", default=4, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def contention(as_json: bool, **values: Any) -> None:
    """Both schedules with a target and a TinyDraft that share this machine's cores, against the simulator."""
    with errors():
        result = measure_contention(**{**values, "model": ensure(values["model"])}, say=say)
    if not as_json:
        for schedule in ("serial", "overlapped"):
            row = result[schedule]
            click.echo(f"{schedule:10} {row['tok_s']:.1f} tok/s, expected {row['expected']:.1f}: {row['within']:+.1%}")
        click.echo(f"the same tokens: {'yes' if result['identical'] else 'NO'}")
    click.echo(json.dumps({**result, "commit": commit()}, allow_nan=False))


_CASE = DeviceCase()


@main.command()
@click.option("--target-ms", default=1e3 * _CASE.target_s, show_default=True, type=click.FloatRange(0.1))
@click.option("--draft-ms", default=1e3 * _CASE.draft_s, show_default=True, type=click.FloatRange(0))
@click.option("--acceptance", default=_CASE.acceptance, show_default=True, type=click.FloatRange(0, 1))
@click.option("--runner-up", default=_CASE.runner_up, show_default=True, type=click.FloatRange(0, 1))
@click.option("--jitter", default=_CASE.jitter, show_default=True, type=click.FloatRange(0, 0.9))
@click.option("--draft-max", "k", default=_CASE.k, show_default=True, type=click.IntRange(1))
@click.option("-n", "--n-tokens", default=_CASE.n_tokens, show_default=True, type=click.IntRange(50))
@click.option("--repeats", default=_CASE.repeats, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def devices(target_ms: float, draft_ms: float, as_json: bool, **values: Any) -> None:
    """Both schedules on devices that are only times, against the simulator; a draft that is too slow."""
    with errors():
        result = measure_devices(DeviceCase(target_s=target_ms / 1e3, draft_s=draft_ms / 1e3, **values), say)
    if not as_json:
        for schedule in ("serial", "overlapped"):
            row = result[schedule]
            click.echo(f"{schedule:10} {row['speedup']['median']:.2f}x, expected {row['expected']:.2f}x, simulated "
                       f"{row['simulated']:.2f}x: off by {row['within']:+.1%}")  # fmt: skip
        slow = result["slow_draft"]
        click.echo(
            f"slow draft: drafted in {slow['rounds_that_drafted']} of {slow['rounds']} rounds, last {slow['last_k']}"
        )
    click.echo(json.dumps({**result, "commit": commit()}, allow_nan=False))


@main.command()
@click.option("-m", "--model", default=MODEL, show_default=True, help="A known pair, or a bundle's folder.")
@click.option("-t", "--threads", default=THREADS, show_default=True, type=click.IntRange(1))
@click.option("-n", "--n-tokens", default=160, show_default=True, type=click.IntRange(2))
@click.option("--prompts", "n_prompts", default=8, show_default=True, type=click.IntRange(2), help="Of each kind.")
@click.option("--kind", "kinds", multiple=True, default=AutoOptions().kinds, show_default=True)
@click.option("-k", "ks", multiple=True, type=click.IntRange(1), default=AutoOptions().ks, show_default=True)
@click.option("--trained", "most_trained", default=1, show_default=True, type=click.IntRange(0), help="Trained drafts.")
@click.option("--temperature", "--temp", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--exact/--fast", default=True, show_default=True)
@click.option(
    "--turns", "n_turns", default=1, show_default=True, type=click.IntRange(1), help="Answers to each prompt."
)
@click.option(
    "--calibrate", type=click.Choice(CALIBRATE), default="half", show_default=True,
    help="On half of the prompts; or as at first use, on other texts, and all prompts judge.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def auto(as_json: bool, **values: Any) -> None:
    """The plan's predictions against measurements, and auto against plain and the best fixed length."""
    options = AutoOptions(**values)
    with errors():
        result = measure_auto(options, say)
    if not as_json:
        for row in result["predictions"]["rows"]:
            click.echo(
                f"{row['label']:44} predicted {row['predicted_tok_s']:6}, measured {row['measured_tok_s']:6} tok/s "
                f"({row['error']:+.0%}; over plain {row['relative_error']:+.0%})"
            )
        click.echo(
            f"chosen: {result['predictions']['chosen']}, {result['predictions']['chosen_vs_best']} of the best, "
            f"{result['predictions']['best_measured']}"
        )
        for row in result["rows"]:
            click.echo(
                f"{row['kind']:10} auto {row['auto_vs_plain']['together']:.2f}x plain "
                f"({row['auto_vs_plain_at_standard_costs']['together']:.2f}x at standard costs), "
                f"{row['auto_vs_best_fixed']['together']:.2f}x the best fixed ({row['best_fixed']}; "
                f"{row['auto_vs_best_fixed_at_standard_costs']['together']:.2f}x at standard costs)"
            )
    click.echo(json.dumps({**values, "commit": commit(), **result}, allow_nan=False))


@main.command()
@click.option("-m", "--model", default=MODEL, show_default=True, help="A known pair, or a bundle's folder.")
@click.option("-t", "--threads", default=THREADS, show_default=True, type=click.IntRange(1))
@click.option("--rows", multiple=True, type=click.IntRange(1), default=DEFAULT_ROWS, show_default=True)
@click.option("--repeats", default=24, show_default=True, type=click.IntRange(1))
@click.option("--device-option", "device_options", multiple=True, metavar="KEY=VALUE", help="Such as kernels=native.")
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def kernels(
    model: str, threads: int, rows: tuple[int, ...], repeats: int, device_options: tuple[str, ...], as_json: bool
) -> None:
    """Where the time of a target call goes: by part of the graph and number of rows."""
    with errors():
        parts = profile_round(model, rows, threads, repeats, device_options=device_options)
    if not as_json:
        click.echo(table(parts))
    card = {"machine": machine_card(), "versions": versions(), "commit": commit()}
    click.echo(
        json.dumps(
            {"model": model, "threads": threads, "device_options": device_options, **card, "rows": parts},
            allow_nan=False,
        )
    )


@main.command()
@click.option("-m", "--model", default=MODEL, show_default=True, help="A known pair.")
@click.option("--only", "names", multiple=True, help="Only these engines.")
@click.option("--setup", is_flag=True, default=False, help="Make environments (some 4 GB in all) and models.")
def peers(model: str, names: tuple[str, ...], setup: bool) -> None:
    """Show the peer engines, or set them up, each in an environment of its own."""
    with errors():
        chosen = [find_peer(name) for name in names] or list(PEERS)
        if setup:
            _setup(model, chosen)
        for peer in chosen:
            missing = peer.missing(model)
            state = f"{missing}: add --setup" if missing else "ready"
            click.echo(f"{peer.name} {peer.version}, {model}: {state} ({peer.folder})")


def _setup(model: str, chosen: Sequence[Peer]) -> None:
    from edgespec.pairs import source_path

    set_up(chosen, model, source_path(model), say)


for extra in (*SUITE, widen_command, article, scaled):
    main.add_command(extra)

if __name__ == "__main__":
    main(prog_name="python -m edgespec_bench")
