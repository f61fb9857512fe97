"""A trained draft on disk: config.json and weights.safetensors, matrices in int8 with a scale a row or in float16.

Owns the zoo's format on the writing side; `edgespec_export.drafts` reads it. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.zoo_config import CONFIG, FORMAT, VERSION, WEIGHTS

__all__ = ["quantize_rows", "write_zoo"]


def quantize_rows(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Symmetric int8 [out, in] and scales [out]; the scale is rounded before it is used."""
    scale = (np.abs(matrix).max(axis=1) / 127).astype(np.float16)
    scale = np.maximum(scale, np.float16(6e-8))
    codes = np.clip(np.rint(matrix / scale[:, None].astype(np.float32)), -127, 127)
    return codes.astype(np.int8), scale


def write_zoo(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], vocabulary: NDArray[np.int32]
) -> None:
    """Write `config.json` and `weights.safetensors`; same input, same bytes."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, NDArray[Any]] = {"vocabulary": vocabulary.astype(np.int32)}
    for name, value in tensors.items():
        if value.ndim == 2:
            stem = name.removesuffix(".weight")
            codes, scale = quantize_rows(np.asarray(value, np.float32))
            stored[f"{stem}.weight.int8"], stored[f"{stem}.weight.scale"] = codes, scale
        else:
            stored[name] = value.astype(np.float32)
    (folder / WEIGHTS).write_bytes(save(stored))
    text = json.dumps({"format": FORMAT, "version": VERSION, **config}, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
