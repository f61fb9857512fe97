"""Test doubles and tiny models that ship with edgespec, so that its users can test without weights.

`TableModel` is a model whose logits come from a table, `LatencyModel` gives any model a cost per call, and
`onnx_models` (imported on use; needs the `export` extra) writes tiny random ONNX decoders in every layout that
`edgespec.backends` loads.
"""

from __future__ import annotations

from edgespec.testing.latency import LatencyModel
from edgespec.testing.table import ForwardCall, KeepCall, TableModel, check_log

__all__ = ["ForwardCall", "KeepCall", "LatencyModel", "TableModel", "check_log"]
