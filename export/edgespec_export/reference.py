"""The float decoder in plain numpy: the oracle that exported graphs are held against.

Owns the same mathematics as the graph, written independently of it and without quantization, caches or fusion tricks.
It holds float32 weights and is slow; it knows nothing of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec_export.config import ModelConfig
from edgespec_export.rope import attention_factor, frequencies

__all__ = ["ReferenceModel", "ReferenceState"]

FloatArray = NDArray[np.float32]


class ReferenceState:
    """Keys and values of each layer, [n_kv_heads, n_past, head_dim]."""

    def __init__(self, config: ModelConfig) -> None:
        empty = np.zeros((config.n_kv_heads, 0, config.head_dim), np.float32)
        self.keys = [empty] * config.n_layers
        self.values = [empty] * config.n_layers

    @property
    def n_past(self) -> int:
        """Tokens held."""
        return self.keys[0].shape[1]


class ReferenceModel:
    """Loads every weight once; `forward` may then be called for any number of states."""

    def __init__(self, config: ModelConfig, weights: Callable[[str], FloatArray]) -> None:
        self.config = config
        self.weights = weights
        self.observe: Callable[[str, FloatArray], None] | None = None  # called with each matrix's name and inputs
        self._loaded: dict[str, FloatArray] = {}
        self._frequencies = frequencies(config.rope, config.head_dim)
        self._factor = attention_factor(config.rope)

    def new_state(self) -> ReferenceState:
        """The state of an empty text."""
        return ReferenceState(self.config)

    def forward(
        self, tokens: Sequence[int], state: ReferenceState | None = None, taps: dict[str, FloatArray] | None = None
    ) -> FloatArray:
        """Logits [len(tokens), n_vocab] float32 of `tokens` after the state's, which grows by them.

        taps: filled with the feature taps of every token, [len(tokens), n_embd].
        """
        state = state or ReferenceState(self.config)
        hidden = self.embed(tokens)
        for index in range(self.config.n_layers):
            hidden = self.layer(index, hidden, state)
            if taps is not None:
                taps[f"layer.{index}"] = hidden
        final = self.final(hidden)
        if taps is not None:
            taps["final"] = final
        head = "embed_tokens" if self.config.is_tied else "lm_head"
        logits: FloatArray = final @ self._weight(f"{head}.weight").T
        return logits

    def embed(self, tokens: Sequence[int]) -> FloatArray:
        """[len(tokens), n_embd] rows of the embedding table."""
        rows: FloatArray = self._weight("embed_tokens.weight")[np.asarray(tokens)]
        return rows

    def layer(self, index: int, hidden: FloatArray, state: ReferenceState) -> FloatArray:
        """The residual stream after layer `index`; its part of the state grows."""
        name = f"layers.{index}"
        hidden = hidden + self._attention(index, self._norm(f"{name}.input_layernorm", hidden), state)
        return hidden + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", hidden))

    def final(self, hidden: FloatArray) -> FloatArray:
        """The final norm's output, which the head multiplies."""
        return self._norm("norm", hidden)

    def forget(self) -> None:
        """Drop the weights loaded so far; they are loaded again when used."""
        self._loaded.clear()

    def _weight(self, name: str) -> FloatArray:
        if name not in self._loaded:
            self._loaded[name] = self.weights(name)
        return self._loaded[name]

    def _norm(self, name: str, values: FloatArray) -> FloatArray:
        mean = np.mean(np.square(values), axis=-1, keepdims=True)
        result: FloatArray = values / np.sqrt(mean + np.float32(self.config.norm_eps)) * self._weight(f"{name}.weight")
        return result

    def _linear(self, name: str, values: FloatArray, has_bias: bool) -> FloatArray:
        if self.observe is not None:
            self.observe(name, values)
        result: FloatArray = values @ self._weight(f"{name}.weight").T
        return result + self._weight(f"{name}.bias") if has_bias else result

    def _mlp(self, name: str, values: FloatArray) -> FloatArray:
        has_bias = self.config.has_mlp_bias
        gate = self._linear(f"{name}.gate_proj", values, has_bias)
        up = self._linear(f"{name}.up_proj", values, has_bias)
        with np.errstate(over="ignore"):  # exp of a large negative gate is infinite and the quotient rightly 0
            active = gate / (1 + np.exp(-gate))
        return self._linear(f"{name}.down_proj", active * up, has_bias)

    def _attention(self, index: int, values: FloatArray, state: ReferenceState) -> FloatArray:
        config, name = self.config, f"layers.{index}.self_attn"
        n, past = values.shape[0], state.keys[index].shape[1]
        query = self._heads(f"{name}.q", values, config.n_heads, past)
        key = self._heads(f"{name}.k", values, config.n_kv_heads, past)
        value = self._linear(f"{name}.v_proj", values, config.has_qkv_bias)
        value = value.reshape(n, config.n_kv_heads, config.head_dim).swapaxes(0, 1)
        state.keys[index] = np.concatenate([state.keys[index], key], axis=1)
        state.values[index] = np.concatenate([state.values[index], value], axis=1)
        group = config.n_heads // config.n_kv_heads
        keys = np.repeat(state.keys[index], group, axis=0)
        scores = query @ keys.swapaxes(1, 2) * np.float32(config.head_dim**-0.5)
        scores = np.where(_visible(n, past, config.windows[index]), scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ np.repeat(state.values[index], group, axis=0)).swapaxes(0, 1).reshape(n, -1)
        return self._linear(f"{name}.o_proj", mixed, config.has_out_bias)

    def _heads(self, name: str, values: FloatArray, n_heads: int, past: int) -> FloatArray:
        """Projected, normed where the model does so, and rotated heads [n_heads, n, head_dim]."""
        rows = self._linear(f"{name}_proj", values, self.config.has_qkv_bias)
        heads = rows.reshape(len(values), n_heads, self.config.head_dim)
        if self.config.has_qk_norm:
            heads = self._norm(f"{name}_norm", heads)
        return self._rotated(heads.swapaxes(0, 1), past)

    def _rotated(self, heads: FloatArray, past: int) -> FloatArray:
        angles = (past + np.arange(heads.shape[1]))[:, None] * self._frequencies
        cos = (np.cos(angles) * self._factor).astype(np.float32)
        sin = (np.sin(angles) * self._factor).astype(np.float32)
        first, second = np.split(heads, 2, axis=-1)
        result: FloatArray = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return result


def _visible(n: int, past: int, window: int | None) -> NDArray[np.bool_]:
    """[n, past + n]: which positions each new token may look at; a window counts the token itself."""
    query = past + np.arange(n)[:, None]
    key = np.arange(past + n)[None, :]
    visible = key <= query
    return visible if window is None else visible & (query - key < window)
