"""Reads tokenizer.json and the small JSON files that lie beside it.

Owns which file says what about BOS, EOS and the chat template: a bundle's bundle.json and chat_template.jinja win over
Hugging Face's tokenizer_config.json and generation_config.json, and those over what tokenizer.json itself implies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, FormatError
from edgespec.text.gguf_vocab import Vocabulary, end_of_turn_ids, import_tokenizers

__all__ = ["check_text", "vocabulary_from_file", "vocabulary_from_folder"]


def check_text(text: object, field: str) -> None:
    """ConfigError naming `field` unless `text` is a string that can be written as UTF-8."""
    if not isinstance(text, str):
        raise ConfigError(f"{field} is {type(text).__name__}; it must be a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{field} holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}: "
            "repair the string where it was cut."
        ) from None


def vocabulary_from_file(path: Path) -> Vocabulary:
    """A tokenizer.json by itself; BOS and EOS come from its post-processor and its conventional token names."""
    return _vocabulary(_read_backend(path), {}, None)


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    """A bundle or a Hugging Face folder. ConfigError if it holds no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: give a folder that has one, or a .gguf file.")
    backend = _read_backend(path)
    settings = _hugging_face_settings(folder, backend)
    bundle = _read_json(folder / "bundle.json")
    settings.update({key: bundle[key] for key in ("bos_id", "add_bos", "eos_ids") if key in bundle})
    template_path = folder / "chat_template.jinja"
    template = settings.pop("chat_template", None)
    if template_path.is_file():
        template = _read_text(template_path)
    return _vocabulary(backend, settings, template)


def _vocabulary(backend: Any, settings: dict[str, Any], template: str | None) -> Vocabulary:
    """`settings` (bos_id, add_bos, eos_ids) where given, else what the tokenizer itself implies."""
    front = backend.encode("", add_special_tokens=True).ids
    bos_id = settings.get("bos_id", front[0] if len(front) == 1 else None)
    eos_ids = settings.get("eos_ids")
    if eos_ids is None:
        decoder = backend.get_added_tokens_decoder()
        eos_ids = end_of_turn_ids({token.content: index for index, token in decoder.items() if token.special})
    vocab = backend.get_vocab(with_added_tokens=True)
    if not vocab:
        raise FormatError("tokenizer.json has an empty vocabulary.")
    n_vocab = max(vocab.values()) + 1
    for index in (*eos_ids, *([] if bos_id is None else [bos_id])):
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise FormatError(f"bos_id and eos_ids must be token ids, not {index!r}.")
    return Vocabulary(
        backend=backend,
        n_vocab=n_vocab,
        bos_id=bos_id,
        add_bos=bool(settings.get("add_bos", bos_id is not None and front[:1] == [bos_id])),
        eos_ids=tuple(eos_ids),
        chat_template=template,
    )


def _read_backend(path: Path) -> Any:
    tokenizers = import_tokenizers()
    try:
        backend = tokenizers.Tokenizer.from_str(_read_text(path))
    except Exception as error:  # the package raises bare Exceptions
        raise FormatError(f"{path.name} is not a tokenizer that the tokenizers package reads: {error}") from error
    backend.no_truncation()  # a file may carry the settings of its training run
    backend.no_padding()
    return backend


def _hugging_face_settings(folder: Path, backend: Any) -> dict[str, Any]:
    """bos_id, add_bos, eos_ids and chat_template as far as the files beside tokenizer.json give them."""
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    settings: dict[str, Any] = {}
    bos_id = _token_id(backend, config.get("bos_token"))
    if bos_id is not None:
        settings["bos_id"] = bos_id
    if isinstance(config.get("add_bos_token"), bool):
        settings["add_bos"] = config["add_bos_token"]
    eos: Any = generation.get("eos_token_id")
    if eos is None:
        eos = _token_id(backend, config.get("eos_token"))
    if eos is not None:
        settings["eos_ids"] = eos if isinstance(eos, list) else [eos]
    template = _chat_template(config.get("chat_template"))
    if template is not None:
        settings["chat_template"] = template
    return settings


def _chat_template(value: Any) -> str | None:
    """A template string, or the entry named "default" of a list of named templates."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) and value else None


def _token_id(backend: Any, token: Any) -> int | None:
    """The id of a token given as a string or as {"content": string}."""
    content = token.get("content") if isinstance(token, dict) else token
    found: int | None = backend.token_to_id(content) if isinstance(content, str) else None
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name} is not UTF-8 at byte {error.start}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name} holds {type(value).__name__}; it must hold an object.")
    return value
