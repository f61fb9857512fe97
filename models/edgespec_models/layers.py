"""The torch layers that every trained draft is made of: RMS norm, a Llama layer, the target's own head on few tokens.

Owns the mathematics that `edgespec_export.drafts` writes as graphs; parameter names are those of the zoo format. Knows
no files and no training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LlamaLayer", "ReducedHead", "RmsNorm", "linear", "rotate"]


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A matrix without bias."""
    return nn.Linear(n_in, n_out, bias=False)


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., length, head_dim] with halves paired; cos, sin: [length, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """The four projections of grouped-query attention; heads first."""

    def __init__(self, n_embd: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.q_proj = linear(n_embd, n_heads * head_dim)
        self.k_proj = linear(n_embd, n_kv_heads * head_dim)
        self.v_proj = linear(n_embd, n_kv_heads * head_dim)
        self.o_proj = linear(n_heads * head_dim, n_embd)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [batch, n_heads, length, head_dim], and keys and values repeated to as many heads."""
        query = rotate(self._heads(self.q_proj(x), self.n_heads), cos, sin)
        key = rotate(self._heads(self.k_proj(x), self.n_kv_heads), cos, sin)
        value = self._heads(self.v_proj(x), self.n_kv_heads)
        repeats = self.n_heads // self.n_kv_heads
        return query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)

    def _heads(self, x: Tensor, n_heads: int) -> Tensor:
        return x.unflatten(-1, (n_heads, self.head_dim)).transpose(1, 2)

    def join(self, attended: Tensor) -> Tensor:
        """[batch, n_heads, length, head_dim] back to [batch, length, n_embd]."""
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, n_embd: int, n_ff: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(n_embd, n_ff), linear(n_embd, n_ff)
        self.down_proj = linear(n_ff, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class LlamaLayer(nn.Module):
    """Pre-norm attention and SwiGLU; `shape` gives n_embd, n_ff, n_heads, n_kv_heads, head_dim and norm_eps."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.n_embd, shape.norm_eps)
        self.self_attn = Attention(shape.n_embd, shape.n_heads, shape.n_kv_heads, shape.head_dim)
        self.post_attention_layernorm = RmsNorm(shape.n_embd, shape.norm_eps)
        self.mlp = Mlp(shape.n_embd, shape.n_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, n_embd] -> the same, causal."""
        query, key, value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        return self.finish(x, functional.scaled_dot_product_attention(query, key, value, is_causal=True))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: [batch, n_heads, length, head_dim] -> the layer's output."""
        x = x + self.self_attn.join(attended)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class ReducedHead(nn.Module):
    """The target's lm head over the reduced vocabulary, frozen; `weight` is [n_vocab_draft, n_embd]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))
