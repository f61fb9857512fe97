"""What the commands of `edgespec train` share: the target, the recipe of a draft for its card, options, a bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Reporter, progress
from edgespec.cli.options import DEFAULT_MODEL
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec_models.pipeline import Target

__all__ = ["FORCE", "MODEL", "THREADS", "bar", "check_package", "commands", "find_target"]

MODEL = click.option(
    "-m", "--model", default=DEFAULT_MODEL, show_default=True, help="The target: a pair's name, a folder or a .gguf."
)
THREADS = click.option("-t", "--threads", type=click.IntRange(1), help="Threads; by default the allowed fast cores.")
FORCE = click.option("--force", is_flag=True, help="Replace what lies at OUT.")


def check_package() -> None:
    from importlib.util import find_spec

    from edgespec.errors import MissingDependencyError

    if find_spec("edgespec_models") is None:
        raise MissingDependencyError(
            "edgespec_models, which comes with edgespec, cannot be found: install edgespec (`pip install -e .` in a "
            "checkout) instead of running it from its folder"
        )


def find_target(values: dict[str, Any], *, needs_weights: bool) -> Target:
    """The target's bundle, fetched and converted if need be, and the float weights that it was made from."""
    from edgespec_models.pipeline import Target

    from edgespec.bundle import Bundle
    from edgespec.manifest import known_manifests
    from edgespec.pairs import ensure, source_path

    name, given = values["model"], values.get("weights")
    if given is not None and not given.exists():
        raise ConfigError(f"--weights {given} does not exist: give a .gguf file or a folder with safetensors")
    with bar(values) as report:
        folder = ensure(name, progress=report)
        if not (folder / "bundle.json").is_file():
            raise ConfigError(f"{folder} is no bundle of edgespec: training reads features, so export one first")
        info = Bundle.open(folder).info
        pair = known_manifests().get(info.name)  # also where the bundle of a known pair was named by its folder
        weights = given
        if needs_weights and weights is None:
            is_source = pair and info.source.get("sha256") == getattr(pair.source, "sha256", None)
            if is_source or (pair and name == info.name):
                weights = source_path(info.name, report)
            elif folder != Path(name).expanduser():  # converted just now, from what was named
                weights = Path(name).expanduser()
    label = info.name if pair is not None else Path(name).name
    return Target(folder, label, weights, pair.license if pair is not None else None, values["threads"])


def commands(kind: str, target: Target, corpora: tuple[Path, ...], values: dict[str, Any]) -> tuple[str, ...]:
    """What makes this draft again, for its card; names of files without their folders."""
    from edgespec_models.pipeline import corpus_command

    context = click.get_current_context()
    given = " ".join(f"--corpus {corpus.name}" for corpus in corpora)
    words = [f"edgespec train {kind} -m {target.label} {given} -o {values['out'].name}"]
    skipped = {"model", "out", "corpora", "rows", "features", "weights", "resume", "force", "as_json",
               "keep_checkpoint", "threads", "device", "max_minutes", "checkpoint_every"}  # fmt: skip
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in skipped or not isinstance(parameter, click.Option):
            continue
        if values.get(name) is not None and (name in ("steps", "lr") or values[name] != parameter.default):
            words.append(f"{max(parameter.opts, key=len)} {values[name]}")
    made = [corpus_command(corpus, target.label) for corpus in corpora]
    return (*(command for command in made if command), " ".join(words))


@contextmanager
def bar(values: dict[str, Any]) -> Iterator[Reporter]:
    with progress(plain=values["as_json"]) as report:
        yield report
