"""Corpora on disk: what is written comes back, the same content gives the same bytes, anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from edgespec_models.corpus import FORMAT, Corpus, JoinedRows, Parts, recipe_path, token_dtype

from edgespec.errors import ConfigError, FormatError


def corpus(n: int = 10, length: int = 20, dtype: type = np.uint16) -> Corpus:
    rng = np.random.default_rng(0)
    return Corpus(rng.integers(0, 99, (n, length)).astype(dtype), rng.random((n, length)) < 0.5, {"format": FORMAT})


def test_saved_corpus_comes_back(tmp_path: Path) -> None:
    written = corpus(dtype=np.uint32)
    written.save(tmp_path / "c.safetensors")
    read = Corpus.load(tmp_path / "c.safetensors")
    assert read.tokens.dtype == np.uint32
    np.testing.assert_array_equal(read.tokens, written.tokens)
    np.testing.assert_array_equal(read.assistant, written.assistant)
    assert read.recipe == {"format": FORMAT}
    assert read.hash == written.hash


def test_same_content_same_bytes_readable_by_all(tmp_path: Path) -> None:
    """The library's own save_file leaves files that only their owner may read."""
    for name in ("a", "b"):
        corpus().save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    probe = tmp_path / "probe"
    probe.write_text("")
    assert (tmp_path / "a.safetensors").stat().st_mode == probe.stat().st_mode


def test_hash_sees_tokens_and_mask() -> None:
    base, other = corpus(), corpus()
    other.assistant[3, 4] ^= True
    third = corpus()
    third.tokens[3, 4] += 1
    assert len({base.hash, other.hash, third.hash}) == 3


def test_npz_loads_without_a_recipe(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", tokens=corpus().tokens, assistant=corpus().assistant)
    read = Corpus.load(tmp_path / "c.npz")
    assert read.recipe is None
    assert read.hash == corpus().hash


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"tokens": np.zeros((4, 8), np.uint16)}, "tokens and assistant"),
        ({"tokens": np.zeros((4, 8), np.int64), "assistant": np.zeros((4, 8), bool)}, "int64"),
        ({"tokens": np.zeros((4, 8), np.uint16), "assistant": np.zeros((4, 7), bool)}, r"\(4, 7\)"),
        ({"tokens": np.zeros((1, 8), np.uint16), "assistant": np.zeros((1, 8), bool)}, "1 rows"),
        ({"tokens": np.array([[{}]]), "assistant": np.zeros((1, 1), bool)}, "cannot be read"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], word: str) -> None:
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(FormatError, match=word):
        Corpus.load(tmp_path / "c.npz")


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FormatError, match="cannot be read"):
        Corpus.load(tmp_path / "c.safetensors")
    with pytest.raises(ConfigError, match="no corpus"):
        Corpus.load(tmp_path / "absent.npz")
    corpus().save(tmp_path / "d.safetensors")
    recipe_path(tmp_path / "d.safetensors").write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="no recipe"):
        Corpus.load(tmp_path / "d.safetensors")
    with pytest.raises(ConfigError, match=r"\.safetensors"):
        corpus().save(tmp_path / "c.npz")


def test_tokens_of_another_vocabulary_are_refused() -> None:
    c = corpus()
    c.check_vocabulary(99, None)
    with pytest.raises(ConfigError, match="end at 49"):
        c.check_vocabulary(50, None)
    named = Corpus(c.tokens, c.assistant, {"format": FORMAT, "tokenizer_hash": "a" * 64})
    with pytest.raises(ConfigError, match="another tokenizer"):
        named.check_vocabulary(99, "b" * 64)


def test_some_rows_are_held_out() -> None:
    assert corpus(2).n_held_out == 1
    assert corpus(100).n_held_out == 4
    assert corpus(10_000, 2).n_held_out == 64


def test_parts_go_on_only_with_the_same_settings(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "c.safetensors")
    recipe = {"format": FORMAT, "settings": {"seed": 1, "temps": (0.0, 1.0)}, "script": [1]}
    assert parts.begin(recipe) == {**recipe, "settings": {"seed": 1, "temps": [0.0, 1.0]}}
    assert parts.begin({**recipe, "script": [2]}, free=("script",))["script"] == [1]
    with pytest.raises(ConfigError, match="begun with script"):
        parts.begin({**recipe, "script": [2]})
    with pytest.raises(ConfigError, match="begun with settings"):
        parts.begin({**recipe, "settings": {"seed": 2}})
    parts.write(0, {"tokens": corpus().tokens})
    assert parts.read(1) is None
    found = parts.read(0)
    assert found is not None
    np.testing.assert_array_equal(found["tokens"], corpus().tokens)
    parts.remove()
    assert not parts.folder.exists()


def test_token_types() -> None:
    assert token_dtype(1 << 16) is np.uint16
    assert token_dtype((1 << 16) + 1) is np.uint32


def test_recipe_is_readable_json(tmp_path: Path) -> None:
    corpus().save(tmp_path / "c.safetensors")
    assert json.loads((tmp_path / "c.json").read_text()) == {"format": FORMAT}


def test_corpora_are_joined_row_by_row() -> None:
    """Held-out rows of each stay held out, alternate at the end, and features follow their rows."""
    rng = np.random.default_rng(0)
    corpora = []
    for n in (60, 110):
        tokens = rng.integers(0, 500, (n, 24)).astype(np.uint16)
        corpora.append(Corpus(tokens, rng.random((n, 24)) < 0.5))
    joined = Corpus.join(corpora)
    assert len(joined) == 170
    assert [corpus.n_held_out for corpus in (*corpora, joined)] == [2, 4, 6]
    assert joined.sources is not None
    assert joined.sources[-6:].tolist() == [[0, 58], [1, 106], [0, 59], [1, 107], [1, 108], [1, 109]]
    assert sorted(map(tuple, joined.sources.tolist())) == [(c, r) for c, n in enumerate((60, 110)) for r in range(n)]
    rows = np.array([0, 80, 167])
    features = JoinedRows([corpus.tokens for corpus in corpora], joined.sources)
    assert features.shape == (170, 24)
    np.testing.assert_array_equal(features[rows], joined.tokens[rows])
    np.testing.assert_array_equal(joined.assistant[-1], corpora[1].assistant[-1])


def test_corpora_of_different_lengths_do_not_join() -> None:
    """One line names the lengths."""
    short, long = (Corpus(np.zeros((4, n), np.uint16), np.ones((4, n), bool), None, Path(f"{n}.npz")) for n in (16, 24))
    with pytest.raises(ConfigError, match=r"16\.npz 16, 24\.npz 24"):
        Corpus.join([short, long])


def test_a_single_corpus_is_itself() -> None:
    """Nothing is copied where there is nothing to join."""
    corpus = Corpus(np.zeros((4, 16), np.uint16), np.ones((4, 16), bool))
    assert Corpus.join([corpus]) is corpus
