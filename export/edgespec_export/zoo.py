"""A trained draft as it is kept: config.json and weights.safetensors of a zoo folder, which need not be trusted.

Owns the format on the reading side: which keys and tensors each kind has, their shapes, int8 rows and their scales.
It knows nothing of targets and graphs; `drafts.py` puts them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import DRAFT_KINDS
from edgespec.config import nearest
from edgespec.errors import ConfigError, ExportRefusedError
from edgespec_export.safetensors import SafetensorsFile

__all__ = ["KINDS", "ZooConfig", "ZooDraft"]

FloatArray = NDArray[np.float32]
KINDS = DRAFT_KINDS
FORMAT, VERSION = "edgespec-draft", 1
_MAX_CONFIG_BYTES = 16 << 20  # the training history is in it
_MOST = 1 << 20  # of any count: keeps products of two within what numpy can address
_MOST_PARTS = 256  # layers or heads, each of which stands for several tensors
_COUNTS: dict[str, tuple[str, ...]] = {
    "tinydraft": ("n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "n_layers"),
    "eagle": ("n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "n_layers"),
    "medusa": ("n_embd", "n_medusa"),
    "exit": ("n_embd", "n_ff", "exit_layer"),
}
_KEYS = {"format", "version", "kind", "target", "n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "rope_theta",
         "norm_eps", "n_layers", "n_vocab", "taps", "exit_layer", "n_medusa", "from_layers", "tokenizer_hash",
         "acceptance", "training"}  # fmt: skip


@dataclass(frozen=True)
class ZooConfig:
    """config.json. Counts that a kind has no use for are 1; taps are feature names of the target, in order.

    exit_layer: None except for an exit. tokenizer_hash: None where the draft does not say for which tokens it is.
    """

    kind: str
    target: str
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int
    n_medusa: int
    exit_layer: int | None
    rope_theta: float
    norm_eps: float
    taps: tuple[str, ...]
    tokenizer_hash: str | None
    acceptance: dict[str, Any] | None


class ZooDraft:
    """An opened zoo folder: `config`, `vocabulary` (ascending int64 ids [V]) and `tensor(name)` in float32."""

    def __init__(self, folder: Path, config: ZooConfig, file: SafetensorsFile) -> None:
        self.folder, self.config, self._file = folder, config, file
        self.vocabulary = self._read_vocabulary()
        self._check_shapes()

    @classmethod
    def open(cls, folder: str | Path) -> ZooDraft:
        """Read and check the folder. Raises ConfigError or FormatError that names what is wrong."""
        folder = Path(folder)
        weights = folder / "weights.safetensors"
        if not (folder / "config.json").is_file() or not weights.is_file():
            raise ConfigError(f"{folder} is no trained draft: it must hold config.json and weights.safetensors.")
        return cls(folder, _read_config(folder / "config.json"), SafetensorsFile.open(weights))

    @property
    def weights_path(self) -> Path:
        return self._file.path

    def tensor(self, name: str) -> FloatArray:
        """The tensor `name`; int8 rows are multiplied by their scales. ExportRefusedError unless all is finite."""
        if name in self._file.tensors:
            value = self._file.float32(name)
        else:
            scale = self._file.float32(f"{name}.scale")
            with np.errstate(invalid="ignore"):  # an infinite scale is refused below
                value = self._file.integers(f"{name}.int8").astype(np.float32) * scale[:, None]
        if not np.isfinite(value).all():
            raise ExportRefusedError(
                f"tensor '{name}' of {self.weights_path} holds NaN or infinite values: it is damaged."
            )
        return value

    def _read_vocabulary(self) -> NDArray[np.int64]:
        path, entry = self.weights_path, self._file.tensors.get("vocabulary")
        if entry is None or len(entry.shape) != 1:
            raise ExportRefusedError(
                f"{path} has no 'vocabulary' of one dimension: which tokens it drafts is not known."
            )
        ids = self._file.integers("vocabulary")
        if ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ExportRefusedError(f"the vocabulary of {path} must hold token ids in ascending order, each once.")
        return ids

    def _check_shapes(self) -> None:
        expected, found = _shapes(self.config), {}
        for name, entry in self._file.tensors.items():
            if name == "vocabulary":
                continue
            if name.endswith(".scale") and f"{name.removesuffix('.scale')}.int8" in self._file.tensors:
                rows = self._file.tensors[f"{name.removesuffix('.scale')}.int8"].shape[:1]
                if entry.shape != rows:
                    raise ExportRefusedError(f"{name} is {list(entry.shape)} and its matrix has {list(rows)} rows.")
            else:
                found[name.removesuffix(".int8")] = entry.shape
        problems = [f"{name} is missing" for name in expected if name not in found]
        problems += [f"{name} is no part of it" for name in found if name not in expected]
        problems += [
            f"{name} is {list(found[name])} and the config says {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        problems += [
            f"{name} has no scales" for name in found
            if f"{name}.int8" in self._file.tensors and f"{name}.scale" not in self._file.tensors
        ]  # fmt: skip
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ExportRefusedError(
                f"{self.weights_path} does not fit its config.json ({self.config.kind}): {shown}. Train the draft"
                " again, or put both files of one draft together."
            )


def _shapes(config: ZooConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the kind but the vocabulary."""
    d, ff, taps = config.n_embd, config.n_ff, range(len(config.taps))
    if config.kind == "medusa":
        shapes: dict[str, tuple[int, ...]] = {f"tap_norm.{index}.weight": (d,) for index in taps}
        shapes |= {"embed_norm.weight": (d,), "in.weight": (d, (len(taps) + 1) * d), "norm.weight": (d,)}
        return shapes | {f"heads.{index}.weight": (d, d) for index in range(config.n_medusa)}
    if config.kind == "exit":
        shapes = {"in_norm.weight": (d,), "norm.weight": (d,), "skip.weight": (d, d)}
        return shapes | {"gate.weight": (ff, d), "up.weight": (ff, d), "down.weight": (d, ff)}
    shapes = {"norm.weight": (d,)}
    if config.kind == "eagle":
        shapes |= {f"fuse_norm.{index}.weight": (d,) for index in taps}
        shapes |= {"fuse.weight": (d, len(taps) * d), "fc.weight": (d, 2 * d)}
        shapes |= {"embed_norm.weight": (d,), "feature_norm.weight": (d,)}
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for index in range(config.n_layers):
        layer = f"layers.{index}."
        shapes |= {f"{layer}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.q_proj.weight": (q_rows, d), f"{layer}self_attn.o_proj.weight": (d, q_rows)}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (kv_rows, d) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (ff, d) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (d, ff)
    return shapes


