"""Log-probabilities of committed tokens, from the target's raw logits (before any sampling processor).

Pure numpy; knows rows of logits, not text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.errors import NumericsError
from edgespec.types import FloatArray

__all__ = ["TokenLogprobs", "row_logprobs"]


@dataclass(frozen=True)
class TokenLogprobs:
    """token: the committed id; logprob: its own; top: the n most likely (id, logprob), best first; rank: 1 = best."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def row_logprobs(logits: FloatArray, token: int, n_top: int) -> TokenLogprobs:
    """Log-softmax of one row [n_vocab] at `token` and at the `n_top` best ids; natural logarithm.

    Raises NumericsError where the row has NaN or no finite maximum.
    """
    peak = float(logits.max())
    if not np.isfinite(peak):
        raise NumericsError(f"the logits of a committed token have the maximum {peak}: the model's weights are broken")
    log_total = peak + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        best = np.argpartition(logits, -n_top)[-n_top:]
        order = best[np.lexsort((best, -logits[best]))]
        top = tuple((int(i), float(logits[i]) - log_total) for i in order)
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    return TokenLogprobs(token, float(logits[token]) - log_total, rank, top)
