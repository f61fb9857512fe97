"""A TinyDraft as a plain Hugging Face folder of a Llama model, which transformers and every converter read.

Owns putting the draft's layers onto its target's embedding, head and tokenizer. Only the weights and texts of the two
are needed, no bundle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ConfigError, ExportRefusedError, IncompatibleError, MissingDependencyError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.config import ModelConfig, expected_shapes
from edgespec_export.rope import RopeConfig
from edgespec_export.sources import WeightSource, open_source
from edgespec_export.writer import new_folder
from edgespec_export.zoo import ZooDraft

__all__ = ["write_hf_folder"]

_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # beside the factor
    "linear": (),
    "dynamic": ("original_ctx",),
    "llama3": ("original_ctx", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_ctx", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def write_hf_folder(zoo_folder: str | Path, target_source: str | Path, out: str | Path) -> Path:
    """Make the folder `out` of the tinydraft in `zoo_folder` and the target's weights (HF folder or GGUF), in float32.

    Raises ConfigError for another kind of draft, IncompatibleError for another target's, ExportError where `out` is
    taken.
    """
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise MissingDependencyError("writing safetensors needs `pip install 'edgespec[export]'`.") from error
    draft, target = ZooDraft.open(zoo_folder), open_source(target_source)
    config, tokenizer = _config(draft, target), Tokenizer.load(target.path)
    if draft.config.tokenizer_hash not in (None, tokenizer.hash):
        raise IncompatibleError(
            f"the draft in {draft.folder} was trained with the tokenizer {str(draft.config.tokenizer_hash)[:16]} and"
            f" {target.path} has {tokenizer.hash[:16]}: use a draft of this target."
        )
    shared = ("embed_tokens.weight", "lm_head.weight")
    with new_folder(Path(out), force=False) as folder:
        tensors = {}
        for name in expected_shapes(config):
            value = target.tensor(name) if name in shared else draft.tensor(name)
            tensors[name if name == "lm_head.weight" else f"model.{name}"] = np.ascontiguousarray(value)
        (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        _write_json(folder / "config.json", _settings(config, tokenizer))
        ends = {"eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
        _write_json(folder / "generation_config.json", ends)
        (folder / "tokenizer.json").write_bytes(target.tokenizer_json(tokenizer).encode())
        _write_json(folder / "tokenizer_config.json", _tokenizer_settings(target, tokenizer, config))
    return Path(out)


def _config(draft: ZooDraft, target: WeightSource) -> ModelConfig:
    zoo, model = draft.config, target.config
    if zoo.kind != "tinydraft":
        raise ConfigError(f"{draft.folder} holds a draft of kind {zoo.kind}: only a tinydraft is a model of its own.")
    if zoo.n_embd != model.n_embd or draft.vocabulary[-1] >= model.n_vocab:
        raise IncompatibleError(
            f"the draft in {draft.folder} is for a model of {zoo.n_embd} channels and at least"
            f" {draft.vocabulary[-1] + 1} tokens, and {model.name} has {model.n_embd} and {model.n_vocab}: use a draft"
            " of this target."
        )
    return ModelConfig(
        name=f"{model.name}-tinydraft",
        architecture="llama",
        n_vocab=model.n_vocab,
        n_ctx=model.n_ctx,
        n_layers=zoo.n_layers,
        n_embd=zoo.n_embd,
        n_ff=zoo.n_ff,
        n_heads=zoo.n_heads,
        n_kv_heads=zoo.n_kv_heads,
        head_dim=zoo.head_dim,
        norm_eps=zoo.norm_eps,
        rope=RopeConfig(theta=zoo.rope_theta, **zoo.rope_scaling or {}),
        windows=(None,) * zoo.n_layers,
        is_tied=model.is_tied,
    )


def _settings(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        **_rope_scaling(config.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.is_tied,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "torch_dtype": "float32",
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any]:
    """The entry of that name, where there is one; every number that transformers wants for the kind."""
    if rope.divisors is not None:
        raise ExportRefusedError(
            "the rotary frequencies of this draft are divided one by one, as its target's GGUF says, and config.json of"
            " a Llama model cannot say so: train the draft on the target's Hugging Face folder."
        )
    if rope.kind == "none":
        return {}
    names = ("factor", *_ROPE_NUMBERS[rope.kind])
    values = {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    if "original_ctx" in values:
        values["original_max_position_embeddings"] = values.pop("original_ctx")
    return {"rope_scaling": {"rope_type": rope.kind, **values}}


def _tokenizer_settings(target: WeightSource, tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.n_ctx,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
    }
    if tokenizer.bos_id is not None:
        settings["bos_token"] = tokenizer.token_string(tokenizer.bos_id)
    if tokenizer.eos_ids:
        settings["eos_token"] = tokenizer.token_string(tokenizer.eos_ids[0])
    template = target.chat_template()
    if template is not None:
        settings["chat_template"] = template
    return settings


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
