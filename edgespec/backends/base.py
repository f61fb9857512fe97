"""Checks and bookkeeping that every backend shares: what a forward or keep call may ask for.

Knows the shapes of calls (counts, indices, lengths), not tensors or runtimes. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgespec.errors import CacheError, ConfigError, NumericsError
from edgespec.types import FloatArray, ModelInfo

__all__ = ["check_context", "check_finite", "check_forward", "check_keep", "check_parents", "check_path", "is_chain"]


def check_forward(
    info: ModelInfo,
    n_past: int,
    tokens: Sequence[int],
    logits_rows: Sequence[int] | None,
    taps: Sequence[str] = (),
    n_ids: int | None = None,
) -> list[int]:
    """Validate one forward call; returns the logits rows as a list of indices within `tokens`.

    n_ids: token ids go up to it, None for `info.n_vocab` (the two differ where logits are over fewer tokens).
    Raises ConfigError naming both values where the call cannot be made.
    """
    n_tokens = len(tokens)
    if n_tokens == 0:
        raise ConfigError(f"{info.name}: a forward pass needs at least one token, got none.")
    if n_past + n_tokens > info.n_ctx:
        raise ConfigError(
            f"{info.name}: {n_past} cached + {n_tokens} new tokens exceed the context of {info.n_ctx}: "
            "shorten the prompt, ask for fewer tokens, or load the model with a larger n_ctx."
        )
    n_ids = n_ids or info.n_vocab
    if min(tokens) < 0 or max(tokens) >= n_ids:
        bad = next(token for token in tokens if not 0 <= token < n_ids)
        raise ConfigError(f"{info.name}: token id {bad} is outside the vocabulary of {n_ids} (0..{n_ids - 1}).")
    for tap in taps:
        if tap not in info.taps:
            raise ConfigError(f"{info.name}: has no tap {tap!r}; it offers {list(info.taps) or 'none'}.")
    if logits_rows is None:
        return list(range(n_tokens))
    rows = list(logits_rows)
    if rows and (min(rows) < 0 or max(rows) >= n_tokens):
        raise ConfigError(f"{info.name}: logits_rows {rows} reach outside the {n_tokens} tokens of the call.")
    return rows


def check_keep(info: ModelInfo, n_past: int, keep: int) -> None:
    """Raise CacheError unless 0 <= keep <= n_past."""
    if not 0 <= keep <= n_past:
        raise CacheError(f"{info.name}: cannot keep {keep} of {n_past} cached tokens: give 0..{n_past}.")


def check_parents(info: ModelInfo, n_tokens: int, parents: Sequence[int]) -> None:
    """Raise ConfigError unless `parents` names, for each token, an earlier one or -1."""
    if len(parents) != n_tokens or any(not -1 <= parent < index for index, parent in enumerate(parents)):
        raise ConfigError(f"{info.name}: parents {list(parents)} do not describe a tree over {n_tokens} tokens.")


def check_path(parents: Sequence[int] | None, n_rows: int, path: Sequence[int]) -> None:
    """Raise CacheError unless `path` runs from a root to a node of the last pass (`parents` None: a chain)."""
    previous = -1
    for index in path:
        if not 0 <= index < n_rows:
            raise CacheError(f"path index {index} is outside the last pass of {n_rows} tokens.")
        parent = index - 1 if parents is None else parents[index]
        if parent != previous:
            raise CacheError(
                f"path {list(path)} is not a root-to-leaf path: token {index} follows {parent}, not {previous}."
            )
        previous = index


def is_chain(parents: Sequence[int] | None) -> bool:
    """True where each token follows the one before it."""
    return parents is None or all(parent == index - 1 for index, parent in enumerate(parents))


def check_finite(name: str, logits: FloatArray, n_past: int, rows: Sequence[int]) -> None:
    """Raise NumericsError where a row of `logits` [n, n_vocab] holds NaN, +inf, or nothing but -inf.

    Looks at one entry a row first (64 of them cost 40 us a round): broken weights or an overflow spoil whole rows, and
    the sampler judges every entry of the rows that it reaches. A few -inf among finite logits are fine.
    """
    if math.isfinite(sum(logits[:, 0].tolist())):
        return
    peaks = logits.max(axis=1)
    if np.isfinite(peaks).all():
        return
    index = int(np.flatnonzero(~np.isfinite(peaks))[0])
    raise NumericsError(
        f"{name}: the logits after position {n_past + rows[index]} have the maximum {float(peaks[index])}: "
        "the model's weights or its precision on this device are broken; export it again or use another device."
    )


def check_context(name: str, n_ctx: int | None, limit: int) -> int:
    """The context to load with: `limit` for None; raises ConfigError, naming the allowed range, for anything else."""
    if n_ctx is None:
        return limit
    if not 1 <= n_ctx <= limit:
        raise ConfigError(
            f"{name}: n_ctx is {n_ctx}, allowed are 1..{limit} (the context that the model was made for)."
        )
    return n_ctx
