"""Rotary position embeddings: the scaling kinds in use, as frequencies and cos/sin tables.

Owns the mathematics of RoPE (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), Llama 3's piecewise scaling
and YaRN (arXiv:2309.00071). It knows nothing about file formats; `config.py` fills in `RopeConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError

__all__ = ["ROPE_KINDS", "RopeConfig", "attention_factor", "frequencies", "scaling", "tables"]

ROPE_KINDS = ("none", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class RopeConfig:
    """theta and how it is stretched. original_ctx: tokens the unscaled model was trained for (0 = not given).

    divisors: one number a frequency that divides it (llama.cpp's `rope_freqs`), already holding Llama 3's scaling.
    """

    theta: float = 10_000.0
    kind: str = "none"
    factor: float = 1.0
    original_ctx: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] | None = None


def scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """What there is to `rope` beside theta, as fields of it; None where it is plain."""
    if rope.kind == "none" and rope.divisors is None:
        return None
    values = {field.name: getattr(rope, field.name) for field in fields(rope) if field.name not in ("theta", "kind")}
    defaults = {field.name: field.default for field in fields(rope)}
    return {"kind": rope.kind} | {name: value for name, value in values.items() if value != defaults[name]}


def frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """[head_dim / 2] float64 radians per position."""
    base = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.divisors is not None:
        base = base / np.asarray(rope.divisors, np.float64)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base  # "dynamic" too: it only differs beyond the original context, which `tables` refuses


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def tables(rope: RopeConfig, head_dim: int, n_ctx: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), each [n_ctx, head_dim / 2] float32. Raises ExportError where no table can be right."""
    if rope.kind == "dynamic" and n_ctx > rope.original_ctx:
        raise ExportError(
            f"dynamic rope scaling changes all positions once the text passes {rope.original_ctx} tokens, and the"
            f" context asked for is {n_ctx}: export with n_ctx={rope.original_ctx}, where it is exact."
        )
    angles = np.arange(n_ctx, dtype=np.float64)[:, None] * frequencies(rope, head_dim)
    factor = attention_factor(rope)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _llama3(rope: RopeConfig, base: NDArray[np.float64]) -> NDArray[np.float64]:
    wavelength = 2 * math.pi / base
    smooth = (rope.original_ctx / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return base * (smooth + (1 - smooth) / rope.factor)


def _yarn(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """Section 3.2 of arXiv:2309.00071: interpolate the slow frequencies, keep the fast ones, ramp in between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_ctx / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    result: NDArray[np.float64] = base / rope.factor * ramp + base * (1 - ramp)
    return result
