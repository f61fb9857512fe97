"""A target's graphs: the whole decoder, the same for trees, and its two halves and head for early exit.

Owns the architecture of these graphs and the names of their inputs and outputs; all of them share one set of weights.
What a layer is made of is `layers.py`'s matter, rounding `matrices.py`'s, bytes `writer.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgespec.errors import ExportRefusedError
from edgespec_export.config import ModelConfig
from edgespec_export.layers import LayerGraph
from edgespec_export.matrices import Matrices
from edgespec_export.options import ExportOptions

__all__ = ["DecoderGraph", "HeadGraph", "Part", "check_options", "has_tree", "parts"]


@dataclass(frozen=True)
class Part:
    """Which layers a graph holds: those from `first` up to `end`.

    A graph of the first layer takes token ids, any other `features`, the residual stream before its own layers. The one
    of the last gives logits, or `hidden.final` if it is a half; a lower half gives `hidden.exit`.
    """

    file: str
    first: int
    end: int
    is_half: bool = False
    has_tree: bool = False


def check_options(config: ModelConfig, options: ExportOptions) -> None:
    """Raise ExportRefusedError for taps, an exit or trees that the model cannot have."""
    known = ["final", *(f"layer.{index}" for index in range(config.n_layers))]
    for tap in options.taps:
        if tap not in known:
            raise ExportRefusedError(f"tap '{tap}' is not in the model: use final, or layer.0 to {known[-1]}.")
    exit_layer = options.exit_layer
    if exit_layer is not None and not 1 <= exit_layer < config.n_layers:
        raise ExportRefusedError(
            f"exit_layer is {exit_layer} and the model has {config.n_layers} layers: at least one must lie below the"
            f" exit and one above it (1 to {config.n_layers - 1})."
        )
    if options.tree and config.sliding_window is not None:
        raise ExportRefusedError(
            f"{config.name} has a sliding window of {config.sliding_window} tokens, which counts rows and not depths of"
            " a tree: export it with tree=False (--no-tree)."
        )


def has_tree(config: ModelConfig, options: ExportOptions) -> bool:
    """Whether a graph for trees is written: as asked, and by default where the model can have one."""
    return config.sliding_window is None if options.tree is None else options.tree


def parts(config: ModelConfig, options: ExportOptions) -> list[Part]:
    """The decoder graphs of a bundle. The first holds every layer, in order: calibration follows it."""
    n_layers, exit_layer = config.n_layers, options.exit_layer
    found = [Part("model.onnx", 0, n_layers)]
    if has_tree(config, options):
        found.append(Part("tree.onnx", 0, n_layers, has_tree=True))
    if exit_layer is not None:
        found.append(Part("lower.onnx", 0, exit_layer, is_half=True))
        found.append(Part("upper.onnx", exit_layer, n_layers, is_half=True))
    return found


class DecoderGraph(LayerGraph):
    """The graph of one `Part`."""

    def __init__(self, config: ModelConfig, options: ExportOptions, matrices: Matrices, part: Part) -> None:
        super().__init__(config, options, matrices, has_tree=part.has_tree)
        self.part = part

    def build(self, on_layer: Callable[[int], None] = lambda index: None) -> None:
        """Emit the whole graph; `on_layer(i)` is called after each layer."""
        part, d = self.part, self.config.n_embd
        if part.first == 0:
            ids = self.take("input_ids", "INT64", ["batch", "sequence_length"])
            self.declare_layers(part.first, part.end)
            residual = self.lookup(self.matrices.embedding(), ids, "embed_tokens/out")
            delta = ""
        else:
            features = self.take("features", "FLOAT", ["sequence_length", d])
            self.declare_layers(part.first, part.end, batch=1)
            residual = self.reshape(features, "features/rows", [1, -1, d])
            delta = self._nothing(residual)
        for index in range(part.first, part.end):
            residual, delta = self.layer(index, residual, delta)
            on_layer(index)
        if part.end == self.config.n_layers:
            self._finish(residual, delta)
        else:
            total = self.node("Add", [residual, delta], ["exit/sum"])
            self._hidden("exit", total)
            self.on_residual(part.end, total)

    def _nothing(self, residual: str) -> str:
        """Zeros to add to the residual stream: the whole graph's norm adds there, and rounds otherwise without."""
        zero = self.matrices.constant("zero", np.zeros(1, np.float32))
        return self.node("Mul", [residual, zero], ["features/zeros"])

    def on_residual(self, index: int, total: str) -> None:
        tap = f"layer.{index - 1}"
        if index > self.part.first and tap in self.options.taps:
            self._hidden(tap, total)

    def _hidden(self, tap: str, source: str) -> str:
        return self.flat(source, self.give(f"hidden.{tap}", ["rows", self.config.n_embd]))

    def _finish(self, residual: str, delta: str) -> None:
        normed, total = self.norm("norm", residual, delta)
        self.on_residual(self.config.n_layers, total)
        if self.part.is_half or "final" in self.options.taps:
            final = self._hidden("final", normed)
        else:
            final = self.flat(normed, "norm/flat")
        if self.part.is_half:
            return
        wanted = self.take("logits_rows", "INT64", ["n_logits"])
        rows = self.node("Gather", [final, wanted], ["logits_rows/out"], axis=0)
        self.head(rows, self.give("logits", ["n_logits", self.config.n_vocab]))


class HeadGraph(LayerGraph):
    """The lm head alone, on rows of `hidden.final`."""

    def build(self) -> None:
        features = self.take("features", "FLOAT", ["n_logits", self.config.n_embd])
        self.head(features, self.give("logits", ["n_logits", self.config.n_vocab]))
