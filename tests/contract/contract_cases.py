"""Every backend in the layouts that it loads, each with an independent source of truth for its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.backends import load_model
from edgespec.testing import TableModel
from edgespec.testing.onnx_models import write_bundle, write_genai, write_optimum
from edgespec.testing.tiny import TinySpec, tiny_logits, tiny_weights
from edgespec.types import FloatArray, Model

SPEC = TinySpec()
WINDOWED = TinySpec(window=8)


@dataclass(frozen=True)
class Case:
    """A loaded model; `truth(tokens)` is [len(tokens), n_vocab] logits that did not go through a cached prefix."""

    name: str
    model: Model
    truth: Callable[[Sequence[int]], FloatArray]
    atol: float


def table_case(name: str, **options: object) -> Case:
    model = TableModel(SPEC.n_vocab, n_ctx=SPEC.n_ctx, order=5, seed=4, **options)
    judge = TableModel(SPEC.n_vocab, n_ctx=SPEC.n_ctx, order=5, seed=4, **options)
    return Case(name, model, lambda tokens: np.stack([judge.row(tokens[: i + 1]) for i in range(len(tokens))]), 0.0)


def float_case(name: str, folder: Path, spec: TinySpec, atol: float = 1e-4) -> Case:
    weights = tiny_weights(spec)
    return Case(name, load_model(folder, threads=1), lambda tokens: tiny_logits(spec, tokens, weights), atol)


def int4_case(name: str, folder: Path) -> Case:
    """The truth is one pass in a fresh session: kernels of different row counts may round differently.

    An activation that rounds to the next of its 8-bit steps moves logits by some 1e-2.
    """
    model = load_model(folder, threads=1)

    def one_pass(tokens: Sequence[int]) -> FloatArray:
        session = model.open_session()
        logits = session.forward(tokens).logits.copy()
        session.close()
        return logits

    return Case(name, model, one_pass, 0.05)


BUILDERS: dict[str, Callable[[Path], Case]] = {
    "table": lambda _: table_case("table"),
    "table-window": lambda _: table_case("table-window", window=8),
    "bundle": lambda path: float_case("bundle", write_bundle(path), SPEC),
    "bundle-window": lambda path: float_case("bundle-window", write_bundle(path, WINDOWED), WINDOWED),
    "bundle-int4": lambda path: int4_case("bundle-int4", write_bundle(path, bits=4)),
    "genai": lambda path: float_case("genai", write_genai(path), SPEC),
    "genai-half": lambda path: float_case("genai-half", write_genai(path, is_half=True), SPEC, 0.2),
    "genai-last-row": lambda path: float_case("genai-last-row", write_genai(path, last_row_only=True), SPEC),
    "genai-one-row": lambda path: float_case("genai-one-row", write_genai(path, one_row=True), SPEC),
    "genai-window": lambda path: float_case("genai-window", write_genai(path, WINDOWED), WINDOWED),
    "optimum": lambda path: float_case("optimum", write_optimum(path), SPEC),
    "optimum-window": lambda path: float_case("optimum-window", write_optimum(path, WINDOWED), WINDOWED),
}
