"""What the matrices of a model are multiplied with: second moments of their inputs over a few thousand tokens of chat.

Owns the run of the float model over the texts, one layer at a time, so that one layer's weights and activations are in
memory and no more. It knows nothing of rounding; `gptq.py` uses the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec_export.config import ModelConfig
from edgespec_export.reference import ReferenceModel, ReferenceState

__all__ = ["Calibration"]

FloatArray = NDArray[np.float32]
# The first token of a text is an attention sink: a few hundred times the others' norm in the middle layers. Left alone
# it would be all that counts there; left out, its own error would be unbounded.
_LARGEST_ROW = 20.0  # times the median squared norm


class Calibration:
    """Second moments of every matrix's inputs, by the matrix's name, in the order in which the model multiplies."""

    def __init__(
        self, config: ModelConfig, weights: Callable[[str], FloatArray], sequences: Sequence[Sequence[int]]
    ) -> None:
        """sequences: token ids of independent texts, each within the model's context."""
        self.n_tokens = sum(map(len, sequences))
        self._config = config
        self._model = ReferenceModel(config, weights)
        self._hidden = [self._model.embed(tokens) for tokens in sequences]
        self._model.forget()
        self._n_done = 0
        self._moments: dict[str, NDArray[np.float64]] = {}

    def moments(self, name: str) -> NDArray[np.float64]:
        """[k, k] mean of x x^T over the inputs x of `name` ("layers.3.mlp.down_proj", "lm_head").

        Names must be asked for in the order of the layers: earlier layers are forgotten as the model moves on.
        """
        name = _first_with_same_input(name)
        while name not in self._moments:
            assert self._n_done <= self._config.n_layers, name
            self._advance()
        return self._moments[name]

    def _advance(self) -> None:
        """Run the texts through the next layer, or to the head after the last one."""
        rows: dict[str, list[FloatArray]] = {}

        def observe(name: str, inputs: FloatArray) -> None:
            if name == _first_with_same_input(name):
                rows.setdefault(name, []).append(inputs)

        self._model.observe = observe
        if self._n_done == self._config.n_layers:
            rows["lm_head"] = [self._model.final(hidden) for hidden in self._hidden]
        else:
            for index, hidden in enumerate(self._hidden):
                self._hidden[index] = self._model.layer(self._n_done, hidden, ReferenceState(self._config))
        self._model.observe = None
        self._model.forget()
        self._moments = {name: second_moments(np.concatenate(parts)) for name, parts in rows.items()}
        self._n_done += 1


def second_moments(inputs: FloatArray) -> NDArray[np.float64]:
    """Mean of x x^T over the rows of [n, k] inputs; rows far longer than most are shortened first."""
    if not np.isfinite(inputs).all():
        raise ExportError(
            "the float model gives NaN or infinite values on the calibration text: quantizer gptq cannot use it."
        )
    power = np.einsum("nk,nk->n", inputs, inputs)
    largest = np.float32(_LARGEST_ROW) * np.median(power)
    shorter = np.sqrt(np.divide(largest, power, out=np.ones_like(power), where=power > largest))
    scaled = inputs * shorter[:, None]
    result: NDArray[np.float64] = (scaled.T @ scaled).astype(np.float64) / len(inputs)
    return result


def _first_with_same_input(name: str) -> str:
    for other, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
        if name.endswith(other):
            return name.removesuffix(other) + first
    return name
