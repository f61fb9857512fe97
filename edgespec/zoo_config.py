"""What the config.json of a trained draft says, read strictly, since such a folder need not be trusted.

Owns the keys of each kind of draft, their types and their limits, for the engine and the exporter alike. Which target a
draft fits is the matter of `zoo`, what its tensors must be that of `edgespec_export.zoo`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.bundle import DRAFT_KINDS
from edgespec.config import nearest
from edgespec.errors import ConfigError

__all__ = ["CONFIG", "FORMAT", "VERSION", "WEIGHTS", "ZooConfig", "declared_format", "is_draft_folder", "read_config"]

FORMAT, VERSION = "edgespec-draft", 1
CONFIG, WEIGHTS = "config.json", "weights.safetensors"
_MAX_CONFIG_BYTES = 16 << 20  # the training history is in it
_MOST = 1 << 20  # of any count: keeps products of two within what numpy can address
_MOST_PARTS = 256  # layers or heads, each of which stands for several tensors
_MOST_TOKENS = 1 << 31
_COUNTS: dict[str, tuple[str, ...]] = {
    "tinydraft": ("n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "n_layers"),
    "eagle": ("n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "n_layers"),
    "medusa": ("n_embd", "n_medusa"),
    "exit": ("n_embd", "n_ff", "exit_layer"),
}
_KEYS = {"format", "version", "kind", "target", "n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "rope_theta",
         "rope_scaling", "norm_eps", "n_layers", "n_vocab", "taps", "exit_layer", "n_medusa", "from_layers",
         "tokenizer_hash", "acceptance", "training"}  # fmt: skip
_SCALINGS = {"none": (), "linear": (), "llama3": ("original_ctx",), "yarn": ("original_ctx",),
             "dynamic": ("original_ctx",)}  # fmt: skip
_SCALING_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_SCALING_KEYS = {"kind", "original_ctx", "truncate", "divisors", *_SCALING_NUMBERS}


@dataclass(frozen=True)
class ZooConfig:
    """config.json. Counts that a kind has no use for are 1; taps are feature names of the target, in order.

    exit_layer: None except for an exit. rope_scaling: the fields of `edgespec_export.rope.RopeConfig` beside theta,
    None for plain rope. tokenizer_hash: None where the draft does not say for which tokens it is.
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
    rope_scaling: dict[str, Any] | None
    norm_eps: float
    taps: tuple[str, ...]
    tokenizer_hash: str | None
    acceptance: dict[str, Any] | None


def is_draft_folder(path: Path) -> bool:
    """Whether `path` holds trained draft weights that are no bundle yet."""
    return bool(declared_format(path) == FORMAT)


def declared_format(folder: Path) -> Any:
    """What config.json in `folder` names as its format; None where there is none that can be read."""
    path = folder / CONFIG
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
        return None
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return fields.get("format") if isinstance(fields, dict) else None


