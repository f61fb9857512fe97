"""What a user can choose about an export, validated when it is built.

Owns names, defaults and allowed ranges. It knows no model: whether a block size divides a row is decided where the row
is known (`quantize.plan_block`).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import ConfigError

__all__ = ["BLOCK_SIZES", "QUANTIZERS", "ExportOptions"]

BLOCK_SIZES = (16, 32, 64, 128, 256)
QUANTIZERS = ("rtn", "mse", "gptq")
_BITS = (4, 8, 32)
_SEARCH = 16


@dataclass(frozen=True)
class ExportOptions:
    """How weights become a bundle. Bits of 32 keep a matrix in float32.

    head_bits, head_block_size: the lm head's own; None follows `bits` and `block_size`.
    embed_bits: the embedding table's; None is the head's where the two are tied and the quantizer is not gptq (its
    bytes then serve both, unless rows end in filler), else 8, or 32 if `bits` is.
    accuracy_level: of MatMulNBits; 4 multiplies in int8, 0 leaves the choice to the runtime, 1 is float32.
    quantizer: "rtn" rounds to nearest; "mse" searches each block's scale for the least squared error of the weights;
    "gptq" does so for the error of what the matrices put out on a calibration text that comes with the exporter.
    search: scales tried per block by mse and gptq; None is their default.
    fallback: what to do with a row that is no multiple of the block: "refuse", "smaller" (a smaller block for that
    matrix) or "pad" (a last block that is part filler). What was done is listed in bundle.json.
    taps: "final" (final norm, before the head) and "layer.N" (residual stream after layer N).
    keep_layers: indices of the layers to keep, in order; None keeps all.
    tree: write the graph for trees of drafted tokens; None where the model can have one.
    exit_layer: layers below an early exit, for which the two halves and the head are written apart; None for no exit.
    fuse_gate_up, fuse_qkv, quick_gelu: shapes of the graph, the same numbers either way.
    """

    name: str | None = None
    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    head_bits: int | None = None
    head_block_size: int | None = None
    embed_bits: int | None = None
    accuracy_level: int = 4
    quantizer: str = "rtn"
    search: int | None = None
    fallback: str = "refuse"
    taps: tuple[str, ...] = ()
    keep_layers: tuple[int, ...] | None = None
    n_ctx: int | None = None
    tree: bool | None = None
    exit_layer: int | None = None
    fuse_gate_up: bool = True
    fuse_qkv: bool = True
    quick_gelu: bool = True

    def __post_init__(self) -> None:
        self._choice("bits", self.bits, _BITS)
        self._choice("block_size", self.block_size, BLOCK_SIZES)
        if self.head_bits is not None:
            self._choice("head_bits", self.head_bits, _BITS)
        if self.head_block_size is not None:
            self._choice("head_block_size", self.head_block_size, BLOCK_SIZES)
        if self.embed_bits is not None:
            self._choice("embed_bits", self.embed_bits, _BITS)
        self._choice("accuracy_level", self.accuracy_level, (0, 1, 2, 3, 4))
        self._choice("fallback", self.fallback, ("refuse", "smaller", "pad"))
        self._choice("quantizer", self.quantizer, QUANTIZERS)
        if self.search is not None and not 1 <= self.search <= 64:
            raise ConfigError(f"search is {self.search}; it counts the scales tried per block, 1 to 64.")
        if self.search is not None and self.quantizer == "rtn":
            raise ConfigError(
                f"search is {self.search} and quantizer rtn tries no scales: set quantizer to mse or gptq."
            )
        if self.n_ctx is not None and self.n_ctx < 1:
            raise ConfigError(f"n_ctx is {self.n_ctx}; give the context in tokens, at least 1.")
        if len(set(self.taps)) != len(self.taps):
            raise ConfigError(f"taps {', '.join(self.taps)} name one twice.")

    @staticmethod
    def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
        if value not in allowed:
            raise ConfigError(f"{name} is {value}; use one of {', '.join(map(str, allowed))}.")

    @property
    def head(self) -> tuple[int, int]:
        """(bits, block size) of the lm head."""
        return self.head_bits or self.bits, self.head_block_size or self.block_size

    @property
    def n_scales(self) -> int:
        """Scales tried per block; 0 is rounding to nearest."""
        return 0 if self.quantizer == "rtn" else self.search or _SEARCH
