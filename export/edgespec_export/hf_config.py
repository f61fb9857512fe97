"""A `ModelConfig` from a Hugging Face config.json (the layouts of transformers 4 and 5).

Owns the key names and each architecture's defaults. A key that changes the numbers and is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import ExportError
from edgespec_export.config import ARCHITECTURES, WAY_OUT, ModelConfig
from edgespec_export.rope import ROPE_KINDS, RopeConfig

__all__ = ["hf_config"]

# key -> the values with which it changes nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None, []),
}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
              "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "finetuned",
              "partial_rotary_factor", "max_position_embeddings"}  # fmt: skip


def hf_config(config: Mapping[str, Any], eos_ids: tuple[int, ...], name: str, *, has_lm_head: bool) -> ModelConfig:
    """config: parsed config.json. has_lm_head: whether the weights hold a head of their own."""
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ExportError(f"model_type '{architecture}' is not supported ({', '.join(ARCHITECTURES)} are). {WAY_OUT}")
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            raise ExportError(f"{key} = {str(config[key])[:80]} in config.json is not supported. {WAY_OUT}")
    n_heads, n_embd = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    n_layers = _count(config, "num_hidden_layers")
    has_bias = bool(config.get("attention_bias"))
    is_tied = bool(config.get("tie_word_embeddings", False))
    if not is_tied and not has_lm_head and "tie_word_embeddings" not in config:
        is_tied = True
    return ModelConfig(
        name=name,
        architecture=architecture,
        n_vocab=_count(config, "vocab_size"),
        n_ctx=_count(config, "max_position_embeddings"),
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=_count(config, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or (128 if architecture == "qwen3" else n_embd // n_heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        windows=_windows(config, n_layers),
        is_tied=is_tied,
        has_qkv_bias=has_bias or architecture == "qwen2",
        has_out_bias=has_bias and architecture != "qwen2",
        has_mlp_bias=bool(config.get("mlp_bias")),
        has_qk_norm=architecture == "qwen3",
        eos_ids=eos_ids,
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ExportError(f"{key} in config.json is {value!r} and must be a positive whole number.")
    return value


def _windows(config: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    """Mistral's window is on wherever it is set, Qwen's only with use_sliding_window and from max_window_layers on."""
    window = config.get("sliding_window")
    if config["model_type"].startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if not window:
        return (None,) * n_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != n_layers:
            raise ExportError(f"layer_types in config.json is not understood ({sorted(unknown)}, {len(kinds)} layers).")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 0) if config["model_type"].startswith("qwen") else 0
    return tuple(window if index >= first else None for index in range(n_layers))


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = "none" if kind == "default" else kind
    unknown = set(settings) - _ROPE_KEYS
    if kind not in ROPE_KINDS or unknown:
        what = f"rope scaling '{kind}'" if kind not in ROPE_KINDS else f"rope setting {', '.join(sorted(unknown))}"
        raise ExportError(f"{what} is not supported ({', '.join(ROPE_KINDS)} are). {WAY_OUT}")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ExportError(f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported. {WAY_OUT}")
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10_000.0
    original = settings.get("original_max_position_embeddings") or config["max_position_embeddings"]
    attention = settings.get("attention_factor")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(settings.get("factor", 1.0)),
        original_ctx=int(original),
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        attention_factor=None if attention is None else float(attention),
        truncate=bool(settings.get("truncate", True)),
    )
