"""What a user can choose about graphs of fixed shapes, validated when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.backends.onnx.socs import find_soc
from edgespec.errors import ConfigError
from edgespec_export.options import ExportOptions

__all__ = ["DTYPES", "StaticOptions"]

DTYPES = ("fp16", "w8a16")
DEFAULT_CONTEXT = 1024  # every call looks at the whole of it, so longer is slower at any length
MOST_ROWS = 64


@dataclass(frozen=True)
class StaticOptions:
    """How weights become graphs of fixed shapes.

    widths: rows of the graphs, each a file over the same weights. n_ctx: places of the cache; None is the model's
    context up to 1,024. dtype: "fp16" is a float graph, which the compiler rounds; "w8a16" holds 8-bit weights and
    16-bit activations, whose ranges are those on `calibration`, a text file. socs: chips to compile for.
    keep_layers, taps: as in ExportOptions.
    """

    name: str | None = None
    widths: tuple[int, ...] = (1, 4, 8)
    n_ctx: int | None = None
    dtype: str = "fp16"
    calibration: Path | None = None
    socs: tuple[str, ...] = ()
    keep_layers: tuple[int, ...] | None = None
    taps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        widths = self.widths
        if not widths or list(widths) != sorted(set(widths)) or not widths[0] >= 1 or widths[-1] > MOST_ROWS:
            raise ConfigError(
                f"widths {','.join(map(str, widths)) or 'are none'}: give row counts from 1 to {MOST_ROWS}, ascending "
                "and each once, such as 1,4,8."
            )
        if self.n_ctx is not None and self.n_ctx < widths[-1]:
            raise ConfigError(f"n_ctx is {self.n_ctx} and the widest graph has {widths[-1]} rows: they must fit in.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype}; use one of {', '.join(DTYPES)}.")
        if (self.dtype == "w8a16") != (self.calibration is not None):
            way = "give a text file with --calibration" if self.dtype == "w8a16" else "drop --calibration"
            raise ConfigError(f"dtype {self.dtype} and calibration {self.calibration}: {way}; w8a16 alone takes one.")
        if len({find_soc(soc).name for soc in self.socs}) != len(self.socs):
            raise ConfigError(f"chips {', '.join(self.socs)} name one twice.")

    def graph_options(self, n_ctx: int) -> ExportOptions:
        """The float weights and plain operators that these graphs are made of."""
        context = self.n_ctx or min(n_ctx, DEFAULT_CONTEXT)
        return ExportOptions(
            name=self.name,
            bits=32,
            quick_gelu=False,
            tree=False,
            taps=self.taps,
            keep_layers=self.keep_layers,
            n_ctx=context,
        )
