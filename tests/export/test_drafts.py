"""Trained drafts become graphs that compute their formulas, over the target's own tables; strange ones are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_reference import TAPS, DraftReference, settings, tensors, write_zoo
from edgespec_export import ExportOptions, export_model
from edgespec_export.drafts import export_draft
from edgespec_export.target_tables import TargetTables
from edgespec_export.zoo import ZooDraft
from graph_runs import Graph, branches, tree_inputs
from safetensors.numpy import load_file, save_file
from tiny_models import N_VOCAB, tiny_config, tiny_weights, write_hf

from edgespec.bundle import DRAFT_KINDS, Bundle
from edgespec.errors import ConfigError, ExportRefusedError, FormatError, IncompatibleError

RNG = np.random.default_rng(11)
VOCABULARY = np.sort(RNG.permutation(N_VOCAB)[:100])
EXTRA = RNG.integers(0, N_VOCAB, 64)
WITH_TAPS: dict[str, Any] = {"taps": TAPS, "exit_layer": 1}
GPTQ: dict[str, Any] = {"quantizer": "gptq", "search": 2, "block_size": 32, "symmetric": False, "fallback": "pad"}


def make_target(folder: Path, family: str = "llama-tied", **options: Any) -> Path:
    return export_model(
        write_hf(folder / f"{family}-source", tiny_config(family)),
        folder / family,
        ExportOptions(**{"bits": 32, **WITH_TAPS, **options}),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def make_draft(folder: Path, kind: str, target: Path, *, int8: bool = False, **options: Any) -> DraftReference:
    """Exports a random draft to folder/out; its reference holds what the zoo's tensors are worth."""
    worth = write_zoo(folder / "zoo", kind, tensors(kind), VOCABULARY, int8=int8)
    export_draft(folder / "zoo", target, folder / "out", **{"bits": 32, **options})
    tables, every = TargetTables.read(Bundle.open(target)), np.arange(N_VOCAB)
    head = tables.embedding if tables.is_tied else tables.head
    return DraftReference(worth, tables.embedding.rows(every), head.rows(every), np.concatenate([VOCABULARY, EXTRA]))


def features(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("int8", [False, True])
def test_tinydraft_computes_its_formula(int8: bool, target: Path, tmp_path: Path) -> None:
    reference = make_draft(tmp_path, "tinydraft", target, int8=int8)
    tokens = RNG.integers(0, N_VOCAB, 12)
    expected = reference.tinydraft(tokens)
    graph = Graph(tmp_path / "out/model.onnx")
    for past, n in ((0, 7), (7, 4), (11, 1)):
        found = graph.run(past, n, input_ids=tokens[None, past : past + n], extra_ids=EXTRA)["logits"]
        assert found.shape == (n, 164)
        np.testing.assert_allclose(found, expected[past : past + n], atol=1e-4)
    found = graph.run(11, 1, input_ids=tokens[None, 11:], extra_ids=EXTRA, logits_rows=np.zeros(2, np.int64))
    np.testing.assert_allclose(found["logits"], expected[[11, 11]], atol=1e-4)


def test_eagle_computes_its_formula_and_fuses_taps(target: Path, tmp_path: Path) -> None:
    reference = make_draft(tmp_path, "eagle", target)
    taps = [features(9, 64) * (1 + index) for index in range(2)]
    fused = Graph(tmp_path / "out/fuse.onnx").run(features=np.concatenate(taps, axis=-1))["hidden.fused"]
    np.testing.assert_allclose(fused, reference.fuse(taps), atol=1e-4)
    tokens = RNG.integers(0, N_VOCAB, 9)
    expected, own = reference.eagle(tokens, fused)
    graph = Graph(tmp_path / "out/model.onnx")
    for past, n in ((0, 6), (6, 3)):
        rows = slice(past, past + n)
        found = graph.run(past, n, input_ids=tokens[None, rows], features=fused[rows], extra_ids=EXTRA)
        np.testing.assert_allclose(found["logits"], expected[rows], atol=1e-4)
        np.testing.assert_allclose(found["hidden.own"], own[rows], atol=1e-4)


@pytest.mark.parametrize("kind", ["tinydraft", "eagle"])
def test_tree_calls_equal_each_branch_alone(kind: str, target: Path, tmp_path: Path) -> None:
    make_draft(tmp_path, kind, target)
    parents, tokens, rows = [-1, 0, 0, 1], RNG.integers(0, N_VOCAB, (1, 9)), features(9, 64)
    tree, model = Graph(tmp_path / "out/tree.onnx"), Graph(tmp_path / "out/model.onnx")
    feeds = {"input_ids": tokens[:, :5], "features": rows[:5], "extra_ids": EXTRA}
    tree.run(0, 5, **feeds, **tree_inputs(range(-1, 4), 0))
    model.run(0, 5, **feeds)
    feeds = {"input_ids": tokens[:, 5:], "features": rows[5:], "extra_ids": EXTRA}
    found = tree.run(5, 4, **feeds, **tree_inputs(parents, 5))
    for path in branches(parents):
        feeds = {"input_ids": tokens[:, 5:][:, path], "features": rows[5:][path], "extra_ids": EXTRA}
        for name, values in model.run(5, len(path), **feeds).items():
            np.testing.assert_allclose(found[name][path], values, atol=1e-4)


def test_medusa_computes_its_formula(target: Path, tmp_path: Path) -> None:
    reference = make_draft(tmp_path, "medusa", target)
    taps = [features(64), features(64)]
    graph = Graph(tmp_path / "out/model.onnx")
    assert "logits_rows" not in graph.inputs
    found = graph.run(input_ids=np.array([[17]]), features=np.concatenate(taps)[None], extra_ids=EXTRA)["logits"]
    np.testing.assert_allclose(found, reference.medusa(17, taps), atol=1e-4)


def test_exit_computes_its_formula(target: Path, tmp_path: Path) -> None:
    reference = make_draft(tmp_path, "exit", target)
    stream = features(5, 64) * 3
    found = Graph(tmp_path / "out/model.onnx").run(features=stream, extra_ids=EXTRA)["logits"]
    np.testing.assert_allclose(found, reference.exit(stream), atol=1e-4)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.05), (4, 0.6)])
