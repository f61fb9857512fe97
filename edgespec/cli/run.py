"""`edgespec run`: a prompt in, text out, with the speculation's figures on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import (
    engine_kwargs,
    engine_options,
    json_option,
    model_option,
    sampling_options,
    sampling_params,
)
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from edgespec.compare import Comparison
    from edgespec.llm import LLM
    from edgespec.outputs import CompletionOutput, Delta

__all__ = ["command", "load_llm", "print_pieces", "print_stats", "prompt_ids", "to_json"]


@click.command("run")
@click.argument("prompt", required=False)
@model_option
@click.option("-f", "--file", "prompt_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the model's chat template.")
@click.option("--system", help="System message for the chat template.")
@click.option("--compare", is_flag=True, help="Run plain and speculative and report speeds and whether they agree.")
@click.option("-v", "--verbose", is_flag=True, help="Colour accepted draft tokens and print the run's figures.")
@engine_options
@sampling_options
@json_option
def command(**values: Any) -> None:
    """Generate text from PROMPT (or --file, or standard input).

    The text is what the target alone would have produced; see the README for what that means.
    """
    prompt = _read_prompt(values["prompt"], values["prompt_file"])
    params = sampling_params(values, stop=tuple(values["stop"]))
    with load_llm(values, may_plan=True) as llm:
        ids = prompt_ids(llm, prompt, raw=values["raw"], system=values["system"])
        if values["compare"]:
            _compare(llm, ids, params, values)
        else:
            _generate(llm, ids, params, values)


def load_llm(values: dict[str, Any], *, may_plan: bool = False, verify: bool = False) -> LLM:
    """The LLM that a command's options describe; a known pair that is not here yet is pulled first.

    Where no draft is named it is what a known pair recommends beyond n-grams, else the plan's if `may_plan`. verify:
    compare every file of a bundle with the hash that it lists; raises BundleError.
    """
    from edgespec.auto import is_plannable
    from edgespec.devices import Device
    from edgespec.llm import LLM
    from edgespec.loading import kind_of, resolve_options
    from edgespec.options import AUTO
    from edgespec.pairs import NO_RECOMMENDATION, default_draft, ensure

    kwargs = engine_kwargs(values)
    draft, draft_model = kwargs.pop("draft"), kwargs.pop("draft_model")
    runtime = Device.parse(values["device"]).runtime
    if draft is None and draft_model is None:
        draft, draft_model = default_draft(values["model"], runtime)
        recommends_nothing = (draft, draft_model) == (NO_RECOMMENDATION, None)
        draft = AUTO if may_plan and recommends_nothing and is_plannable(kwargs) else draft
    resolve_options(draft, draft_model, kwargs, values["model"])  # mistakes are said before anything is downloaded
    with console.progress(plain=values["as_json"]) as report:
        model = ensure(values["model"], report, runtime)
        if draft_model is not None and kind_of(draft_model) == "model":
            draft_model = ensure(draft_model, report, Device.parse(values["draft_device"]).runtime)
        if verify:
            _verify([model, draft_model], report)
        llm = LLM(model, draft=draft, draft_model=draft_model, progress=report, **kwargs)
        if verify:
            _verify([*llm.loaded.bundles.values()], report)
        return llm


def _verify(folders: Sequence[str | Path | None], report: console.Reporter) -> None:
    """Compare the files of those that are bundles with their hashes."""
    from edgespec.bundle import Bundle

    for folder in folders:
        if folder is not None and (Path(folder) / "bundle.json").is_file():
            report(f"hashing {Path(folder).name}")
            Bundle.open(folder).verify_hashes()


def prompt_ids(llm: LLM, prompt: str, *, raw: bool, system: str | None) -> list[int]:
    """Token ids of `prompt`, as a user's message where the model has a chat template and `raw` is off."""
    if raw or llm.tokenizer is None or llm.tokenizer.chat_template is None:
        if system is not None:
            if raw:
                raise ConfigError("--system needs the chat template: drop --raw, or put the text into the prompt")
            raise ConfigError("--system needs a chat template, and this model has none: put the text into the prompt")
        return llm.encode(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*messages, {"role": "user", "content": prompt}])


