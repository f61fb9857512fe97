"""Counter-based Gumbel noise: every random decision is a pure function of what it decides.

A value depends on (seed, sample, purpose, absolute position, index, round, token) and on nothing else, so there is
nothing to roll back when tokens are rejected. The hash is SplitMix64, uniforms are the 2**52 midpoints of (0, 1)
(exact in float64, never 0 or 1), and the logarithm uses IEEE basic operations only: the same values on every
platform. It knows nothing of models or rules; whoever asks chooses the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.types import Candidates

__all__ = ["Noise", "Purpose", "log"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_START = 0x6A09E667F3BCC908  # first 64 bits of the fraction of sqrt(2)

_U_GOLDEN, _U_MUL1, _U_MUL2 = np.uint64(_GOLDEN), np.uint64(_MUL1), np.uint64(_MUL2)
_U12, _U27, _U30, _U31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH = tuple(2.0 / n for n in range(19, 1, -2))  # 2 atanh(s) / s - 2 in powers of s**2, highest first

_STEP = 2.0**-52
_PRUNE_OVER = 2048  # candidates beyond which most logarithms are skipped
_HEAD_GAP = 4.0  # candidates within this of the best logit are always evaluated
_SCALAR_UP_TO = 8  # candidates up to which Python floats beat numpy's call overhead (measured: 4 us each against 40 us)
_SLACK = 1e-9  # far above the rounding of `log`, far below anything that costs time


class Purpose(IntEnum):
    """What a random value decides; each purpose has its own independent stream."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive, normal float64 values, identical on every platform.

    Within 5e-16 of the true value, relatively, also near x = 1.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa += mantissa * low
    exponent -= low
    mantissa -= 1.0
    s = mantissa / (mantissa + 2.0)
    z = s * s
    series = z * _ATANH[0]
    for coefficient in _ATANH[1:]:
        series += coefficient
        series *= z
    series += 2.0
    series *= s
    series += exponent * _LN2
    result: NDArray[np.float64] = series
    return result


def _log_one(x: float) -> float:
    """`log` of one Python float: the same operations in the same order, so the same value."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa += mantissa
        exponent -= 1
    mantissa -= 1.0
    s = mantissa / (mantissa + 2.0)
    z = s * s
    series = z * _ATANH[0]
    for coefficient in _ATANH[1:]:
        series = (series + coefficient) * z
    return (series + 2.0) * s + exponent * _LN2


def _mix(x: int) -> int:
    """SplitMix64's finalizer on one Python integer."""
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def _fold(key: int, values: Iterable[int]) -> int:
    """Chain `values` into `key`; for a fixed key each step is a bijection of the value's low 64 bits."""
    for value in values:
        key = _mix((key + value * _GOLDEN + _START) & _MASK)
    return key


def _limbs(value: int) -> list[int]:
    """A Python integer of any size and sign as 64-bit words, different for different integers."""
    words = [value & _MASK]
    value >>= 64
    while value not in (0, -1):
        words.append(value & _MASK)
        value >>= 64
    return [*words, len(words), int(value == -1)]


