"""Stop rules that need no text: EOS and chosen ids. Rules on text live in `edgespec.text.stream`."""

from __future__ import annotations

from collections.abc import Collection

from edgespec.types import StopSignal

__all__ = ["TokenStop"]


class TokenStop:
    """Stops at any of `ids`, from the token after `min_tokens` on. Keeps which id it was in `stop_reason`."""

    def __init__(self, ids: Collection[int], min_tokens: int = 0) -> None:
        self.ids = frozenset(ids)
        self.min_tokens = min_tokens
        self.n_pushed = 0
        self.stop_reason: str | int | None = None

    def push(self, token: int) -> StopSignal | None:
        self.n_pushed += 1
        if token in self.ids and self.n_pushed > self.min_tokens:
            self.stop_reason = token
            return StopSignal("stop")
        return None
