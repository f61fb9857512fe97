"""`edgespec info`: what a bundle says of itself. Only shows `edgespec.bundle`'s facts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import format_bytes, print_json

if TYPE_CHECKING:
    from edgespec.bundle import Bundle

__all__ = ["command"]


@click.command(name="info")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def command(model: str, as_json: bool) -> None:
    """Say what MODEL (a known name that was pulled, or a bundle's folder) is: sizes, rounding, source, what it offers.

    Nothing is downloaded. Weights that were made up for measuring say that they are synthetic.
    """
    from edgespec.bundle import Bundle
    from edgespec.pairs import resolve

    bundle = Bundle.open(resolve(model))
    size = sum(entry["bytes"] for entry in bundle.files.values())
    if as_json:
        facts = dataclasses.asdict(bundle.info)
        print_json({**facts, "synthetic": bundle.info.synthetic, "path": str(bundle.folder), "bytes": size})
        return
    for line in _lines(bundle, size):
        click.echo(line)


def _lines(bundle: Bundle, size: int) -> list[str]:
    info, rounding = bundle.info, bundle.info.quantization
    lines = [f"{info.name}  {bundle.folder}"]
    if info.synthetic is not None:
        lines.append(f"SYNTHETIC: {info.synthetic}")
    lines.append(
        f"{info.architecture}, {info.n_layers} layers of {info.n_embd}, {info.n_heads} heads on {info.n_kv_heads}, "
        f"{info.n_vocab:,} tokens, context {info.n_ctx:,}, {format_bytes(size)}"
    )
    if "block_size" in rounding:
        bits = "float32" if rounding["bits"] == 32 else f"int{rounding['bits']}, blocks of {rounding['block_size']}"
        lines.append(f"{bits}, {rounding['quantizer']}")
    if info.static is not None:
        lines.append(f"{info.static['dtype']}, fixed shapes of {', '.join(map(str, info.static['widths']))} rows")
    if info.parity is not None:
        lines.append(
            f"against the float weights: KLD {info.parity['kld_mean']}, top token the same in "
            f"{info.parity['top1_agreement']:.1%}"
        )
    graphs = ", ".join(sorted(name for name in bundle.files if name.endswith(".onnx")))
    lines.append(f"graphs: {graphs}; features: {', '.join(info.taps) or 'none'}")
    return lines
