"""A tiny real tokenizer file: byte-level, one token a byte-like character, for models that need some text.

Written as plain JSON, so it needs no package; reading it takes the same path as a real tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["N_SPECIAL", "paired_strings", "tiny_strings", "write_tokenizer"]

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>")
N_SPECIAL = len(SPECIAL)


def tiny_strings(n_vocab: int) -> list[str]:
    """The token strings of ids 0..n_vocab: three special ones, then printable ASCII from "a" on, then pairs."""
    letters = [chr(code) for code in (*range(97, 123), *range(65, 91), *range(48, 58), 0x120, 0x10A)]
    pairs = [a + b for a in letters for b in letters]
    return [*SPECIAL, *letters, *pairs][:n_vocab]


def paired_strings(n_vocab: int) -> list[str]:
    """The same with at least one pair: a GGUF's vocabulary needs a merge."""
    strings = tiny_strings(n_vocab)
    return strings if any(len(token) == 2 for token in strings) else [*strings[:-1], "ab"]


def write_tokenizer(folder: Path, n_vocab: int, *, strings: Sequence[str] | None = None) -> Path:
    """Write tokenizer.json into `folder`; `strings` replaces the token strings. Returns its path."""
    tokens = list(strings or tiny_strings(n_vocab))
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True, "type": "ByteLevel"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(tokens[:N_SPECIAL])],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(token) for token in tokens[N_SPECIAL:] if len(token) == 2],
        },
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path
