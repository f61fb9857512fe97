"""The part of `edgespec export` that makes graphs of fixed shapes for NPUs (`--flavour npu`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgespec.cli.console import progress

__all__ = ["NPU_OPTIONS", "npu_options", "write_static"]

Command = TypeVar("Command", bound=Callable[..., Any])
NPU_OPTIONS = ("soc", "widths", "dtype", "calibration")


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return () if value is None else tuple(part.strip() for part in value.split(","))


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,4,8` as (1, 4, 8)."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    bad = next((part for part in parts if not part.isdecimal()), None)
    if bad is not None:
        raise click.BadParameter(f"'{bad}' is no number of rows; write them as 1,4,8.")
    return tuple(map(int, parts))


def npu_options(command: Command) -> Command:
    """Add the options of `--flavour npu`."""
    for option in reversed(
        (
            click.option("--soc", callback=_names, help="Chips to compile for, such as sm8650,sm8750 (--flavour npu)."),
            click.option("--widths", callback=_counts, help="Rows of the graphs (--flavour npu); default: 1,4,8."),
            click.option(
                "--dtype",
                type=click.Choice(["fp16", "w8a16"]),
                default=None,
                help="Precision on the NPU (--flavour npu); default: fp16. w8a16 needs --calibration.",
            ),
            click.option(
                "--calibration",
                type=click.Path(path_type=Path, dir_okay=False),
                help="A text file whose activations set the ranges of w8a16.",
            ),
        )
    ):
        command = option(command)
    return command


def write_static(
    source: Path, out: Path, target: str | None, settings: dict[str, Any], check: Any, *, force: bool, as_json: bool
) -> None:
    """A model, or with `target` a trained draft, as a bundle of fixed shapes."""
    from edgespec_export import StaticOptions, export_static, export_static_draft

    from edgespec.errors import ConfigError
    from edgespec.pairs import ensure
    from edgespec.zoo_config import is_draft_folder

    given = {key: settings[key] for key in ("name", "n_ctx", "keep_layers", "taps", "calibration")}
    given["socs"] = settings["soc"]
    given |= {key: settings[key] for key in ("widths", "dtype") if settings[key] is not None}
    options = StaticOptions(**given)
    is_draft = is_draft_folder(source)
    if is_draft != (target is not None):
        raise ConfigError(
            f"{source} is a trained draft: say with --target whose embedding table it takes (a pair or a bundle)"
            if is_draft
            else f"--target is for trained drafts, and {source} is none: drop it"
        )
    with progress(plain=as_json) as report:
        if target is None:
            export_static(source, out, options, report, check=check, force=force)
        else:
            export_static_draft(source, ensure(target, report), out, options, report, check=check, force=force)
