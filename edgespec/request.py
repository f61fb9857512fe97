"""One request while it runs: its prompt as token ids, and the loop's commits as deltas and, at the end, an output.

Knows text and statistics; the loop, caches and models are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from edgespec.engine.decoder import Job
from edgespec.engine.stops import TokenStop
from edgespec.errors import ConfigError
from edgespec.outputs import CompletionOutput, Delta, Logprob
from edgespec.stats import RunStats
from edgespec.types import Committed

if TYPE_CHECKING:
    from edgespec.engine.logprobs import TokenLogprobs
    from edgespec.text import TextStream, Tokenizer

__all__ = ["Run", "token_ids"]


class Run:
    """Turns the loop's commits into deltas and, at the end, the output."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        job: Job,
        stop: TokenStop | TextStream,
        stats: RunStats,
        started: float,
        sample: int,
    ) -> None:
        self.tokenizer, self.job, self.stop, self.stats = tokenizer, job, stop, stats
        self.started, self.sample = started, sample
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []

    def delta(self, committed: Committed) -> Delta:
        self.token_ids += committed.tokens
        self.logprobs += [self._logprob(entry) for entry in committed.record.logprobs or ()]
        self.stats.add(committed.record)
        self.stats.exact = self.job.is_exact
        self.stats.total_s = time.perf_counter() - self.started
        if self.stats.rounds == 1:
            self.stats.ttft_s = self.stats.total_s
        text = "" if isinstance(self.stop, TokenStop) else self.stop.take()
        output = None
        if committed.finish_reason:
            text += "" if isinstance(self.stop, TokenStop) else self.stop.finish()
            output = self._output(committed)
        return Delta(text, committed.tokens, committed.record, output)

    def _output(self, committed: Committed) -> CompletionOutput:
        return CompletionOutput(
            index=self.sample,
            text="" if isinstance(self.stop, TokenStop) else self.stop.text,
            token_ids=self.token_ids,
            finish_reason=committed.finish_reason,
            stop_reason=self.stop.stop_reason,
            logprobs=self.logprobs if committed.record.logprobs is not None else None,
            stats=self.stats,
        )

    def _logprob(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        own = (entry.token, entry.logprob, entry.rank)
        rows = {t: Logprob(p, i + 1, self._string(t)) for i, (t, p) in enumerate(entry.top)}
        rows[own[0]] = Logprob(own[1], own[2], self._string(own[0]))
        return rows

    def _string(self, token: int) -> str:
        return self.tokenizer.token_string(token) if self.tokenizer else str(token)


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Plain ints; raises ConfigError for anything that is no whole number, rather than rounding it."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise ConfigError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ConfigError(f"prompt holds {token!r}, which is no token id: ids are whole numbers")
    return [int(token) for token in prompt]
