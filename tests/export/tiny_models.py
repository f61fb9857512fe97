"""Small random models on disk, as Hugging Face folders and as GGUF files, for the export tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.config import ModelConfig, expected_shapes
from edgespec_export.rope import RopeConfig

N_VOCAB, EOS, BOS = 264, 257, 256
SPECIALS = ["<s>", "<|im_end|>", "<pad0>", "<pad1>", "<pad2>", "<pad3>", "<pad4>"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"},
    "llama-tied": {"architecture": "llama", "is_tied": True},
    "llama-biased": {"architecture": "llama", "has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True},
    "mistral-window": {"architecture": "mistral", "windows": (8, 8)},
    "qwen2": {"architecture": "qwen2", "has_qkv_bias": True, "is_tied": True},
    "qwen3": {"architecture": "qwen3", "has_qk_norm": True, "head_dim": 32},
}


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """Hidden 64, two layers, four heads on two key-value heads."""
    settings: dict[str, Any] = {
        "name": family,
        "n_vocab": N_VOCAB,
        "n_ctx": 128,
        "n_layers": 2,
        "n_embd": 64,
        "n_ff": 96,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-5,
        "rope": RopeConfig(theta=10_000.0),
        "windows": (None, None),
        "eos_ids": (EOS,),
    }
    return ModelConfig(**{**settings, **FAMILIES[family], **changes})


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by the exporter's names, scaled so that logits stay around 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
        weights[name] = (values + name.endswith("norm.weight")).astype(np.float32)
    return weights


def byte_tokens() -> list[str]:
    """The 256 characters of byte-level BPE, two merged pairs' worth of vocabulary, specials."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = chr(256 + index)
    return [table[byte] for byte in range(256)] + SPECIALS + ["th"]


def tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(byte_tokens())}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    text: str = tokenizer.to_str()
    return text


def hf_settings(config: ModelConfig) -> dict[str, Any]:
    """config.json of the model."""
    window = config.sliding_window
    return {
        "model_type": config.architecture,
        "vocab_size": config.n_vocab,
        "max_position_embeddings": config.n_ctx,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_ff,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_out_bias,
        "mlp_bias": config.has_mlp_bias,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "eos_token_id": EOS,
    }


def write_hf(
    folder: Path, config: ModelConfig, weights: dict[str, np.ndarray] | None = None, shards: int = 1, **settings: Any
) -> Path:
    """A model folder; `settings` replace entries of config.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config) if weights is None else weights
    named = {name if name.startswith("lm_head") else f"model.{name}": value for name, value in weights.items()}
    (folder / "config.json").write_text(json.dumps({**hf_settings(config), **settings}), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    places = {}
    for shard in range(shards):
        names = sorted(named)[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: named[name] for name in names}, folder / file)
        places.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return folder


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, index, part = stem.split(".", 2)
        return f"blk.{index}.{_GGUF_PARTS[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _llama_order(value: np.ndarray, n_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores rotated rows of the llama architecture (its `permute`)."""
    halves = value.reshape(n_heads, 2, value.shape[0] // n_heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, np.ndarray] | None = None,
    quantization: str = "F32",
    extra: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter would write it; `extra` adds unsigned or string metadata."""
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config) if weights is None else weights
    arch = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(config.name)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer)
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, value in weights.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = _llama_order(value, config.n_heads if ".q_proj." in name else config.n_kv_heads)
        kind = gguf.GGMLQuantizationType[quantization if value.ndim == 2 else "F32"]
        data = value if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(value, kind)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(BOS)
    writer.add_add_bos_token(False)
