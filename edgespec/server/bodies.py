"""What a request asks for: the bodies of OpenAI's API, under `SamplingParams`' names and OpenAI's.

A field that cannot be honoured is refused by name; nothing is ignored but what says nothing of the answer. Knows no
model.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from edgespec.errors import ConfigError
from edgespec.sampling_params import SamplingParams

__all__ = ["Asked", "BadRequest", "field_of", "read_json", "read_request"]

ALIASES = {"max_completion_tokens": "max_tokens"}
SILENT = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
# Served with these values alone, which are their defaults.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {*FIXED}


class BadRequest(ConfigError):
    """A request that cannot be answered. param: the field; status, code: as HTTP and OpenAI name the mistake."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Asked:
    """A request. prompt: messages of a chat, else text or token ids. model: None where none is named."""

    prompt: Any
    params: SamplingParams
    model: str | None = None
    is_stream: bool = False
    wants_usage: bool = False


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body; raises BadRequest."""
    try:
        text = body.decode("utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is a JSON {type(fields).__name__}; it must be an object")
    return fields


def read_request(fields: Mapping[str, Any], *, is_chat: bool) -> Asked:
    """What is asked for; raises BadRequest naming the field. Fields that are null are not there."""
    given = {name: value for name, value in fields.items() if value is not None}
    prompt_field = "messages" if is_chat else "prompt"
    own = {"model", "stream", "stream_options", prompt_field}
    for name, value in given.items():
        _check_served(name, value, own)
    if prompt_field not in given:
        raise BadRequest(f"{prompt_field} is missing", prompt_field)
    is_stream = _boolean(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest(f"stream_options is {options!r}; it must be an object", "stream_options")
    if options and not is_stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    for name in options:
        if name != "include_usage":
            raise BadRequest(f"stream_options.{name!r} is not known here", f"stream_options.{name}")
    model = given.get("model")
    if not isinstance(model, str | None):
        raise BadRequest(f"model is {model!r}; it must be a string", "model")
    prompt = _messages(given[prompt_field]) if is_chat else _prompt(given[prompt_field])
    return Asked(prompt, _params(given), model, is_stream, _boolean(options, "include_usage"))


def _check_served(name: str, value: Any, own: set[str]) -> None:
    if name in FIXED:
        if not any(type(value) is type(one) and value == one for one in FIXED[name]):
            wanted = " or ".join(json.dumps(one) for one in FIXED[name])
            raise BadRequest(f"{name} is served as {wanted} alone", name)
    elif name not in own and name not in SILENT and name not in SAMPLING and name not in ALIASES:
        raise BadRequest(f"{name!r} is not known here", name, code="unknown_parameter")


def _params(given: Mapping[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = ALIASES.get(name, name)
        if field not in SAMPLING:
            continue
        if field in values:
            raise BadRequest(f"{name} is given twice, under two names", name)
        values[field] = value
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        named = field_of(error)
        raise BadRequest(str(error), next((n for n in given if ALIASES.get(n, n) == named), named)) from error


def field_of(error: ConfigError) -> str | None:
    """The sampling parameter that a message is about, which it names first."""
    found = re.match(r"\w+", str(error))
    return found[0] if found and found[0] in SAMPLING else None


def _messages(value: Any) -> Any:
    """Messages as they are, if they say nothing that templates do not get to see; their form is for the template."""
    for place, message in enumerate(value if isinstance(value, list) else ()):
        for name, field in message.items() if isinstance(message, dict) else ():
            if name not in ("role", "content", "name") and field not in (None, []):
                raise BadRequest(f"messages[{place}] has {name!r}, which is not served", f"messages[{place}].{name}")
    return value


def _prompt(value: Any) -> Any:
    """Text or token ids; a list of one of these is that one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise BadRequest(f"prompt holds {len(value)} prompts; one is served at a time", "prompt")
        value = value[0]
    if not isinstance(value, (str, Sequence)) or isinstance(value, bytes):
        raise BadRequest(f"prompt is a {type(value).__name__}; it must be text or a list of token ids", "prompt")
    return value


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} is {value!r}; it must be true or false", name)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!r} twice")
        found[name] = value
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON has")