def _read_prompt(argument: str | None, path: Path | None) -> str:
    if argument is not None and argument != "-" and path is not None:
        raise ConfigError("the prompt was given twice, as an argument and as --file: give one")
    try:
        if path is not None:
            text = path.read_text(encoding="utf-8-sig")
        elif argument is not None and argument != "-":
            text = argument
        elif sys.stdin is None or (sys.stdin.isatty() and argument is None):
            raise ConfigError('there is no prompt: give one as an argument ("..."), as --file, or on standard input')
        else:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text (byte {error.start}): convert it first") from error
    if not text.strip():
        raise ConfigError("the prompt is empty: give some text")
    return text.removesuffix("\n")


def _generate(llm: LLM, ids: list[int], params: Any, values: dict[str, Any]) -> None:
    deltas = llm.stream(ids, params)
    if values["as_json"]:
        output = _last(deltas)
        console.print_json({"model": str(values["model"]), "prompt_tokens": len(ids), **to_json(output)})
        return
    last = print_pieces(llm, deltas, colour=values["verbose"])
    if last is None:
        return
    for note in last.stats.notes:
        console.say(f"note: {note}")
    if values["verbose"]:
        print_stats(last)


def print_pieces(llm: LLM, deltas: Iterator[Delta], *, colour: bool) -> CompletionOutput | None:
    """Print an answer as it comes, and end its line whatever happens; what it came to, None where it was cut short."""
    out = console.out()
    last: CompletionOutput | None = None
    try:
        for text, delta in _pieces(llm, deltas, colour=colour):
            out.print(text, end="")
            last = delta.output or last
    finally:
        out.print()
        deltas.close()  # type: ignore[attr-defined]
    return last


def _pieces(llm: LLM, deltas: Iterator[Delta], *, colour: bool) -> Iterator[tuple[str | Text, Delta]]:
    """The text of each delta; with `colour`, accepted draft tokens in green, cut where the text is cut."""
    from rich.text import Text

    from edgespec.text import TextStream

    shown, held = TextStream(llm.tokenizer, ignore_eos=True) if llm.tokenizer else None, Text()
    for delta in deltas:
        if not colour or shown is None or delta.record is None:
            yield delta.text, delta
            continue
        for i, token in enumerate(delta.token_ids):
            shown.push(token)
            held.append(shown.take(), style="green" if i < delta.record.accepted else "")
        if delta.output is not None:
            held.append(shown.finish())
        ready, held = held[: len(delta.text)], held[len(delta.text) :]
        yield ready, delta


def _last(deltas: Iterator[Delta]) -> CompletionOutput:
    output: CompletionOutput | None = None
    for delta in deltas:
        output = delta.output
    assert output is not None
    return output


def to_json(output: CompletionOutput) -> dict[str, Any]:
    """An answer as plain data."""
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "stats": output.stats.to_dict(),
    }


def print_stats(output: CompletionOutput) -> None:
    """An answer's figures, on stderr."""
    from edgespec.compare import speculation_lines

    s = output.stats
    rate = "none drafted" if s.acceptance_rate is None else f"{s.acceptance_rate:.0%} of {s.drafted} accepted"
    speed = "" if s.decode_tok_s is None else f", {s.decode_tok_s:.1f} tok/s"
    console.say(
        f"{s.emitted} tokens in {s.rounds} rounds ({s.mean_acceptance_length:.2f} a round), {rate}{speed}, "
        f"first token after {1e3 * s.ttft_s:.0f} ms, seed {s.seed}, finished: {output.finish_reason}"
    )
    for line in speculation_lines(s):
        console.say(line)


def _compare(llm: LLM, ids: list[int], params: Any, values: dict[str, Any]) -> None:
    from edgespec.compare import compare

    with console.progress("comparing plain and speculative", plain=values["as_json"]) as report:
        result = compare(llm, ids, params, progress=report)
    if values["as_json"]:
        console.print_json({"model": str(values["model"]), **result.to_dict()})
    else:
        _print_comparison(result)


def _print_comparison(result: Comparison) -> None:
    from rich.table import Table

    out = console.out()
    out.print(result.speculative.text)
    table = Table(title=None, show_edge=False)
    for column in ("", "tok/s", "tokens a round", "first token"):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in result.runs.items():
        s = run.stats
        speed = "-" if s.decode_tok_s is None else f"{s.decode_tok_s:.1f}"
        table.add_row(name, speed, f"{s.mean_acceptance_length or 0:.2f}", f"{1e3 * s.ttft_s:.0f} ms")
    out.print()
    out.print(table)
    for line in result.summary():
        out.print(line)
