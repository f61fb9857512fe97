"""Does the exported graph compute what the weights say: comparison with the float reference, and the gate on it.

Owns the grid (query lengths on past lengths: verifying is a query of several tokens on a past), the measures and their
limits. It runs the graph through onnxruntime directly, so that a fault of edgespec's own backend cannot hide one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, ExportError, MissingDependencyError
from edgespec_export.config import ModelConfig

__all__ = ["CheckOptions", "GraphRunner", "Parity", "compare", "gate", "limits", "measured_rows", "rounded"]

FloatArray = NDArray[np.float32]
QUERIES = (1, 2, 5, 33)
PASTS = (0, 1, 9)
# bits -> (least top-1 agreement, largest mean KLD): loose enough for small models, far from what a wrong graph gives
_LIMITS = {4: (0.6, 0.5), 8: (0.9, 0.05), 32: (0.99, 1e-3)}
_CHUNK = 64  # rows compared at once: 64 x 151,936 logits are 39 MB


@dataclass(frozen=True)
class CheckOptions:
    """Limits of the gate and the number of text tokens. None for a limit: the default of the weights' bits."""

    min_top1: float | None = None
    max_kld: float | None = None
    n_tokens: int = 256

    def __post_init__(self) -> None:
        if self.min_top1 is not None and not 0 <= self.min_top1 <= 1:
            raise ConfigError(f"min_top1 is {self.min_top1}; it is a share between 0 and 1.")
        if self.max_kld is not None and not self.max_kld >= 0:
            raise ConfigError(f"max_kld is {self.max_kld}; it must not be negative.")
        if self.n_tokens < 2:
            raise ConfigError(f"n_tokens is {self.n_tokens}; at least 2 are needed.")


@dataclass(frozen=True)
class Parity:
    """How far the graph is from the float model. kld in nats, reference to graph; top1_agreement as a share;
    argmax_flips: tokens of the text whose top token differs.

    grid: rows of {query, past, kld_mean, top1_agreement, max_abs_error}. The text's figures are the ones that gate.
    """

    kld_mean: float
    kld_max: float
    top1_agreement: float
    max_abs_error: float
    argmax_flips: int
    n_tokens: int
    grid: tuple[dict[str, float], ...]

    def to_json(self) -> dict[str, Any]:
        """As bundle.json holds it, rounded so that the last bits of a machine do not show."""
        values = asdict(self)
        values["grid"] = [{key: rounded(value) for key, value in row.items()} for row in self.grid]
        return {key: rounded(value) for key, value in values.items()}


class Runner(Protocol):
    """The graph that is judged."""

    def forward(self, tokens: Sequence[int], past: int) -> FloatArray:
        """Logits [len(tokens), n_vocab] of `tokens` on the first `past` cached ones; a view until the next call."""


class Reference(Protocol):
    """What it is judged by: `edgespec_export.reference.ReferenceModel`, or logits that another program left."""

    def new_state(self) -> Any:
        """The state of an empty text."""

    def forward(self, tokens: Sequence[int], state: Any) -> FloatArray:
        """Logits [len(tokens), n_vocab] of `tokens` after the state's, which grows by them."""


class GraphRunner:
    """Runs a bundle's model.onnx on the CPU with one cache buffer, as a session would."""

    def __init__(self, folder: Path, config: ModelConfig, taps: Sequence[str] = (), *, n_ctx: int) -> None:
        ort = _onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(
                str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises many unrelated types
            raise ExportError(f"onnxruntime cannot load the model that was written: {error}") from error
        shape = (1, config.n_kv_heads, n_ctx, config.head_dim)
        self.config, self.taps = config, taps
        self.hidden: dict[str, FloatArray] = {}
        self._cache = {
            f"{index}.{part}": ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            for index in range(config.n_layers)
            for part in ("key", "value")
        }

    def forward(self, tokens: Sequence[int], past: int) -> FloatArray:
        """Logits [len(tokens), n_vocab] of `tokens` on the first `past` cached ones; `hidden` gets the taps."""
        binding = self._session.io_binding()
        total = past + len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_rows": np.arange(len(tokens), dtype=np.int64),
        }
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name, cache in self._cache.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", cache)
            binding.bind_ortvalue_output(f"present.{name}", cache)
        outputs = ["logits", *(f"hidden.{tap}" for tap in self.taps)]
        for name in outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        fetched = [value.numpy() for value in binding.get_outputs()[-len(outputs) :]]  # in the order of binding
        self.hidden = dict(zip(self.taps, fetched[1:], strict=True))
        logits: FloatArray = fetched[0]
        return logits


