"""The trained drafts of a pair, widened with it: each reads all copies of a feature as it read the one.

Before the noise a wide draft guesses what the original guesses; on a noisy target it is as good as its training on
another model lets it be. Owns the arithmetic for the four kinds of the zoo. It trains nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.zoo import ZooDraft
from numpy.typing import NDArray

from edgespec.zoo import TrainedDraft
from edgespec.zoo_config import CONFIG

__all__ = ["widen_draft"]

FloatArray = NDArray[np.float32]
_COUNTS = ("n_embd", "n_ff", "n_heads", "n_kv_heads")


def widen_draft(draft: TrainedDraft, factor: int, folder: Path) -> Path:
    """Write `draft` for a target `factor` times as wide as its own to `folder`, in the zoo's format; `folder`."""
    from edgespec_models.zoo_format import write_zoo

    opened = ZooDraft.open(draft.folder)
    raw = json.loads((draft.folder / CONFIG).read_text(encoding="utf-8"))
    config: dict[str, Any] = {key: value for key, value in raw.items() if key not in ("format", "version", "training")}
    config |= {key: raw[key] * factor for key in _COUNTS if key in raw}
    config["target"] = f"{raw['target']}-x{factor}"
    config["acceptance"] = None  # nobody measured it on this target
    tensors = {name: _wide(name, opened.tensor(name), factor, opened) for name in _names(opened)}
    write_zoo(folder, config, tensors, opened.vocabulary.astype(np.int32))
    return folder


def _names(draft: ZooDraft) -> list[str]:
    from edgespec_export.zoo import _shapes

    return list(_shapes(draft.config))


def _wide(name: str, value: FloatArray, factor: int, draft: ZooDraft) -> FloatArray:
    """Copies behind each other; a matrix over several joined inputs has the copies of each input together."""
    if name == "norm.weight":  # before the head, whose sum runs over all copies
        return np.tile(value, factor) / np.float32(factor)
    if value.ndim == 1:
        return np.tile(value, factor)
    n_taps = len(draft.config.taps)
    joined = {"in.weight": n_taps + 1, "fuse.weight": n_taps, "fc.weight": 2}.get(name, 1)
    parts = np.split(value / np.float32(factor), joined, axis=1)
    return np.concatenate([np.tile(part, (factor, factor)) for part in parts], axis=1)
