"""Bundles whose graph misbehaves on purpose: what a broken driver or device does, on a provider that really runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["spoil"]

AFTER = 12  # tokens until nan and gone begin


def spoil(folder: Path, how: str) -> Path:
    """Change the plain graph of the bundle in `folder`, and its hash.

    how: `rows` and `rows-past` turn the logits around in calls of several tokens (the latter only on a past); `nan` and
    `gone` give NaN, or raise, as soon as more than AFTER tokens are cached.
    """
    path = folder / "model.onnx"
    model = onnx.load(path)
    for node in model.graph.node:
        node.output[:] = ["right" if name == "logits" else name for name in node.output]
    nodes, constants = {"nan": _nan, "gone": _gone}.get(how, lambda: _rows(on_past=how == "rows-past"))()
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    onnx.save(model, path)
    data = path.read_bytes()
    fields = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    fields["files"]["model.onnx"].update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "bundle.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def _nan() -> tuple[list[onnx.NodeProto], dict[str, Any]]:
    nodes = [
        helper.make_node("Greater", ["total_sequence_length", "after"], ["is_late"]),
        helper.make_node("Where", ["is_late", "nan", "right"], ["logits"]),
    ]
    return nodes, {"after": np.int32(AFTER), "nan": np.float32(np.nan)}


def _gone() -> tuple[list[onnx.NodeProto], dict[str, Any]]:
    """Looks up a table of AFTER + 1 zeros at the number of cached tokens."""
    nodes = [
        helper.make_node("Gather", ["zeros", "total_sequence_length"], ["zero"], axis=0),
        helper.make_node("Add", ["right", "zero"], ["logits"]),
    ]
    return nodes, {"zeros": np.zeros(AFTER + 1, np.float32)}


def _rows(*, on_past: bool) -> tuple[list[onnx.NodeProto], dict[str, Any]]:
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["ids.shape"]),
        helper.make_node("Gather", ["ids.shape", "second"], ["n_rows"], axis=0),
        helper.make_node("Greater", ["n_rows", "second"], ["is_several"]),
        helper.make_node("Cast", ["n_rows"], ["n_rows.32"], to=TensorProto.INT32),
        helper.make_node("Greater", ["total_sequence_length", "n_rows.32"], ["has_past"]),
        helper.make_node("And", ["is_several", "has_past" if on_past else "is_several"], ["is_bad"]),
        helper.make_node("Where", ["is_bad", "bad", "good"], ["sign"]),
        helper.make_node("Mul", ["right", "sign"], ["logits"]),
    ]
    return nodes, {"second": np.int64(1), "bad": np.float32(-1), "good": np.float32(1)}
