"""`TextStream`: tokens in, text that is safe to show out, and the decision to stop.

Owns the last partial character, stop strings that may still complete, and which rule ended the text. Work for a token
grows with the token, not with the text. It knows no model; the round loop sees it as a `StopRule`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgespec.errors import ConfigError
from edgespec.types import StopSignal

if TYPE_CHECKING:
    from edgespec.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Incremental text of one generation; joined deltas equal `tokenizer.decode` of all its ids, cut at the stop.

    stop: strings that end the text; of several, the one that completes first, and of those the longest.
    stop_token_ids: tokens that end it and whose text is left out. eos_ids: the tokenizer's unless given.
    include_stop: keep the text of the stop string or stop token. min_tokens: no stop among the first so many tokens.
    keep_leading_space: as in `Tokenizer.decode`, for text that goes on from a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: str | Iterable[str] = (),
        stop_token_ids: Iterable[int] = (),
        eos_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        skip_special: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        keep_leading_space: bool = False,
    ) -> None:
        eos = () if ignore_eos else tokenizer.eos_ids if eos_ids is None else eos_ids
        self._tokenizer = tokenizer
        self._stop_ids = frozenset((*stop_token_ids, *eos))
        self._matchers = [_Matcher(text) for text in ((stop,) if isinstance(stop, str) else stop)]
        self._skip_special, self._include_stop, self._min_tokens = skip_special, include_stop, min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strips_leading_space and not keep_leading_space
        self._shown: list[str] = []  # safe to show, in order
        self._n_taken = 0  # entries of _shown that take() has given out
        self._held = ""  # may be the beginning of a stop string
        self._n_tokens = 0
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at the stop; without a character whose bytes are not complete."""
        return "".join(self._shown) + self._held

    def push(self, token: int) -> StopSignal | None:
        """Take in the next token; a signal if it ends the text. No token may follow one."""
        assert self.stop_reason is None, "push after the stop"
        self._n_tokens += 1
        may_stop = self._n_tokens > self._min_tokens
        ends = may_stop and token in self._stop_ids
        if not ends or self._include_stop:
            data = self._tokenizer.text_bytes(token, skip_special=self._skip_special)
            # The strings are not asked about the token that ends the text anyway.
            self._append(self._utf8.decode(data), may_stop and not ends)
        if ends:
            self.stop_reason = token
        return None if self.stop_reason is None else StopSignal("stop")

    def take(self) -> str:
        """Text that has become safe to show since the last call."""
        new = "".join(self._shown[self._n_taken :])
        self._n_taken = len(self._shown)
        return new

    def finish(self) -> str:
        """The rest of the text when no token follows; half a character becomes U+FFFD."""
        if not isinstance(self.stop_reason, str):
            ended_by = self.stop_reason
            self._append(self._utf8.decode(b"", True), ended_by is None and self._n_tokens > self._min_tokens)
            self._show(self._held)
            self._held = ""
        return self.take()

    def _append(self, text: str, may_stop: bool) -> None:
        """Add decoded text, looking for stop strings one character at a time; sets `stop_reason` if one completes."""
        if self._strip_next and text:
            self._strip_next = False
            text = text[1:] if text[0] == " " else text
        if not self._matchers:
            self._show(text)
            return
        pending = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [matcher for matcher in self._matchers if matcher.advance(char)]
            if complete and may_stop:
                longest = max(complete, key=lambda matcher: len(matcher.text))
                self.stop_reason = longest.text
                self._show(pending[: end if self._include_stop else end - len(longest.text)])
                self._held = ""
                return
        n_held = max((matcher.n_matched for matcher in self._matchers), default=0)
        n_safe = len(pending) - n_held
        self._show(pending[:n_safe])
        self._held = pending[n_safe:]

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)


class _Matcher:
    """Knuth-Morris-Pratt search for one stop string over characters that arrive one by one."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"a stop string is {text!r}; it must be a string that is not empty.")
        self.text = text
        self.n_matched = 0  # length of the longest beginning of `text` that the text so far ends with
        self._fallback = [0] * (len(text) + 1)
        for length in range(1, len(text)):
            self._fallback[length + 1] = self._step(self._fallback[length], text[length])

    def advance(self, char: str) -> bool:
        """Whether `char` completes the string. A completed string that did not stop may overlap the next one."""
        self.n_matched = self._step(self.n_matched, char)
        if self.n_matched < len(self.text):
            return False
        self.n_matched = self._fallback[self.n_matched]
        return True

    def _step(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == char)
