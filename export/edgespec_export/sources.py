"""Weights in: one interface over a GGUF file and a Hugging Face safetensors folder.

Owns tensor names, dequantization and llama.cpp's row order of rotated heads. Every tensor comes out as float32 under
Hugging Face's name without `model.`; nothing is read before it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, ExportError, MissingDependencyError
from edgespec.gguf import GGUFFile
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.config import ModelConfig
from edgespec_export.gguf_config import gguf_config

__all__ = ["GGUF_NAMES", "GGUF_PARTS", "GGUFSource", "WeightSource", "file_sha256", "open_source"]

FloatArray = NDArray[np.float32]

GGUF_NAMES = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight",
               "output.weight": "lm_head.weight"}  # fmt: skip
GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class WeightSource(Protocol):
    """A model's config, tensors and texts, whatever file they come from.

    synthetic: what was done to the weights where nobody trained them as they are; None for a trained model.
    """

    @property
    def format(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def synthetic(self) -> Mapping[str, Any] | None: ...

    def tensor(self, name: str) -> FloatArray:
        """The tensor as float32. Raises ExportError where it cannot be read."""

    def sha256(self) -> str:
        """Hash over the weights' bytes."""

    def tokenizer_json(self, tokenizer: Tokenizer) -> str:
        """The text of a tokenizer.json; `tokenizer` was loaded from `path`."""

    def chat_template(self) -> str | None: ...


def open_source(path: str | Path) -> WeightSource:
    """A .gguf file or a folder with config.json and *.safetensors. Raises ConfigError for anything else."""
    path = Path(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GGUFSource(path)
    if path.is_dir() and (path / "config.json").is_file():
        from edgespec_export.hf_source import HFSource

        return HFSource(path)
    what = "does not exist" if not path.exists() else "is neither"
    raise ConfigError(f"{path} {what}: give a .gguf file, or a folder with config.json and *.safetensors.")


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class GGUFSource:
    """Weights and texts of one GGUF file."""

    format = "gguf"
    synthetic: Mapping[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile.open(path)
        self._names = {_local_name(name): name for name in self.file.tensors if name != "rope_freqs.weight"}
        self.shapes = {local: self.file.tensors[name].shape for local, name in self._names.items()}
        self.config = self._with_rope_divisors(gguf_config(self.file.metadata, self.shapes, path.stem))

    def tensor(self, name: str) -> FloatArray:
        value = self._dequantized(self._names[name])
        if self.config.architecture in ("llama", "mistral") and ".self_attn." in name:
            part = name.split(".self_attn.")[1]
            if part.startswith("q_proj"):
                return _half_split(value, self.config.n_heads)
            if part.startswith("k_proj"):
                return _half_split(value, self.config.n_kv_heads)
        return value

    def sha256(self) -> str:
        return file_sha256(self.path)

    def tokenizer_json(self, tokenizer: Tokenizer) -> str:
        return tokenizer.to_json()

    def chat_template(self) -> str | None:
        template = self.file.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _dequantized(self, name: str) -> FloatArray:
        info = self.file.tensors[name]
        convert = _dequantizer()
        try:
            value = convert(self.file.raw(name), info.type)
        except (NotImplementedError, KeyError) as error:
            raise ExportError(f"tensor '{name}' has type {info.type}, which cannot be dequantized here.") from error
        return value.reshape(info.shape)

    def _with_rope_divisors(self, config: ModelConfig) -> ModelConfig:
        """Llama 3's scaling arrives as a tensor of divisors instead of as settings."""
        if "rope_freqs.weight" not in self.file.tensors:
            return config
        divisors = self._dequantized("rope_freqs.weight")
        if divisors.shape != (config.head_dim // 2,):
            raise ExportError(f"rope_freqs.weight is {list(divisors.shape)} and {config.head_dim // 2} are expected.")
        return replace(config, rope=replace(config.rope, divisors=tuple(float(item) for item in divisors)))


def _local_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in GGUF_PARTS:
        return f"layers.{parts[1]}.{GGUF_PARTS[parts[2]]}.{parts[3]}"
    return name  # unknown: the shape check names it


def _half_split(value: FloatArray, n_heads: int) -> FloatArray:
    """Undo llama.cpp's order of rotated rows (pairs next to each other) to halves, as cos/sin tables here expect."""
    rows = value.shape[0]
    paired = value.reshape(n_heads, rows // n_heads // 2, 2, *value.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(value.shape)


def _dequantizer() -> Callable[[NDArray[Any], str], FloatArray]:
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingDependencyError("reading GGUF weights needs gguf: `pip install 'edgespec[export]'`.") from error

    def convert(raw: NDArray[Any], type_name: str) -> FloatArray:
        if type_name == "F32":
            return np.asarray(raw).view(np.float32)
        if type_name in ("F16", "F64"):
            return np.asarray(raw).view(np.float16 if type_name == "F16" else np.float64).astype(np.float32)
        return np.asarray(dequantize(np.asarray(raw), GGMLQuantizationType[type_name]), np.float32)

    return convert