def compare(runner: Runner, reference: Reference, text: Sequence[int]) -> Parity:
    """The grid on the text's first tokens, then the whole text teacher-forced.

    Raises ExportError for NaN, infinite or all-equal logits of the graph.
    """
    grid = []
    for past in PASTS:
        for query in QUERIES:
            if past + query <= len(text):
                grid.append({"query": query, "past": past, **_cell(runner, reference, text, query, past)})
    state, parts = reference.new_state(), []
    for start in range(0, len(text), _CHUNK):
        tokens = text[start : start + _CHUNK]
        parts.append(measured_rows(reference.forward(tokens, state), runner.forward(tokens, start)))
    kld, top1, error = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Parity(
        kld_mean=float(kld.mean()),
        kld_max=float(kld.max()),
        top1_agreement=float(top1.mean()),
        max_abs_error=float(error.max()),
        argmax_flips=int((~top1).sum()),
        n_tokens=len(text),
        grid=tuple(grid),
    )


def gate(parity: Parity, bits: int, options: CheckOptions) -> None:
    """Raise ExportError where the figures are worse than allowed."""
    min_top1, max_kld = limits(bits, options)
    if parity.top1_agreement < min_top1 or not parity.kld_mean <= max_kld:
        raise ExportError(
            f"the exported model agrees with the float one on {parity.top1_agreement:.1%} of {parity.n_tokens} top"
            f" tokens (at least {min_top1:.1%} wanted) with a mean KLD of {parity.kld_mean:.4g} (at most {max_kld:.4g}"
            " wanted): use more bits or a smaller block, or lower the limits with --min-top1 and --max-kld."
        )


def limits(bits: int, options: CheckOptions) -> tuple[float, float]:
    """(least top-1 agreement, largest mean KLD) for weights of so many bits."""
    min_top1, max_kld = _LIMITS[bits]
    return (
        min_top1 if options.min_top1 is None else options.min_top1,
        max_kld if options.max_kld is None else options.max_kld,
    )


def _cell(runner: Runner, reference: Reference, text: Sequence[int], query: int, past: int) -> dict[str, float]:
    """One place of the grid: the past is filled first, then the query runs in one call."""
    state = reference.new_state()
    if past:
        reference.forward(text[:past], state)
        runner.forward(text[:past], 0)
    tokens = text[past : past + query]
    kld, top1, error = measured_rows(reference.forward(tokens, state), runner.forward(tokens, past))
    return {"kld_mean": float(kld.mean()), "top1_agreement": float(top1.mean()), "max_abs_error": float(error.max())}


def measured_rows(expected: FloatArray, found: FloatArray) -> tuple[NDArray[np.float64], NDArray[np.bool_], FloatArray]:
    """Per row: KLD in nats, whether the top tokens agree, largest difference of a logit."""
    _check_logits(found)
    log_expected, log_found = _log_softmax(expected), _log_softmax(found)
    kld = (np.exp(log_expected) * (log_expected - log_found)).sum(axis=-1)
    same = expected.argmax(axis=-1) == found.argmax(axis=-1)
    return np.maximum(kld, 0), same, np.abs(expected - found).max(axis=-1)


def _check_logits(logits: FloatArray) -> None:
    if not np.isfinite(logits).all():
        row = int(np.flatnonzero(~np.isfinite(logits).all(axis=-1))[0])
        raise ExportError(f"the exported model gives NaN or infinite logits (row {row}): the weights are damaged.")
    flat = logits.max(axis=-1) == logits.min(axis=-1)
    if flat.any():
        value = float(logits[int(np.flatnonzero(flat)[0]), 0])
        raise ExportError(f"the exported model gives the same logit {value} for every token: the weights are damaged.")


def _log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "checking an export runs it with onnxruntime: `pip install 'edgespec[export]'`, or use --no-check."
        ) from error
    return onnxruntime
