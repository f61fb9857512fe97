"""What kind of model the weights are: one `ModelConfig` from GGUF metadata or a Hugging Face config.json.

Owns which architectures and settings are understood, and the shapes that such a model must have. Whatever it does not
know is refused by name, since a setting that is ignored gives a model that is quietly wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgespec.errors import ExportError, ExportRefusedError
from edgespec_export.rope import RopeConfig

__all__ = ["ARCHITECTURES", "ModelConfig", "check_shapes", "expected_shapes", "kept_layers"]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
WAY_OUT = "Export its Hugging Face folder with `edgespec export --via optimum` instead."


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Counts are of tokens, layers, heads and channels.

    windows: sliding window of each layer in tokens, None where a layer sees everything.
    """

    name: str
    architecture: str
    n_vocab: int
    n_ctx: int
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    windows: tuple[int | None, ...] = ()
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = ("n_vocab", "n_ctx", "n_layers", "n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim")
        for name in counts:
            if getattr(self, name) < 1:
                raise ExportError(f"{name} of {self.name} is {getattr(self, name)} and must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ExportError(f"{self.name}: {self.n_heads} heads cannot share {self.n_kv_heads} key-value heads.")
        if self.head_dim % 16:
            raise ExportError(
                f"{self.name}: heads of {self.head_dim} channels do not fit the attention operator, which wants"
                f" multiples of 16. {WAY_OUT}"
            )

    @property
    def sliding_window(self) -> int | None:
        """The narrowest window of any layer."""
        return min((window for window in self.windows if window is not None), default=None)


def kept_layers(config: ModelConfig, keep: tuple[int, ...]) -> ModelConfig:
    """The config of the model that has only the layers `keep`. Raises ExportError for an impossible list."""
    if not keep or any(not 0 <= index < config.n_layers for index in keep) or list(keep) != sorted(set(keep)):
        raise ExportRefusedError(
            f"keep_layers {list(keep)} must be ascending, without repeats and within 0 to {config.n_layers - 1}."
        )
    return replace(config, n_layers=len(keep), windows=tuple(config.windows[index] for index in keep))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model has, by its name here (Hugging Face's, without `model.`)."""
    d, ff = config.n_embd, config.n_ff
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q_rows, d),
        "self_attn.k_proj.weight": (kv_rows, d),
        "self_attn.v_proj.weight": (kv_rows, d),
        "self_attn.o_proj.weight": (d, q_rows),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }
    biased = [("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows)]
    biased = biased if config.has_qkv_bias else []
    biased += [("self_attn.o_proj", d)] if config.has_out_bias else []
    biased += [("mlp.gate_proj", ff), ("mlp.up_proj", ff), ("mlp.down_proj", d)] if config.has_mlp_bias else []
    layer.update({f"{name}.bias": (rows,) for name, rows in biased})
    if config.has_qk_norm:
        layer.update({f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"})
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.n_vocab, d), "norm.weight": (d,)}
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.n_vocab, d)
    for index in range(config.n_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ExportError that lists what differs between the config's tensors and the ones in the weights."""
    expected = expected_shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of this model" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])} and the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ExportError(
            f"the weights do not fit the config of {config.name} ({config.architecture}, {config.n_layers} layers):"
            f" {shown}. Use the config and the weights of one and the same model."
        )
