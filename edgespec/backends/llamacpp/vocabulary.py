"""llama.cpp's tokenizer held against edgespec's: short texts have to give the same ids in both.

edgespec rebuilds the tokenizer from the GGUF's metadata (`edgespec.text.gguf_vocab`); llama.cpp has its own reading of
the same keys. Where they differ, prompts would be other tokens than the model was trained on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from edgespec.errors import IncompatibleError
from edgespec.text import Tokenizer

__all__ = ["PROBES", "check_tokenizer", "llama_ids"]

PROBES = (
    "Hello, world!",
    "The quick brown fox jumps over 13 lazy dogs.",
    " leading space",
    "trailing space ",
    "  two  spaces   and    more",
    "\n",
    "a\nb\n\nc\r\nd\te",
    "it's we'll I'M DON'T",
    "0 12 345 6789 01234567 3.14159 1e-9 ١٢٣",
    "CamelCase snake_case kebab-case",
    "def f(x):\n    return x**2 + 1  # square\n",
    '{"key": [1, 2.5, null], "x": "\\n"}',
    "<div class='a'>&amp;</div>",
    "https://example.org/a?b=c&d=%20",
    "naïve café Übergröße ĳs Ångström",
    "e\u0301 o\u0308 (combining)",
    "Привет, мир! Это тест.",
    "Γειά σου κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "你好,世界。中文字符测试",
    "こんにちは世界 カタカナ",
    "안녕하세요 한글",
    "👍🏽 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☕️",
    "½ ² ₃ ™ € £ ¥ — … “quotes” «guillemets»",
    "\u00a0nbsp\u2003em\u200bzero\ufeffbom",
    "!!!???...---===###@@@",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x\u0000y\u007fz",
)


def check_tokenizer(llama: Any, vocab: Any, tokenizer: Tokenizer, name: str) -> None:
    """Raise IncompatibleError naming the first text that the two tokenize differently."""
    for text in _probes(tokenizer):
        ours = tokenizer.encode(text, add_special=False)
        theirs = llama_ids(llama, vocab, text)
        if ours == theirs:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise IncompatibleError(
            f"{name}: its tokenizer reads {text!r} differently in edgespec and in llama.cpp (from token {at} on: "
            f"{ours[at : at + 4]} and {theirs[at : at + 4]}): convert the model again with a current llama.cpp, or run "
            "the original model's folder on ONNX"
        )


def _probes(tokenizer: Tokenizer) -> Iterator[str]:
    yield from PROBES
    spellings = [tokenizer.token_string(token) for token in sorted(tokenizer.special_ids)[:8]]
    for spelling in spellings:
        if spelling:
            yield f"{spelling}user\nHi {spelling}"


def llama_ids(llama: Any, vocab: Any, text: str) -> list[int]:
    """llama.cpp's ids of `text` without BOS; special tokens written in it are recognised."""
    data = text.encode()
    room = len(data) + 8
    while True:
        tokens = (ctypes.c_int32 * room)()
        n = llama.llama_tokenize(vocab, data, len(data), tokens, room, False, True)
        if n >= 0:
            return list(tokens[:n])
        room = -n
