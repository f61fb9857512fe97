"""Options that several commands share, under the one name that the Python API and the config file use too.

Short forms and the spellings of llama.cpp are aliases. Values are checked where they are used, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from edgespec.draft.base import DRAFT_DRAFTS, DRAFTERS
from edgespec.engine.controller import CONTROLLERS
from edgespec.engine.scheduler import SCHEDULES

__all__ = [
    "DEFAULT_MODEL",
    "engine_kwargs",
    "engine_options",
    "json_option",
    "model_option",
    "sampling_options",
    "sampling_params",
]

DEFAULT_MODEL = "smollm2-135m"

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE = (
    click.option(
        "-md", "--draft-model", help="Draft model: a pair's name, a bundle, a .gguf file, or trained draft weights."
    ),
    click.option(
        "--draft",
        help=f"Draft kinds in order of priority: none, auto (the plan's), {', '.join(DRAFTERS)}.  [default: what the "
        "pair recommends; else auto, where the text cannot depend on it: not with --fast, --tree, another --verifier]",
    ),
    click.option(
        "--num-speculative-tokens",
        "--draft-max",
        type=int,
        help="Most tokens a round.  [3, or the fewest if more; with --draft auto the plan's]",
    ),
    click.option(
        "--min-speculative-tokens", "--draft-min", type=int, default=0, show_default=True, help="Fewest; else none."
    ),
    click.option(
        "--controller",
        type=click.Choice(list(CONTROLLERS)),
        help="How many tokens a round drafts.  [fixed, with --draft auto adaptive]",
    ),
    click.option(
        "--verifier",
        type=click.Choice(["coupled", "rejection", "block", "typical"]),
        default="coupled",
        show_default=True,
        help="Acceptance rule; typical needs --lossy typical.",
    ),
    click.option("--lossy", type=click.Choice(["typical"]), help="Allow a rule that changes the distribution."),
    click.option(
        "--exact/--fast",
        default=True,
        show_default=True,
        help="Rows that do not depend on how many run together, or the fastest row counts.",
    ),
    click.option(
        "--draft-p-min",
        type=float,
        default=0.0,
        show_default=True,
        help="Stop drafting at a token less likely than this.",
    ),
    click.option(
        "--draft-draft",
        type=click.Choice(list(DRAFT_DRAFTS)),
        default="none",
        show_default=True,
        help="What guesses the tokens of a draft that is a model, for it to judge several in one pass.",
    ),
    click.option("--tree/--chain", default=False, show_default=True, help="Draft trees; needs --fast."),
    click.option("--tree-rows", type=int, default=8, show_default=True, help="Most drafted tokens of a tree."),
    click.option("--tree-width", type=int, default=3, show_default=True, help="Most tokens that follow one of a tree."),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default=None,
        help="overlapped: the draft works while the target verifies.  [serial, with --draft auto the plan's]",
    ),
    click.option("--trace", help="Write what ran when to this file, for ui.perfetto.dev."),
    click.option("--prompt-lookup-min", type=int, default=2, show_default=True, help="Shortest n-gram match."),
    click.option("-c", "--n-ctx", "--ctx-size", type=int, help="Context in tokens."),
    click.option("-cd", "--draft-n-ctx", "--ctx-size-draft", type=int, help="The draft's context in tokens."),
    click.option("-t", "--threads", type=int, help="Threads; by default the allowed fast cores."),
    click.option(
        "--device",
        "--target-device",
        default="cpu",
        show_default=True,
        help="Where the target runs: cpu, gpu, npu, qnn:htp, webgpu:0 ... (`edgespec doctor` lists them).",
    ),
    click.option("--draft-device", default="cpu", show_default=True, help="Where the draft runs."),
    click.option(
        "--device-option",
        "--device-options",
        "device_options",
        multiple=True,
        default=(),
        metavar="KEY=VALUE",
        help="Option of the target's provider; may be given several times.",
    ),
    click.option(
        "--draft-device-option",
        "--draft-device-options",
        "draft_device_options",
        multiple=True,
        default=(),
        metavar="KEY=VALUE",
        help="The same of the draft's.",
    ),
    click.option(
        "--strict-device/--allow-fallback",
        default=False,
        show_default=True,
        help="An operator that a device leaves to the CPU, or a draft that fails, is an error.",
    ),
)

SAMPLING = (
    click.option("-n", "--max-tokens", "--predict", type=int, default=256, show_default=True),
    click.option("--temperature", "--temp", type=float, default=0.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 = off."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("-s", "--seed", type=int, help="By default a random one, which is reported."),
    click.option("--repetition-penalty", "--repeat-penalty", type=float, default=1.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--stop", multiple=True, help="Stop string; may be given several times."),
    click.option("--min-tokens", type=int, default=0, show_default=True),
    click.option("--ignore-eos", is_flag=True),
)

model_option = click.option(
    "-m", "--model", default=DEFAULT_MODEL, show_default=True, help="A pair's name, a folder or a .gguf file."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout, nothing else there.")


def engine_options(command: Command) -> Command:
    """Add the fields of EngineOptions."""
    for option in reversed(ENGINE):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """Add the fields of SamplingParams that a command line needs."""
    for option in reversed(SAMPLING):
        command = option(command)
    return command


def engine_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's parameters that `edgespec.LLM` takes."""
    from edgespec.options import EngineOptions

    names = {*EngineOptions.names(), "draft_model"}
    return {name: value for name, value in values.items() if name in names}


def sampling_params(values: Mapping[str, Any], **changes: Any) -> Any:
    """A SamplingParams from a command's parameters; raises ConfigError."""
    from dataclasses import fields

    from edgespec.sampling import SamplingParams
    from edgespec.text.tokenizer_files import check_text

    for stop in values.get("stop") or ():
        check_text(stop, "--stop")
    names = {f.name for f in fields(SamplingParams)}
    return SamplingParams(**{**{name: value for name, value in values.items() if name in names}, **changes})
