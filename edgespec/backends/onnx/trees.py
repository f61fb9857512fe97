"""What a tree of tokens means for its rows: how deep each stands, and whom it sees. Knows indices, not graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.onnx.buffers import Array

__all__ = ["depths", "sees"]


def depths(parents: Sequence[int]) -> Array:
    """[n] depth of each token of a tree; 0 is right after the cached prefix."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return np.array(found, np.int64)


def sees(parents: Sequence[int]) -> Array:
    """[n, n] bool: row i sees itself and its ancestors."""
    seen = np.eye(len(parents), dtype=bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            seen[index] |= seen[parent]
    return seen
