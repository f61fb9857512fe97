"""A tiny random Llama-like decoder: its sizes, its weights, and a float64 reference in numpy.

The reference is written from the architecture alone, so that it can judge any runtime. Knows nothing of ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.types import FloatArray

__all__ = ["TinySpec", "rope_tables", "tiny_logits", "tiny_weights"]

Weights = dict[str, FloatArray]


@dataclass(frozen=True)
class TinySpec:
    """Sizes of the decoder; `window` is the number of tokens that a token sees, itself included (None: all)."""

    n_vocab: int = 64
    n_embd: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    n_ffn: int = 64
    n_ctx: int = 96
    window: int | None = None
    eos_ids: tuple[int, ...] = (2,)
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    seed: int = 0

    @property
    def qkv_width(self) -> int:
        """Columns of the packed query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


def tiny_weights(spec: TinySpec) -> Weights:
    """Random float32 weights, [in, out] for matrices; logits come out with a deviation of a few units."""
    rng = np.random.default_rng([spec.seed, 77])

    def matrix(rows: int, columns: int) -> FloatArray:
        result: FloatArray = (rng.standard_normal((rows, columns)) * rows**-0.5).astype(np.float32)
        return result

    weights: Weights = {"embed": rng.standard_normal((spec.n_vocab, spec.n_embd)).astype(np.float32)}
    for layer in range(spec.n_layers):
        weights[f"{layer}.norm1"] = rng.uniform(0.5, 1.5, spec.n_embd).astype(np.float32)
        weights[f"{layer}.qkv"] = matrix(spec.n_embd, spec.qkv_width)
        weights[f"{layer}.out"] = matrix(spec.n_heads * spec.head_dim, spec.n_embd)
        weights[f"{layer}.norm2"] = rng.uniform(0.5, 1.5, spec.n_embd).astype(np.float32)
        weights[f"{layer}.gate"] = matrix(spec.n_embd, spec.n_ffn)
        weights[f"{layer}.up"] = matrix(spec.n_embd, spec.n_ffn)
        weights[f"{layer}.down"] = matrix(spec.n_ffn, spec.n_embd)
    weights["norm"] = rng.uniform(0.5, 1.5, spec.n_embd).astype(np.float32)
    weights["head"] = 3 * matrix(spec.n_embd, spec.n_vocab)
    return weights


def rope_tables(spec: TinySpec) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines, [n_ctx, head_dim / 2] float32, of the half-split rotation."""
    half = spec.head_dim // 2
    angles = np.arange(spec.n_ctx)[:, None] * spec.rope_theta ** (-np.arange(half) / half)[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def tiny_logits(
    spec: TinySpec, tokens: Sequence[int], weights: Weights | None = None, features: FloatArray | None = None
) -> FloatArray:
    """[len(tokens), n_vocab] float64 logits of one pass over `tokens` without any cache.

    features: [len(tokens), n_embd] to add to the embeddings.
    """
    weights = tiny_weights(spec) if weights is None else weights
    hidden: FloatArray = weights["embed"][list(tokens)].astype(np.float64)
    if features is not None:
        hidden = hidden + features
    for layer in range(spec.n_layers):
        qkv = _rms(hidden, weights[f"{layer}.norm1"], spec.rms_eps) @ weights[f"{layer}.qkv"]
        hidden = hidden + _attend(spec, qkv) @ weights[f"{layer}.out"]
        normed = _rms(hidden, weights[f"{layer}.norm2"], spec.rms_eps)
        gate = normed @ weights[f"{layer}.gate"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ weights[f"{layer}.up"])) @ weights[f"{layer}.down"]
    result: FloatArray = _rms(hidden, weights["norm"], spec.rms_eps) @ weights["head"]
    return result


def _rms(x: FloatArray, scale: FloatArray, eps: float) -> FloatArray:
    result: FloatArray = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale
    return result


def _attend(spec: TinySpec, qkv: FloatArray) -> FloatArray:
    """[n, n_heads * head_dim] causal grouped-query attention over packed [n, qkv_width] rows."""
    n = qkv.shape[0]
    heads = qkv.reshape(n, spec.n_heads + 2 * spec.n_kv_heads, spec.head_dim).transpose(1, 0, 2)
    cos, sin = (table[:n].astype(np.float64) for table in rope_tables(spec))
    queries = _rotate(heads[: spec.n_heads], cos, sin)
    keys = _rotate(heads[spec.n_heads : spec.n_heads + spec.n_kv_heads], cos, sin)
    values = heads[spec.n_heads + spec.n_kv_heads :]
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    hides = (distance < 0) if spec.window is None else (distance < 0) | (distance >= spec.window)
    outputs = []
    for head in range(spec.n_heads):
        kv = head * spec.n_kv_heads // spec.n_heads
        scores = np.where(hides, -np.inf, queries[head] @ keys[kv].T / np.sqrt(spec.head_dim))
        probs = np.exp(scores - scores.max(axis=1, keepdims=True))
        outputs.append(probs / probs.sum(axis=1, keepdims=True) @ values[kv])
    return np.concatenate(outputs, axis=1)


def _rotate(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
