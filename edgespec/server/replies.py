"""Answers in the words of OpenAI's API: whole ones, chunks of a stream, usage, errors.

`edgespec` in a reply holds what OpenAI's API has no place for: the request's figures. Knows no HTTP.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from edgespec.outputs import CompletionOutput, Delta

__all__ = ["DONE", "Reply", "error_body", "event"]

DONE = b"data: [DONE]\n\n"


class Reply:
    """The frame of one request's answers. model: as the server calls it."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._frame = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        """The answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": output.finish_reason, "logprobs": None}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": output.text, "refusal": None}
        else:
            choice["text"] = output.text
        frame = {**self._frame, "object": "chat.completion" if self.is_chat else "text_completion"}
        return {**frame, "choices": [choice], "usage": _usage(output), "edgespec": output.stats.to_dict()}

    def opening(self, wants_usage: bool) -> list[dict[str, Any]]:
        """Chunks before the first text: who speaks, in a chat."""
        if not self.is_chat:
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, wants_usage)]

    def chunks(self, delta: Delta, wants_usage: bool) -> list[dict[str, Any]]:
        """The chunks of one round: its text; with the last one why it ended, and then the usage if it is wanted."""
        found = []
        if delta.text:
            text = {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
            found.append(self._chunk({**text, "finish_reason": None}, wants_usage))
        if delta.output is not None:
            nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
            last = self._chunk({**nothing, "finish_reason": delta.output.finish_reason}, wants_usage)
            found.append({**last, "edgespec": delta.output.stats.to_dict()})
            if wants_usage:
                found.append({**last, "choices": [], "usage": _usage(delta.output)})
        return found

    def _chunk(self, choice: dict[str, Any], wants_usage: bool) -> dict[str, Any]:
        frame = {**self._frame, "object": "chat.completion.chunk" if self.is_chat else "text_completion"}
        chunk = {**frame, "choices": [{"index": 0, "logprobs": None, **choice}]}
        return {**chunk, "usage": None} if wants_usage else chunk


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _usage(output: CompletionOutput) -> dict[str, Any]:
    stats = output.stats
    n_prompt, n_new = stats.prompt_tokens, len(output.token_ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }
