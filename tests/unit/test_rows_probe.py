"""The probe that tells a device whose attention is wrong from one that rounds otherwise for several rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends import load_model
from edgespec.backends.onnx.model import OnnxModel
from edgespec.backends.onnx.probe import rows_agree
from edgespec.backends.onnx.session import OnnxSession
from edgespec.errors import BackendError
from edgespec.testing.onnx_models import write_bundle, write_feature_draft
from edgespec.testing.tiny import TinySpec, tiny_logits
from edgespec.types import FloatArray

Fault = Callable[[list[int], int, FloatArray], FloatArray]  # text so far, first row, logits of the call
SPEC = TinySpec()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    found = load_model(write_bundle(tmp_path_factory.mktemp("probe")), threads=1)
    assert isinstance(found, OnnxModel)
    return found


def faulty(model: OnnxModel, fault: Fault) -> Callable[[], OnnxSession]:
    """Sessions whose calls of several rows go through `fault`."""

    def open_one() -> OnnxSession:
        session, text = model.open_session(), list[int]()
        forward = session.forward

        def wrong(tokens: Any, **options: Any) -> Any:
            first = session.n_past
            text[first:] = tokens
            rows = forward(tokens, **options)
            if len(tokens) > 1:
                rows.logits[...] = fault(text, first, rows.logits.copy())
            return rows

        session.forward = wrong  # type: ignore[method-assign]
        return session

    return open_one


def first_keys_only(n_keys: int) -> Fault:
    """Rows see the first keys and themselves, as if those between were not there."""

    def fault(text: list[int], first: int, logits: FloatArray) -> FloatArray:
        for row in range(len(logits)):
            if (at := first + row) >= n_keys:
                logits[row] = tiny_logits(SPEC, [*text[:n_keys], text[at]])[-1]
        return logits

    return fault


def rounded(share: float) -> Fault:
    def fault(text: list[int], first: int, logits: FloatArray) -> FloatArray:
        rng = np.random.default_rng(text[: first + 2])
        return logits + share * logits.std() * rng.standard_normal(logits.shape).astype(np.float32)

    return fault


def agrees(model: OnnxModel, fault: Fault) -> bool:
    return rows_agree(faulty(model, fault), model.info, SPEC.n_vocab)


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1])
def test_rounding_is_no_fault(model: OnnxModel, share: float) -> None:
    assert agrees(model, rounded(share))


@pytest.mark.parametrize("n_keys", [1, 4, 8, 16])
def test_attention_over_the_first_keys_only_is_found(model: OnnxModel, n_keys: int) -> None:
    """Five tokens and one loose limit let a GPU pass that was wrong from the fifth key on."""
    assert not agrees(model, first_keys_only(n_keys))


def test_other_faults_are_found(model: OnnxModel) -> None:
    assert not agrees(model, lambda text, first, logits: logits[::-1])
    assert not agrees(model, lambda text, first, logits: np.where(np.arange(len(logits))[:, None], logits, 0))
    assert not agrees(model, lambda text, first, logits: logits * np.nan)


def test_a_reduced_vocabulary_with_places_that_stand_for_no_token(tmp_path: Path) -> None:
    """Their logits are -inf, whose differences are no numbers."""
    draft = load_model(write_feature_draft(tmp_path, [1, 4, 5, 9, 20]), threads=1)
    assert isinstance(draft, OnnxModel)
    assert rows_agree(draft.open_session, draft.info, 64, SPEC.n_embd)


def test_a_device_that_runs_nothing_is_an_error(model: OnnxModel) -> None:
    def broken() -> OnnxSession:
        session = model.open_session()
        session.close()
        return session

    with pytest.raises(BackendError, match="tiny does not run on device 'cpu'"):
        rows_agree(broken, model.info, SPEC.n_vocab)
