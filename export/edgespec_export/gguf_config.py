"""A `ModelConfig` from GGUF metadata.

Owns the metadata key names of llama.cpp. Facts that GGUF keeps in its tensors only (biases, tied embeddings, Llama 3
rope factors) come from their presence and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import ExportError
from edgespec_export.config import ARCHITECTURES, WAY_OUT, ModelConfig
from edgespec_export.rope import RopeConfig
from edgespec_export.texts import END_OF_TURN

__all__ = ["gguf_config"]

# `<arch>.*` keys that change the numbers and that the graph has no place for
_REFUSED = ("expert_count", "attention.causal", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
            "residual_scale", "embedding_scale", "attention.scale", "attn_logit_softcapping",
            "final_logit_softcapping", "rope.scaling.yarn_log_multiplier")  # fmt: skip


def gguf_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> ModelConfig:
    """shapes: tensor shapes by their names here. Raises ExportError for what is missing or not understood."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ExportError(f"architecture '{architecture}' is not supported ({', '.join(ARCHITECTURES)} are). {WAY_OUT}")
    reader = _Keys(metadata, architecture)
    for key in _REFUSED:
        if reader.get(key) not in (None, 0, 0.0, True):
            raise ExportError(f"{architecture}.{key} = {reader.get(key)} is not supported. {WAY_OUT}")
    n_heads, n_embd = reader.count("attention.head_count"), reader.count("embedding_length")
    n_layers = reader.count("block_count")
    head_dim = reader.get("attention.key_length") or n_embd // n_heads
    if reader.get("attention.value_length") not in (None, head_dim):
        raise ExportError(f"keys of {head_dim} and values of {reader.get('attention.value_length')} channels differ.")
    if reader.get("rope.dimension_count") not in (None, head_dim):
        rotated = reader.get("rope.dimension_count")
        raise ExportError(f"only {rotated} of {head_dim} channels are rotated, which is not supported. {WAY_OUT}")
    window = reader.get("attention.sliding_window") or None
    first = "layers.0."
    return ModelConfig(
        name=str(metadata.get("general.name") or name),
        architecture=architecture,
        n_vocab=_vocabulary(shapes, metadata),
        n_ctx=reader.count("context_length"),
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=reader.count("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=reader.get("attention.head_count_kv") or n_heads,
        head_dim=head_dim,
        norm_eps=float(reader.need("attention.layer_norm_rms_epsilon")),
        rope=_rope(reader),
        windows=(window,) * n_layers,
        is_tied="lm_head.weight" not in shapes,
        has_qkv_bias=first + "self_attn.q_proj.bias" in shapes,
        has_out_bias=first + "self_attn.o_proj.bias" in shapes,
        has_mlp_bias=first + "mlp.down_proj.bias" in shapes,
        has_qk_norm=first + "self_attn.q_norm.weight" in shapes,
        eos_ids=_eos_ids(metadata),
    )


class _Keys:
    """The `<arch>.` keys, with errors that name them."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.architecture = metadata, architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ExportError(f"the GGUF has no '{self.architecture}.{key}': it is incomplete, convert it again.")
        return value

    def count(self, key: str) -> int:
        value = self.need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ExportError(f"'{self.architecture}.{key}' is {str(value)[:60]} and must be one positive number.")
        return value


def _vocabulary(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, Any]) -> int:
    if "embed_tokens.weight" in shapes:
        return shapes["embed_tokens.weight"][0]
    return len(metadata.get("tokenizer.ggml.tokens", ()))


def _rope(reader: _Keys) -> RopeConfig:
    kind = reader.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise ExportError(f"rope scaling '{kind}' is not supported in a GGUF (none, linear, yarn are). {WAY_OUT}")
    factor = float(reader.get("rope.scaling.factor") or 1.0)
    original = int(reader.get("rope.scaling.original_context_length") or reader.get("context_length") or 0)
    mscale = reader.get("rope.scaling.attn_factor")
    rope = RopeConfig(theta=float(reader.get("rope.freq_base") or 10_000.0), kind=kind, factor=factor)
    if kind != "yarn":
        return rope
    return RopeConfig(
        rope.theta,
        kind,
        factor,
        original,
        beta_fast=float(reader.get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(reader.get("rope.scaling.yarn_beta_slow") or 1.0),
        attention_factor=None if mscale is None else float(mscale),
    )


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS, end of turn and end of message, and end-of-turn tokens that no key names. Never the beginning of a turn."""
    keys = ("eos", "eot", "eom")
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    found += metadata.get("tokenizer.ggml.eos_token_ids", [])
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if END_OF_TURN & set(tokens):
        found += [index for index, token in enumerate(tokens) if token in END_OF_TURN]
    return tuple(dict.fromkeys(int(item) for item in found if item is not None))
