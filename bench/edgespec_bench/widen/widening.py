"""A model's weights made wider without changing its function, and noise on top of them.

The residual stream, heads and feed-forward of the wide model are copies of the original's next to each other. A copied
input halves (thirds ...) its weights, so every copy of an output is the original's; RMSNorm sees the same mean square;
the last norm takes the division that a tied head cannot. Noise makes the copies differ. Owns that arithmetic, and
reads the original one tensor at a time. It knows no folders and no acceptance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.config import ModelConfig, expected_shapes
from edgespec_export.sources import WeightSource
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.text.tokenizer import Tokenizer

__all__ = ["DITHER", "FACTORS", "Noise", "WidenedSource", "widened_config"]

FloatArray = NDArray[np.float32]
FACTORS = (2, 3)
DITHER = 0.5
_HEADS = ("embed_tokens.weight", "lm_head.weight")  # the same where they are tied
_ROWS_AT_ONCE = 8192  # bounds the noise of an embedding table to some 50 MB


@dataclass(frozen=True)
class Noise:
    """size: deviation of the normal noise on the head over the root mean square of its weights; 0 is none.

    With noise on the head, the layers' copies of a weight are made to differ by DITHER, with a sum of zero over the
    copies of an input: that computes the same, and lets rounding to int4 err in other places in each copy, so that the
    errors average out instead of adding up. Noise on the layers that does not sum to zero was tried instead: up to a
    size it changes nothing, beyond it the target's text is no language any more (bench/LOG.md). On the head it moves
    the choice between tokens that are likely anyway.
    """

    size: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.size <= 10:
            raise ConfigError(f"noise is {self.size}: give its size relative to the weights, between 0 and 10")


@dataclass(frozen=True)
class WidenedSource:
    """The weights of `original` widened by `factor`, as the exporter reads weights.

    synthetic: what bundle.json will say of them. With noise, values are rounded to float16, in which a folder holds
    them; without, they are exact.
    """

    original: WeightSource
    factor: int
    noise: Noise
    synthetic: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.factor not in FACTORS:
            raise ConfigError(f"factor is {self.factor}: use {' or '.join(map(str, FACTORS))}")

    @property
    def format(self) -> str:
        return "widened"

    @property
    def path(self) -> Path:
        return self.original.path

    @property
    def config(self) -> ModelConfig:
        return widened_config(self.original.config, self.factor)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return expected_shapes(self.config)

    def tensor(self, name: str) -> FloatArray:
        """The wide tensor, float32."""
        value = self.original.tensor(name)
        wide = _copies(name, value, self.factor)
        if self.noise.size == 0:
            return wide
        if value.ndim == 2:
            self._add_noise(name, wide)
        rounded: FloatArray = wide.astype(np.float16).astype(np.float32)
        return rounded

    def _add_noise(self, name: str, wide: FloatArray) -> None:
        """In place; the same name, size and seed give the same noise, whatever was read before."""
        digest = hashlib.sha256(f"{self.noise.seed} {self.factor} {name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        size = self.noise.size if name in _HEADS else DITHER
        deviation = np.float32(size * np.sqrt(np.mean(np.square(wide[:_ROWS_AT_ONCE]))))
        for start in range(0, len(wide), _ROWS_AT_ONCE):
            part = wide[start : start + _ROWS_AT_ONCE]
            noise = rng.standard_normal((len(part), self.factor, part.shape[1] // self.factor), np.float32)
            if name not in _HEADS:
                noise -= noise.mean(axis=1, keepdims=True)
            part += deviation * noise.reshape(part.shape)

    def sha256(self) -> str:
        """Over what decides the weights."""
        text = json.dumps([self.original.sha256(), self.factor, self.noise.size, self.noise.seed])
        return hashlib.sha256(text.encode()).hexdigest()

    def tokenizer_json(self, tokenizer: Tokenizer) -> str:
        return self.original.tokenizer_json(tokenizer)

    def chat_template(self) -> str | None:
        return self.original.chat_template()


def widened_config(config: ModelConfig, factor: int) -> ModelConfig:
    """The wide model's config: everything but the depth, the vocabulary and the heads' size times `factor`."""
    return replace(
        config,
        name=f"{config.name}-x{factor}",
        n_embd=config.n_embd * factor,
        n_ff=config.n_ff * factor,
        n_heads=config.n_heads * factor,
        n_kv_heads=config.n_kv_heads * factor,
    )


def _copies(name: str, value: FloatArray, factor: int) -> FloatArray:
    """The wide form of one tensor. Copies lie behind each other, heads too, so that groups of heads stay together."""
    if name in _HEADS:
        return np.tile(value, (1, factor))  # the head's sum over copies is divided by the last norm
    if name == "norm.weight":
        return np.tile(value, factor) / np.float32(factor)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value  # of one head's channels
    if value.ndim == 1:
        return np.tile(value, factor)
    return np.tile(value / np.float32(factor), (factor, factor))
