"""Chat templates: messages to prompt text, with Jinja as Hugging Face sets it up.

Templates come with downloaded models and are not trusted: they run in Jinja's immutable sandbox with only the globals
and filters that chat templates use, and `template_limits` bounds their steps, time and memory. Owns the checks of
messages; knows no tokenizer.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from edgespec.errors import ConfigError, MissingDependencyError
from edgespec.text.tokenizer_files import check_text

__all__ = ["ChatTemplate", "check_messages"]

_MAX_SOURCE_CHARACTERS = 1 << 18  # the longest templates in use have about 20,000


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises ConfigError for a template that does not compile, MissingDependencyError without jinja2."""
        try:
            import jinja2

            from edgespec.text.template_limits import LimitedEnvironment
        except ImportError as error:
            raise MissingDependencyError(
                "chat templates need jinja2, which is not installed: pip install 'jinja2>=3.1.6'"
            ) from error
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ConfigError(f"the chat template has {len(source):,} characters, over {_MAX_SOURCE_CHARACTERS:,}.")
        self.source = source
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._environment = LimitedEnvironment(filters={"tojson": _tojson}, functions=functions)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise ConfigError(f"the chat template does not compile: {_reason(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text. Raises ConfigError for malformed messages or a template that fails or goes on too long."""
        checked = check_messages(messages)
        try:
            text = self._environment.render_limited(self._template, {"messages": checked, **variables})
        except ConfigError:
            raise
        except Exception as error:  # whatever foreign code raises
            raise ConfigError(f"the chat template failed: {_reason(error)}") from error
        check_text(text, "the chat template's output")
        return text


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with contents as plain strings (text parts are joined by a newline).

    Raises ConfigError naming the field, e.g. `messages[2].content`.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages is {type(messages).__name__}; it must be a list of objects with role and content.")
    if not messages:
        raise ConfigError("messages is empty; give at least one object with role and content.")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{field} is {type(message).__name__}; it must be an object with role and content.")
    role = message.get("role")
    check_text(role, f"{field}.role")
    if not role:
        raise ConfigError(f"{field}.role is empty; use system, user or assistant.")
    return {**message, "role": role, "content": _content(message.get("content"), f"{field}.content")}


def _content(content: Any, field: str) -> str:
    if content is None:
        raise ConfigError(f"{field} is missing or null; it must be a string or a list of text parts.")
    if not isinstance(content, (list, tuple)):
        check_text(content, field)
        return str(content)
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise ConfigError(f"{field}[{index}] is a part of type {kind!r}; only parts of type 'text' are supported.")
        check_text(part.get("text"), f"{field}[{index}].text")
        parts.append(part["text"])
    return "\n".join(parts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in Hugging Face templates: plain JSON, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ConfigError(f"the chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"\d{5}", form):  # the C library pads to any width
        raise ConfigError(f"the chat template asks for the date in an unusual format: {form[:40]!r}.")
    return datetime.datetime.now().strftime(form)


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"{type(error).__name__}: {error}" + (f" (line {line})" if line else "")
