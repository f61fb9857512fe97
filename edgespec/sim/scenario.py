"""The figures of a target and a draft on their devices: what a simulated round is made of.

Typed in, or read from a profile. Times in seconds; a profile's JSON has milliseconds. Steps in the target's time over
its rows are kept as they were measured, never fitted away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, FormatError

__all__ = ["Scenario", "read_profile"]

_KEYS = ("target_ms", "draft_ms", "acceptance", "runner_up", "host_ms", "jitter", "contention")


@dataclass(frozen=True)
class Scenario:
    """target_s: rows of a forward call -> seconds; for a count that was not measured the next larger one counts.

    draft_s: one draft step. acceptance: chance that a drafted token is accepted given those before it, by position; the
    last entry holds for later ones. runner_up: chance that the draft's second choice is right where its first is not.
    host_s: a round's work outside the devices. target_jitter, draft_jitter: times vary evenly by this share, up and
    down. target_slowdown, draft_slowdown: what each takes while the other is busy over what it takes in turn; under 1
    where taking turns costs more, as each then evicts what the other has cached.
    Raises ConfigError for figures that cannot be.
    """

    target_s: Mapping[int, float]
    draft_s: float
    acceptance: tuple[float, ...]
    runner_up: float = 0.5
    host_s: float = 0.0
    target_jitter: float = 0.0
    draft_jitter: float = 0.0
    target_slowdown: float = 1.0
    draft_slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not self.target_s or min(self.target_s) != 1:
            raise ConfigError(
                f"target times are given for rows {sorted(self.target_s)}: one row is needed, the cost of a plain step"
            )
        if not self.acceptance:
            raise ConfigError("acceptance is empty: give one chance, or one for each position")
        for rows, seconds in self.target_s.items():
            _check(f"target time of {rows} rows", seconds, 0, math.inf, is_open=True)
        for field in fields(self)[1:]:
            low, high = _RANGES[field.name]
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                _check(field.name, one, low, high, is_open=field.name.endswith("_slowdown"))

    def verify_s(self, n_rows: int) -> float:
        """Seconds of a target call; raises ConfigError for more rows than were measured."""
        most = max(self.target_s)
        if n_rows > most:
            raise ConfigError(
                f"{n_rows} rows in a call, but target times go up to {most} rows: measure more, or lower k"
            )
        return self.target_s[min(rows for rows in self.target_s if rows >= n_rows)]

    @property
    def plain_s(self) -> float:
        """Seconds a token without speculation."""
        return self.target_s[1]

    @property
    def most_k(self) -> int:
        """Most tokens that a round can draft within the measured row counts."""
        return max(self.target_s) - 1

    @property
    def overlapped_draft_s(self) -> float:
        """Seconds of a draft step that waits for no target, in an overlapped run: caches stay warm there, or not."""
        return self.draft_s * min(1.0, self.draft_slowdown)

    def chance(self, position: int) -> float:
        """Acceptance at a position, the first being 0, given that those before it were accepted."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]

    def with_cost_ratio(self, ratio: float) -> Scenario:
        """The same pair with a draft step of `ratio` target steps."""
        return replace(self, draft_s=ratio * self.plain_s)

    @classmethod
    def flat(cls, target_s: float, draft_s: float, acceptance: float, *, most_rows: int = 33, **more: Any) -> Scenario:
        """A target that verifies up to `most_rows` rows in the time of one."""
        return cls({1: target_s, most_rows: target_s}, draft_s, (acceptance,), **more)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the profile") -> Scenario:
        """From plain data; raises FormatError naming the key.

        target_ms: {"1": 5.4, "2": 6.6, ...} or one number for any count. draft_ms: a number. acceptance: a number or a
        list by position. runner_up, host_ms, jitter: numbers; jitter also {"target", "draft"}. contention: how much
        longer each takes beside the other, {"target": 1.1, "draft": 1.2}.
        """
        unknown = sorted(set(data) - set(_KEYS))
        if unknown:
            raise FormatError(f"{where}: key {unknown[0]!r} is not known: use {', '.join(_KEYS)}")
        missing = [key for key in _KEYS[:3] if key not in data]
        if missing:
            raise FormatError(f"{where}: key {missing[0]!r} is missing: a simulation needs {', '.join(_KEYS[:3])}")
        jitter, slowdown = (_pair(data, key, where) for key in ("jitter", "contention"))
        acceptance = data["acceptance"]
        return cls(
            target_s=_target_times(data["target_ms"], where),
            draft_s=_number(data["draft_ms"], "draft_ms", where) / 1e3,
            acceptance=tuple(
                _number(value, "acceptance", where)
                for value in (acceptance if isinstance(acceptance, list) else [acceptance])
            ),
            runner_up=_number(data.get("runner_up", 0.5), "runner_up", where),
            host_s=_number(data.get("host_ms", 0.0), "host_ms", where) / 1e3,
            target_jitter=jitter.get("target", 0.0),
            draft_jitter=jitter.get("draft", 0.0),
            target_slowdown=slowdown.get("target", 1.0),
            draft_slowdown=slowdown.get("draft", 1.0),
        )


def read_profile(path: Path) -> Mapping[str, Any]:
    """The figures in a JSON file, for `Scenario.from_json`; raises ConfigError or FormatError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON that can be read ({error}): give a profile") from error
    if not isinstance(data, dict):
        raise FormatError(f"{path}: a profile is an object, this is a {type(data).__name__}")
    return data


_RANGES: Mapping[str, tuple[float, float]] = {
    "draft_s": (0, math.inf),
    "acceptance": (0, 1),
    "runner_up": (0, 1),
    "host_s": (0, math.inf),
    "target_jitter": (0, 0.99),
    "draft_jitter": (0, 0.99),
    "target_slowdown": (0, math.inf),
    "draft_slowdown": (0, math.inf),
}


def _check(name: str, value: float, low: float, high: float, *, is_open: bool = False) -> None:
    fits = math.isfinite(value) and (low < value if is_open else low <= value) and value <= high
    if not fits:
        above = f"from {low:g} up" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value}: it must be {'over 0' if is_open else above}")


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{where}: {key} holds {value!r}, which is no number")
    return float(value)


def _target_times(value: Any, where: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        seconds = _number(value, "target_ms", where) / 1e3
        return {1: seconds, 33: seconds}
    times = {}
    for rows, ms in value.items():
        if not str(rows).isdecimal() or int(rows) < 1:
            raise FormatError(f"{where}: target_ms names {rows!r} rows: it must be a whole number from 1 up")
        times[int(rows)] = _number(ms, "target_ms", where) / 1e3
    return times


def _pair(data: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    """Figures of target and draft; one number stands for both."""
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        value = dict.fromkeys(("target", "draft"), value)
    unknown = sorted(set(value) - {"target", "draft"})
    if unknown:
        raise FormatError(f"{where}: {key} names {unknown[0]!r}: use target and draft")
    return {side: _number(number, key, where) for side, number in value.items()}
