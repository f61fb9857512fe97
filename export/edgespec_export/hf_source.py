"""Weights in from a Hugging Face folder: config.json, safetensors (one file or sharded), tokenizer files.

Owns the folder's layout and the types of safetensors. Reads only JSON and safetensors, never a pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, FormatError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.hf_config import hf_config
from edgespec_export.safetensors import SafetensorsFile
from edgespec_export.sources import file_sha256
from edgespec_export.texts import END_OF_TURN

__all__ = ["HFSource"]

FloatArray = NDArray[np.float32]
_INDEX = "model.safetensors.index.json"


class HFSource:
    """A model folder as `save_pretrained` writes it."""

    format = "huggingface"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files = [SafetensorsFile.open(path) for path in _weight_files(folder)]
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        for file in self._files:
            for name in file.tensors:
                self._place(name, file)
        config = _read(folder / "config.json")
        self.synthetic = _synthetic(config, folder)
        has_head = "lm_head.weight" in self._places
        self.config = hf_config(config, _stop_ids(folder), folder.resolve().name, has_lm_head=has_head)
        if self.config.is_tied:
            self._places.pop("lm_head.weight", None)
        self.shapes = {name: file.tensors[stored].shape for name, (file, stored) in self._places.items()}

    def _place(self, stored: str, file: SafetensorsFile) -> None:
        name = stored.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):
            return  # recomputed from the config
        if name in self._places:
            raise ExportError(f"tensor '{stored}' is in more than one file of {self.path}: remove the spare copy.")
        self._places[name] = (file, stored)

    def tensor(self, name: str) -> FloatArray:
        file, stored = self._places[name]
        return file.float32(stored)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(bytes.fromhex(file_sha256(file.path)))
        return digest.hexdigest()

    def tokenizer_json(self, tokenizer: Tokenizer) -> str:
        return (self.path / "tokenizer.json").read_text(encoding="utf-8")  # as it is, with what edgespec has no use for

    def chat_template(self) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = _read(self.path / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):  # several named ones: the default is the chat
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None


def _synthetic(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """What config.json says of weights that nobody trained as they are."""
    said = config.get("edgespec_synthetic")
    if said is not None and not isinstance(said, dict):
        raise FormatError(f"edgespec_synthetic in {folder / 'config.json'} is {said!r} and must be an object.")
    return said


def _weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the only safetensors file."""
    if (folder / _INDEX).is_file():
        names = sorted(set(_read(folder / _INDEX).get("weight_map", {}).values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ExportError(f"{folder / _INDEX} names '{name}', which is not a file of the folder.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ExportError(
            f"{folder} holds {len(files)} safetensors files and no index: one file or an index is needed."
        )
    return files


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds no JSON object.")
    return value


def _stop_ids(folder: Path) -> tuple[int, ...]:
    """All end ids: of generation_config.json (a number or a list), config.json, and end-of-turn tokens by name."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    added = _read(folder / "tokenizer.json").get("added_tokens", [])
    found += [item.get("id") for item in added if isinstance(item, dict) and item.get("content") in END_OF_TURN]
    return tuple(dict.fromkeys(item for item in found if isinstance(item, int)))
