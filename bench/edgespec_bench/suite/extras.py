"""What a comparison of speeds needs beside it: how far a side is from the float weights, what the plan predicted.

Writes the rows `fidelity` and `prediction`. Knows which sides speak of logits, not how they make them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgeSpecError
from edgespec_bench.auto import AutoOptions, measure_auto
from edgespec_bench.fidelity import Passage, fidelity, float_bundle, write_passages
from edgespec_bench.prompts import load_prompts
from edgespec_bench.sides import Side
from edgespec_bench.suite.parts import COPYING, Size
from edgespec_bench.suite.rows import RowFile
from edgespec_bench.suite.turns import Encode

__all__ = ["measure_fidelity", "measure_prediction", "write_references"]

Progress = Callable[..., None]


def write_references(model: str, size: Size, threads: int, encode: Encode, progress: Progress) -> list[Passage]:
    """Continuations of chat prompts by the float weights, with their logits. Raises where these are not at hand."""
    from edgespec.pairs import source_path

    progress("fidelity: the float weights write the references", 0, 1)
    bundle = float_bundle(source_path(model), model)
    prompts = [encode(prompt.messages) for prompt in load_prompts("chat")[: size.fidelity_prompts]]
    return write_passages(bundle, prompts, size.fidelity_tokens, threads)


def measure_fidelity(
    model: str, sides: Sequence[Side], passages: Sequence[Passage], threads: int, out: RowFile, progress: Progress
) -> None:
    """A row for each side that tells its logits; a side that cannot is a `skip` row."""
    for number, side in enumerate(sides):
        progress("fidelity: the sides", number, len(sides))
        if side.missing(model):
            continue  # said where speeds are measured
        try:
            with side.start(model, threads) as process, tempfile.TemporaryDirectory() as folder:
                rows = [_logits(process, passage, str(Path(folder) / "logits.npy")) for passage in passages]
        except EdgeSpecError as error:
            out.write("skip", part="fidelity", side=side.name, reason=str(error))
            continue
        out.write("fidelity", part="fidelity", model=model, side=side.name, **fidelity(passages, rows).to_dict())


def _logits(process: Any, passage: Passage, path: str) -> Any:
    process.ask(do="logits", prompt=passage.prompt, continuation=passage.continuation, path=path)
    return np.load(path)


def measure_prediction(model: str, size: Size, threads: int, out: RowFile, progress: Progress) -> None:
    """Predicted and measured speed of every fixed length: half of the prompts calibrate, the others judge.

    Both are over plain decoding with the same rows, predicted and measured, so that a machine that has become slower
    between the calibration and the measurement is not taken for an error of the model.
    """
    kinds = ("chat", "code", *COPYING)
    options = AutoOptions(model, threads, size.n_tokens, 2 * size.judged, kinds, ks=tuple(range(1, 7)))
    found = measure_auto(options, lambda text: progress(f"prediction: {text}", 0, 1))
    for row in found["predictions"]["rows"]:
        out.write("prediction", part="prediction", model=model, kinds=list(kinds), judged=size.judged, **row)
