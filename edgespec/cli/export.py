"""`edgespec export`: weights in; a bundle, a GGUF or a Hugging Face folder out; `edgespec_export` does the work.

Options become `ExportOptions`; those that do not go with the format asked for are errors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from edgespec.cli.console import format_bytes, print_json, progress, say
from edgespec.cli.export_layouts import write_fastest
from edgespec.cli.export_npu import NPU_OPTIONS, npu_options, write_static
from edgespec.cli.export_optimum import optimum_options, write_via_optimum

__all__ = ["command"]

MOST_NOTES = 3
GGUF_QUANTS = (
    *("q8_0", "f16", "f32", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs", "q2_k"),
    *("q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
)


def _comma_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if value else ()


def _layer_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`0-3,28,29` as (0, 1, 2, 3, 28, 29)."""
    if value is None:
        return None
    layers: list[int] = []
    for part in value.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise click.BadParameter(f"'{part}' is neither a layer number nor a range such as 0-3.")
        layers += range(int(first), int(last or first) + 1)
    return tuple(layers)


@click.command(name="export")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--name", help="The bundle's name; default: the model's own.")
@click.option("--bits", type=click.Choice(["4", "8", "32"]), default="4", show_default=True, help="32 keeps float.")
@click.option("--block-size", type=int, default=32, show_default=True, help="Weights that share a scale: 16 to 256.")
@click.option("--symmetric/--asymmetric", default=True, show_default=True, help="Without or with zero points.")
@click.option("--head-bits", type=click.Choice(["4", "8", "32"]), help="Of the lm head; default: as --bits.")
@click.option("--head-block-size", type=int, help="Of the lm head; default: as --block-size.")
@click.option("--embed-bits", type=click.Choice(["4", "8", "32"]), help="Of the embedding table.")
@click.option("--accuracy-level", type=int, default=4, show_default=True, help="4 multiplies in int8, 1 in float.")
@click.option(
    "--quantizer",
    type=click.Choice(["rtn", "mse", "gptq"]),
    default="rtn",
    show_default=True,
    help="Round to nearest, search scales, or fit the outputs on a calibration text.",
)
@click.option("--search", type=int, help="Scales that mse and gptq try per block.")
@click.option(
    "--fallback",
    type=click.Choice(["refuse", "smaller", "pad"]),
    default="refuse",
    show_default=True,
    help="For rows that the block does not divide.",
)
@click.option("--taps", callback=_comma_list, help="Features to give out: final, layer.N; separated by commas.")
@click.option("--tree/--no-tree", default=None, help="A graph for trees of drafts; default: where it is possible.")
@click.option("--exit-layer", type=int, help="Layers below an early exit: writes the halves and the head apart.")
@click.option("--keep-layers", callback=_layer_list, help="Only these layers, such as 0-7,28,29: a cheap draft.")
@click.option(
    "-c", "--ctx-size", "--n-ctx", "--context", "n_ctx", type=int, help="Context in tokens; default: the model's."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with a float reference.")
@click.option("--min-top1", type=float, help="Least share of equal top tokens for the check to pass.")
@click.option("--max-kld", type=float, help="Largest mean KL divergence, in nats, for the check to pass.")
@click.option(
    "--optimize-for",
    help="rows=N: of several layouts of the weights, the one with the fastest calls of N rows here, within --max-kld.",
)
@click.option("--check-tokens", type=int, default=256, show_default=True, help="Length of the text compared.")
@click.option(
    "--flavour",
    type=click.Choice(["cpu", "npu", "gguf"]),
    default="cpu",
    show_default=True,
    help="npu: graphs of fixed shapes in plain operators; of a TinyDraft with --target. gguf: as --format gguf.",
)
@npu_options
@optimum_options
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["bundle", "gguf", "hf"]),
    default="bundle",
    show_default=True,
    help="gguf: a file for llama.cpp, with --quant. hf: a Hugging Face folder in float32.",
)
@click.option("--target", help="Of a TinyDraft (--format hf, --flavour npu), whose tables it takes: a pair or a path.")
@click.option(
    "--quant",
    "--gguf-type",
    "gguf_type",
    type=click.Choice(GGUF_QUANTS),
    default="q8_0",
    show_default=True,
    help="Of a GGUF's matrices; all but the first three are made by llama.cpp.",
)
@click.option("--requantize", is_flag=True, help="With --format gguf, quantize weights that are low-bit already.")
@click.option("--force", is_flag=True, help="Replace the bundle or file that OUT is.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout, no progress bar.")
@click.pass_context
def command(
    context: click.Context,
    /,
    source: Path,
    out: Path,
    flavour: str,
    via: str | None,
    optimum_python: str | None,
    file_format: str,
    gguf_type: str,
    requantize: bool,
    target: str | None,
    check: bool,
    optimize_for: str | None,
    min_top1: float | None,
    max_kld: float | None,
    check_tokens: int,
    force: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Convert SOURCE into the bundle folder or file OUT.

    SOURCE is a .gguf, a folder with config.json and safetensors, a known pair's name, or with --target a trained draft.
    """
    from edgespec_export import CheckOptions, ExportOptions, export_model

    from edgespec.bundle import Bundle
    from edgespec.errors import ConfigError

    if flavour == "gguf" and file_format in ("bundle", "gguf"):
        flavour, file_format = "cpu", "gguf"
    _refuse_strangers(context, file_format, flavour, via)
    source = _weights(source, as_json)
    if file_format == "gguf":
        _write_gguf(source, out, gguf_type, requantize=requantize, force=force, as_json=as_json)
        return
    if file_format == "hf":
        _write_hf(source, target, out, as_json=as_json)
        return
    if not check and (min_top1 is not None or max_kld is not None):
        raise ConfigError("--min-top1 and --max-kld judge the check, which --no-check leaves out: drop one of the two")
    limits = CheckOptions(min_top1=min_top1, max_kld=max_kld, n_tokens=check_tokens) if check else None
    if via is not None:
        write_via_optimum(source, out, optimum_python, limits, _parity_table, as_json=as_json)
        return
    if flavour == "npu":
        write_static(source, out, target, settings, limits, force=force, as_json=as_json)
    else:
        for key in ("bits", "head_bits", "embed_bits"):
            settings[key] = None if settings[key] is None else int(settings[key])
        options = ExportOptions(**{key: value for key, value in settings.items() if key not in NPU_OPTIONS})
        if optimize_for is not None:
            write_fastest(source, out, options, optimize_for, limits, force=force, as_json=as_json)
            return
        with progress(plain=as_json) as report:
            export_model(source, out, options, report, check=limits, force=force)
    _show(Bundle.open(out), as_json)


def _weights(source: Path, as_json: bool) -> Path:
    """The file or folder SOURCE, or the weights of the known pair of that name."""
    from edgespec.manifest import known_manifests
    from edgespec.pairs import source_path

    if source.exists() or str(source) not in known_manifests():
        return source
    with progress(plain=as_json) as report:
        return source_path(str(source), report)


# what each kind of output takes beside the common options; None: whatever is not listed for another
_COMMON = {"source", "out", "flavour", "via", "file_format", "as_json"}
_CHECK = {"check", "min_top1", "max_kld", "check_tokens"}
_OWN: dict[str, set[str] | None] = {
    "--format gguf": {"gguf_type", "requantize", "force"},
    "--format hf": {"target"},
    "--flavour npu": {"name", "taps", "keep_layers", "n_ctx", "target", "force", *_CHECK, *NPU_OPTIONS},
    "--via optimum": {"optimum_python", *_CHECK},
    "--flavour cpu": None,
}
_NOT_CPU = ("optimum_python", "gguf_type", "requantize", "target", *NPU_OPTIONS)


def _refuse_strangers(context: click.Context, file_format: str, flavour: str, via: str | None) -> None:
    """Options that the kind of output would ignore are errors."""
    from edgespec.errors import ConfigError

    if file_format != "bundle" and flavour != "cpu":
        raise ConfigError(f"--flavour {flavour} is of bundles and --format is {file_format}: drop one of the two")
    what = f"--format {file_format}" if file_format != "bundle" else f"--flavour {flavour}"
    if via is not None:
        if what != "--flavour cpu":
            raise ConfigError(f"{what} does not go with --via {via}: drop one of the two")
        what = f"--via {via}"
    own = _OWN[what]
    for parameter in context.command.params:
        name = str(parameter.name)
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        is_stranger = name not in _COMMON | own if own is not None else name in _NOT_CPU
        if is_given and is_stranger:
            raise ConfigError(f"{parameter.opts[0]} does not go with {what}: drop one of the two")


def _write_gguf(source: Path, out: Path, gguf_type: str, *, requantize: bool, force: bool, as_json: bool) -> None:
    from edgespec_export.gguf_quantize import export_gguf

    with progress(plain=as_json) as report:
        made = export_gguf(source, out, type=gguf_type, requantize=requantize, progress=report, force=force)
    size = out.stat().st_size
    if as_json:
        fallbacks = [asdict(item) for item in made.fallbacks]
        print_json({"path": str(out), "bytes": size, "type": gguf_type, "types": made.types, "fallbacks": fallbacks})
        return
    click.echo(f"{gguf_type}, {format_bytes(size)}: {out}")
    click.echo(f"tensors: {', '.join(f'{n} of {kind}' for kind, n in made.types.items())}")
    groups = Counter((item.n_columns, item.wanted, item.type) for item in made.fallbacks)
    for (columns, wanted, kind), n in groups.items():
        tensors = "1 tensor is" if n == 1 else f"{n} tensors are"
        say(f"note: {tensors} {kind}, because rows of {columns} values are no whole blocks of {wanted}.")


def _write_hf(source: Path, target: str | None, out: Path, *, as_json: bool) -> None:
    from edgespec_export.hf_out import write_hf_folder, write_hf_model

    from edgespec.errors import ConfigError
    from edgespec.manifest import known_manifests
    from edgespec.pairs import source_path
    from edgespec.zoo_config import is_draft_folder

    if target is None and is_draft_folder(source):
        raise ConfigError(
            "--format hf of a trained draft needs --target, whose embedding table it takes: a pair, .gguf or folder"
        )
    with progress(plain=as_json) as report:
        if target is None:
            write_hf_model(source, out)
        else:
            weights = source_path(target, report) if target in known_manifests() else Path(target).expanduser()
            write_hf_folder(source, weights, out)
    size = sum(item.stat().st_size for item in out.iterdir())
    if as_json:
        print_json({"path": str(out), "bytes": size})
    else:
        click.echo(f"Hugging Face model in float32, {format_bytes(size)}: {out}")


def _show(bundle: Any, as_json: bool) -> None:
    info = bundle.info
    size = sum(entry["bytes"] for entry in bundle.files.values())
    facts = {"path": str(bundle.folder), "bytes": size, "quantization": info.quantization, "parity": info.parity}
    if as_json:
        print_json({"name": info.name, **facts})
        return
    click.echo(f"{info.name} ({info.architecture}, {info.n_layers} layers, {format_bytes(size)}): {bundle.folder}")
    notes = info.quantization["notes"]
    for note in notes[:MOST_NOTES]:
        click.echo(f"note: {note}")
    if len(notes) > MOST_NOTES:
        click.echo(f"note: and {len(notes) - MOST_NOTES} more like these; bundle.json lists them all")
    if info.parity is not None:
        click.echo(_parity_table(info.parity))
        if info.parity["argmax_flips"]:
            flips, count = info.parity["argmax_flips"], info.parity["n_tokens"]
            level = info.quantization.get("accuracy_level")
            how = "" if level is None else f" (accuracy level {level})"
            say(f"warning: {flips} of {count} top tokens differ from the float model's{how}.")
        if info.parity.get("npu"):
            click.echo(_npu_line(info.parity["npu"]))


def _npu_line(npu: dict[str, Any]) -> str:
    where = f"{npu['device']}{' (emulated)' if npu['is_emulated'] else ''}"
    return (
        f"on {where}, {npu['n_tokens']} tokens: KLD {npu['kld_mean']:.2e}, top-1 {npu['top1_agreement']:.1%}, largest "
        f"error {npu['max_abs_error']} with logits of up to {npu['max_abs_logit']}; stated error {npu['stated_error']}"
    )


def _parity_table(parity: dict[str, Any]) -> str:
    """Plain text, so that it reads the same in a log."""
    lines = [f"{'compared with float':>22}  {'KLD':>9}  {'top-1':>6}  {'max error':>9}"]
    rows = [(f"{row['query']} on a past of {row['past']}", row) for row in parity["grid"]]
    rows.append((f"text of {parity['n_tokens']} tokens", parity))
    lines += [
        f"{label:>22}  {row['kld_mean']:>9.2e}  {row['top1_agreement']:>6.1%}  {row['max_abs_error']:>9.2e}"
        for label, row in rows
    ]
    return "\n".join(lines)
