"""Small tables: made up, and counted from a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_models.table import count_table, write_table

from edgespec.draft.table import WHOLE, NgramTable, context_keys

__all__ = ["table_after", "table_of", "write_table_of"]


def table_after(following: Mapping[int, int], chance: float = 0.8) -> NgramTable:
    """What follows single tokens, all as likely."""
    keys = context_keys(np.array([*following]), 1)
    entries = {
        int(key): round(chance * WHOLE) << 32 | token for key, token in zip(keys, following.values(), strict=True)
    }
    return NgramTable(entries, 1, 1 + max((*following, *following.values())), None, {})


def write_table_of(folder: Path, text: Sequence[int], n_vocab: int, order: int = 3, **facts: Any) -> Path:
    """Counted from two copies of a text."""
    tokens = np.array([text, text])
    entries = count_table(tokens, np.ones(tokens.shape, bool), order, n_vocab, 10_000)
    about = {"target": "t", "tokenizer_hash": None, "n_vocab": n_vocab, "order": order}
    write_table(folder, entries, {**about, **facts})
    return folder


def table_of(folder: Path, text: Sequence[int], n_vocab: int, order: int = 3) -> NgramTable:
    return NgramTable.read(write_table_of(folder, text, n_vocab, order))
