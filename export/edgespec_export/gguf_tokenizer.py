"""The `tokenizer.*` keys of a GGUF file, copied from another one or made from a tokenizer.json.

Owns the way back from byte-level BPE to llama.cpp's lists and to the name of its word splitting, which is found by
trying: a name fits if our reader then cuts a text full of edge cases as the source does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ExportRefusedError
from edgespec.text.gguf_vocab import vocabulary_from_gguf
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.sources import WeightSource

__all__ = ["tokenizer_metadata"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# one name of each way that llama.cpp splits words, common ones first
_SPLITS = ("llama-bpe", "smollm", "qwen2", "gpt-2", "default", "dbrx", "glm4", "qwen35", "deepseek-llm",
           "deepseek-coder", "deepseek-v3", "falcon", "tekken", "gpt-4o", "bailingmoe", "seed-coder")  # fmt: skip
_PROBE = (
    "Hello, world!  It's 3.14159 or 1234567890; WE'LL see\tthey've \n\n  def f(x):\n        return x**2 != None\r\n"
    "   leading and trailing   \n \n¿Qué? naïve Straße élève Ωμέγα привет мир 你好\uff0c世界 日本語テキスト 한국어 "
    "🙂🏳\ufe0f\u200d🌈 ½ ٣٤ "
    "http://a.b/c?d=e&f#g <|x|> CamelCaseHTTPServer2 a_b-c... ''''' \"\"\" $%^&*() x\u00a0y"
)


def tokenizer_metadata(source: WeightSource, tokenizer: Tokenizer, n_vocab: int) -> dict[str, Any]:
    """Every `tokenizer.*` key of `source`'s tokenizer for a model of `n_vocab` tokens.

    Raises ExportRefusedError for a tokenizer.json that is no byte-level BPE, or splits words as no llama.cpp name does.
    """
    if source.format == "gguf":
        from edgespec.gguf import GGUFFile

        metadata = GGUFFile.open(source.path).metadata
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and value != []}
    keys = _vocabulary(source.path, json.loads(source.tokenizer_json(tokenizer)), n_vocab)
    keys["tokenizer.ggml.pre"] = _split_name(source.path, keys, tokenizer)
    if tokenizer.bos_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    ends = list(dict.fromkeys([*tokenizer.eos_ids, *source.config.eos_ids]))
    for name, token in zip(("eos", "eot", "eom"), ends, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = token
    keys["tokenizer.ggml.add_bos_token"] = tokenizer.add_bos
    template = source.chat_template()
    if template is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def _vocabulary(path: Path, content: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    model = content.get("model") or {}
    splits = json.dumps(content.get("pre_tokenizer"))
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or "ByteLevel" not in splits:
        raise ExportRefusedError(
            f"the tokenizer of {path} is no byte-level BPE, the only kind that a GGUF is made from: give the model's"
            " own GGUF as the source."
        )
    tokens = [f"[PAD{index}]" for index in range(n_vocab)]
    types = [_UNUSED] * n_vocab
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, _NORMAL
    for entry in content.get("added_tokens") or []:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = _CONTROL if entry.get("special") else _USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _split_name(path: Path, keys: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    expected = tokenizer.encode(_PROBE, add_special=False)
    for name in _SPLITS:
        backend = vocabulary_from_gguf({**keys, "tokenizer.ggml.pre": name}).backend
        if backend.encode(_PROBE, add_special_tokens=False).ids == expected:
            return name
    raise ExportRefusedError(
        f"the tokenizer of {path} splits words in a way that no name of llama.cpp stands for: give the model's own GGUF"
        " as the source."
    )
