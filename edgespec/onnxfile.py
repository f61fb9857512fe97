"""Where an ONNX file takes its external weights and compiled code from, read straight from the protobuf bytes.

Visits every tensor and node of a model, in subgraphs, functions and attributes too. It needs no onnx package and copies
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edgespec.errors import BundleError
from edgespec.wire import DELIMITED, spans_of

__all__ = ["context_paths", "external_locations"]

# message -> field number -> message of the submessages that can lead to a tensor (field numbers of onnx.proto)
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_MAX_DEPTH = 64
_MAX_NAME = 4096  # bytes of an attribute that are read; an embedded binary is longer


def external_locations(path: Path) -> list[str]:
    """Every distinct `location` of external data in the model, sorted. Raises BundleError for a broken file."""
    return _found(path, "entry", _location)


def context_paths(path: Path) -> list[str]:
    """What every EPContext node (code compiled for a device) of the model names as its binary, sorted.

    An embedded binary, or a node without one, comes out as some other text. Raises BundleError for a broken file.
    """
    return _found(path, "node", _context)


def _found(path: Path, wanted: str, read: Callable[[memoryview], Iterator[str]]) -> list[str]:
    """What `read` finds in the messages of the kind `wanted`."""
    try:
        size = path.stat().st_size
        view = np.memmap(path, np.uint8, mode="r").data if size else memoryview(b"")
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return sorted({text for message in _messages(view, "model", wanted, 0) for text in read(message)})
    except (IndexError, ValueError) as error:
        raise BundleError(f"{path} is not a valid ONNX file ({error}): export or pull the bundle again.") from error


def _messages(view: memoryview, message: str, wanted: str, depth: int) -> Iterator[memoryview]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"messages are nested deeper than {_MAX_DEPTH}")
    if message == wanted:
        yield view
    children = _CHILDREN.get(message, {})
    for number, payload in _fields(view) if children else ():
        child = children.get(number)
        if child is not None and payload is not None:
            yield from _messages(payload, child, wanted, depth + 1)


def _location(view: memoryview) -> Iterator[str]:
    """The value of a key-value entry whose key is `location`."""
    entry = {number: bytes(payload) for number, payload in _fields(view) if payload is not None}
    if entry.get(1) == b"location":
        yield entry.get(2, b"").decode("utf-8", "replace")


def _context(view: memoryview) -> Iterator[str]:
    """The attribute `ep_cache_context` of a node of the type EPContext, or of any node that has one."""
    fields = [(number, payload) for number, payload in _fields(view) if payload is not None]
    is_context = any(number == 4 and bytes(payload) == b"EPContext" for number, payload in fields)
    found = []
    for number, payload in fields:
        if number == 5:
            entry = {key: bytes(value[:_MAX_NAME]) for key, value in _fields(payload) if value is not None}
            if entry.get(1) == b"ep_cache_context":
                found.append(entry.get(4, b"").decode("utf-8", "replace"))
    yield from found or ([""] if is_context else [])


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """(field number, bytes of a length-delimited field or None) for each field of a message."""
    for span in spans_of(view):
        yield span.number, view[span.begin : span.end] if span.wire == DELIMITED else None
