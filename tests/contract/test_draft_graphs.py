"""Graphs of drafts: features beside tokens, a reduced vocabulary, graphs without a cache; trees on a target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from contract_cases import exported
from edgespec_export.drafts import export_draft
from edgespec_export.target_tables import TargetTables
from export.draft_reference import DraftReference, tensors, write_zoo

from edgespec.backends import load_model
from edgespec.backends.onnx.model import OnnxModel
from edgespec.backends.onnx.session import SharedCacheSession
from edgespec.backends.onnx.stateless import StatelessGraph
from edgespec.bundle import Bundle
from edgespec.errors import BackendError, BundleError, ConfigError
from edgespec.testing.onnx_models import write_bundle, write_feature_draft
from edgespec.testing.tiny import TinySpec, tiny_logits

SPEC = TinySpec()
VOCABULARY = [1, 4, 5, 9, 20, 33, 34, 60]
TOKENS = np.random.default_rng(4).integers(0, 64, 40).tolist()
FEATURES = np.random.default_rng(5).standard_normal((40, SPEC.n_embd)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_feature_draft(tmp_path_factory.mktemp("draft"), VOCABULARY, SPEC, tree=True)


def open_folder(folder: Path, **options: bool) -> SharedCacheSession:
    session = load_model(folder, threads=1, **options).open_session()
    assert isinstance(session, SharedCacheSession)
    return session


def truth(tokens: list[int], rows: list[int], ids: list[int]) -> np.ndarray:
    """Logits over `ids` after `tokens` with the features of `rows`."""
    return tiny_logits(SPEC, tokens, features=FEATURES[rows])[:, ids]


def test_features_go_with_their_tokens(folder: Path) -> None:
    session = open_folder(folder)
    expected = truth(TOKENS[:9], list(range(9)), VOCABULARY)
    first = session.forward(TOKENS[:4], features=FEATURES[:4]).logits[:, : len(VOCABULARY)].copy()
    second = session.forward(TOKENS[4:9], features=FEATURES[4:9], taps=["own"])
    np.testing.assert_allclose(first, expected[:4], atol=1e-4)
    np.testing.assert_allclose(second.logits[:, : len(VOCABULARY)], expected[4:], atol=1e-4)
    assert second.hidden["own"].shape == (5, SPEC.n_embd)
    session.keep(4)
    again = session.forward([7, 8], features=FEATURES[[20, 21]], logits_rows=[1]).logits
    expected = truth([*TOKENS[:4], 7, 8], [0, 1, 2, 3, 20, 21], VOCABULARY)
    np.testing.assert_allclose(again[0, : len(VOCABULARY)], expected[-1], atol=1e-4)


def test_trees_over_features(folder: Path) -> None:
    for prefix in (0, 1, 6):
        session = open_folder(folder, tree=True)
        if prefix:
            session.forward(TOKENS[:prefix], features=FEATURES[:prefix])
        parents = [-1, 0, 0, 2, -1]
        at = list(range(30, 35))
        rows = session.forward([3, 4, 5, 6, 7], features=FEATURES[at], parents=parents, taps=["own"])
        assert rows.hidden["own"].shape == (5, SPEC.n_embd)
        for branch in ([0], [0, 1], [0, 2], [0, 2, 3], [4]):
            tokens = [*TOKENS[:prefix], *(3 + index for index in branch)]
            expected = truth(tokens, [*range(prefix), *(at[index] for index in branch)], VOCABULARY)
            np.testing.assert_allclose(rows.logits[branch[-1], : len(VOCABULARY)], expected[-1], atol=1e-4)


def test_features_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    session = open_folder(folder)
    with pytest.raises(ConfigError, match=r"give features \(2, 32\)"):
        session.forward([1, 2])
    with pytest.raises(ConfigError, match=r"features are \(1, 32\), the call takes \(2, 32\)"):
        session.forward([1, 2], features=FEATURES[:1])
    target = load_model(write_bundle(tmp_path), threads=1).open_session()
    with pytest.raises(ConfigError, match="takes no features"):
        target.forward([1, 2], features=FEATURES[:2])
    with pytest.raises(ConfigError, match="whole vocabulary"):
        target.set_extra([1])


def test_a_reduced_vocabulary_and_its_extra_tokens(folder: Path) -> None:
    model = load_model(folder, threads=1)
    assert isinstance(model, OnnxModel)
    assert model.vocabulary is not None
    assert (model.vocabulary.tolist(), model.info.n_vocab) == (VOCABULARY, len(VOCABULARY) + 4)
    assert model.draft is not None
    assert model.draft["kind"] == "eagle"
    session = model.open_session()
    call = {"tokens": [63], "features": FEATURES[:1]}  # a token beyond the reduced vocabulary may be read
    assert np.isneginf(session.forward(**call).logits[:, len(VOCABULARY) :]).all(), "no extra token yet"
    for extra in ([40, 2], [2, 3, 41, 63], [0], []):
        session.keep(0)
        session.set_extra(extra)
        logits = session.forward(**call).logits[0]
        ids = [*VOCABULARY, *extra]
        np.testing.assert_allclose(logits[: len(ids)], truth([63], [0], ids)[0], atol=1e-4)
        assert np.isneginf(logits[len(ids) :]).all()
    with pytest.raises(ConfigError, match="token id 64 is outside the vocabulary of 64"):
        session.forward([64], features=FEATURES[:1])


@pytest.mark.parametrize(
    ("extra", "message"),
    [([2, 3, 6, 7, 8], "at most 4"), ([64], "outside the 64"), ([-1], "outside"), ([2, 2], "twice"), ([9], "twice")],
)
def test_extra_tokens_that_do_not_fit(folder: Path, extra: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_folder(folder).set_extra(extra)


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 5], [5, 64], list(range(13))])
def test_broken_vocabularies(tmp_path: Path, ids: list[int]) -> None:
    folder = write_feature_draft(tmp_path, VOCABULARY, SPEC)
    raw = np.array(ids, "<i4").tobytes()
    (folder / "vocabulary.i32").write_bytes(raw)
    fields = json.loads((folder / "bundle.json").read_text())
    fields["files"]["vocabulary.i32"]["bytes"] = len(raw)
    (folder / "bundle.json").write_text(json.dumps(fields))
    with pytest.raises(BundleError, match=r"vocabulary\.i32"):
        load_model(folder)


def test_graphs_without_a_cache(tmp_path: Path) -> None:
    head = StatelessGraph(write_bundle(tmp_path, exit_layer=1) / "head.onnx", threads=1)
    matrix = FEATURES[:32]
    for step, n_rows in enumerate((1, 3, 1, 3, 8, 1)):
        result = head.run({"features": matrix[step : step + n_rows]})["logits"]
        expected = StatelessGraph(head.path, threads=1).run({"features": matrix[step : step + n_rows]})["logits"]
        np.testing.assert_array_equal(result, expected)
        assert head.run_s > 0
    assert head.n_runs == 6
    assert len(head._bindings) == 3
    with pytest.raises(ConfigError, match="takes features; got nothing"):
        head.run({})
    with pytest.raises(ConfigError, match=r"features has the shape \(2, 5\)"):
        head.run({"features": np.zeros((2, 5))})
    head.close()
    with pytest.raises(BackendError, match="closed"):
        head.run({"features": matrix})


def test_a_draft_without_a_cache_is_no_model(tmp_path: Path) -> None:
    folder = write_feature_draft(tmp_path, VOCABULARY)
    fields = (folder / "bundle.json").read_text()
    (folder / "bundle.json").write_text(fields.replace('"kind": "eagle"', '"kind": "medusa"'))
    with pytest.raises(ConfigError, match="kind medusa, which has no cache"):
        load_model(folder)


@pytest.mark.parametrize("tree", [False, True])
def test_an_exported_eagle_head(tmp_path: Path, tree: bool) -> None:
    """The exporter's graphs in the runtime's sessions, against the formulas in numpy."""
    target = exported(tmp_path / "target", "llama-tied")
    vocabulary = np.arange(3, 203, 2)
    worth = write_zoo(tmp_path / "zoo", "eagle", tensors("eagle"), vocabulary)
    model = load_model(export_draft(tmp_path / "zoo", target, tmp_path / "out", bits=32), threads=1, tree=tree)
    assert isinstance(model, OnnxModel)
    taps = FEATURES[:20].reshape(10, -1)[:, :64], FEATURES[20:].reshape(10, -1)
    fused = model.fuse.run({"features": np.concatenate(taps, axis=1)})["hidden.fused"].copy()
    extra = [2, 60, 262]
    table = TargetTables.read(Bundle.open(target)).embedding.rows(np.arange(264))
    expected, own = DraftReference(worth, table, table, np.array([*vocabulary, *extra])).eagle(TOKENS[:10], fused)
    session = model.open_session()
    assert isinstance(session, SharedCacheSession)
    session.set_extra(extra)
    session.forward(TOKENS[:6], features=fused[:6])
    rows = session.forward(TOKENS[6:10], features=fused[6:], taps=["own"])
    np.testing.assert_allclose(rows.logits[:, :103], expected[6:], atol=1e-4)
    np.testing.assert_allclose(rows.hidden["own"], own[6:], atol=1e-4)
    assert np.isneginf(rows.logits[:, 103:]).all()


@pytest.mark.parametrize("bits", [32, 4])
def test_a_tree_behind_a_prompt_leaves_the_prompt_as_it_is(tmp_path: Path, bits: int) -> None:
    """A first call with a tree ran the prompt's first token alone, which moved int4 logits of all its rows by units."""
    folder = write_bundle(tmp_path, bits=bits, tree=True)
    plain, tree = open_folder(folder), open_folder(folder, tree=True)
    prompt = TOKENS[:6]
    expected = plain.forward(prompt).logits.copy()
    parents = [*range(-1, 5), 5, 5, 6]
    rows = tree.forward([*prompt, 3, 4, 5], parents=parents, logits_rows=[8, 5, 0]).logits
    np.testing.assert_array_equal(rows[1:], expected[[5, 0]])
    tree.keep(6, list(range(6)))
    np.testing.assert_array_equal(tree.forward(TOKENS[6:8]).logits, plain.forward(TOKENS[6:8]).logits)