def _bits(key: int, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[m] 52 random bits for each token under `key`."""
    x = tokens.astype(np.uint64)
    shifted = np.empty_like(x)
    x *= _U_GOLDEN
    x += np.uint64(key)
    for shift, factor in ((_U30, _U_MUL1), (_U27, _U_MUL2)):
        x ^= np.right_shift(x, shift, out=shifted)
        x *= factor
    x ^= np.right_shift(x, _U31, out=shifted)
    x >>= _U12
    return x


def _gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[m] standard Gumbel values, -log(-log(u)), strictly ordered as the bits up to rounding."""
    u = bits.astype(np.float64)
    u += 0.5
    u *= _STEP
    return -log(-log(u))


class Noise:
    """The noise of one sample of one request.

    seed: any Python integer. sample: 0 for the first of `n` samples of a request, 1 for the second ...
    `index` tells apart decisions that share purpose, position and round: siblings, tree nodes.
    """

    def __init__(self, seed: int, sample: int = 0) -> None:
        self.seed = int(seed)
        self.sample = int(sample)
        self._base = _fold(_fold(_START, _limbs(self.seed)), _limbs(self.sample))

    def _key(self, purpose: int, position: int, index: int, round: int) -> int:
        return _fold(self._base, (purpose, position, index, round))

    def gumbel(
        self, purpose: Purpose, position: int, tokens: NDArray[np.int64], round: int = 0, index: int = 0
    ) -> NDArray[np.float64]:
        """Standard Gumbel noise of each of `tokens` [m] at an absolute position -> [m] float64."""
        return _gumbel(_bits(self._key(purpose, position, index, round), np.asarray(tokens, dtype=np.int64)))

    def uniform(self, purpose: Purpose, position: int, index: int = 0, round: int = 0) -> float:
        """One uniform value strictly between 0 and 1, independent of the Gumbel noise of any purpose."""
        key = self._key(int(purpose) + 256, position, index, round)
        return ((_mix(key) >> 12) + 0.5) * _STEP

    def accept(self, probability: float, purpose: Purpose, position: int, index: int = 0, round: int = 0) -> bool:
        """True with the given probability; never at 0, always at 1 and above."""
        return self.uniform(purpose, position, index, round) < probability

    def draw(self, candidates: Candidates, purpose: Purpose, position: int, round: int = 0, index: int = 0) -> int:
        """One token id with probability softmax(logits): argmax of logit + Gumbel noise, lowest id at ties."""
        m = len(candidates.ids)
        if m == 1:
            return int(candidates.ids[0])
        if m <= _SCALAR_UP_TO:
            return _draw_few(self._key(purpose, position, index, round), candidates)
        return self.draw_many(candidates, 1, purpose, position, round, index)[0]

    def draw_many(
        self, candidates: Candidates, n: int, purpose: Purpose, position: int, round: int = 0, index: int = 0
    ) -> list[int]:
        """The first `n` tokens of sampling without replacement, in order (Gumbel top-n, arXiv 1903.06059).

        Fewer than n where there are fewer candidates. The first one is what `draw` gives.
        """
        ids = candidates.ids
        key = self._key(purpose, position, index, round)
        if len(ids) > _PRUNE_OVER:
            ids, scores = _contenders(key, candidates, n)
        else:
            scores = _gumbel(_bits(key, ids)) + candidates.logits
        if n == 1:
            return [int(ids[scores.argmax()])]
        order = np.lexsort((ids, -scores))[:n]
        return [int(token) for token in ids[order]]


def _draw_few(key: int, candidates: Candidates) -> int:
    """`Noise.draw` for a handful of candidates, without numpy's overhead."""
    best, best_score = -1, -math.inf
    for token, logit in zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True):
        u = ((_mix((key + token * _GOLDEN) & _MASK) >> 12) + 0.5) * _STEP
        score = logit - _log_one(-_log_one(u))
        if score > best_score:
            best, best_score = token, score
    return best


def _contenders(key: int, candidates: Candidates, n: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Ids (ascending) and scores of a subset that surely holds the `n` best of logit + noise.

    All are hashed; the noise of the tokens near the top is evaluated first. The n-th best score then bounds from below
    the uniform that any other token needs, since noise grows with the uniform: few of them need a logarithm.
    """
    ids, logits = candidates
    limit = float(logits.max()) - _HEAD_GAP
    in_head = logits >= limit
    head = np.flatnonzero(in_head)
    if len(head) < n:
        return ids, _gumbel(_bits(key, ids)) + logits
    bits = _bits(key, ids)
    bar = float(np.partition(_gumbel(bits[head]) + logits[head], -n)[-n]) - _SLACK
    needed = max(np.exp(-np.exp(limit - bar)) - _SLACK, 0.0)
    in_head |= bits >= np.uint64(needed / _STEP)
    chosen = np.flatnonzero(in_head)
    return ids[chosen], _gumbel(bits[chosen]) + logits[chosen]
