"""Block quantization to int4 and int8 in the layout of the MatMulNBits operator, vectorised numpy.

Owns rounding, packing and its inverse, and the choice of a block for a row. A value is `(q - zero_point) * scale` with
one scale (and zero point) for each block of consecutive inputs. It knows nothing of graphs or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportRefusedError
from edgespec_export.options import BLOCK_SIZES

__all__ = ["QuantizedMatrix", "dequantize", "encode_blocks", "from_codes", "plan_block", "quantize", "round_codes"]

FloatArray = NDArray[np.float32]
_ROWS_AT_ONCE = 4096  # bounds the temporaries to some tens of MB


@dataclass(frozen=True)
class QuantizedMatrix:
    """A [n, k] matrix. packed [n, blocks, block * bits / 8] uint8, low nibble first; scales [n, blocks] float32;
    zero_points [n, ceil(blocks * bits / 8)] uint8, or None for the symmetric middle (8 or 128)."""

    packed: NDArray[np.uint8]
    scales: FloatArray
    zero_points: NDArray[np.uint8] | None
    n: int
    k: int
    bits: int
    block: int


def plan_block(k: int, block: int, fallback: str, name: str) -> int:
    """The block that rows of `k` values are cut into: `block` where it divides k, else as `fallback` says."""
    if k % block == 0 or fallback == "pad":
        return block
    smaller = [size for size in BLOCK_SIZES if size < block and k % size == 0]
    if fallback == "smaller" and smaller:
        return smaller[-1]
    hint = f"a block of {smaller[-1]} divides it" if smaller else "no block of 16 or more divides it"
    advice = "'smaller' or 'pad'" if smaller else "'pad'"
    raise ExportRefusedError(
        f"{name} has rows of {k} values, which blocks of {block} do not divide ({hint}):"
        f" choose another block size, set fallback to {advice}, or keep it in float with bits=32."
    )


def quantize(weight: FloatArray, bits: int, block: int, *, symmetric: bool = True, search: int = 0) -> QuantizedMatrix:
    """Quantize [n, k] float32. search: scales tried per block for the least squared error (0: round to nearest)."""
    n, k = weight.shape
    blocks = -(-k // block)
    packed = np.empty((n, blocks, block * bits // 8), np.uint8)
    scales = np.empty((n, blocks), np.float32)
    zeros = np.empty((n, blocks), np.uint8)
    for start in range(0, n, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, n))
        values = np.zeros((rows.stop - start, blocks * block), np.float32)
        values[:, :k] = weight[rows]
        values = values.reshape(-1, blocks, block)
        codes, scales[rows], zeros[rows] = encode_blocks(values, bits, symmetric, search)
        packed[rows] = _pack(codes, bits)
    return QuantizedMatrix(packed, scales, None if symmetric else _pack_zeros(zeros, bits), n, k, bits, block)


def from_codes(
    codes: NDArray[np.uint8], scales: FloatArray, zeros: NDArray[np.uint8] | None, k: int, bits: int
) -> QuantizedMatrix:
    """A matrix from its codes [n, blocks, block], scales and zero points [n, blocks]."""
    packed_zeros = None if zeros is None else _pack_zeros(zeros, bits)
    return QuantizedMatrix(_pack(codes, bits), scales, packed_zeros, codes.shape[0], k, bits, codes.shape[2])


def dequantize(matrix: QuantizedMatrix) -> FloatArray:
    """[n, k] float32, what the kernel multiplies with."""
    codes = _unpack(matrix.packed, matrix.bits).astype(np.float32)
    if matrix.zero_points is None:
        zeros: NDArray[np.float32] | float = float(1 << (matrix.bits - 1))
    else:
        zeros = _unpack(matrix.zero_points, matrix.bits)[:, : matrix.scales.shape[1], None].astype(np.float32)
    values = (codes - zeros) * matrix.scales[:, :, None]
    result: FloatArray = values.reshape(matrix.n, -1)[:, : matrix.k]
    return result


def encode_blocks(
    values: FloatArray, bits: int, symmetric: bool, search: int, importance: FloatArray | None = None
) -> tuple[NDArray[np.uint8], FloatArray, NDArray[np.uint8]]:
    """Codes [r, blocks, block], scales and zero points [r, blocks] of `values` [r, blocks, block].

    importance: [block] weights of the squared errors that a search of scales compares; None counts all the same.
    """
    scale, zero = _symmetric(values, bits) if symmetric else _asymmetric(values, bits)
    best = round_codes(values, scale, zero, bits)
    if search:
        weights = np.ones(values.shape[-1], np.float32) if importance is None else importance
        scale, zero, best = _search(values, scale, zero, best, bits, symmetric, search, weights)
    return best.astype(np.uint8), scale, zero.astype(np.uint8)


def _symmetric(values: FloatArray, bits: int) -> tuple[FloatArray, FloatArray]:
    """The value of largest magnitude goes to the code -2^(bits-1), which has one step more than the other side."""
    half = np.float32(1 << (bits - 1))
    low, high = values.min(axis=-1), values.max(axis=-1)
    scale = np.where(-low > high, low, high) / -half
    return scale.astype(np.float32), np.full(scale.shape, half, np.float32)


def _asymmetric(values: FloatArray, bits: int) -> tuple[FloatArray, FloatArray]:
    """The whole range including zero over 2^bits - 1 steps, with a whole zero point."""
    top = np.float32((1 << bits) - 1)
    low = np.minimum(values.min(axis=-1), 0)
    high = np.maximum(values.max(axis=-1), 0)
    scale = ((high - low) / top).astype(np.float32)
    zero = np.rint(np.divide(-low, scale, out=np.zeros_like(low), where=scale != 0))
    return scale, np.clip(zero, 0, top).astype(np.float32)


def round_codes(values: FloatArray, scale: FloatArray, zero: FloatArray, bits: int) -> FloatArray:
    """Codes of [..., block] values under [...] scales and zero points, as floats."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.rint(values * inverse[..., None])
    codes += zero[..., None]
    np.clip(codes, 0, (1 << bits) - 1, out=codes)
    return codes


