"""A strict reader of GGUF files (versions 2 and 3, little endian) that need not be trusted.

Owns the container: header, metadata, tensor table, alignment. Every length is checked against the file's size before
anything is allocated for it, and whatever is wrong is one `FormatError` with the key and the byte offset. It knows
nothing of what a metadata key or a block type means; `edgespec_export.sources` dequantizes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError

__all__ = ["GGUFFile", "TensorInfo"]

# type id -> (name, elements in a block, bytes in a block); the ids of ggml.h
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
# metadata value type id -> little-endian numpy dtype; 7 (bool), 8 (string) and 9 (array) are handled apart
_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_KEY_BYTES = 65_535  # the format's own limit
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, one key byte, type, one value byte
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape (outermost dimension first, as numpy has it), block type, place in the file in bytes."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GGUFFile:
    """An opened GGUF file: `metadata` (str, int, float, bool or a list of one of them) and `tensors` by name."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], version: int) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Read header, metadata and tensor table. Raises FormatError for any file that is not valid and whole."""
        path = Path(path)
        try:
            size = path.stat().st_size
            data = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        except OSError as error:
            raise FormatError(f"{path} cannot be opened as a GGUF file: {error.strerror or error}.") from error
        return _Reader(path, data.data).read()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """[nbytes] uint8, the tensor's bytes mapped from the file and not copied. Raises FormatError if absent."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path} has no tensor '{name}'; it has {len(self.tensors)} others.")
        return np.memmap(self.path, np.uint8, mode="r", offset=info.offset, shape=(info.nbytes,))


class _Reader:
    """Walks the bytes once, from the magic to the last tensor's end."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.pos = 0
        self.where = "the header"

    def fail(self, problem: str) -> NoReturn:
        raise FormatError(
            f"{self.path} is not a valid GGUF file: {problem} ({self.where}, byte {self.pos} of {self.size})."
            " Download or convert it again."
        )

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            self.fail(f"{what} needs {count} bytes and {self.size - self.pos} are left")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.view, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.view, self.pos)
        self.pos += 8
        return int(value)

    def text(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        end = self.pos + length
        try:
            value = str(self.view[self.pos : end], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 ({error.reason} at its byte {error.start})")
        self.pos = end
        return value

    def name(self, what: str) -> str:
        start = self.pos
        length = self.u64(f"the length of {what}")
        if not 0 < length <= _MAX_KEY_BYTES:
            self.fail(f"{what} has a length of {length} and 1 to {_MAX_KEY_BYTES} is allowed")
        self.pos = start
        return self.text(what)

    def read(self) -> GGUFFile:
        version, n_tensors, n_pairs = self.header()
        metadata: dict[str, Any] = {}
        for index in range(n_pairs):
            self.where = f"metadata pair {index}"
            key = self.name("the key")
            self.where = f"key '{key}'"
            if key in metadata:
                self.fail("the key appears twice")
            metadata[key] = self.value(self.u32("the value's type"))
        alignment = self.alignment(metadata)
        relative = self.tensor_table(n_tensors)
        return GGUFFile(self.path, metadata, self.placed(relative, alignment), version)

    def header(self) -> tuple[int, int, int]:
        self.need(4, "the magic")
        if bytes(self.view[:4]) != b"GGUF":
            self.fail(f"it starts with {bytes(self.view[:4])!r} instead of b'GGUF'")
        self.pos = 4
        version = self.u32("the version")
        if version not in (2, 3):
            big = " (a big-endian file)" if version and version & 0xFFFF == 0 else ""
            self.fail(f"version {version}{big} is not supported, versions 2 and 3 are")
        n_tensors = self.u64("the tensor count")
        n_pairs = self.u64("the metadata count")
        left = self.size - self.pos
        if n_pairs * _MIN_PAIR_BYTES + n_tensors * _MIN_TENSOR_BYTES > left:
            self.fail(f"{n_pairs} metadata pairs and {n_tensors} tensors do not fit in the {left} bytes left")
        return version, n_tensors, n_pairs

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text("the value")
        if kind == _ARRAY:
            return self.array()
        return self.numbers(kind, 1, "the value")[0]

    def array(self) -> list[Any]:
        kind = self.u32("the array's element type")
        count = self.u64("the array's length")
        if kind != _STRING:
            return self.numbers(kind, count, f"an array of {count} values")
        if count * 8 > self.size - self.pos:
            self.fail(f"an array of {count} strings does not fit in the {self.size - self.pos} bytes left")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """The hot loop: vocabularies hold hundreds of thousands of strings, so it keeps everything local."""
        view, size, pos, unpack = self.view, self.size, self.pos, _U64.unpack_from
        result: list[str] = []
        append = result.append
        for index in range(count):
            if size - pos < 8:
                self.pos = pos
                self.need(8, f"the length of string {index} of {count}")
            end = pos + 8 + unpack(view, pos)[0]
            if end > size:
                self.pos = pos
                self.fail(f"string {index} of {count} is {end - pos - 8} bytes long and {size - pos - 8} are left")
            try:
                append(str(view[pos + 8 : end], "utf-8"))
            except UnicodeDecodeError:
                self.pos = pos
                self.fail(f"string {index} of {count} is not UTF-8")
            pos = end
        self.pos = pos
        return result

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype("<u1") if kind == _BOOL else np.dtype(_SCALARS.get(kind, "V0"))
        if dtype.itemsize == 0:
            allowed = "one of its elements" if kind == _ARRAY else "known"
            self.fail(f"value type {kind} is not {allowed}; the types are 0 to 12, and an array holds no arrays")
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.view, dtype, count, self.pos)
        if kind == _BOOL:
            if count and int(values.max()) > 1:
                self.fail("a boolean is neither 0 nor 1")
            values = values.astype(np.bool_)
        self.pos += count * dtype.itemsize
        result: list[Any] = values.tolist()
        return result

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or value < 1 or value & (value - 1) or value > 1 << 20:
            self.where = "key 'general.alignment'"
            self.fail(f"the alignment is {value!r} and must be a power of two")
        return value

    def tensor_table(self, count: int) -> dict[str, TensorInfo]:
        """Tensors with offsets relative to the data section, whose start is only known after the table."""
        tensors: dict[str, TensorInfo] = {}
        for index in range(count):
            self.where = f"tensor {index}"
            name = self.name("the tensor's name")
            self.where = f"tensor '{name}'"
            if name in tensors:
                self.fail("the tensor appears twice")
            tensors[name] = self.tensor()
        return tensors

    def tensor(self) -> TensorInfo:
        n_dims = self.u32("the number of dimensions")
        if not 1 <= n_dims <= 4:
            self.fail(f"it has {n_dims} dimensions and 1 to 4 are allowed")
        dims = [self.u64("a dimension") for _ in range(n_dims)]
        if 0 in dims:
            self.fail(f"a dimension is zero in {dims}")
        kind = self.u32("the tensor's type")
        if kind not in _TENSOR_TYPES:
            self.fail(f"tensor type {kind} is not known")
        name, block, block_bytes = _TENSOR_TYPES[kind]
        if dims[0] % block:
            self.fail(f"its rows of {dims[0]} values are not whole blocks of {block} ({name})")
        nbytes = prod(dims) // block * block_bytes
        offset = self.u64("the tensor's offset")
        if nbytes > self.size or offset > self.size:
            self.fail(f"{nbytes} bytes at offset {offset} lie outside of the file")
        return TensorInfo(tuple(reversed(dims)), name, offset, nbytes)

    def placed(self, relative: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The same tensors with offsets in the file; raises where one is misaligned, cut off or overlaps another."""
        start = -(-self.pos // alignment) * alignment
        result: dict[str, TensorInfo] = {}
        end = start
        for name, info in sorted(relative.items(), key=lambda item: item[1].offset):
            self.where, self.pos = f"tensor '{name}'", start + info.offset
            if info.offset % alignment:
                self.fail(f"its offset {info.offset} is not a multiple of {alignment}")
            if self.pos < end:
                self.fail("it overlaps the tensor before it")
            end = self.pos + info.nbytes
            if end > self.size:
                self.fail(f"its data ends at byte {end}, after the end of the file")
            result[name] = TensorInfo(info.shape, info.type, self.pos, info.nbytes)
        return {name: result[name] for name in relative}
