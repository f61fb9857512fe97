"""A zoo beside the tiny known pair: random drafts of every kind in the format that training writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from edgespec_models.zoo_format import write_zoo
from pair_world import N_EMBD, N_HEADS

N_VOCAB_DRAFT, N_FF = 120, 48
TAPS = ["layer.1", "final"]
EXIT_LAYER = 1
TARGET_EXPORT = f"taps = {TAPS!r}\nexit_layer = {EXIT_LAYER}\ntree = true\n"
KINDS = {"tinydraft": "tinydraft", "eagle": "eagle", "medusa": "medusa", "early-exit": "exit"}

_D = N_EMBD
_LAYER = {
    "input_layernorm": (_D,),
    **{f"self_attn.{name}_proj": (_D, _D) for name in "qkvo"},
    "post_attention_layernorm": (_D,),
    "mlp.gate_proj": (N_FF, _D),
    "mlp.up_proj": (N_FF, _D),
    "mlp.down_proj": (_D, N_FF),
}
_LAYER_0 = {f"layers.0.{name}": shape for name, shape in _LAYER.items()}
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "tinydraft": _LAYER_0,
    "eagle": {
        **_LAYER_0,
        **{"fuse_norm.0": (_D,), "fuse_norm.1": (_D,), "fuse": (_D, 2 * _D), "fc": (_D, 2 * _D)},
        **{"embed_norm": (_D,), "feature_norm": (_D,)},
    },
    "medusa": {
        **{"tap_norm.0": (_D,), "tap_norm.1": (_D,), "embed_norm": (_D,), "in": (_D, 3 * _D)},
        **{f"heads.{index}": (_D, _D) for index in range(3)},
    },
    "exit": {"in_norm": (_D,), "skip": (_D, _D), "gate": (N_FF, _D), "up": (N_FF, _D), "down": (_D, N_FF)},
}


def write_draft(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """A random draft of the zoo kind `kind` for the pair `tiny`; `changes` replace entries of its config.json."""
    rng = np.random.default_rng([seed, len(kind)])
    tensors = {
        f"{name}.weight": (
            np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[-1] ** -0.5
        ).astype(np.float32)
        for name, shape in {**_SHAPES[kind], "norm": (_D,)}.items()
    }
    config = {
        "kind": kind,
        "target": "tiny",
        "n_embd": N_EMBD,
        "n_ff": N_FF,
        "n_heads": N_HEADS,
        "n_kv_heads": N_HEADS,
        "head_dim": N_EMBD // N_HEADS,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "n_layers": 1,
        "taps": TAPS if kind in ("eagle", "medusa") else [],
        "exit_layer": EXIT_LAYER if kind == "exit" else None,
        "n_medusa": 3,
        "tokenizer_hash": None,
        "acceptance": {"mean_acceptance_length": 2.25, "k": 4, "setting": "T = 0"},
        "training": {"steps": 1},
    }
    write_zoo(folder, {**config, **changes}, tensors, np.arange(N_VOCAB_DRAFT, dtype=np.int32))
    return folder


def write_all(root: Path) -> Path:
    """A zoo with all four kinds for `tiny`; returns `root`."""
    for kind in KINDS.values():
        write_draft(root / "tiny" / kind, kind)
    return root
