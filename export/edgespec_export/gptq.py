"""GPTQ: rounding that lets later inputs of a row make up for the error of earlier ones (arXiv 2210.17323).

Owns one matrix: weights and the second moments of its inputs in, codes and scales out. The recursion is written in the
equivalent form of arXiv 2307.13304 (LDLQ), which needs a Cholesky factor and no inverse. It knows neither models nor
where the second moments come from (`calibration.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec_export.quantize import QuantizedMatrix, encode_blocks, from_codes

__all__ = ["DAMPING", "quantize_gptq"]

FloatArray = NDArray[np.float32]
DAMPING = 0.01  # share of the mean second moment that is added to every input's
_ROWS_AT_ONCE = 2048  # a block of errors stays within a CPU's cache
_PANEL = 16  # inputs between two matrix products within a block: thousands of small ones would wait for threads


def quantize_gptq(
    weight: FloatArray,
    hessian: NDArray[np.float64],
    bits: int,
    block: int,
    *,
    symmetric: bool = True,
    search: int = 16,
    damping: float = DAMPING,
) -> QuantizedMatrix:
    """Quantize [n, k] float32 for inputs x with the second moments `hessian` = E[x x^T], [k, k].

    Minimizes the squared error of x @ weight.T instead of the weights' own. search: scales tried per block, 0 for none.
    Rows do not depend on each other. Mutates nothing. Raises ExportError for values that are not finite.
    """
    n, k = weight.shape
    if hessian.shape != (k, k):
        raise ExportError(f"second moments are {list(hessian.shape)} and the weight {[n, k]}: [{k}, {k}] is needed.")
    feedback, importance = _feedback(hessian, damping)
    blocks = -(-k // block)
    codes = np.empty((n, blocks, block), np.uint8)
    scales, zeros = np.empty((n, blocks), np.float32), np.empty((n, blocks), np.uint8)
    for start in range(0, n, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, n))
        part = np.ascontiguousarray(weight[rows].T)
        if not np.isfinite(part).all():
            raise ExportError("a weight to quantize holds NaN or infinite values: the file is damaged.")
        codes[rows], scales[rows], zeros[rows] = _rows(part, feedback, importance, bits, block, symmetric, search)
    return from_codes(codes, scales, None if symmetric else zeros, k, bits)


def _rows(
    weight: FloatArray,
    feedback: FloatArray,
    importance: FloatArray,
    bits: int,
    block: int,
    symmetric: bool,
    search: int,
) -> tuple[NDArray[np.uint8], FloatArray, NDArray[np.uint8]]:
    """codes [r, blocks, block], scales and zero points [r, blocks] of the transposed rows `weight` [k, r]."""
    k, n_rows = weight.shape
    blocks = -(-k // block)
    codes = np.zeros((n_rows, blocks, block), np.uint8)
    scales, zeros = np.empty((n_rows, blocks), np.float32), np.empty((n_rows, blocks), np.uint8)
    errors = np.empty_like(weight)  # weight minus what it became
    for index in range(blocks):
        first, last = index * block, min((index + 1) * block, k)
        wanted = weight[first:last] + feedback[:first, first:last].T @ errors[:first]
        padded = np.zeros((n_rows, 1, block), np.float32)
        padded[:, 0, : last - first] = wanted.T
        weights = np.zeros(block, np.float32)
        weights[: last - first] = importance[first:last]
        _, scale, zero = encode_blocks(padded, bits, symmetric, search, weights)
        scales[:, index], zeros[:, index] = scale[:, 0], zero[:, 0]
        inside = feedback[first:last, first:last]
        rounded = _columns(weight[first:last], wanted, inside, scale[:, 0], zero[:, 0], bits, errors[first:last])
        codes[:, index, : last - first] = rounded.T
        codes[:, index, last - first :] = zero  # filler counts as zero
    return codes, scales, zeros


def _columns(
    weight: FloatArray,
    wanted: FloatArray,
    feedback: FloatArray,
    scale: FloatArray,
    zero: NDArray[np.uint8],
    bits: int,
    errors: FloatArray,
) -> NDArray[np.uint8]:
    """One block, an input at a time: codes [b, r] of `wanted` [b, r]; `errors` [b, r] is filled, `wanted` used up."""
    codes = np.empty(weight.shape, np.uint8)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    low, high = -zero.astype(np.float32), np.float32((1 << bits) - 1) - zero
    for start in range(0, len(weight), _PANEL):
        stop = min(start + _PANEL, len(weight))
        if start:
            wanted[start:stop] += feedback[:start, start:stop].T @ errors[:start]
        for j in range(start, stop):
            column = wanted[j] + np.einsum("i,ir->r", feedback[start:j, j], errors[start:j])
            steps = np.clip(np.rint(column * inverse), low, high)
            codes[j] = steps - low
            errors[j] = weight[j] - steps * scale
    return codes


def _feedback(hessian: NDArray[np.float64], damping: float) -> tuple[FloatArray, FloatArray]:
    """(feedback [k, k], importance [k]) of the damped second moments H = (F + 1) D (F + 1)^T, F strictly upper.

    Input j is rounded after F[:j, j] times the errors before it was added. importance: the second moment of each input.
    """
    k = len(hessian)
    moments = np.diagonal(hessian)
    if not np.isfinite(hessian).all():
        raise ExportError("second moments hold NaN or infinite values: the float model's numbers overflow.")
    mean = float(moments.mean())
    if mean <= 0:  # no input at all: nothing to make up for
        return np.zeros((k, k), np.float32), np.ones(k, np.float32)
    damped = hessian / mean
    damped[np.diag_indices(k)] += damping
    try:
        factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError as error:
        raise ExportError(
            "second moments are not those of any input (no Cholesky factor even with damping): this is a fault of"
            " edgespec, or of the caller that gave them."
        ) from error
    unit = factor / np.diagonal(factor)
    return np.triu(unit, 1).astype(np.float32), np.diagonal(damped).astype(np.float32)
