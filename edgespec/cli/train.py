"""`edgespec train`: a target writes its own corpus (`data`), and drafts are trained on it (one command a kind).

Options in, `edgespec_models` does the work, a line out. Interrupted work is kept and the way to go on is said.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli import _debug_option as debug_option
from edgespec.cli import train_table
from edgespec.cli.console import Reporter, print_json, say
from edgespec.cli.options import json_option
from edgespec.cli.train_common import FORCE, MODEL, THREADS, bar, check_package, commands, find_target
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec_models.pipeline import Target

__all__ = ["command"]

Command = TypeVar("Command", bound=Callable[..., Any])


TRAINING = (
    MODEL,
    click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The draft's folder."),
    click.option(
        "--corpus",
        "corpora",
        type=click.Path(path_type=Path),
        multiple=True,
        help="From `edgespec train data`; several are joined.",
    ),
    click.option("--rows", type=click.IntRange(2), help="Instead of --corpus: write one of so many rows beside OUT."),
    click.option("--features", type=click.Path(path_type=Path), help="Folder of features; default: beside the corpus."),
    click.option("--weights", type=click.Path(path_type=Path), help="The target's float weights, for a bundle."),
    click.option("--steps", type=click.IntRange(1), default=2400, show_default=True),
    click.option("--batch", "batch_rows", type=click.IntRange(1), default=4, show_default=True, help="Rows a step."),
    click.option("--lr", type=click.FloatRange(0, 1, min_open=True), default=1e-3, show_default=True),
    click.option(
        "--dropout",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.1,
        show_default=True,
        help="Share of a draft's inputs that a training step leaves out.",
    ),
    click.option("-s", "--seed", type=click.IntRange(0), default=0, show_default=True),
    click.option("--device", default="cpu", show_default=True, help="Of torch: cpu, cuda ..."),
    THREADS,
    click.option(
        "--vocabulary", type=click.IntRange(64), default=8192, show_default=True, help="Tokens that it can draft."
    ),
    click.option("--checkpoint-every", type=click.IntRange(1), default=300, show_default=True, help="Steps."),
    click.option("--eval-every", type=click.IntRange(1), default=300, show_default=True, help="Steps."),
    click.option(
        "--patience", type=click.IntRange(0), default=0, help="Evaluations without a better one; 0: all steps."
    ),
    click.option("--max-minutes", type=click.FloatRange(0, min_open=True), help="Stop at the step reached by then."),
    click.option("--resume", is_flag=True, help="Go on from the checkpoint in OUT."),
    click.option("--keep-checkpoint", is_flag=True, help="Leave it in OUT, to train on with more steps."),
    FORCE,
    json_option,
)
OWN: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "tinydraft": (click.option("--layers", help="The target's layers that it starts from, such as 0,15,29."),),
    "eagle": (
        click.option("--taps", help="Features to look at, such as layer.9,layer.19,final; default: the bundle's."),
        click.option(
            "--rollout", type=click.IntRange(1, 8), default=2, show_default=True, help="Own steps trained on."
        ),
        click.option("--depth", type=click.IntRange(1, 8), default=1, show_default=True, help="Decoder layers."),
    ),
    "medusa": (
        click.option("--taps", help="Features to look at, final last; default: the bundle's."),
        click.option("--heads", type=click.IntRange(1, 8), default=3, show_default=True, help="Tokens it drafts."),
    ),
    "exit": (click.option("--width", type=click.IntRange(1), default=1536, show_default=True, help="Of the adapter."),),
}
SUMMARIES = {
    "tinydraft": "Train a small Llama draft model on the target's distribution.",
    "eagle": "Train a decoder layer over the target's features.",
    "medusa": "Train heads that draft several tokens at once.",
    "exit": "Train an early exit after the target's lower layers.",
}


class _Group(click.Group):
    """Its commands take `--debug` too, as all others do."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is not None and not any("--debug" in parameter.opts for parameter in found.params):
            found.params.append(debug_option())
        return found


@click.group("train", cls=_Group, no_args_is_help=True)
def command() -> None:
    """Train drafts for a target on text that it wrote itself."""


