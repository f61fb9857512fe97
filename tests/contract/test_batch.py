"""Aligned sequences run together are the sequences run one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contract_cases import exported

from edgespec.backends import load_model
from edgespec.backends.onnx.batch import BatchSession
from edgespec.backends.onnx.model import OnnxModel
from edgespec.errors import CacheError, ConfigError
from edgespec.testing.onnx_models import write_bundle, write_feature_draft, write_genai

TOKENS = np.random.default_rng(9).integers(0, 64, (5, 40))


def load(folder: Path, **options: bool) -> OnnxModel:
    model = load_model(folder, threads=1, **options)
    assert isinstance(model, OnnxModel)
    return model


@pytest.fixture(scope="module", params=[32, 4])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    return load(write_bundle(tmp_path_factory.mktemp("batch"), bits=request.param, tree=True))


@pytest.mark.parametrize("family", ["llama-biased", "qwen3"])
def test_a_batch_on_an_exported_bundle(tmp_path: Path, family: str) -> None:
    model = load(exported(tmp_path, family))
    session = BatchSession(model, 3, 30)
    session.forward(TOKENS[:3, :20])
    rows = session.forward(TOKENS[:3, 20:22], taps=["layer.2"])
    for index in range(3):
        single = model.open_session()
        single.forward(TOKENS[index, :20].tolist())
        own = single.forward(TOKENS[index, 20:22].tolist(), taps=["layer.2"])
        np.testing.assert_allclose(rows.logits[index], own.logits[-1], atol=1e-4)
        np.testing.assert_allclose(rows.hidden["layer.2"][index], own.hidden["layer.2"], atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_batch_is_its_sequences(model: OnnxModel, batch: int) -> None:
    session = BatchSession(model, batch, 40)
    singles = [model.open_session() for _ in range(batch)]
    done = 0
    for width in (7, 1, 1, 6, 1):
        piece = TOKENS[:batch, done : done + width]
        rows = session.forward(piece, taps=["final"])
        assert rows.logits.shape == (batch, 64)
        for index, single in enumerate(singles):
            own = single.forward(piece[index].tolist(), taps=["final"])
            np.testing.assert_allclose(rows.logits[index], own.logits[-1], atol=0.05)
            np.testing.assert_allclose(rows.hidden["final"][index], own.hidden["final"], atol=0.05)
        done += width
        assert session.n_past == done
    session.keep(0)
    again = session.forward(TOKENS[:batch, 10:20]).logits
    np.testing.assert_allclose(again[0], model.open_session().forward(TOKENS[0, 10:20].tolist()).logits[-1], atol=0.05)


def test_calls_that_do_not_fit(model: OnnxModel) -> None:
    session = BatchSession(model, 2, 10)
    for tokens in (TOKENS[:3, :4], TOKENS[0, :4], TOKENS[:2, :0]):
        with pytest.raises(ConfigError, match=r"a call takes \[2, 1 or more\]"):
            session.forward(tokens)
    session.forward(TOKENS[:2, :8])
    with pytest.raises(ConfigError, match=r"8 cached \+ 3 new tokens exceed the capacity of 10"):
        session.forward(TOKENS[:2, :3])
    with pytest.raises(ConfigError, match=r"reach outside 0\.\.63"):
        session.forward([[1], [64]])
    with pytest.raises(ConfigError, match="no tap 'middle'"):
        session.forward([[1], [2]], taps=["middle"])
    with pytest.raises(CacheError, match="cannot keep 9 of 8"):
        session.keep(9)
    session.close()
    with pytest.raises(ConfigError, match="capacity of 0"):
        session.forward([[1], [2]])


def test_models_that_take_no_batch(model: OnnxModel, tmp_path: Path) -> None:
    for batch, capacity, message in ((0, 8, "give 1 or more"), (2, 0, "allowed are 1..96"), (2, 97, "1..96")):
        with pytest.raises(ConfigError, match=message):
            BatchSession(model, batch, capacity)
    others = [
        load(model.folder.graph.parent, tree=True),
        load(write_genai(tmp_path / "genai")),
        load(write_feature_draft(tmp_path / "draft", [1, 2, 3])),
    ]
    for other in others:
        with pytest.raises(ConfigError, match=r"model\.onnx of a target"):
            BatchSession(other, 2, 8)