def read_config(folder: Path) -> ZooConfig:
    """Read and check config.json of a draft's folder. Raises ConfigError that names the file and the key."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} is no trained draft: it must hold {CONFIG} and {WEIGHTS}.")
    reader = _Reader(folder / CONFIG, _load(folder / CONFIG))
    if type(reader.get("version")) is not int or reader.get("version") != VERSION:
        raise reader.refused("version", f"version {VERSION} is read here: update edgespec")
    kind = reader.get("kind")
    if not isinstance(kind, str) or kind not in DRAFT_KINDS:
        raise reader.refused("kind", f"use one of {', '.join(DRAFT_KINDS)}, or update edgespec")
    reader.check_keys(_KEYS)
    counts = {key: reader.count(key) if key in _COUNTS[kind] else 1 for keys in _COUNTS.values() for key in keys}
    exit_layer = counts.pop("exit_layer")
    has_rope = kind in ("tinydraft", "eagle")
    theta = reader.positive("rope_theta", None if has_rope else 10_000.0)
    config = ZooConfig(
        kind=kind,
        target=reader.text("target") or "",
        exit_layer=exit_layer if kind == "exit" else None,
        rope_theta=theta,
        rope_scaling=_rope_scaling(reader, theta, counts["head_dim"]) if has_rope else None,
        norm_eps=reader.positive("norm_eps"),
        taps=_taps(reader, is_needed=kind in ("eagle", "medusa")),
        tokenizer_hash=reader.text("tokenizer_hash"),
        acceptance=reader.facts("acceptance"),
        **counts,
    )
    if kind == "medusa" and config.taps[-1] != "final":
        raise reader.refused("taps", "the last tap of medusa heads is 'final'")
    return config


def _load(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is {path.stat().st_size} bytes long; at most {_MAX_CONFIG_BYTES} are read.")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f'{path} does not say "format": "{FORMAT}": it is not the config of a trained draft.')
    return values


def _taps(reader: _Reader, *, is_needed: bool) -> tuple[str, ...]:
    value = reader.get("taps") or []
    if not isinstance(value, list) or not all(isinstance(tap, str) for tap in value) or len(value) > 16:
        raise reader.refused("taps", "a list of at most 16 names such as layer.9 and final is wanted")
    if len(set(value)) != len(value) or (is_needed and not value):
        raise reader.refused("taps", "at least one tap is wanted, and none twice")
    return tuple(value)


def _rope_scaling(reader: _Reader, theta: float, head_dim: int) -> dict[str, Any] | None:
    """How the target's rotary embedding is stretched, in numbers for which its formulas are defined."""
    facts = reader.facts("rope_scaling")
    if facts is None:
        return None
    inner = _Reader(reader.path, facts, "rope_scaling.")
    inner.check_keys(_SCALING_KEYS)
    kind, divisors = facts.get("kind", "none"), facts.get("divisors")
    if not isinstance(kind, str) or kind not in _SCALINGS or (kind == "none" and divisors is None):
        raise inner.refused("kind", f"use one of {', '.join(_SCALINGS)}, the first with divisors only")
    result: dict[str, Any] = {"kind": kind}
    for key in (*_SCALING_NUMBERS, "original_ctx", "truncate"):
        if key == "truncate" and type(facts.get(key, True)) is not bool:
            raise inner.refused(key, "true or false is wanted")
        if key == "original_ctx" and (key in facts or key in _SCALINGS[kind]):
            inner.count(key, _MOST_TOKENS)
        if key in _SCALING_NUMBERS and key in facts and not 1e-6 <= inner.positive(key) <= 1e6:
            raise inner.refused(key, "a number from 1e-6 to 1e6 is wanted")
        result |= {key: facts[key]} if key in facts else {}
    if divisors is not None:
        result["divisors"] = inner.numbers("divisors", head_dim // 2)
    if kind == "llama3" and facts.get("high_freq_factor", 4.0) <= facts.get("low_freq_factor", 1.0):
        raise inner.refused("high_freq_factor", "more than low_freq_factor is wanted")
    if kind == "yarn" and theta <= 1.0:
        raise reader.refused("rope_theta", "yarn scaling wants more than 1")
    return result


class _Reader:
    """Keys of config.json or of an object in it (`prefix`), with errors that name them."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refused(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self.prefix}{key} is {str(self.get(key))[:60]!r}; {wanted}.")

    def check_keys(self, known: set[str]) -> None:
        for key in self.values:
            if key not in known:
                raise ConfigError(f"{self.path}: unknown key {self.prefix + key!r}{nearest(key, known)}")

    def count(self, key: str, most: int | None = None) -> int:
        value = self.get(key)
        most = most or (_MOST_PARTS if key in ("n_layers", "n_medusa", "exit_layer") else _MOST)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refused(key, f"a whole number from 1 to {most} is wanted")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not _is_positive(value):
            raise self.refused(key, "a positive number is wanted")
        return float(value)

    def numbers(self, key: str, n: int) -> tuple[float, ...]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != n or not all(map(_is_positive, value)):
            raise self.refused(key, f"a list of {n} positive numbers is wanted")
        return tuple(map(float, value))

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refused(key, "a string is wanted")
        return value

    def facts(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(key, "an object is wanted")
        return value


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= sys.float_info.max
