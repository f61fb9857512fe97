"""What generation returns; field names as users of vLLM know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.stats import RunStats
from edgespec.types import RoundRecord

__all__ = ["CompletionOutput", "Delta", "Logprob", "RequestOutput"]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm, from the target's raw logits. rank: 1 = most likely, None where it was not counted."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One sample. finish_reason: stop | length; stop_reason: the stop string or token id (EOS too) that ended it.

    token_ids keep the token that completed a stop string; text is cut before it. logprobs: one dict a token, with the
    token itself always among its keys.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    stats: RunStats


@dataclass
class RequestOutput:
    """The samples of one prompt, in order of their index."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def stats(self) -> RunStats:
        """Statistics of the first sample."""
        return self.outputs[0].stats

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "outputs": [
                {
                    "index": o.index,
                    "text": o.text,
                    "token_ids": o.token_ids,
                    "finish_reason": o.finish_reason,
                    "stop_reason": o.stop_reason,
                    "stats": o.stats.to_dict(),
                }
                for o in self.outputs
            ],
        }


@dataclass
class Delta:
    """One round's news: text that is safe to show, the ids committed, the round. `output` is set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    record: RoundRecord | None
    output: CompletionOutput | None = None
