"""The parameters of one request, under vLLM's names, validated when they are built.

Knows no vocabulary: whether token ids exist is checked by `edgespec.sampling.Sampler`, which has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, when to stop, what to report.

    n: samples of each prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. seed: None draws one. bad_words_ids:
    token sequences that must not appear. logit_bias: token id -> value added to its logit. repetition_penalty
    divides the logits of tokens in prompt and output; frequency and presence penalties are subtracted for tokens
    of the output. logprobs: how many alternatives to report with each token, None for no logprobs.
    Raises ConfigError naming the field, its value and the allowed range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_words_ids", _words(self.bad_words_ids))
        self._set("logit_bias", _bias(self.logit_bias))

    def _check_numbers(self) -> None:
        self._integer("n", 1, None)
        self._real("temperature", 0.0, None)
        if 0.0 < self.temperature < 1e-6:
            raise _wrong("temperature", self.temperature, "0 for greedy decoding, or at least 1e-06")
        self._real("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, None)
        self._real("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", None, None)
        self._integer("max_tokens", 1, None)
        self._integer("min_tokens", 0, None)
        if self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self._real("presence_penalty", -100.0, 100.0)
        self._real("frequency_penalty", -100.0, 100.0)
        self._real("repetition_penalty", 0.0, 100.0, open_low=True)
        if self.logprobs is not None:
            self._integer("logprobs", 0, None)

    @property
    def has_penalties(self) -> bool:
        """Whether a row depends on which tokens the history holds."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int | None, high: int | None) -> None:
        value = getattr(self, name)
        wanted = "a whole number" + _range(low, high, False)
        if not _is_integer(value) or not _is_within(value, low, high, False):
            raise _wrong(name, value, wanted)
        self._set(name, int(value))

    def _real(self, name: str, low: float | None, high: float | None, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not math.isfinite(value) or not _is_within(value, low, high, open_low):
            raise _wrong(name, value, "a finite number" + _range(low, high, open_low))
        self._set(name, float(value))


def _wrong(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}, but it must be {wanted}.")


def _range(low: float | None, high: float | None, open_low: bool) -> str:
    parts = []
    if low is not None:
        parts.append(f"{'above' if open_low else 'at least'} {low:g}")
    if high is not None:
        parts.append(f"at most {high:g}")
    return ", " + " and ".join(parts) if parts else ""


def _is_within(value: float, low: float | None, high: float | None, open_low: bool) -> bool:
    if low is not None and (value < low or (open_low and value == low)):
        return False
    return high is None or value <= high


def _is_real(value: object) -> bool:
    """Whether it is a number that a float holds; whole numbers may be larger."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and float(value) is not None
    except OverflowError:
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise _wrong("stop", value, "a string or a list of strings")
    strings = tuple(value)
    if not all(isinstance(text, str) and text for text in strings):
        raise _wrong("stop", value, "a string or a list of strings, none of them empty")
    return strings


def _ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong(name, value, "a list of token ids")
    ids = tuple(value)
    if not all(_is_integer(token) and token >= 0 for token in ids):
        raise _wrong(name, value, "a list of token ids, whole numbers of at least 0")
    return tuple(int(token) for token in ids)


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong("bad_words_ids", value, "a list of lists of token ids")
    words = tuple(_ids("bad_words_ids", word) for word in value)
    if not all(words):
        raise _wrong("bad_words_ids", value, "a list of lists of token ids, none of them empty")
    return words


def _bias(value: Any) -> dict[int, float]:
    wanted = "a mapping from token ids to finite numbers (or -inf to forbid a token)"
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, wanted)
    result: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token = int(key) if isinstance(key, str) else key
        except ValueError:
            raise _wrong("logit_bias", value, wanted) from None
        if not _is_integer(token) or token < 0 or token in result or not _is_real(bias):
            raise _wrong("logit_bias", value, wanted)
        if math.isnan(bias) or bias == math.inf:
            raise _wrong("logit_bias", value, wanted)
        result[int(token)] = float(bias)
    return result