def _read_config(path: Path) -> ZooConfig:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is {path.stat().st_size} bytes long; at most {_MAX_CONFIG_BYTES} are read.")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f'{path} does not say "format": "{FORMAT}": it is not the config of a trained draft.')
    reader = _Reader(path, values)
    if values.get("version") != VERSION:
        raise reader.refused("version", f"version {VERSION} is read here: update edgespec")
    kind = values.get("kind")
    if kind not in KINDS:
        raise reader.refused("kind", f"use one of {', '.join(KINDS)}")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, _KEYS)}")
    counts = {key: reader.count(key) if key in _COUNTS[kind] else 1 for keys in _COUNTS.values() for key in keys}
    exit_layer = counts.pop("exit_layer") if kind == "exit" else None
    counts.pop("exit_layer", None)
    config = ZooConfig(
        kind=kind,
        target=reader.text("target") or "",
        exit_layer=exit_layer,
        rope_theta=reader.positive("rope_theta", 10_000.0 if kind in ("medusa", "exit") else None),
        norm_eps=reader.positive("norm_eps"),
        taps=reader.taps(is_needed=kind in ("eagle", "medusa")),
        tokenizer_hash=reader.text("tokenizer_hash"),
        acceptance=reader.facts("acceptance"),
        **counts,
    )
    if kind == "medusa" and config.taps[-1] != "final":
        raise reader.refused("taps", "the last tap of medusa heads is 'final'")
    return config


class _Reader:
    """Keys of config.json, with errors that name them."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def refused(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} is {str(self.values.get(key))[:60]!r}; {wanted}.")

    def count(self, key: str) -> int:
        value = self.values.get(key)
        most = _MOST_PARTS if key in ("n_layers", "n_medusa", "exit_layer") else _MOST
        if type(value) is not int or not 1 <= value <= most:
            raise self.refused(key, f"a whole number from 1 to {most} is wanted")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refused(key, "a positive number is wanted")
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refused(key, "a string is wanted")
        return value

    def facts(self, key: str) -> dict[str, Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(key, "an object is wanted")
        return value

    def taps(self, *, is_needed: bool) -> tuple[str, ...]:
        value = self.values.get("taps") or []
        if not isinstance(value, list) or not all(isinstance(tap, str) for tap in value) or len(value) > 16:
            raise self.refused("taps", "a list of at most 16 names such as layer.9 and final is wanted")
        if len(set(value)) != len(value) or (is_needed and not value):
            raise self.refused("taps", "at least one tap is wanted, and none twice")
        return tuple(value)
