"""How large the results of a template's operators, methods and filters can become, judged from their arguments.

Each function of `GROWTH` gives an upper bound, in the units of `weigh`, before anything is computed; it refuses what
cannot be bounded. Which of them are asked, and what happens with the bounds, is `template_limits`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["GROWTH", "MAX_RANGE", "MAX_SIZE", "weigh"]

MAX_SIZE = 1 << 23  # characters of one value; an entry of a list counts as ENTRY of them
ENTRY = 32
MAX_RANGE = 100_000
_MAX_WIDTH = 10_000
_UNBOUNDED_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def weigh(value: Any) -> int:
    """Characters of a value with everything in it, ENTRY for each entry; stops counting above MAX_SIZE."""
    total, pending = 0, [value]
    while pending and total <= MAX_SIZE:
        item = pending.pop()
        total += len(item) if isinstance(item, str) else ENTRY
        if isinstance(item, str):
            continue
        if isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
    return total


def _sum(left: Any, args: Args, _: Kwargs) -> int:
    return sum(weigh(side) for side in (left, args[0]) if isinstance(side, (str, list, tuple)))


def _product(left: Any, args: Args, _: Kwargs) -> int:
    for many, times in ((left, args[0]), (args[0], left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int):
            return weigh(many) * max(times, 0)
    return 0


def _power(left: Any, args: Args, _: Kwargs) -> int:
    for side in (left, args[0]):
        if not isinstance(side, (int, float)) or abs(side) > 64:
            raise ConfigError(f"the chat template computes a power of {side!r}; only numbers up to 64 are supported.")
    return 0


def _percent(left: Any, args: Args, kwargs: Kwargs) -> int:
    return _format(left, args, kwargs) if isinstance(left, str) else 0


def _format(form: Any, args: Args, kwargs: Kwargs) -> int:
    text = str(form)
    if _UNBOUNDED_FORMAT.search(text):
        raise ConfigError("the chat template formats to a width over 9,999 or one that is not written out.")
    n_fields = text.count("%") + text.count("{")
    return len(text) + n_fields * (weigh([*args, *kwargs.values()]) + _widest(text))


def _widest(text: str) -> int:
    return max((int(digits) for digits in re.findall(r"\d+", text)), default=0)


def _pad(subject: Any, args: Args, kwargs: Kwargs) -> int:
    """center, ljust, expandtabs, indent, batch, tojson: a width for each line or entry."""
    given = [*args, *kwargs.values()]
    width = max((abs(value) for value in given if isinstance(value, int)), default=8)
    width = max([width, *(len(value) for value in given if isinstance(value, str))])
    if width > _MAX_WIDTH:
        raise ConfigError(f"the chat template pads to {width:,} characters, over {_MAX_WIDTH:,}.")
    if isinstance(subject, str):
        return len(subject) + (subject.count("\n") + subject.count("\t") + 1) * width
    return weigh(subject) * (width if args or kwargs else 1)


def _replace(subject: Any, args: Args, kwargs: Kwargs) -> int:
    texts = [str(value) for value in (*args[:2], *(kwargs[key] for key in ("old", "new") if key in kwargs))]
    if len(texts) < 2:
        return 0  # the call itself will fail
    text = str(subject)
    return len(text) + (text.count(texts[0]) if texts[0] else len(text) + 1) * len(texts[1])


def _join(items: Any, args: Args, kwargs: Kwargs) -> int:
    separator = str(args[0] if args else kwargs.get("d", ""))
    return weigh(items) + len(items) * len(separator) if isinstance(items, (list, tuple, str)) else 0


GROWTH: dict[str, Callable[[Any, Args, Kwargs], int]] = {
    "+": _sum,
    "*": _product,
    "**": _power,
    "%": _percent,
    "format": _format,
    "replace": _replace,
    "join": _join,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "tojson"), _pad),
}
