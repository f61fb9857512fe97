"""A trained draft as it is kept: config.json and weights.safetensors of a zoo folder, which need not be trusted.

Owns which tensors each kind has, their shapes, int8 rows and their scales; the config is read by `edgespec.zoo_config`.
It knows nothing of targets and graphs; `drafts.py` puts them together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportRefusedError
from edgespec.zoo_config import WEIGHTS, ZooConfig, read_config
from edgespec_export.safetensors import SafetensorsFile

__all__ = ["ZooDraft"]

FloatArray = NDArray[np.float32]


class ZooDraft:
    """An opened zoo folder: `config`, `vocabulary` (ascending int64 ids [V]) and `tensor(name)` in float32."""

    def __init__(self, folder: Path, config: ZooConfig, file: SafetensorsFile) -> None:
        self.folder, self.config, self._file = folder, config, file
        self.vocabulary = self._read_vocabulary()
        self._check_shapes()

    @classmethod
    def open(cls, folder: str | Path) -> ZooDraft:
        """Read and check the folder. Raises ConfigError or FormatError that names what is wrong."""
        folder = Path(folder)
        return cls(folder, read_config(folder), SafetensorsFile.open(folder / WEIGHTS))

    @property
    def weights_path(self) -> Path:
        return self._file.path

    def tensor(self, name: str) -> FloatArray:
        """The tensor `name`; int8 rows are multiplied by their scales. ExportRefusedError unless all is finite."""
        if name in self._file.tensors:
            value = self._file.float32(name)
        else:
            scale = self._file.float32(f"{name}.scale")
            with np.errstate(invalid="ignore"):  # an infinite scale is refused below
                value = self._file.integers(f"{name}.int8").astype(np.float32) * scale[:, None]
        if not np.isfinite(value).all():
            raise ExportRefusedError(
                f"tensor '{name}' of {self.weights_path} holds NaN or infinite values: it is damaged."
            )
        return value

    def _read_vocabulary(self) -> NDArray[np.int64]:
        path, entry = self.weights_path, self._file.tensors.get("vocabulary")
        if entry is None or len(entry.shape) != 1:
            raise ExportRefusedError(
                f"{path} has no 'vocabulary' of one dimension: which tokens it drafts is not known."
            )
        ids = self._file.integers("vocabulary")
        if ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ExportRefusedError(f"the vocabulary of {path} must hold token ids in ascending order, each once.")
        return ids

    def _check_shapes(self) -> None:
        expected, found = _shapes(self.config), {}
        for name, entry in self._file.tensors.items():
            if name == "vocabulary":
                continue
            if name.endswith(".scale") and f"{name.removesuffix('.scale')}.int8" in self._file.tensors:
                rows = self._file.tensors[f"{name.removesuffix('.scale')}.int8"].shape[:1]
                if entry.shape != rows:
                    raise ExportRefusedError(f"{name} is {list(entry.shape)} and its matrix has {list(rows)} rows.")
            else:
                found[name.removesuffix(".int8")] = entry.shape
        problems = [f"{name} is missing" for name in expected if name not in found]
        problems += [f"{name} is no part of it" for name in found if name not in expected]
        problems += [
            f"{name} is {list(found[name])} and the config says {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        problems += [
            f"{name} has no scales" for name in found
            if f"{name}.int8" in self._file.tensors and f"{name}.scale" not in self._file.tensors
        ]  # fmt: skip
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ExportRefusedError(
                f"{self.weights_path} does not fit its config.json ({self.config.kind}): {shown}. Train the draft"
                " again, or put both files of one draft together."
            )


def _shapes(config: ZooConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the kind but the vocabulary."""
    d, ff, taps = config.n_embd, config.n_ff, range(len(config.taps))
    if config.kind == "medusa":
        shapes: dict[str, tuple[int, ...]] = {f"tap_norm.{index}.weight": (d,) for index in taps}
        shapes |= {"embed_norm.weight": (d,), "in.weight": (d, (len(taps) + 1) * d), "norm.weight": (d,)}
        return shapes | {f"heads.{index}.weight": (d, d) for index in range(config.n_medusa)}
    if config.kind == "exit":
        shapes = {"in_norm.weight": (d,), "norm.weight": (d,), "skip.weight": (d, d)}
        return shapes | {"gate.weight": (ff, d), "up.weight": (ff, d), "down.weight": (d, ff)}
    shapes = {"norm.weight": (d,)}
    if config.kind == "eagle":
        shapes |= {f"fuse_norm.{index}.weight": (d,) for index in taps}
        shapes |= {"fuse.weight": (d, len(taps) * d), "fc.weight": (d, 2 * d)}
        shapes |= {"embed_norm.weight": (d,), "feature_norm.weight": (d,)}
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for index in range(config.n_layers):
        layer = f"layers.{index}."
        shapes |= {f"{layer}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.q_proj.weight": (q_rows, d), f"{layer}self_attn.o_proj.weight": (d, q_rows)}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (kv_rows, d) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (ff, d) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (d, ff)
    return shapes
