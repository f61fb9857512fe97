"""The bytes behind each token: byte-level alphabets (GPT-2) and SentencePiece spellings with byte fallback.

Owns the two mappings and the choice between them, which follows the decoder that a tokenizer.json declares. It joins
nothing: `Tokenizer.decode` and `TextStream` do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TokenBytes:
    """id -> bytes, worked out once per token. Unknown ids above the vocabulary (padding of a model) are empty.

    special_ids: ids of special tokens. strips_leading_space: the decoder drops one space at the beginning of a text.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._added: dict[int, str] = {
            index: token.content for index, token in backend.get_added_tokens_decoder().items()
        }
        special = (index for index, token in backend.get_added_tokens_decoder().items() if token.special)
        self.special_ids = frozenset(special)
        steps = list(_decoder_steps(backend))
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and not {"Metaspace", "ByteFallback", "Replace"} & set(kinds):
            raise ConfigError(
                f"the tokenizer's decoder is {' + '.join(kinds) or 'missing'}; edgespec decodes byte-level and "
                "SentencePiece-style (Metaspace, ByteFallback) vocabularies."
            )
        self.strips_leading_space = any(_strips(step) for step in steps)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of one token; ConfigError for a negative id."""
        found = self._cache.get(token)
        if found is None:
            if token < 0:
                raise ConfigError(f"token id {token} is negative; ids start at 0.")
            found = self._cache[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None and (self._byte_level or token in self.special_ids):
            return added.encode()  # literal text, never in the byte alphabet
        spelling: str | None = self._backend.id_to_token(token)
        if spelling is None or spelling == f"[PAD{token}]":
            return b""
        if self._byte_level:
            return _from_alphabet(spelling)
        byte = _BYTE_TOKEN.fullmatch(spelling) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return spelling.replace("\u2581", " ").encode()


def _from_alphabet(spelling: str) -> bytes:
    """A spelling outside the alphabet stands for itself, as in the `tokenizers` package."""
    try:
        return bytes([_ALPHABET[char] for char in spelling])
    except KeyError:
        return spelling.encode()


def _decoder_steps(backend: Any) -> Iterator[dict[str, Any]]:
    """The decoder's parts, in order, with nested sequences flattened."""
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            yield step


def _strips(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step["type"] == "Strip" and step.get("content") == " " and bool(step.get("start"))
