"""`edgespec check`: is this pair lossless on this machine? Three levels of evidence and a broken rule beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import engine_options, json_option
from edgespec.cli.run import load_llm

if TYPE_CHECKING:
    from edgespec.proof.pair import CheckReport

__all__ = ["command"]


@click.command("check")
@click.argument("model")
@click.option("-n", "--max-tokens", type=click.IntRange(min=8), default=128, show_default=True, help="Per prompt.")
@click.option("-s", "--seed", type=int, default=0, show_default=True)
@engine_options
@json_option
@click.pass_context
def command(context: click.Context, /, **values: Any) -> None:
    """Check that MODEL with its draft gives what MODEL alone would give.

    Exits with 1 where a level fails.
    """
    from edgespec.proof.pair import check_pair

    with load_llm(values, verify=True) as llm, console.progress(plain=values["as_json"]) as report:
        result = check_pair(llm, max_tokens=values["max_tokens"], seed=values["seed"], progress=report)
    if values["as_json"]:
        console.print_json({"model": values["model"], "draft": llm.options.draft, **result.to_dict()})
    else:
        _print(result)
    context.exit(0 if result.lossless else 1)


def _print(result: CheckReport) -> None:
    out = console.out()
    a, n, p = result.algorithm, result.numerics, result.pair
    out.print(f"1. algorithm: {_verdict(a['passed'])}")
    out.print(
        f"   {a['n_enumerations']} exact enumerations of {', '.join(a['rules'])}: total variation at most "
        f"{a['max_total_variation']:.1e}; {a['coupled_mismatches']} of {a['coupled_models']} coupled runs differ; "
        f"{a['broken_rules_caught']} of {a['broken_rules_caught'] + len(a['broken_rules_missed'])} broken rules caught"
    )
    out.print(f"2. numerics: {n['mode']}")
    if n["exact_rows"]:
        out.print(
            f"   bit-identical rows in calls of {n['exact_rows'][0]} to {n['exact_rows'][1]} tokens"
            f"{_multiples(n['exact_rows_multiple'])}; a one-row call "
            f"differs by up to {n['single_row_max_abs_diff']:.3g} in a logit ({n['single_row_argmax_flips']} other "
            f"argmax in {n['single_row_positions']} positions)"
        )
    out.print(f"3. this pair: {_verdict(p['passed'])}")
    for row in p["identity"]:
        same = "identical" if row["identical"] else f"differs: {row['first_differences']}"
        out.print(f"   {row['setting']}: {row['tokens']} tokens, {row['accepted']} accepted drafts, {same}")
    for row in p["distribution"]:
        out.print(f"   {row['rule']} rule: p = {row['p_value']:.2g} over {row['tokens']} tokens")
    for rule in p["rules_without_trees"]:
        out.print(f"   {rule} rule: not played, as it judges chains and trees were drafted")
    control = p["negative_control"]
    out.print(
        f"   negative control (the lossy {control['rule']} rule): p = {control['p_value']:.2g}, has to be under 1e-06"
    )
    if not p["identity_judged"]:
        out.print("   identity is shown and not judged: without exact rows it is not promised")
    out.print(f"lossless: {'yes' if result.lossless else 'NO'}")


def _multiples(multiple: int) -> str:
    return "" if multiple == 1 else f" (multiples of {multiple})"


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"
