"""The protobuf wire format, as far as editing a graph's nodes needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Field", "delimited", "fields_of", "number"]


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


def fields_of(data: bytes) -> Iterator[Field]:
    """The fields of a message. Raises IndexError or ValueError where it is none."""
    position, end = 0, len(data)
    while position < end:
        start = position
        tag, position = _varint(data, position)
        value: int | bytes
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
        elif wire == 2:
            length, position = _varint(data, position)
            value = data[position : position + length]
            position += length
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value = data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {wire}")
        if position > end:
            raise ValueError("a field runs past its end")
        yield Field(tag >> 3, value, data[start:position])


def _varint(data: bytes, position: int) -> tuple[int, int]:
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
