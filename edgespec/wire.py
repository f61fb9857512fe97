"""The protobuf wire format, as far as reading an ONNX file and editing a graph's nodes need it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["DELIMITED", "Field", "Span", "delimited", "fields_of", "number", "spans_of"]

VARINT, DELIMITED = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # wire type -> bytes


class Field(NamedTuple):
    """value: an int for varints, bytes of a length-delimited field, bytes of 4 or 8 else. raw: with its tag."""

    number: int
    value: int | bytes
    raw: bytes

    @property
    def bytes(self) -> bytes:
        """The value of a message or text; raises ValueError for a number."""
        if not isinstance(self.value, bytes):
            raise ValueError("a number where a message or text is expected")
        return self.value


class Span(NamedTuple):
    """Where a field of a message lies. start: of its tag; begin, end: of its payload. value: of a varint, else 0."""

    number: int
    wire: int
    start: int
    begin: int
    end: int
    value: int


def spans_of(data: bytes | memoryview) -> Iterator[Span]:
    """Where the fields of a message lie; nothing is copied. Raises IndexError or ValueError where it is none."""
    position, size = 0, len(data)
    while position < size:
        start, value = position, 0
        tag, position = _varint(data, position)
        wire, begin = tag & 7, position
        if wire == VARINT:
            value, position = _varint(data, position)
        elif wire == DELIMITED:
            length, begin = _varint(data, position)
            position = begin + length
        elif wire in _FIXED:
            position += _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if position > size:
            raise ValueError("a field runs past its end")
        yield Span(tag >> 3, wire, start, begin, position, value)


def fields_of(data: bytes) -> Iterator[Field]:
    """The fields of a message. Raises IndexError or ValueError where it is none."""
    for span in spans_of(data):
        value = span.value if span.wire == VARINT else data[span.begin : span.end]
        yield Field(span.number, value, data[span.start : span.end])


def _varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _encoded(number: int) -> bytes:
    parts = bytearray()
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def delimited(field: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return _encoded(field << 3 | 2) + _encoded(len(payload)) + payload


def number(field: int, value: int) -> bytes:
    """A varint field; value >= 0."""
    return _encoded(field << 3) + _encoded(value)