def _search(
    values: FloatArray,
    scale: FloatArray,
    zero: FloatArray,
    best: FloatArray,
    bits: int,
    symmetric: bool,
    steps: int,
    weights: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shrunk and stretched scales, each refitted by least squares; a block keeps the one of least squared error."""
    start_scale, start_zero = scale, zero
    scale, zero = scale.copy(), zero.copy()
    error = _squared_error(values, best, scale, zero, weights)
    for step in np.linspace(0.75, 1.15, steps, dtype=np.float32):
        trial_scale = start_scale * step
        trial_zero = start_zero if symmetric else _shifted(values, trial_scale, bits)
        codes = round_codes(values, trial_scale, trial_zero, bits)
        centred = codes - trial_zero[..., None]
        power = _weighted(np.square(centred), weights)
        dot = _weighted(centred * values, weights)
        fitted = np.divide(dot, power, out=trial_scale.copy(), where=power != 0)
        trial_error = _squared_error(values, codes, fitted, trial_zero, weights)
        better = trial_error < error
        scale[better], zero[better], error[better] = fitted[better], trial_zero[better], trial_error[better]
        best[better] = codes[better]
    return scale, zero, best


def _shifted(values: FloatArray, scale: FloatArray, bits: int) -> FloatArray:
    """The zero point that centres the block's range on the codes for a given scale."""
    top = np.float32((1 << bits) - 1)
    middle = (values.max(axis=-1) + values.min(axis=-1)) / 2
    zero = np.rint(top / 2 - np.divide(middle, scale, out=np.zeros_like(middle), where=scale != 0))
    result: FloatArray = np.clip(zero, 0, top)
    return result


def _squared_error(
    values: FloatArray, codes: FloatArray, scale: FloatArray, zero: FloatArray, weights: FloatArray
) -> FloatArray:
    difference = codes - zero[..., None]
    difference *= scale[..., None]
    difference -= values
    return _weighted(np.square(difference, out=difference), weights)


def _weighted(values: FloatArray, weights: FloatArray) -> FloatArray:
    """[r, blocks] sums of [r, blocks, block] values by the weights [block]."""
    sums: FloatArray = np.einsum("rbk,k->rb", values, weights)  # no product: thousands of small ones wait for threads
    return sums


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)


def _pack_zeros(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 4 and zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)))
    return _pack(zeros, bits)