@command.command("data")
@MODEL
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="A .safetensors file.")
@click.option("--rows", type=click.IntRange(2), default=2000, show_default=True, help="Conversations to keep.")
@click.option("--length", type=click.IntRange(16), default=448, show_default=True, help="Tokens of each.")
@click.option("-s", "--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=24, show_default=True, help="Conversations written at once.")
@click.option("--temp-user", type=float, default=1.0, show_default=True)
@click.option("--temp-assistant", default="0,0.7", show_default=True, help="Rows take these in turn.")
@click.option("--top-k", type=int, default=50, show_default=True, help="0 = off.")
@click.option("--system", help="System message; default: the chat template's own.")
@click.option("--prompts", help="First user turns: `tasks` (built in) or a .jsonl file; default: the model's own.")
@click.option("--raw", "is_raw", is_flag=True, help="Without the chat template: text that just goes on.")
@click.option("--max-user", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a user's turn.")
@click.option("--min-assistant", type=click.IntRange(0), help="Drop rows with fewer; default: a quarter of a row.")
@click.option("--max-repetition", type=float, default=0.6, show_default=True, help="Drop rows above (8-grams).")
@THREADS
@FORCE
@json_option
def data(**values: Any) -> None:
    """Let the target write a corpus: conversations with itself, or raw text where it has no chat template."""
    check_package()
    from edgespec_models.conversation import DataSettings
    from edgespec_models.corpus import check_name, recipe_path
    from edgespec_models.pipeline import make_corpus

    names = set(DataSettings.__dataclass_fields__)
    settings = DataSettings(
        **{k: v for k, v in values.items() if k in names - {"temp_assistant"}},
        temp_assistant=_numbers("--temp-assistant", values["temp_assistant"], float),
    )
    out: Path = values["out"]
    check_name(out)
    if out.exists() and not values["force"]:
        raise ConfigError(f"{out} exists: give another name, or --force to replace it")
    target = find_target(values, needs_weights=False)
    hint = f"finished batches are kept in {out}.parts: run the same command to go on"
    with _resumable(lambda: hint), bar(values) as report:
        corpus = make_corpus(target, out, settings, report)
    found = (corpus.recipe or {})["filters"]
    facts = {
        "path": str(out),
        "recipe": str(recipe_path(out)),
        "rows": len(corpus),
        "tokens": int(corpus.tokens.size),
        "assistant_tokens": int(corpus.assistant.sum()),
        **found,
    }
    if values["as_json"]:
        print_json(facts)
        return
    click.echo(
        f"{facts['rows']} rows of {corpus.length} tokens, {facts['assistant_tokens']:,} of them the assistant's; of "
        f"{found['written']} written, {found['repetitive']} were repetitive and {found['short']} short of answers"
    )
    click.echo(f"{out}")


def _add_kind(kind: str) -> None:
    """One command a kind: the shared options and its own."""

    def train(**values: Any) -> None:
        _train(kind, values)

    train.__doc__ = SUMMARIES[kind]
    decorated: Any = train
    for option in reversed((*TRAINING, *OWN[kind])):
        decorated = option(decorated)
    command.command(kind)(decorated)


for _kind in OWN:
    _add_kind(_kind)
command.add_command(train_table.command)


def _train(kind: str, values: dict[str, Any]) -> None:
    check_package()
    from edgespec_models.corpus import Corpus
    from edgespec_models.pipeline import TrainRequest, check_torch, train_draft

    out: Path = values["out"]
    if bool(values["corpora"]) == (values["rows"] is not None):
        raise ConfigError("say what to train on: either --corpus (see `edgespec train data`) or --rows")
    _check_out(out, values)
    options, taps = _own_options(kind, values)
    if values["corpora"]:
        Corpus.join(
            [Corpus.load(path) for path in values["corpora"]]
        )  # a mistake is said before anything is downloaded
    check_torch()
    _check_device(values["device"])
    target = find_target(values, needs_weights=True)
    with _resumable(lambda: _way_on(out)), bar(values) as report:
        corpora = values["corpora"] or (_own_corpus(target, values, report),)
        _clear(out, values)
        same = (
            "steps", "batch_rows", "lr", "dropout", "seed", "device", "threads", "checkpoint_every", "eval_every",
            "patience",
        )  # fmt: skip
        request = TrainRequest(
            kind=kind,
            target=target,
            corpora=corpora,
            out=out,
            features=values["features"],
            taps=taps,
            n_vocab_draft=values["vocabulary"],
            resume=values["resume"],
            keep_checkpoint=values["keep_checkpoint"],
            max_seconds=None if values["max_minutes"] is None else 60 * values["max_minutes"],
            commands=commands(kind, target, corpora, values),
            options=options,
            **{name: values[name] for name in same},
        )
        config = train_draft(request, report, lambda step: _report_step(step, report))
    _show(kind, out, config, values["as_json"])


def _check_out(out: Path, values: dict[str, Any]) -> None:
    """Refuse to overwrite, and to resume what is not there, before anything is done."""
    is_used = any((out / name).exists() for name in ("config.json", "checkpoint.safetensors"))
    if values["resume"] and values["force"]:
        raise ConfigError("--resume goes on with what is in OUT and --force replaces it: give one of them")
    if values["resume"] and not (out / "checkpoint.safetensors").is_file():
        raise ConfigError(f"{out} holds no checkpoint to resume from: drop --resume")
    if is_used and not values["resume"] and not values["force"]:
        raise ConfigError(f"{out} holds a draft already: --resume goes on with it, --force replaces it")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: OUT is the folder of the draft")


def _clear(out: Path, values: dict[str, Any]) -> None:
    """With --force: only files that training wrote; anything else in the folder stays."""
    if values["force"]:
        for name in ("config.json", "weights.safetensors", "checkpoint.safetensors", "README.md", "log.jsonl"):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "candidate", ignore_errors=True)


def _check_device(device: str) -> None:
    """Raise ConfigError for a device that this torch does not have."""
    torch = importlib.import_module("torch")
    try:
        torch.empty(1, device=device)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--device {device}: this torch {torch.__version__} cannot use it ({reason}): use cpu"
        ) from error


