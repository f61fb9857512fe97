"""Medians and spread of repeated measurements. Knows nothing of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Spread", "paired_ratio", "spread"]


@dataclass(frozen=True)
class Spread:
    """Five figures of `n` values; the quartiles interpolate linearly."""

    n: int
    minimum: float
    quartile1: float
    median: float
    quartile3: float
    maximum: float

    def to_dict(self, digits: int = 4) -> dict[str, Any]:
        """Plain data, rounded to `digits` significant digits."""
        return {name: float(f"{value:.{digits}g}") if name != "n" else value for name, value in asdict(self).items()}


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    assert len(values) > 0, "a spread needs a value"
    q = np.quantile(np.asarray(values, np.float64), [0, 0.25, 0.5, 0.75, 1])
    return Spread(len(values), *(float(x) for x in q))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the ratios of measurements taken right after each other, so that slow drift cancels."""
    assert len(numerators) == len(denominators), "pairs come in equal numbers"
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
