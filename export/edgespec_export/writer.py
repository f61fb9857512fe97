"""A bundle's files on disk, always the same bytes for the same input.

Owns the .onnx files, model.onnx.data and the temporary folder that becomes the bundle only when everything in it is
right. It does not know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportRefusedError
from edgespec_export.layers import LayerGraph

__all__ = ["DataFile", "new_folder", "write_model"]

DATA_NAME = "model.onnx.data"
_INLINE_BYTES = 1024  # smaller tensors stay in model.onnx
_PAGE = 4096  # so that runtimes can map the file
_OPSET = 21
_IR_VERSION = 10


class DataFile:
    """The initializers: small ones inline, others appended to model.onnx.data, equal bytes once."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / DATA_NAME).open("wb")
        self._places: dict[bytes, tuple[int, int]] = {}
        self._position = 0
        self.initializers: dict[str, Any] = {}

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._position

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Declare the initializer `name`; declaring it again is allowed for equal contents only."""
        from onnx import TensorProto, helper

        array = np.ascontiguousarray(array)
        tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        if array.nbytes < _INLINE_BYTES:
            tensor.raw_data = array.tobytes()
        else:
            self._external(tensor, array)
        assert self.initializers.get(name, tensor) == tensor, name
        self.initializers[name] = tensor

    def _external(self, tensor: Any, array: NDArray[Any]) -> None:
        from onnx import TensorProto

        digest = hashlib.sha256(array.data).digest()
        if digest not in self._places:
            self._file.write(b"\0" * (-self._position % _PAGE))
            self._position += -self._position % _PAGE
            self._places[digest] = (self._position, array.nbytes)
            self._file.write(array.data)
            self._position += array.nbytes
        offset, length = self._places[digest]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA_NAME), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)


def write_model(folder: Path, file: str, graph: LayerGraph, data: DataFile) -> None:
    """The .onnx file of a built graph, with the initializers that its nodes use."""
    from onnx import TensorProto, helper

    def value(entry: tuple[str, str, list[int | str]]) -> Any:
        return helper.make_tensor_value_info(entry[0], getattr(TensorProto, entry[1]), entry[2])

    used = {name for node in graph.nodes for name in node.input}
    proto = helper.make_graph(
        graph.nodes,
        "decoder",
        [value(entry) for entry in graph.inputs],
        [value(entry) for entry in graph.outputs],
        initializer=[tensor for name, tensor in data.initializers.items() if name in used],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(proto, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="edgespec")
    (folder / file).write_bytes(model.SerializeToString(deterministic=True))


@contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling that takes the name `target` when the block ends well, and vanishes when it does not.

    Raises ExportError where `target` exists and is not to be replaced (`force`), or is no bundle.
    """
    _check_target(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        _check_target(target, force)  # somebody may have made one meanwhile
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_target(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ExportRefusedError(
            f"{target} is a file: the bundle needs a folder of that name (source and target swapped?)."
        )
    if target.is_symlink():
        raise ExportRefusedError(f"{target} is a link: give the folder itself.")
    entries = {item.name for item in target.iterdir()}
    if entries and "bundle.json" not in entries:
        raise ExportRefusedError(f"{target} holds other files and no bundle: choose an empty or a new folder.")
    if entries and not force:
        raise ExportRefusedError(f"{target} already holds a bundle: choose another folder, or replace it with --force.")
    strangers = entries - _listed(target) - {"bundle.json"}
    if entries and strangers:
        raise ExportRefusedError(
            f"{target} holds {min(strangers)}, which is no part of its bundle and would be lost: choose another folder."
        )


def _listed(folder: Path) -> set[str]:
    """Names of the files that a bundle's own list has; none where it cannot be read."""
    try:
        files = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["files"]
        return set(files)
    except (OSError, ValueError, KeyError, TypeError):
        return set()