def _own_options(kind: str, values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """The core's options and the taps that a kind's own flags mean."""
    taps = tuple(part.strip() for part in values["taps"].split(",")) if values.get("taps") else None
    if kind == "tinydraft":
        layers = values["layers"]
        return ({"layers": _numbers("--layers", layers, int)} if layers else {}), None
    names = {
        "eagle": {"rollout": "n_steps", "depth": "n_layers"},
        "medusa": {"heads": "n_medusa"},
        "exit": {"width": "n_ff"},
    }
    return {name: values[flag] for flag, name in names[kind].items()}, taps


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}: give numbers separated by commas") from None


def _own_corpus(target: Target, values: dict[str, Any], report: Reporter) -> Path:
    """--rows: a corpus beside OUT, written by the target, or the one that an earlier run wrote there."""
    from edgespec_models.conversation import DataSettings
    from edgespec_models.corpus import Corpus
    from edgespec_models.pipeline import make_corpus

    out: Path = values["out"]
    path = out.with_name(f"{out.name}.corpus.safetensors")
    if path.is_file():
        if len(Corpus.load(path)) != values["rows"]:
            raise ConfigError(f"{path} holds {len(Corpus.load(path))} rows, not {values['rows']}: give it as --corpus")
        return path
    make_corpus(target, path, DataSettings(rows=values["rows"], seed=values["seed"]), report)
    return path


def _report_step(step: Any, report: Reporter) -> None:
    report("training", step.step, step.steps)
    if step.survival is None:
        return
    survival = "/".join(f"{share:.2f}" for share in step.survival)
    found = "" if not step.acceptance else f", {step.acceptance['mean_acceptance_length']:.2f} tokens a round"
    say(f"step {step.step}: loss {step.loss:.3f}, held-out survival {survival}{found}, {step.tokens_s:.0f} tokens/s")


def _show(kind: str, out: Path, config: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"kind": kind, "path": str(out), "acceptance": config["acceptance"]})
        return
    length, k = config["acceptance"]["mean_acceptance_length"], config["acceptance"]["k"]
    click.echo(f"{kind}: {length:.2f} tokens a round at {k} drafted ({config['acceptance']['setting']}): {out}")


@contextmanager
def _resumable(hint: Callable[[], str]) -> Iterator[None]:
    """Say how to go on where the user interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {hint()}")
        raise


def _way_on(out: Path) -> str:
    """What an interrupted training left."""
    if (out / "checkpoint.safetensors").is_file():
        return f"the last checkpoint is in {out}: run the same command with --resume to go on"
    return "there is no checkpoint yet; corpus and features are kept: run the same command to start over"
