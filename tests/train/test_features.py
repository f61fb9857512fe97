"""Features on disk are what one production session gives for each row, however often the run was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_models.corpus import Corpus
from edgespec_models.features import LARGEST, STATE, dump_features
from edgespec_models.pipeline import Target

from edgespec.backends.onnx.batch import BatchSession
from edgespec.errors import ConfigError, FormatError

TAPS = ("layer.0", "final")


@pytest.fixture(scope="module")
def model(target: Target) -> Iterator[Any]:
    loaded = target.open_model()
    yield loaded
    loaded.close()


@pytest.fixture
def corpus() -> Corpus:
    tokens = np.random.default_rng(5).integers(0, 256, (7, 24)).astype(np.uint16)
    return Corpus(tokens, np.ones(tokens.shape, bool))


def opener(model: Any, corpus: Corpus) -> Callable[[int], Any]:
    return lambda n: BatchSession(model, n, corpus.length)


def test_features_are_those_of_a_single_session(model: Any, corpus: Corpus, tmp_path: Path) -> None:
    features = dump_features(opener(model, corpus), corpus, TAPS, tmp_path, target="t", batch=3)
    for tap in TAPS:
        assert features[tap].shape == (7, 24, 64)
        assert features[tap].dtype == np.float16
        assert isinstance(features[tap], np.memmap)
    session = model.open_session()
    for i, row in enumerate(corpus.tokens.tolist()):
        session.keep(0)
        hidden = session.forward(row, logits_rows=(), taps=TAPS).hidden
        for tap in TAPS:
            np.testing.assert_allclose(features[tap][i], hidden[tap], rtol=2e-3, atol=2e-3)
    session.close()


def test_interrupted_features_go_on(
    model: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec_models.features.SAVE_EVERY", 1)
    whole = dump_features(opener(model, corpus), corpus, TAPS, tmp_path / "whole", target="t", batch=2)
    n_rows: list[int] = []

    class Failing(BatchSession):
        def forward(self, tokens: Any, taps: Any = ()) -> Any:
            if sum(n_rows) >= 4:
                raise KeyboardInterrupt
            n_rows.append(len(tokens))
            return super().forward(tokens, taps)

    with pytest.raises(KeyboardInterrupt):
        dump_features(lambda n: Failing(model, n, 24), corpus, TAPS, tmp_path / "broken", target="t", batch=2)
    seen: list[tuple[str, float]] = []
    broken = dump_features(
        opener(model, corpus),
        corpus,
        TAPS,
        tmp_path / "broken",
        target="t",
        batch=2,
        progress=lambda stage, done, total: seen.append((stage, done)),
    )
    assert [done for _, done in seen] == [6, 7], "what was there was computed again"
    for tap in TAPS:
        np.testing.assert_array_equal(broken[tap], whole[tap])


def test_finished_features_need_no_model(model: Any, corpus: Corpus, tmp_path: Path) -> None:
    dump_features(opener(model, corpus), corpus, TAPS, tmp_path, target="t")

    def fail(n: int) -> Any:
        raise AssertionError("opened a session")

    dump_features(fail, corpus, ("final",), tmp_path, target="t")


def test_another_tap_is_added(model: Any, corpus: Corpus, tmp_path: Path) -> None:
    before = dump_features(opener(model, corpus), corpus, ("final",), tmp_path, target="t")["final"].copy()
    both = dump_features(opener(model, corpus), corpus, ("final", "layer.1"), tmp_path, target="t")
    np.testing.assert_array_equal(both["final"], before)
    assert np.abs(both["layer.1"]).sum(-1).all()


def test_features_of_another_corpus_or_target_are_refused(model: Any, corpus: Corpus, tmp_path: Path) -> None:
    dump_features(opener(model, corpus), corpus, TAPS, tmp_path, target="t")
    other = Corpus(corpus.tokens + 1, corpus.assistant)
    with pytest.raises(ConfigError, match="another corpus"):
        dump_features(opener(model, corpus), other, TAPS, tmp_path, target="t")
    with pytest.raises(ConfigError, match="another target"):
        dump_features(opener(model, corpus), corpus, TAPS, tmp_path, target="u")
    (tmp_path / STATE).write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        dump_features(opener(model, corpus), corpus, TAPS, tmp_path, target="t")


def test_values_beyond_float16_are_clipped(corpus: Corpus, tmp_path: Path) -> None:
    """A residual stream may have single channels beyond 65,504: they became infinite."""

    class Large:
        def __init__(self, n: int) -> None:
            self.n = n

        def keep(self, n_past: int) -> None: ...

        def close(self) -> None: ...

        def forward(self, tokens: Any, taps: Any) -> Any:
            hidden = np.full((*tokens.shape, 3), -1e6, np.float32)
            return type("Rows", (), {"hidden": dict.fromkeys(taps, hidden)})()

    features = dump_features(Large, corpus, TAPS, tmp_path, target="t")
    assert (features["final"] == np.float16(-LARGEST)).all()
