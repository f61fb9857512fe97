"""Between strings and token ids: tokenizers, chat templates and streaming text with stop strings."""

from __future__ import annotations

from edgespec.text.stream import TextStream
from edgespec.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
