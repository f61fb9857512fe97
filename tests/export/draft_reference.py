"""Trained drafts in plain numpy, written from their formulas and not from their graphs, and random ones on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.config import ModelConfig
from edgespec_export.reference import ReferenceModel, ReferenceState
from edgespec_export.rope import RopeConfig

Tensors = dict[str, np.ndarray]
EPS = 1e-5
TAPS = ("layer.0", "final")


def settings(kind: str, /, **changes: Any) -> dict[str, Any]:
    """config.json of a draft for the tiny target: hidden 64, four heads on two."""
    values = {
        "format": "edgespec-draft",
        "version": 1,
        "kind": kind,
        "target": "tiny",
        "n_embd": 64,
        "n_ff": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "norm_eps": EPS,
        "n_layers": 2 if kind in ("tinydraft", "eagle") else 1,
        "taps": list(TAPS) if kind in ("eagle", "medusa") else [],
        "tokenizer_hash": None,
        "acceptance": {"mean_acceptance_length": 1.0},
        "training": {"steps": 0},
        **({"n_medusa": 3} if kind == "medusa" else {}),
        **({"exit_layer": 1} if kind == "exit" else {}),
    }
    return {key: value for key, value in {**values, **changes}.items() if value != "remove"}


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    d, ff = 64, 48
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (64, d),
        "self_attn.k_proj": (32, d),
        "self_attn.v_proj": (32, d),
        "self_attn.o_proj": (d, 64),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    layers = {f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    own: dict[str, dict[str, tuple[int, ...]]] = {
        "tinydraft": layers,
        "eagle": {
            **layers,
            **{"fuse_norm.0": (d,), "fuse_norm.1": (d,), "fuse": (d, 2 * d), "fc": (d, 2 * d)},
            **{"embed_norm": (d,), "feature_norm": (d,)},
        },
        "medusa": {
            **{"tap_norm.0": (d,), "tap_norm.1": (d,), "embed_norm": (d,), "in": (d, 3 * d)},
            **{f"heads.{index}": (d, d) for index in range(3)},
        },
        "exit": {"in_norm": (d,), "skip": (d, d), "gate": (ff, d), "up": (ff, d), "down": (d, ff)},
    }
    return {f"{name}.weight": shape for name, shape in {**own[kind], "norm": (d,)}.items()}


def tensors(kind: str, seed: int = 5) -> Tensors:
    rng = np.random.default_rng(seed)
    values = {
        name: rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        for name, shape in shapes(kind).items()
    }
    return {name: value.astype(np.float16).astype(np.float32) for name, value in values.items()}


def write_zoo(
    folder: Path, kind: str, weights: Tensors, vocabulary: np.ndarray, /, *, int8: bool = False, **changes: Any
) -> Tensors:
    """The zoo folder; returns what its tensors are worth, which with int8 differs from `weights`."""
    from safetensors.numpy import save_file

    stored: Tensors = {"vocabulary": vocabulary.astype(np.int32)}
    worth = {}
    for name, value in weights.items():
        if int8 and value.ndim == 2:
            scale = (np.abs(value).max(axis=1) / 127).astype(np.float16)
            codes = np.clip(np.rint(value / scale[:, None].astype(np.float32)), -127, 127).astype(np.int8)
            stored[f"{name}.int8"], stored[f"{name}.scale"] = codes, scale
            worth[name] = codes * scale[:, None].astype(np.float32)
        else:
            stored[name] = value.astype(np.float16 if value.ndim == 2 else np.float32)
            worth[name] = stored[name].astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "weights.safetensors")
    (folder / "config.json").write_text(json.dumps(settings(kind, **changes)))
    return worth


class DraftReference:
    """embedding, head: [n_vocab, n_embd] of the target. Logits are over the vocabulary and then the extra ids."""

    def __init__(self, weights: Tensors, embedding: np.ndarray, head: np.ndarray, ids: np.ndarray) -> None:
        self.weights, self.embedding, self.head = weights, embedding, head[ids]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.weights[f"{name}.weight"]

    def times(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self.norm("norm", x) @ self.head.T

    def tinydraft(self, tokens: np.ndarray) -> np.ndarray:
        return self.logits(self._layers(self.embedding[tokens], 2))

    def fuse(self, taps: list[np.ndarray]) -> np.ndarray:
        return self.times("fuse", np.concatenate([self.norm(f"fuse_norm.{i}", t) for i, t in enumerate(taps)], -1))

    def eagle(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(logits, own) of rows 0, 1, ..."""
        embedded = self.norm("embed_norm", self.embedding[tokens])
        x = self.times("fc", np.concatenate([embedded, self.norm("feature_norm", features)], -1))
        own = self._layers(x, 2)
        return self.logits(own), own

    def medusa(self, token: int, taps: list[np.ndarray]) -> np.ndarray:
        """[n_heads, ...]; taps: [n_embd] each."""
        normed = [self.norm(f"tap_norm.{index}", tap) for index, tap in enumerate(taps)]
        joined = np.concatenate([*normed, self.norm("embed_norm", self.embedding[token])])
        base = normed[-1] + silu(self.times("in", joined))
        return self.logits(np.stack([base + silu(self.times(f"heads.{index}", base)) for index in range(3)]))

    def exit(self, stream: np.ndarray) -> np.ndarray:
        x = self.norm("in_norm", stream)
        y = self.times("skip", x) + self.times("down", silu(self.times("gate", x)) * self.times("up", x))
        return self.logits(y)

    def _layers(self, x: np.ndarray, count: int) -> np.ndarray:
        config = ModelConfig("reference", "llama", 1, 64, count, 64, 48, 4, 2, 16, EPS, RopeConfig(10_000.0),
                             (None,) * count)  # fmt: skip
        model, state = ReferenceModel(config, self.weights.__getitem__), ReferenceState(config)
        for index in range(count):
            x = model.layer(index, x, state)
        return x


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
