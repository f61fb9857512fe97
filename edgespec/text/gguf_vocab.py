"""Rebuilds a tokenizer from the metadata of a GGUF file.

Owns the meaning of the `tokenizer.*` keys: byte-level BPE (`tokenizer.ggml.model` = gpt2) and SentencePiece-style
vocabularies (= llama: scores, byte fallback), which special tokens there are, and whether a BOS is added. Other kinds
are refused by name. It returns a `tokenizers` object and plain settings; the API around them is `Tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError, FormatError, MissingDependencyError
from edgespec.text.pretokenizers import PreTokenizer, find_pre_tokenizer

__all__ = ["Vocabulary", "end_of_turn_ids", "import_tokenizers", "vocabulary_from_gguf"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PADDING_TOKEN = re.compile(r"\[PAD(\d+)\]")
# names that chat models give to the token which ends a turn, for files that do not say which one it is
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>", "<|end_of_sentence|>")


@dataclass(frozen=True)
class Vocabulary:
    """backend: a `tokenizers.Tokenizer` that adds no BOS by itself when asked for no special tokens.

    n_vocab counts padding ids that have no text of their own.
    """

    backend: Any
    n_vocab: int
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def import_tokenizers() -> Any:
    """The `tokenizers` package, or MissingDependencyError."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError(
            "text needs the tokenizers package, which is not installed: pip install 'tokenizers>=0.20'"
        ) from error
    return tokenizers


def end_of_turn_ids(special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """The id of the conventional end-of-turn token among the special tokens, if there is one."""
    return next(((special_ids[name],) for name in _END_OF_TURN if name in special_ids), ())


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Rebuild the tokenizer that a GGUF file describes.

    Raises FormatError on keys that are missing or contradict each other, ConfigError on a kind that is not known.
    """
    tokenizers = import_tokenizers()
    kind = _required(metadata, "tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; edgespec rebuilds 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece-style) vocabularies: export from the model's own folder (with its tokenizer.json) instead."
        )
    tokens = _required(metadata, "tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    ids = _index(tokens, types)
    if kind == "gpt2":
        pre = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
        backend, adds_bos = _byte_level(tokenizers, ids, metadata, pre), pre.add_bos
    else:
        backend, adds_bos = _sentencepiece(tokenizers, ids, tokens, types, metadata), True
    _add_tokens(tokenizers, backend, tokens, types)
    return _with_settings(tokenizers, backend, tokens, types, metadata, adds_bos)


def _required(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind) or not value:
        raise FormatError(
            f"the GGUF file has no usable {key} (found {type(value).__name__}): it carries no tokenizer, or a "
            "damaged one."
        )
    return value


def _index(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """token -> id without the padding that converters put at the end of a vocabulary."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        padding = _PADDING_TOKEN.fullmatch(token)
        if types[index] == _UNUSED and padding and int(padding[1]) == index:
            continue
        if token in ids:
            raise FormatError(
                f"tokenizer.ggml.tokens holds {token!r} twice, as ids {ids[token]} and {index}: the file cannot be "
                "tokenized unambiguously."
            )
        ids[token] = index
    return ids


def _byte_level(tokenizers: Any, ids: dict[str, int], metadata: Mapping[str, Any], pre: PreTokenizer) -> Any:
    """Byte-level BPE from the file's own merge list."""
    merges = []
    for index, line in enumerate(_required(metadata, "tokenizer.ggml.merges", list)):
        left, space, right = line[1:].partition(" ")  # a piece is never empty, but may begin with a space
        left = line[:1] + left
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise FormatError(
                f"tokenizer.ggml.merges[{index}] is {line!r}, whose parts or result are not in the vocabulary."
            )
        merges.append((left, right))
    pre_tokenizers, decoders, regex = tokenizers.pre_tokenizers, tokenizers.decoders, tokenizers.Regex
    model = tokenizers.models.BPE(vocab=ids, merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokenizers: Any, ids: dict[str, int], tokens: Sequence[str], types: Sequence[int], metadata: Mapping[str, Any]
) -> Any:
    """BPE with byte fallback; the merges are every split of a token into two tokens, best score first."""
    scores = _required(metadata, "tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise FormatError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens.")
    mergeable = {token: float(scores[i]) for token, i in ids.items() if types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown_id, int) or not 0 <= unknown_id < len(tokens):
        raise FormatError(f"tokenizer.ggml.unknown_token_id is {unknown_id!r} in a vocabulary of {len(tokens)} tokens.")
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    model = tokenizers.models.BPE(
        vocab=ids,
        merges=_merges_from_scores(mergeable, ids),
        unk_token=tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every (left, right) that joins into a scored token, in the order in which SentencePiece would apply them.

    Ties follow the conversion that Hugging Face's tokenizers were made with, so that both give the same ids.
    """
    merges: list[tuple[str, str, float]] = []
    for token, score in scores.items():
        splits = [(token[:i], token[i:], score) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        merges.extend(sorted(splits, key=lambda split: (ids[split[0]], ids[split[1]])))
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _add_tokens(tokenizers: Any, backend: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Declare control tokens as special and user-defined ones as plain added tokens; both are found inside text."""
    special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    added = [
        tokenizers.AddedToken(token, special=special[kind], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special and token
    ]
    backend.add_tokens(added)


def _with_settings(
    tokenizers: Any,
    backend: Any,
    tokens: Sequence[str],
    types: Sequence[int],
    metadata: Mapping[str, Any],
    adds_bos: bool,
) -> Vocabulary:
    bos_id = _token_id(metadata, "bos", len(tokens))
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and bos_id is not None
    ends = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    if ends[1] is None:
        ends.extend(end_of_turn_ids({t: i for i, t in enumerate(tokens) if types[i] == _CONTROL}))
    if add_bos and bos_id is not None:
        bos = tokens[bos_id]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    return Vocabulary(
        backend=backend,
        n_vocab=len(tokens),
        bos_id=bos_id,
        add_bos=add_bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=metadata.get("tokenizer.chat_template") or None,
    )


def _token_id(metadata: Mapping[str, Any], name: str, n_vocab: int) -> int | None:
    """`tokenizer.ggml.<name>_token_id`, checked against the vocabulary; None where absent."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_vocab:
        raise FormatError(f"tokenizer.ggml.{name}_token_id is {value!r} in a vocabulary of {n_vocab} tokens.")
    return value
