"""A safetensors file that need not be trusted: every range checked, values mapped and converted on use.

Owns the container and its types; bfloat16 is widened here, since numpy has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportRefusedError, FormatError

__all__ = ["SafetensorsFile", "SafetensorsTensor"]

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class SafetensorsTensor:
    """offset and nbytes are places in the file."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An opened file: `tensors` by name."""

    def __init__(self, path: Path, tensors: dict[str, SafetensorsTensor]) -> None:
        self.path, self.tensors = path, tensors

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read the header. Raises FormatError for a file that is not valid and whole."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise FormatError(f"{path} is not a whole safetensors file: header of {length} bytes, file of {size}.")
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                entries = {name: _entry(entry, 8 + length) for name, entry in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise FormatError(f"{path} has a safetensors header that is not valid ({error}).") from error
        for name, tensor in entries.items():
            if tensor.offset + tensor.nbytes > size:
                raise FormatError(f"{path}: tensor '{name}' ends after the end of the file ({size} bytes).")
        return cls(path, entries)

    def float32(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32. Raises ExportRefusedError for a type that holds no plain floats."""
        tensor = self.tensors[name]
        if tensor.type not in (*_FLOATS, "BF16"):
            known = ", ".join((*_FLOATS, "BF16"))
            raise ExportRefusedError(f"tensor '{name}' has type {tensor.type}; {known} can be exported.")
        raw = self._raw(tensor)
        if tensor.type == "BF16":
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(_FLOATS[tensor.type]).astype(np.float32)
        return np.asarray(values).reshape(tensor.shape)

    def integers(self, name: str) -> NDArray[np.int64]:
        """The tensor as int64. Raises ExportRefusedError for a type that holds no whole numbers."""
        tensor = self.tensors[name]
        if tensor.type not in _INTEGERS:
            raise ExportRefusedError(f"tensor '{name}' has type {tensor.type}; whole numbers are wanted.")
        return np.asarray(self._raw(tensor).view(_INTEGERS[tensor.type]).astype(np.int64)).reshape(tensor.shape)

    def _raw(self, tensor: SafetensorsTensor) -> NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.nbytes,))


def _entry(entry: dict[str, Any], start: int) -> SafetensorsTensor:
    first, last = (int(value) for value in entry["data_offsets"])
    shape = tuple(int(value) for value in entry["shape"])
    if not 0 <= first <= last or any(value < 1 for value in shape):
        raise ValueError(f"shape {list(shape)} at {first} to {last}")
    kind = str(entry["dtype"])
    if kind in _SIZES and prod(shape) * _SIZES[kind] != last - first:
        raise ValueError(f"shape {list(shape)} of {kind} does not take {last - first} bytes")
    return SafetensorsTensor(shape, kind, start + first, last - first)
