"""Pearson's test without scipy, for draws against known probabilities."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["chi_square_pvalue"]


def chi_square_pvalue(counts, probabilities):
    """p-value of observed `counts` [m] under `probabilities` [m]; cells that expect fewer than 10 are pooled.

    Wilson-Hilferty's normal approximation of the chi-square tail, good to a few percent from one degree of freedom on.
    """
    counts, expected = np.asarray(counts, float), np.asarray(probabilities, float) * np.sum(counts)
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    if freedom == 0:
        return 1.0
    if freedom == 1:
        return math.erfc(math.sqrt(statistic / 2))
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
