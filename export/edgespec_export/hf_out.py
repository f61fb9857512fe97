"""A model, or a TinyDraft with its target's tables, as a plain Hugging Face folder, which every converter reads.

Owns config.json as transformers wants it, and putting a draft's layers onto its target's embedding, head and tokenizer.
What config.json cannot say is refused. Only weights and texts are needed, no bundle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, ExportRefusedError, IncompatibleError, MissingDependencyError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.config import ModelConfig, check_shapes, expected_shapes
from edgespec_export.exporter import KeptWeights
from edgespec_export.rope import RopeConfig
from edgespec_export.sources import WeightSource, open_source
from edgespec_export.writer import new_folder
from edgespec_export.zoo import ZooDraft

__all__ = ["write_hf_folder", "write_hf_model"]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# architecture -> (bias of query, key and value; of the output; of the three of the MLP) that its config can say
_BIASES: dict[str, tuple[tuple[bool, bool, bool], ...]] = {
    "llama": ((False, False, False), (True, True, False), (False, False, True), (True, True, True)),
    "mistral": ((False, False, False),),
    "qwen2": ((True, False, False),),
    "qwen3": ((False, False, False), (True, True, False)),
}

_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # beside the factor
    "linear": (),
    "dynamic": ("original_ctx",),
    "llama3": ("original_ctx", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_ctx", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def write_hf_model(source: str | Path, out: str | Path) -> Path:
    """Make the folder `out` of the whole model in `source` (a GGUF or a Hugging Face folder), in float32.

    Raises ConfigError and ExportError with the way out; ExportRefusedError for what a config.json cannot say.
    """
    opened = open_source(source)
    check_shapes(opened.config, opened.shapes)
    return _write(Path(out), opened.config, KeptWeights(opened, None), opened, Tokenizer.load(opened.path))


def write_hf_folder(zoo_folder: str | Path, target_source: str | Path, out: str | Path) -> Path:
    """Make the folder `out` of the tinydraft in `zoo_folder` and the target's weights (HF folder or GGUF), in float32.

    Raises ConfigError for another kind of draft, IncompatibleError for another target's, ExportError where `out` is
    taken.
    """
    draft, target = ZooDraft.open(zoo_folder), open_source(target_source)
    config, tokenizer = _config(draft, target), Tokenizer.load(target.path)
    if draft.config.tokenizer_hash not in (None, tokenizer.hash):
        raise IncompatibleError(
            f"the draft in {draft.folder} was trained with the tokenizer {str(draft.config.tokenizer_hash)[:16]} and"
            f" {target.path} has {tokenizer.hash[:16]}: use a draft of this target."
        )
    shared = ("embed_tokens.weight", "lm_head.weight")
    return _write(Path(out), config, lambda name: (target if name in shared else draft).tensor(name), target, tokenizer)


def _write(
    out: Path,
    config: ModelConfig,
    tensor: Callable[[str], NDArray[np.float32]],
    texts: WeightSource,
    tokenizer: Tokenizer,
) -> Path:
    """All tensors are in memory at once, as safetensors' writer wants them."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise MissingDependencyError("writing safetensors needs `pip install 'edgespec[export]'`.") from error
    settings = _settings(config, tokenizer)
    with new_folder(out, force=False) as folder:
        tensors = {}
        for name in expected_shapes(config):
            tensors[name if name == "lm_head.weight" else f"model.{name}"] = np.ascontiguousarray(tensor(name))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _write_json(folder / "config.json", settings)
        _write_json(folder / "generation_config.json", {key: settings[key] for key in ("eos_token_id", "bos_token_id")})
        (folder / "tokenizer.json").write_bytes(texts.tokenizer_json(tokenizer).encode())
        _write_json(folder / "tokenizer_config.json", _tokenizer_settings(texts, tokenizer, config))
    return out


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
    family = "mistral" if config.architecture == "llama" and config.sliding_window else config.architecture
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
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
        **_biases(config, family),
        **_windows(config, family),
        "tie_word_embeddings": config.is_tied,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(dict.fromkeys((*tokenizer.eos_ids, *config.eos_ids))),
        "torch_dtype": "float32",
    }


def _biases(config: ModelConfig, family: str) -> dict[str, Any]:
    """Refuses biases and norms that the family's class in transformers would leave out."""
    biases = config.has_qkv_bias, config.has_out_bias, config.has_mlp_bias
    if biases not in _BIASES[family] or config.has_qk_norm != (family == "qwen3"):
        kinds = zip(("query, key and value", "attention output", "MLP"), biases, strict=True)
        has = [kind for kind, is_there in kinds if is_there] or ["no"]
        raise ExportRefusedError(
            f"{config.name} has {' and '.join(has)} biases{' and query and key norms' if config.has_qk_norm else ''},"
            f" which config.json of a {family} model cannot say: keep the format that it is in."
        )
    if family in ("mistral", "qwen2"):
        return {}
    return {"attention_bias": config.has_out_bias, **({"mlp_bias": config.has_mlp_bias} if family == "llama" else {})}


def _windows(config: ModelConfig, family: str) -> dict[str, Any]:
    """Mistral's class has one window for all layers, Qwen's a list of which layers have it."""
    window = config.sliding_window
    if family == "llama":
        return {}
    if family == "mistral":
        if len(set(config.windows)) > 1:
            raise ExportRefusedError(f"{config.name} has layers of different windows, which a Mistral cannot have.")
        return {"sliding_window": window}
    if {item for item in config.windows if item is not None} not in (set(), {window}):
        raise ExportRefusedError(f"{config.name} has sliding windows of different lengths: keep the format it is in.")
    kinds = ["full_attention" if item is None else "sliding_attention" for item in config.windows]
    return {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": kinds}


def _rope_scaling(rope: RopeConfig) -> dict[str, Any]:
    """The entry of that name, where there is one; every number that transformers wants for the kind."""
    if rope.divisors is not None:
        raise ExportRefusedError(
            "the rotary frequencies are divided one by one, as a GGUF says, and a config.json cannot say so: use the"
            " model's Hugging Face folder instead (and train drafts on that)."
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