def test_rounded_drafts_stay_close_and_are_the_same_bytes(
    kind: str, bits: int, limit: float, target: Path, tmp_path: Path
) -> None:
    reference = make_draft(tmp_path, kind, target, int8=True, bits=bits)
    tokens, rows, tap = RNG.integers(0, N_VOCAB, 6), features(6, 64), features(64)
    expected = {
        "tinydraft": lambda: reference.tinydraft(tokens),
        "eagle": lambda: reference.eagle(tokens, rows)[0],
        "medusa": lambda: reference.medusa(int(tokens[0]), [tap, tap]),
        "exit": lambda: reference.exit(rows),
    }[kind]()
    feeds = {"input_ids": tokens[None], "features": rows, "extra_ids": EXTRA}
    if kind == "medusa":
        feeds |= {"input_ids": tokens[None, :1], "features": np.concatenate([tap, tap])[None]}
    found = Graph(tmp_path / "out/model.onnx").run(0, 6, **feeds)["logits"]
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < limit
    export_draft(tmp_path / "zoo", target, tmp_path / "again", bits=bits)
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(("family", "options", "is_tied"), [
    ("llama-tied", {"bits": 4}, True),
    ("llama-tied", {"bits": 4, **GPTQ}, True),
    ("llama-tied", {"bits": 4, **GPTQ, "block_size": 128}, True),
    ("llama", {"bits": 4, "head_bits": 8}, False),
    ("llama", {"bits": 32}, False),
])  # fmt: skip
def test_tables_come_from_the_target_as_it_rounded_them(
    family: str, options: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    """A tied head that GPTQ rounded to four bits is passed over for the finer embedding."""
    made = make_target(tmp_path, family, **options)
    tables = TargetTables.read(Bundle.open(made))
    assert tables.is_tied == is_tied
    every, weights = np.arange(N_VOCAB), tiny_weights(tiny_config(family))
    for name, table in (("embed_tokens", tables.embedding), (None if is_tied else "lm_head", tables.head)):
        if name:
            error = np.abs(table.rows(every) - weights[f"{name}.weight"]).max()
            quantized = table.quantized
            assert error < {None: 1e-7, 8: 0.01, 4: 0.1}[quantized and quantized.bits]
    reference = make_draft(tmp_path, "exit", made)
    rows = features(3, 64)
    found = Graph(tmp_path / "out/model.onnx").run(features=rows, extra_ids=EXTRA)["logits"]
    np.testing.assert_allclose(found, reference.exit(rows), atol=1e-4)


def test_the_bundle_says_what_the_draft_is(target: Path, tmp_path: Path) -> None:
    for kind in DRAFT_KINDS:
        make_draft(tmp_path / kind, kind, target, bits=4)
        bundle = Bundle.open(tmp_path / kind / "out")
        about = bundle.info.draft
        assert about is not None
        assert bundle.info.n_vocab == len(VOCABULARY) + about["n_extra"] == 164
        assert about["kind"] == kind
        assert about["n_heads"] == (3 if kind == "medusa" else 1)
        assert about["taps"] == (list(TAPS) if kind in ("eagle", "medusa") else [])
        original = Bundle.open(target).info
        assert about["target"]["n_vocab"] == N_VOCAB
        assert about["target"]["tokenizer_hash"] == bundle.info.tokenizer_hash == original.tokenizer_hash
        assert about["acceptance"] == {"mean_acceptance_length": 1.0}
        assert bundle.info.exit_layer == (1 if kind == "exit" else None)
        np.testing.assert_array_equal(bundle.vocabulary(), VOCABULARY)
        assert bundle.has("tokenizer.json")
    with pytest.raises(ConfigError, match="is itself a draft"):
        export_draft(tmp_path / "exit/zoo", tmp_path / "eagle/out", tmp_path / "other")


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("eagle", {"format": "other"}, "not the config of a trained draft"),
    ("eagle", {"version": 2}, "version is '2'"),
    ("eagle", {"kind": "lookup"}, "kind is 'lookup'"),
    ("eagle", {"n_heds": 4}, "unknown key 'n_heds'"),
    ("eagle", {"n_embd": "64"}, "n_embd is '64'"),
    ("eagle", {"n_ff": "remove"}, "n_ff is 'None'"),
    ("eagle", {"n_ff": 1 << 40}, "n_ff is '1099511627776'"),
    ("eagle", {"norm_eps": -1}, "norm_eps is '-1'"),
    ("eagle", {"rope_theta": True}, "rope_theta is 'True'"),
    ("eagle", {"rope_theta": 10**400}, "rope_theta is '1000"),
    ("eagle", {"rope_scaling": [8]}, "rope_scaling is"),
    ("eagle", {"rope_scaling": {}}, "rope_scaling.kind is 'None'"),
    ("eagle", {"rope_scaling": {"kind": "longrope"}}, "rope_scaling.kind is 'longrope'"),
    ("eagle", {"rope_scaling": {"kind": "linear", "factr": 2}}, "unknown key 'rope_scaling.factr'; did you mean"),
    ("eagle", {"rope_scaling": {"kind": "linear", "factor": 0}}, "rope_scaling.factor is '0'"),
    ("eagle", {"rope_scaling": {"kind": "linear", "factor": 1e300}}, "rope_scaling.factor is '1e[+]300'"),
    ("eagle", {"rope_scaling": {"kind": "yarn", "factor": 2}}, "rope_scaling.original_ctx is 'None'"),
    ("eagle", {"rope_scaling": {"kind": "yarn", "original_ctx": 8, "truncate": 1}}, "rope_scaling.truncate is '1'"),
    ("eagle", {"rope_theta": 1.0, "rope_scaling": {"kind": "yarn", "original_ctx": 8}}, "rope_theta is '1.0'"),
    ("eagle", {"rope_scaling": {"kind": "llama3", "original_ctx": 8, "high_freq_factor": 1.0}}, "high_freq_factor is"),
    ("eagle", {"rope_scaling": {"divisors": [1.0] * 7}}, "a list of 8 positive numbers"),
    ("eagle", {"taps": []}, "at least one tap"),
    ("eagle", {"taps": ["final", "final"]}, "none twice"),
    ("eagle", {"taps": "final"}, "a list of at most 16"),
    ("eagle", {"tokenizer_hash": 3}, "tokenizer_hash is '3'"),
    ("eagle", {"acceptance": [1]}, "acceptance is"),
    ("medusa", {"taps": ["final", "layer.0"]}, "the last tap of medusa heads is 'final'"),
    ("medusa", {"n_medusa": 0}, "n_medusa is '0'"),
    ("tinydraft", {"n_layers": 1000}, "n_layers is '1000'"),
    ("exit", {"exit_layer": None}, "exit_layer is 'None'"),
])  # fmt: skip
def test_configs_that_are_not_understood_are_refused(
    kind: str, changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    write_zoo(tmp_path / "zoo", kind, tensors(kind), VOCABULARY, **changes)
    with pytest.raises(ConfigError, match=message):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"a": "\xff"}'])
