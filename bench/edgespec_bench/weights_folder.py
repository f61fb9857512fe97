"""A model's float weights as a Hugging Face folder, for engines that build their own files from one.

Plain Llama architectures only; writes float32 safetensors, config.json and the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["llama_config", "write_weights_folder"]


def write_weights_folder(source: Path, folder: Path) -> None:
    """Dequantize `source` (a GGUF file or a folder) into `folder`. Raises ConfigError for other architectures."""
    from edgespec_export.sources import open_source
    from safetensors.numpy import save_file

    from edgespec.text import Tokenizer

    weights = open_source(source)
    config = llama_config(weights.config)
    folder.mkdir(parents=True)
    tensors = {_full_name(name): weights.tensor(name).copy() for name in weights.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(weights.tokenizer_json(Tokenizer.load(source)), encoding="utf-8")
    template = weights.chat_template()
    extra = {"chat_template": template} if template else {}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **extra})


def llama_config(config: Any) -> dict[str, Any]:
    """config.json of a plain Llama model."""
    if config.architecture != "llama" or config.has_qkv_bias or config.has_qk_norm:
        raise ConfigError(f"{config.name} is of architecture {config.architecture!r}: only plain Llama is written here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.n_vocab,
        "tie_word_embeddings": config.is_tied,
        "max_position_embeddings": config.n_ctx,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_ids),
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _full_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
