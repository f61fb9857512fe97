"""The command `widen`; what it does is in `targets`."""

from __future__ import annotations

import json
from typing import Any

import click

from edgespec.cli import console
from edgespec_bench.console import errors, say
from edgespec_bench.widen.targets import WidenOptions, widen

__all__ = ["command"]

_DEFAULTS = WidenOptions()


@click.command("widen")
@click.option("-m", "--model", default=_DEFAULTS.model, show_default=True, help="A known pair of plain Llama form.")
@click.option("--factor", type=int, default=_DEFAULTS.factor, show_default=True, help="2 or 3 times as wide.")
@click.option("--acceptance", type=float, default=_DEFAULTS.acceptance, show_default=True, help="Of the original.")
@click.option("--tolerance", type=float, default=_DEFAULTS.tolerance, show_default=True)
@click.option("--noise", type=float, default=None, help="Relative size of the noise; skips the search.")
@click.option("--measure", is_flag=True, default=False, help="With --noise: measure the acceptance that it gives.")
@click.option("-s", "--seed", type=int, default=_DEFAULTS.seed, show_default=True)
@click.option("-t", "--threads", type=click.IntRange(1), default=_DEFAULTS.threads, show_default=True)
@click.option("--prompts", "n_prompts", type=click.IntRange(1), default=_DEFAULTS.n_prompts, show_default=True)
@click.option("-n", "--n-tokens", type=click.IntRange(2), default=_DEFAULTS.n_tokens, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON on stdout.")
def command(as_json: bool, **values: Any) -> None:
    """Make a larger synthetic target: the same function with 4 or 9 times the layer weights, then noise.

    The noise is as large as it takes for the original, as a draft, to be accepted as often as --acceptance says.
    """
    with errors():
        options = WidenOptions(**values)
        with console.progress(plain=as_json) as report:
            result = widen(options, say, lambda step, done, total=None: report(step, done, total))
    if not as_json:
        click.echo(f"{result['name']}: SYNTHETIC, {result['n_parameters'] / 1e9:.2f} B parameters, {result['what']}")
        click.echo(f"edgespec run -m {result['name']} --draft model -md {result['model']}")
    click.echo(json.dumps(result, allow_nan=False))
