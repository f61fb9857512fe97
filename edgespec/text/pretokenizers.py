"""How a byte-level BPE vocabulary of a GGUF file cuts text into words before merging.

Owns the table from `tokenizer.ggml.pre` to regular expressions, applied one after the other: every match and every
gap between matches becomes a piece of its own. Follows llama.cpp's table; where that one approximates the pattern the
model was trained with (tekken, gpt-4o: upper and lower case beyond ASCII) the original pattern is kept. Knows no
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import ConfigError

__all__ = ["PreTokenizer", "find_pre_tokenizer"]


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: applied in order. ignore_merges: a whole word that is in the vocabulary is taken as it is.

    add_bos: what holds where the file has no `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3_like(digits: str) -> str:
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTION}|{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"


def _cased_words(contraction: str, digits: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES_AND_SPACES}"


_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES_AND_SPACES}"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
)
_CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

_DIGITWISE = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_TRIPLETS = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_llama3_like(r"\p{N}"),))
_GPT4O = PreTokenizer((_cased_words(_CONTRACTION + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3))
_FALLBACK = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (_FALLBACK, "default"),
    (_DIGITWISE, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        _PLAIN_GPT2,
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de",
    ),
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_TRIPLETS, "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer(_TRIPLETS.patterns, ignore_merges=True), "glm4 glm5"),
    (_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (
        PreTokenizer(
            (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK_AND_HANGUL, r"\p{N}+"),
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True), "tekken"),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
)
_BY_NAME = {name: family for family, names in _FAMILIES for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The patterns of a `tokenizer.ggml.pre` name; ConfigError with that name if it is not in the table."""
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise ConfigError(
            f"the GGUF file's tokenizer.ggml.pre is {name!r}, which edgespec cannot rebuild: export from the model's "
            f"own folder (with its tokenizer.json) instead; known are {known}."
        )
    return _BY_NAME[name]
