"""How far graphs of fixed shapes are from the float model: on the CPU, and on an NPU or its emulator if there is one.

Owns the two measurements and what is said of them; the measures and the gate are `parity.py`'s. The NPU's runs in a
child, for a vendor's library may crash.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgespec.backends import load_model
from edgespec.backends.onnx.contexts import compiler, run_child
from edgespec.backends.onnx.devices import find_device
from edgespec.backends.onnx.npu_child import RESULT
from edgespec.backends.onnx.providers import locate
from edgespec.backends.onnx.static import StaticSession
from edgespec.errors import BackendError, ExportError, MissingDependencyError
from edgespec_export.config import ModelConfig
from edgespec_export.parity import CheckOptions, FloatArray, compare, gate, measured_rows, rounded
from edgespec_export.reference import ReferenceModel
from edgespec_export.texts import check_tokens

__all__ = ["NPU", "Checked", "measured"]

NPU = "qnn:htp"
# Whose limits hold on the CPU. There fp16 is float; w8a16 has one scale for a whole matrix, which is coarser than 8
# bits in blocks: four layers of SmolLM2 agree on 86 % of top tokens, with a KLD of 0.04.
_LIMITS_OF = {"fp16": 32, "w8a16": 4}
# Of the text, and as many random ones, which are further from what a calibration saw. The emulator takes a quarter of a
# second for a step of four small layers.
NPU_TOKENS = 16
# Some other text is worse than those: the error that is stated is this many times the largest that was seen.
STATED = 2.0


@dataclass(frozen=True)
class Checked:
    """The float model. config: of the text's tokens; extra: those of a draft's last logits columns while it is checked.

    n_columns: logits columns that stand for a token.
    """

    config: ModelConfig
    reference: ReferenceModel
    extra: tuple[int, ...]
    n_columns: int


class _Runner:
    """A bundle's session as `compare` wants it."""

    def __init__(self, folder: Path, checked: Checked) -> None:
        self._session = cast(StaticSession, load_model(folder).open_session())
        self._n_columns = checked.n_columns
        if checked.extra:
            self._session.set_extra(checked.extra)

    def forward(self, tokens: Sequence[int], past: int) -> FloatArray:
        self._session.keep(past)
        logits: FloatArray = self._session.forward(tokens).logits[:, : self._n_columns]
        return logits


def measured(folder: Path, checked: Checked, dtype: str, check: CheckOptions) -> dict[str, Any]:
    """The figures for bundle.json: those of the CPU, and under `npu` those of the NPU (None where there is none).

    The bundle in `folder` is complete but for them. Raises ExportError where either is worse than allowed.
    """
    text = check_tokens(folder, checked.config, check.n_tokens)
    parity = compare(_Runner(folder, checked), checked.reference, text)
    gate(parity, _LIMITS_OF[dtype], check)
    return {**parity.to_json(), "npu": _on_npu(folder, checked, text[:NPU_TOKENS])}


def _on_npu(folder: Path, checked: Checked, text: Sequence[int]) -> dict[str, Any] | None:
    try:
        device = find_device(NPU)
    except (MissingDependencyError, BackendError):
        return None
    noise = np.random.default_rng(1).integers(0, checked.config.n_vocab, len(text)).tolist()
    texts = [list(text), noise]
    expected = np.concatenate([checked.reference.forward(tokens) for tokens in texts])
    found, nodes = npu_logits(folder, texts, checked.extra)
    kld, top1, error = measured_rows(expected, found[:, : checked.n_columns])
    worst = float(error.max())
    if not top1.any():
        raise ExportError(
            f"on {device.name} none of {len(top1)} top tokens is the float model's, and logits differ by up to"
            f" {worst:.3g}: export with --dtype fp16, or with a calibration text more like what the model will see."
        )
    values = {
        "kld_mean": float(kld.mean()),
        "kld_max": float(kld.max()),
        "top1_agreement": float(top1.mean()),
        "max_abs_error": worst,
        "stated_error": STATED * worst,
        "max_abs_logit": float(np.abs(expected).max()),
    }
    facts = {"device": device.name, "is_emulated": locate(device).is_emulated, "compiler": compiler(), "nodes": nodes}
    return {**facts, "n_tokens": len(top1), **{key: rounded(value) for key, value in values.items()}}


def npu_logits(folder: Path, texts: Sequence[Sequence[int]], extra: Sequence[int]) -> tuple[FloatArray, dict[str, int]]:
    """(logits [all tokens, n_vocab] of the bundle in `folder` on the NPU, nodes by provider), run in a child.

    Raises BackendError where it fails or crashes.
    """
    with tempfile.TemporaryDirectory(prefix="edgespec-npu-") as name:
        request = {
            "task": "run",
            "bundle": str(folder),
            "device": NPU,
            "options": {},
            "texts": [list(text) for text in texts],
            "extra": list(extra),
            "out": name,
        }
        run_child(request, f"the run on {NPU}")
        result = json.loads((Path(name) / RESULT).read_bytes())
        return np.load(Path(name) / "logits.npy"), result["nodes"]