def test_broken_configs_are_config_errors(content: bytes, target: Path, tmp_path: Path) -> None:
    write_zoo(tmp_path / "zoo", "exit", tensors("exit"), VOCABULARY)
    (tmp_path / "zoo/config.json").write_bytes(content)
    with pytest.raises(ConfigError):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("eagle", {"tokenizer_hash": "ab" * 32}, "trained with the tokenizer abab"),
    ("eagle", {"taps": ["layer.7", "final"]}, "needs the features layer.7.*--taps layer.7,final"),
    ("exit", {"exit_layer": 2}, "sits after 2 layers.*--exit-layer 2"),
])  # fmt: skip
def test_drafts_of_another_target_are_refused(
    kind: str, changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    write_zoo(tmp_path / "zoo", kind, tensors(kind), VOCABULARY, **changes)
    with pytest.raises(IncompatibleError, match=message):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")


@pytest.mark.parametrize(("changes", "message"), [
    ({"skip.weight": None}, "skip.weight is missing"),
    ({"skip.weight": np.zeros((64, 32), np.float16)}, r"skip.weight is \[64, 32\] and the config says \[64, 64\]"),
    ({"other.weight": np.zeros(3, np.float32)}, "other.weight is no part of it"),
    ({"skip.weight": np.full((64, 64), np.nan, np.float16)}, "NaN or infinite"),
    ({"skip.weight": np.zeros((64, 64), np.int8)}, "type I8"),
    ({"skip.weight": None, "skip.weight.int8": np.zeros((64, 64), np.int8)}, "skip.weight has no scales"),
    ({"skip.weight": None, "skip.weight.int8": np.zeros((64, 64), np.int8),
      "skip.weight.scale": np.full(64, np.inf, np.float16)}, "NaN or infinite"),
    ({"skip.weight": None, "skip.weight.int8": np.zeros((64, 64), np.int8),
      "skip.weight.scale": np.ones(3, np.float16)}, r"skip.weight.scale is \[3\]"),
    ({"vocabulary": None}, "has no 'vocabulary'"),
    ({"vocabulary": np.array([3, 2, 5], np.int32)}, "ascending order"),
    ({"vocabulary": np.array([3, 3, 5], np.int32)}, "ascending order"),
    ({"vocabulary": np.array([-1, 3], np.int32)}, "ascending order"),
    ({"vocabulary": np.array([1.0, 2.0], np.float32)}, "whole numbers are wanted"),
    ({"vocabulary": np.array([1, N_VOCAB], np.int32)}, f"drafts token {N_VOCAB}"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(
    changes: dict[str, np.ndarray | None], message: str, target: Path, tmp_path: Path
) -> None:
    write_zoo(tmp_path / "zoo", "exit", tensors("exit"), VOCABULARY)
    path = tmp_path / "zoo/weights.safetensors"
    stored = {**load_file(path), **changes}
    save_file({name: value for name, value in stored.items() if value is not None}, path)
    with pytest.raises((ExportRefusedError, IncompatibleError), match=message):  # the input is at fault
        export_draft(tmp_path / "zoo", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_with_hard_links_is_read(target: Path, tmp_path: Path) -> None:
    """onnx refuses data files with several links, as `cp -al` and backups make them; no draft could be made then."""
    linked = shutil.copytree(target, tmp_path / "linked", copy_function=os.link)
    make_draft(tmp_path, "exit", linked)
    assert Bundle.open(tmp_path / "out").info.draft


def test_cut_weights_and_empty_folders_are_refused(target: Path, tmp_path: Path) -> None:
    write_zoo(tmp_path / "zoo", "exit", tensors("exit"), VOCABULARY)
    path = tmp_path / "zoo/weights.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FormatError, match="ends after the end"):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")
    path.unlink()
    with pytest.raises(ConfigError, match=r"must hold config\.json and weights.safetensors"):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")


def test_a_bundle_in_place_is_replaced_with_force_only(target: Path, tmp_path: Path) -> None:
    make_draft(tmp_path, "exit", target)
    with pytest.raises(ExportRefusedError, match="already holds a bundle"):
        export_draft(tmp_path / "zoo", target, tmp_path / "out")
    seen: list[tuple[str, int, int]] = []
    export_draft(tmp_path / "zoo", target, tmp_path / "out", force=True, progress=lambda *step: seen.append(step))
    assert seen == [("graphs", 1, 1)]


def test_configs_of_the_trainer_are_read(tmp_path: Path) -> None:
    """The trainer writes what it knows for every kind; keys that a kind has no use for are not looked at."""
    extra = {"n_vocab": N_VOCAB, "from_layers": [0, 1], "n_layers": 0, "n_medusa": None}
    write_zoo(tmp_path / "zoo", "exit", tensors("exit"), VOCABULARY, **extra)
    draft = ZooDraft.open(tmp_path / "zoo")
    assert draft.config.exit_layer == 1
    assert set(settings("exit")) <= set(json.loads((tmp_path / "zoo/config.json").read_text()))
