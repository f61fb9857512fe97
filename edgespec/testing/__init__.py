"""Test doubles and tiny models that ship with edgespec, so that its users can test without weights.

`TableModel` is a model whose logits come from a table, `LatencyModel` gives any model a cost per call, `coin_pair` is a
target and a draft that agree as often as asked, and
`onnx_models` (imported on use; needs the `export` extra) writes tiny random ONNX decoders in every layout that
`edgespec.backends` loads.
"""

from __future__ import annotations

from edgespec.testing.coins import CoinModel, coin_pair
from edgespec.testing.latency import LatencyModel
from edgespec.testing.table import ForwardCall, KeepCall, TableModel, check_log

__all__ = ["CoinModel", "ForwardCall", "KeepCall", "LatencyModel", "TableModel", "check_log", "coin_pair"]
