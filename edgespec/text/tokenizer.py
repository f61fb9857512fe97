"""`Tokenizer`: strings to token ids and back, and the facts of a vocabulary (BOS, EOS, hash).

Reads a folder with tokenizer.json (a bundle, or a Hugging Face model), a bare tokenizer.json, or a GGUF file. Decoding
goes over the bytes of each token, so that streaming and one-shot decoding cannot disagree. It knows no model and no
sampling; chat templates are rendered by `chat_template`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from edgespec.text.chat_template import ChatTemplate
from edgespec.text.gguf_vocab import Vocabulary, vocabulary_from_gguf
from edgespec.text.token_bytes import TokenBytes
from edgespec.text.tokenizer_files import check_text, vocabulary_from_file, vocabulary_from_folder

__all__ = ["Tokenizer"]


class Tokenizer:
    """A vocabulary with its text rules. Immutable; safe to share between threads.

    n_vocab: ids are 0..n_vocab-1; some may be padding without text. eos_ids: tokens that end a generation.
    add_bos: whether `encode` puts `bos_id` in front.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self.n_vocab = vocabulary.n_vocab
        self.bos_id = vocabulary.bos_id
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.eos_ids = vocabulary.eos_ids
        self._bytes = TokenBytes(self._backend)
        self._template_source = vocabulary.chat_template

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a folder with tokenizer.json, a tokenizer.json, or a .gguf file.

        Raises ConfigError where there is no tokenizer or it is of an unsupported kind, FormatError where a file does
        not hold what it should.
        """
        path = Path(path)
        if path.is_dir():
            return cls(vocabulary_from_folder(path))
        if not path.is_file():
            raise ConfigError(
                f"no tokenizer at {path}: give a folder with tokenizer.json, a tokenizer.json or a .gguf."
            )
        if path.suffix.lower() == ".gguf":
            from edgespec.gguf import GGUFFile

            return cls(vocabulary_from_gguf(GGUFFile.open(path).metadata))
        return cls(vocabulary_from_file(path))

    def encode(self, text: str, *, add_special: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        add_special: put the BOS in front where the model wants one and `text` does not begin with it already.
        field: what to call `text` in the ConfigError for a lone surrogate.
        """
        check_text(text, field)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a rendered chat, with exactly one BOS where the model wants one."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, field="messages")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, keep_leading_space: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        keep_leading_space: keep the space that SentencePiece-style vocabularies drop at the beginning of a text; for
        text that goes on from a prompt.
        """
        text = b"".join(self.text_bytes(token, skip_special=skip_special) for token in ids).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and not keep_leading_space and text[:1] == " " else text

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops one space at the beginning of a text."""
        return self._bytes.strips_leading_space

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for padding ids. ConfigError for a negative id."""
        return self._bytes[token]

    def text_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """What a token adds to a decoded text: `token_bytes`, or nothing for a special token that is skipped."""
        return b"" if skip_special and token in self._bytes.special_ids else self._bytes[token]

    def token_string(self, token: int) -> str:
        """The vocabulary's own spelling of a token (byte-level alphabet, `<0x0A>`); empty for padding ids."""
        return self._content.get(token, "")

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out by default."""
        return self._bytes.special_ids

    @cached_property
    def _content(self) -> dict[int, str]:
        """id -> spelling, ascending, without padding ids."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        pairs = sorted((index, token) for token, index in vocab.items())
        return {index: token for index, token in pairs if token != f"[PAD{index}]"}

    @cached_property
    def hash(self) -> str:
        """sha256 over the id and spelling of every token, special ones included; padding ids do not count."""
        digest = hashlib.sha256()
        for index, token in self._content.items():
            spelling = token.encode()
            digest.update(b"%d:%d:" % (index, len(spelling)) + spelling)
        return digest.hexdigest()

    def first_difference(self, other: Tokenizer) -> str | None:
        """A sentence on the first id that the two vocabularies spell differently, or None if they agree.

        Padding ids at the end of one vocabulary are no difference.
        """
        if self.hash == other.hash:
            return None
        for index in sorted(self._content.keys() | other._content.keys()):
            mine, theirs = self._content.get(index), other._content.get(index)
            if mine != theirs:
                return f"token {index} is {_shown(mine)} in one vocabulary and {_shown(theirs)} in the other"
        raise AssertionError("equal contents with unequal hashes")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat. `variables` go to the template (e.g. `tools`, `enable_thinking`).

        Raises ConfigError where the model has no template, a message is malformed, or the template fails.
        """
        template = self.chat_template
        if template is None:
            raise ConfigError("this model has no chat template: give a plain prompt (a base model), or another model.")
        defaults = {
            "bos_token": self._spelling(self.bos_id),
            "eos_token": self._spelling(next(iter(self.eos_ids), None)),
        }
        return template.render(messages, add_generation_prompt=add_generation_prompt, **{**defaults, **variables})

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The compiled chat template, or None where the model has none."""
        return None if self._template_source is None else ChatTemplate(self._template_source)

    @property
    def chat_template_source(self) -> str | None:
        """The template's Jinja text, for a bundle's chat_template.jinja."""
        return self._template_source

    def to_json(self) -> str:
        """The tokenizer.json text; the same text for the same vocabulary every time."""
        text: str = self._backend.to_str(pretty=False)
        return text

    def _spelling(self, token: int | None) -> str:
        return "" if token is None else self.token_string(token)


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
