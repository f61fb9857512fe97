"""The GGUF reader against crafted and cut files: one typed error that names the place, quickly and without memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import FormatError
from edgespec.gguf import GGUFFile

U8, F32, BOOL, STRING, ARRAY, U64 = 0, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + value


def tensor(name: str, dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", kind, offset)


def build(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, counts: Any = None, align: int = 32
) -> bytes:
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


GOOD_PAIRS = [
    pair("general.architecture", STRING, text("llama")),
    pair("a.number", 4, struct.pack("<I", 7)),
    pair("a.flag", BOOL, b"\1"),
    pair("a.float", F32, struct.pack("<f", 0.5)),
    pair("a.list", ARRAY, array(STRING, 3, text("x") + text("é") + text(""))),
    pair("a.numbers", ARRAY, array(U8, 4, bytes([1, 2, 3, 250]))),
    pair("a.flags", ARRAY, array(BOOL, 2, b"\0\1")),
]
VALUES = np.arange(8, dtype=np.float32)
GOOD = build(GOOD_PAIRS, [tensor("t"), tensor("u", (32,), 8, 32)], VALUES.tobytes() + bytes(34))


def open_bytes(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(version: int, tmp_path: Path) -> None:
    file = open_bytes(tmp_path, GOOD[:4] + struct.pack("<I", version) + GOOD[8:])
    assert file.version == version
    assert file.metadata == {
        "general.architecture": "llama",
        "a.number": 7,
        "a.flag": True,
        "a.float": 0.5,
        "a.list": ["x", "é", ""],
        "a.numbers": [1, 2, 3, 250],
        "a.flags": [False, True],
    }
    assert file.tensors["t"].shape == (2, 4)
    assert (file.tensors["u"].type, file.tensors["u"].nbytes) == ("Q8_0", 34)
    np.testing.assert_array_equal(file.raw("t").view(np.float32), VALUES)
    with pytest.raises(FormatError, match="no tensor 'v'"):
        file.raw("v")


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    content = build([pair("general.alignment", 4, struct.pack("<I", 128))], [tensor("t")], VALUES.tobytes(), align=128)
    assert open_bytes(tmp_path, content).tensors["t"].offset % 128 == 0


HUGE = 1 << 62
ONE = [pair("k", U8, b"\1")]
BROKEN = {
    "empty file": (b"", "the magic"),
    "another file": (b"PK\3\4" + bytes(60), "instead of b'GGUF'"),
    "version 1": (build([], [], version=1), "version 1 is not supported"),
    "big endian": (build([], [], version=0x03000000), "big-endian"),
    "huge pair count": (build(ONE, [], counts=(0, HUGE)), "do not fit"),
    "huge tensor count": (build(ONE, [], counts=(HUGE, 1)), "do not fit"),
    "empty key": (build([pair("", U8, b"\1" * 20)], []), "length of 0"),
    "huge key": (build([struct.pack("<Q", HUGE) + bytes(20)], []), f"length of {HUGE}"),
    "key not UTF-8": (build([pair(b"\xff\xfe", U8, b"\1" * 8)], []), "not UTF-8"),
    "key twice": (build(ONE * 2, [], bytes(64)), "the key appears twice"),
    "unknown type": (build([pair("k", 13, bytes(8))], []), "value type 13"),
    "huge string": (build([pair("k", STRING, struct.pack("<Q", HUGE) + bytes(8))], []), f"needs {HUGE} bytes"),
    "huge array": (build([pair("k", ARRAY, array(U64, HUGE))], []), "key 'k'"),
    "huge string array": (build([pair("k", ARRAY, array(STRING, HUGE))], []), "array of .* does not fit"),
    "array of arrays": (build([pair("k", ARRAY, array(ARRAY, 1, bytes(12)))], []), "holds no arrays"),
    "array of unknown": (build([pair("k", ARRAY, array(99, 1, bytes(12)))], []), "value type 99"),
    "string of an array is cut": (build([pair("k", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", 999)))], []),
                                  "string 1 of 2"),
    "boolean 2": (build([pair("k", BOOL, b"\2" * 8)], []), "neither 0 nor 1"),
    "alignment 0": (build([pair("general.alignment", 4, bytes(4))], []), "power of two"),
    "alignment 24": (build([pair("general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
    "alignment as text": (build([pair("general.alignment", STRING, text("32"))], []), "power of two"),
    "zero dimension": (build([], [tensor("t", (4, 0))], bytes(64)), r"dimension is zero in \[4, 0\]"),
    "no dimensions": (build([], [tensor("t", ())], bytes(64)), "0 dimensions"),
    "five dimensions": (build([], [tensor("t", (1,) * 5)], bytes(64)), "5 dimensions"),
    "overflowing dimensions": (build([], [tensor("t", (1 << 40, 1 << 40))], bytes(64)), "outside of the file"),
    "tensor type": (build([], [tensor("t", kind=77)], bytes(64)), "tensor type 77"),
    "half a block": (build([], [tensor("t", (33,), 8)], bytes(64)), "whole blocks of 32"),
    "huge offset": (build([], [tensor("t", offset=HUGE)], bytes(64)), "outside of the file"),
    "misaligned offset": (build([], [tensor("t", offset=8)], bytes(64)), "not a multiple of 32"),
    "overlap": (build([], [tensor("t"), tensor("u")], bytes(64)), "overlaps the tensor before"),
    "tensor twice": (build([], [tensor("t"), tensor("t", offset=32)], bytes(64)), "twice"),
    "data cut": (build([], [tensor("t")], bytes(31)), "after the end of the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_crafted_files_give_one_error_with_the_place_and_no_memory(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            open_bytes(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert f"of {len(content)})" in str(caught.value)


def test_every_cut_of_a_valid_file_is_an_error(tmp_path: Path) -> None:
    open_bytes(tmp_path, GOOD)
    for size in range(len(GOOD)):
        with pytest.raises(FormatError, match=f"of {size}\\)"):
            open_bytes(tmp_path, GOOD[:size])


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(place: int, value: int) -> None:
    """Whatever a byte is changed to, the answer is a file or a FormatError, never another exception."""
    import tempfile

    changed = bytearray(GOOD)
    changed[place] = value
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = open_bytes(Path(folder), bytes(changed))
            assert all(len(file.raw(name)) == info.nbytes for name, info in file.tensors.items())
            del file
        except FormatError:
            pass


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nothing\.gguf cannot be opened"):
        GGUFFile.open(tmp_path / "nothing.gguf")
