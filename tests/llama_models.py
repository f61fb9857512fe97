"""Tiny random GGUFs of models whose caches cannot always be rewound: a sliding window, and a recurrent state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.testing.gguf_models import add_vocabulary
from edgespec.testing.tokenizer import paired_strings

N_VOCAB, N_CTX, N_EMBD, N_FFN, WINDOW = 64, 1024, 32, 64, 8


def write_windowed(path: Path) -> Path:
    """A Gemma 2 of two layers, the first of which sees a window of 8 tokens."""
    writer = _writer(path, "gemma2")
    writer.add_feed_forward_length(N_FFN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(WINDOW)
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (N_EMBD,), "attn_q": (64, N_EMBD), "attn_k": (32, N_EMBD),
        "attn_v": (32, N_EMBD), "attn_output": (N_EMBD, 64), "post_attention_norm": (N_EMBD,), "ffn_norm": (N_EMBD,),
        "ffn_gate": (N_FFN, N_EMBD), "ffn_up": (N_FFN, N_EMBD), "ffn_down": (N_EMBD, N_FFN),
        "post_ffw_norm": (N_EMBD,)}  # fmt: skip
    for layer in range(2):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", _random(rng, shape))
    return _finish(writer, rng, path)


def write_recurrent(path: Path) -> Path:
    """A Mamba of two layers."""
    writer = _writer(path, "mamba")
    inner, state, rank = 2 * N_EMBD, 16, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    rng = np.random.default_rng(8)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (N_EMBD,), "ssm_in.weight": (2 * inner, N_EMBD),
        "ssm_conv1d.weight": (inner, 4), "ssm_conv1d.bias": (inner,), "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank), "ssm_dt.bias": (inner,), "ssm_d": (inner,),
        "ssm_out.weight": (N_EMBD, inner)}  # fmt: skip
    for layer in range(2):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}", _random(rng, shape))
        writer.add_tensor(f"blk.{layer}.ssm_a", -rng.uniform(0.5, 2, (inner, state)).astype(np.float32))
    return _finish(writer, rng, path)


def _writer(path: Path, architecture: str) -> Any:
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, paired_strings(N_VOCAB), 2)
    return writer


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
    return values.astype(np.float32)


def _finish(writer: Any, rng: np.random.Generator, path: Path) -> Path:
    writer.add_tensor("token_embd.weight", rng.standard_normal((N_VOCAB, N_EMBD)).astype(np.float32))
    writer.add_tensor("output_norm.weight", _random(rng, (N_EMBD,)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
