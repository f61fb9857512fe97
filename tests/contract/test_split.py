"""A target in parts: the same numbers as the whole graph, and rows that the lower half has kept run once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import load_model
from edgespec.backends.onnx.split import SplitModel, SplitSession
from edgespec.engine.exact import probe_exact_rows
from edgespec.errors import BackendError, CacheError, ConfigError, IncompatibleError
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec
from edgespec.types import Session

SPEC = TinySpec(n_layers=3)
TOKENS = np.random.default_rng(8).integers(0, 64, 96).tolist()


@pytest.fixture(scope="module", params=[32, 4])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("split"), SPEC, bits=request.param, exit_layer=1)


@pytest.fixture
def split(folder: Path) -> SplitSession:
    session = load_model(folder, threads=1, split=True).open_session()
    assert isinstance(session, SplitSession)
    return session


@pytest.fixture
def whole(folder: Path) -> Session:
    return load_model(folder, threads=1).open_session()


def test_every_width_is_the_whole_graph_bit_for_bit(split: SplitSession, whole: Session) -> None:
    done = 0
    for width in range(1, 10):
        piece = TOKENS[done : done + width]
        found, expected = (session.forward(piece, taps=["final"]) for session in (split, whole))
        np.testing.assert_array_equal(found.logits, expected.logits)
        np.testing.assert_array_equal(found.hidden["final"], expected.hidden["final"])
        done += width
    for rows in ([], [2], [1, 3], [3, 0]):
        for session in (split, whole):
            session.keep(done)
        found, expected = (session.forward(TOKENS[50:54], logits_rows=rows) for session in (split, whole))
        np.testing.assert_array_equal(found.logits, expected.logits)


def test_kept_rows_run_once(split: SplitSession, whole: Session) -> None:
    """With exact rows, what a draft left in the lower half is what the forward pass would have computed."""
    report = probe_exact_rows(load_model(split_folder(split), threads=1, split=True))
    assert report.exact is not None
    split.exact = report.exact
    for session in (split, whole):
        session.forward(TOKENS[:20], logits_rows=())
    rng = np.random.default_rng(2)
    committed = TOKENS[:20]
    for width in range(2, 10):
        piece = rng.integers(0, 64, report.exact.width(width)).tolist()
        for token in piece[:-1]:
            split.exit_rows([token])
        before = split.n_lower_rows_run
        found, expected = (session.forward(piece) for session in (split, whole))
        assert split.n_lower_rows_run - before == report.exact.width(1), "only the last token was left to run"
        np.testing.assert_array_equal(found.logits, expected.logits)
        n_kept = int(rng.integers(1, len(piece) + 1))
        committed += piece[:n_kept]
        for session in (split, whole):
            session.keep(len(committed))
    check = load_model(split_folder(split), threads=1).open_session()
    np.testing.assert_array_equal(split.forward([1, 2]).logits, whole.forward([1, 2]).logits)
    np.testing.assert_array_equal(whole.forward([3, 4]).logits, check.forward([*committed, 1, 2, 3, 4]).logits[-2:])


def split_folder(session: SplitSession) -> Path:
    return session._head.path.parent


def test_a_forward_that_leaves_the_draft_runs_the_rest_again(split: SplitSession, whole: Session) -> None:
    """Rows of tokens that a call does not begin with must not be taken for its own."""
    for session in (split, whole):
        session.forward(TOKENS[:6])
    drafted = TOKENS[10:16]
    hidden, run_s = split.exit_rows(drafted)
    assert hidden.shape == (6, SPEC.n_embd)
    assert run_s > 0
    assert (split.n_past, split.n_ahead) == (6, 6)
    before = split.n_lower_rows_run
    piece = [*drafted[:3], 63, *drafted[4:]]
    np.testing.assert_allclose(split.forward(piece).logits, whole.forward(piece).logits, atol=0.05)
    assert split.n_lower_rows_run - before == 3
    assert (split.n_past, split.n_ahead) == (12, 0)
    split.keep(9)
    whole.keep(9)
    np.testing.assert_allclose(split.forward(TOKENS[:4]).logits, whole.forward(TOKENS[:4]).logits, atol=0.05)


def test_keep_forgets_the_rows_ahead(split: SplitSession, whole: Session) -> None:
    split.forward(TOKENS[:4])
    split.exit_rows(TOKENS[4:8])
    split.keep(4)
    assert split.n_ahead == 0
    split.exit_rows(TOKENS[40:42])
    whole.forward(TOKENS[:4])
    piece = TOKENS[40:45]
    np.testing.assert_allclose(split.forward(piece).logits, whole.forward(piece).logits, atol=0.05)


def test_the_exit_tap_is_what_exit_rows_returns(split: SplitSession) -> None:
    ahead = split.exit_rows(TOKENS[:5])[0].copy()
    split.keep(0)
    tapped = split.forward(TOKENS[:5], taps=["exit", "final"]).hidden
    np.testing.assert_allclose(tapped["exit"], ahead, atol=1e-4)
    split.keep(0)
    split.exit_rows(TOKENS[:3])
    both = split.forward(TOKENS[:5], taps=["exit"]).hidden["exit"]
    np.testing.assert_allclose(both, ahead, atol=0.05)


def test_inexact_rows_are_run_again_where_exact_ones_are_wanted(split: SplitSession) -> None:
    split.forward(TOKENS[:4])
    split.exit_rows(TOKENS[4:7])
    report = probe_exact_rows(load_model(split_folder(split), threads=1, split=True))
    split.exact = report.exact
    before = split.n_lower_rows_run
    split.forward(TOKENS[4:8])
    assert split.n_lower_rows_run - before == 4


def test_without_reuse_every_row_runs_twice(split: SplitSession) -> None:
    split.reuse = False
    split.exit_rows(TOKENS[:5])
    split.forward(TOKENS[:6])
    assert (split.n_lower_rows_run, split.n_upper_rows_run) == (11, 6)
    split.keep(0)
    split.reuse = True
    split.exit_rows(TOKENS[:5])
    split.forward(TOKENS[:6])
    assert (split.n_lower_rows_run, split.n_upper_rows_run) == (17, 12)


def test_padding_stops_at_the_context(folder: Path) -> None:
    session = load_model(folder, threads=1, n_ctx=10, split=True).open_session()
    assert isinstance(session, SplitSession)
    session.exact = probe_exact_rows(load_model(folder, threads=1, split=True)).exact
    session.forward(TOKENS[:9])
    session.exit_rows(TOKENS[9:10])
    assert session.forward(TOKENS[9:10]).logits.shape == (1, 64)
    with pytest.raises(ConfigError, match="exceed the context of 10"):
        session.exit_rows([1])


def test_bad_calls(split: SplitSession) -> None:
    for tokens, message in (([], "at least one"), ([64], "outside the vocabulary"), ([1] * 97, "exceed the context")):
        with pytest.raises(ConfigError, match=message):
            split.exit_rows(tokens)
    split.close()
    with pytest.raises(CacheError, match="closed"):
        split.exit_rows([1])


def test_sessions_share_the_model(folder: Path) -> None:
    model = load_model(folder, threads=1, split=True)
    assert isinstance(model, SplitModel)
    first, second = model.open_session(), model.open_session()
    first.exit_rows(TOKENS[:3])
    whole = load_model(folder, threads=1)
    views = first.forward(TOKENS[:5]).logits
    expected = views.copy()
    second.forward(TOKENS[20:25])
    np.testing.assert_array_equal(views, expected, "another session's call changed what this one returned")
    np.testing.assert_allclose(expected, whole.open_session().forward(TOKENS[:5]).logits, atol=0.05)
    info = model.info
    assert (info.n_vocab, info.tree, set(info.taps)) == (64, False, {"exit", "final"})
    assert info.kv_bytes_per_token == whole.info.kv_bytes_per_token
    assert model.content_key != whole.content_key
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.open_session()


def test_folders_without_the_graphs_say_how_to_get_them(tmp_path: Path) -> None:
    plain = write_bundle(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"no tree\.onnx.*--tree"):
        load_model(plain, tree=True)
    with pytest.raises(ConfigError, match=r"no lower\.onnx, upper\.onnx, head\.onnx.*--exit-layer"):
        load_model(plain, split=True)
    with pytest.raises(ConfigError, match="choose one"):
        load_model(plain, tree=True, split=True)


def test_halves_of_another_model(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, SPEC, exit_layer=1)
    data = (folder / "bundle.json").read_text()
    (folder / "bundle.json").write_text(data.replace('"n_layers": 3', '"n_layers": 4'))
    with pytest.raises(IncompatibleError, match="n_layers 4 against 3"):
        load_model(folder, split=True)
