"""A GGUF file in one of llama.cpp's block types, quantized by llama.cpp itself.

Owns the names of those types, what may be quantized (weights that still are float, unless one asks for more), the list
of tensors whose rows the blocks do not divide, and the proof that what was written loads. Needs llama-cpp-python.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.cpu import default_threads
from edgespec.errors import ConfigError, ExportError, ExportRefusedError
from edgespec.gguf import GGUFFile
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.gguf_out import GGUF_TYPES, check_place, write_gguf

__all__ = ["ALL_TYPES", "QUANTIZED_TYPES", "Fallback", "GGUFReport", "export_gguf", "read_report"]

Progress = Callable[[str, int, int], None]

# name -> llama.cpp's general.file_type. Types that need an importance matrix are left out.
QUANTIZED_TYPES = {
    "bf16": 32, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "iq4_nl": 25, "iq4_xs": 30, "q2_k": 10, "q3_k_s": 11,
    "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18,
}  # fmt: skip
ALL_TYPES = (*GGUF_TYPES, *QUANTIZED_TYPES)
_FLOAT = ("F32", "F16", "BF16")
_FALLBACK = re.compile(
    r"warning: (\S+)\s+- ncols\s+(\d+) not divisible by\s+(\d+) \(required for type\s+(\S+)\).*falling back to\s+(\S+)"
)
_PROBE_TOKENS, _PROBE_CONTEXT = 4, 256


@dataclass(frozen=True)
class Fallback:
    """A tensor whose rows of `n_columns` values are no whole blocks of `wanted`, so that it was written as `type`."""

    tensor: str
    n_columns: int
    wanted: str
    type: str


@dataclass(frozen=True)
class GGUFReport:
    """What was written. types: block type -> number of tensors."""

    path: Path
    type: str
    types: dict[str, int]
    fallbacks: tuple[Fallback, ...]


def export_gguf(
    source: str | Path,
    out: str | Path,
    *,
    type: str = "q8_0",
    requantize: bool = False,
    progress: Progress | None = None,
    force: bool = False,
) -> GGUFReport:
    """Write `source` (a Hugging Face folder or a GGUF) as the GGUF file `out` with matrices of `type`.

    f32, f16 and q8_0 are written by edgespec, the others by llama.cpp, which keeps some tensors in wider types. The
    file is loaded and run before it appears. requantize: quantize what is quantized already. Raises ConfigError and
    ExportError; ExportRefusedError for weights that are low-bit already, MissingDependencyError without llama.cpp.
    """
    if type not in ALL_TYPES:
        raise ConfigError(f"type is {type!r}; use one of {', '.join(ALL_TYPES)}.")
    source, out = Path(source), Path(out)
    if type in GGUF_TYPES:
        if requantize:
            raise ConfigError(f"requantize is for types below 8 bits and would have no effect on {type}: drop it.")
        return read_report(write_gguf(source, out, type=type, progress=progress, force=force), type)
    from edgespec.backends.llamacpp.library import library

    library()  # a missing package is said before the work begins
    check_place(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.gguf")
    floats = out.with_name(f".{out.name}.{os.getpid()}.f32.gguf")
    try:
        is_gguf = source.is_file() and source.suffix.lower() == ".gguf"
        start = source if is_gguf else write_gguf(source, floats, type="f32", progress=progress)
        fallbacks = _quantize(start, temporary, type, requantize)
        _check(start, temporary)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
        floats.unlink(missing_ok=True)
    return GGUFReport(out, type, _count_types(GGUFFile.open(out)), fallbacks)


def read_report(path: Path, type: str) -> GGUFReport:
    """The report of a file that edgespec wrote: rows that q8_0's blocks do not divide are in f16."""
    file = GGUFFile.open(path)
    fallbacks = [
        Fallback(name, tensor.shape[-1], type, tensor.type.lower())
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and tensor.type.lower() != type
    ]
    return GGUFReport(path, type, _count_types(file), tuple(fallbacks))


def _quantize(source: Path, out: Path, type: str, requantize: bool) -> tuple[Fallback, ...]:
    """llama.cpp's own quantization; which tensors fell back to another type."""
    from edgespec.backends.llamacpp.library import clear_log, library, log_lines, uninterrupted, why
    from edgespec.backends.llamacpp.settings import check_length

    file = GGUFFile.open(source)
    check_length(source, file)
    low = _low_bit(file)
    if low and not requantize:
        shown = ", ".join(f"{n} tensors of {kind.lower()}" for kind, n in low.most_common(3))
        raise ExportRefusedError(
            f"{source} is quantized already ({shown}), and quantizing it again to {type} adds to its error: start from "
            "the float weights, or ask for it with --requantize."
        )
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.nthread = default_threads()
    params.ftype = QUANTIZED_TYPES[type]
    params.allow_requantize = requantize
    clear_log()
    with uninterrupted():
        status = llama.llama_model_quantize(os.fsencode(source), os.fsencode(out), params)
    if status != 0 and "iostream" in why():
        raise ExportError(f"llama.cpp cannot write into {out.parent}: is there room, and may you write there?")
    if status != 0:
        raise ExportError(f"llama.cpp cannot quantize {source} to {type}: {why()}.")
    matches = (_FALLBACK.search(line) for line in log_lines())
    return tuple(Fallback(m[1], int(m[2]), m[4].lower(), m[5].lower()) for m in matches if m)


def _low_bit(file: GGUFFile) -> Counter[str]:
    return Counter(tensor.type for tensor in file.tensors.values() if tensor.type not in _FLOAT)


def _count_types(file: GGUFFile) -> dict[str, int]:
    return dict(Counter(tensor.type.lower() for tensor in file.tensors.values()).most_common())


def _check(source: Path, out: Path) -> None:
    """Raise ExportError unless `out` loads, has the source's words and gives finite logits that are not all alike."""
    from edgespec.backends.llamacpp.model import load

    if Tokenizer.load(out).hash != Tokenizer.load(source).hash:
        raise ExportError(
            f"the tokenizer that llama.cpp wrote differs from the one of {source}: this is a fault of it."
        )
    n_ctx = GGUFFile.open(out).metadata.get(f"{GGUFFile.open(out).metadata['general.architecture']}.context_length")
    model = load(out, kind="gguf", n_ctx=min(_PROBE_CONTEXT, n_ctx) if isinstance(n_ctx, int) else None)
    try:
        logits = model.open_session().forward(list(range(min(_PROBE_TOKENS, model.info.n_vocab)))).logits
        if not np.isfinite(logits).all() or float(np.ptp(logits, axis=1).min()) == 0.0:
            raise ExportError(
                f"the quantized model gives the logits {logits[0, :4].tolist()} ...: its weights are broken."
            )
    finally:
        model.close()
