"""Writes a tiny random Llama decoder as a GGUF file, for llama.cpp.

It holds the weights of `edgespec.testing.tiny`, whose numpy reference it must match, and the vocabulary of
`edgespec.testing.tokenizer`. Needs the `export` extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.testing.tiny import TinySpec, Weights, tiny_weights
from edgespec.testing.tokenizer import N_SPECIAL, paired_strings
from edgespec.types import FloatArray

__all__ = ["add_vocabulary", "write_gguf"]

_NORMAL, _CONTROL = 1, 3


def write_gguf(
    path: Path,
    spec: TinySpec | None = None,
    *,
    type: str = "F32",
    name: str = "tiny",
    weights: Weights | None = None,
    strings: Sequence[str] | None = None,
) -> Path:
    """The decoder of `spec` (without a window) as the file `path`.

    type: of the matrices, F32, F16 or one of gguf's quantized ones. strings: the token strings, by default
    `edgespec.testing.tokenizer.paired_strings`.
    """
    import gguf

    spec = spec or TinySpec()
    weights = tiny_weights(spec) if weights is None else weights
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_vocab_size(spec.n_vocab)
    writer.add_context_length(spec.n_ctx)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.n_ffn)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    add_vocabulary(writer, strings or paired_strings(spec.n_vocab), spec.eos_ids[0])
    kind = gguf.GGMLQuantizationType[type]
    for tensor, value in _tensors(spec, weights):
        is_float = value.ndim == 1 or type == "F32"
        data = value if is_float else gguf.quants.quantize(value, kind)
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType.F32 if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: Any, tokens: Sequence[str], eos_id: int) -> None:
    """Byte-level BPE over `tokens`, of which the first few are special and pairs are merged from their letters."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([_CONTROL] * N_SPECIAL + [_NORMAL] * (len(tokens) - N_SPECIAL))
    writer.add_token_merges([" ".join(token) for token in tokens[N_SPECIAL:] if len(token) == 2])
    writer.add_eos_token_id(eos_id)
    writer.add_add_bos_token(False)


def _tensors(spec: TinySpec, weights: Weights) -> Iterator[tuple[str, FloatArray]]:
    """llama.cpp's names and layout: [out, in], rotated rows in pairs."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    yield "token_embd.weight", weights["embed"]
    for layer in range(spec.n_layers):
        qkv = weights[f"{layer}.qkv"].T
        yield f"blk.{layer}.attn_norm.weight", weights[f"{layer}.norm1"]
        yield f"blk.{layer}.attn_q.weight", _paired(qkv[:q], spec.n_heads)
        yield f"blk.{layer}.attn_k.weight", _paired(qkv[q : q + kv], spec.n_kv_heads)
        yield f"blk.{layer}.attn_v.weight", np.ascontiguousarray(qkv[q + kv :])
        yield f"blk.{layer}.attn_output.weight", np.ascontiguousarray(weights[f"{layer}.out"].T)
        yield f"blk.{layer}.ffn_norm.weight", weights[f"{layer}.norm2"]
        for part in ("gate", "up", "down"):
            yield f"blk.{layer}.ffn_{part}.weight", np.ascontiguousarray(weights[f"{layer}.{part}"].T)
    yield "output_norm.weight", weights["norm"]
    yield "output.weight", np.ascontiguousarray(weights["head"].T)


def _paired(matrix: FloatArray, n_heads: int) -> FloatArray:
    """Rows of a head that are rotated together next to each other instead of in its two halves."""
    halves = matrix.reshape(n_heads, 2, matrix.shape[0] // n_heads // 2, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)
