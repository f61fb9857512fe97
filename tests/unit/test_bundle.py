"""A bundle is whole, unaltered, and reaches nothing outside of its folder; and it can be moved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.bundle import Bundle, write_bundle
from edgespec.errors import BundleError
from edgespec.onnxfile import external_locations

INFO: dict[str, Any] = {
    "name": "tiny",
    "architecture": "llama",
    "flavour": "cpu",
    "n_vocab": 8,
    "n_ctx": 16,
    "n_layers": 1,
    "n_embd": 4,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 4,
    "eos_ids": [2, 5],
    "bos_id": None,
    "add_bos": False,
    "tokenizer_hash": None,
    "sliding_window": None,
    "quantization": {"bits": 32},
    "taps": ["final"],
    "parity": None,
    "source": {"format": "gguf"},
}


DRAFT: dict[str, Any] = {
    "kind": "eagle",
    "taps": ["layer.0", "final"],
    "n_heads": 1,
    "n_extra": 2,
    "target": {"name": "big", "n_embd": 4, "n_vocab": 12, "tokenizer_hash": None},
    "acceptance": None,
}


def write_onnx(
    folder: Path, location: str = "model.onnx.data", where: str = "initializer", name: str = "model.onnx"
) -> None:
    """y = x + w, with w in an external file; `where` puts the tensor into an attribute or a subgraph instead."""
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    nodes, initializers = [helper.make_node("Add", ["x", "w"], ["y"])], [weight]
    if where == "attribute":
        nodes, initializers = [helper.make_node("Constant", [], ["w"], value=weight), *nodes], []
    if where == "subgraph":
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["z"])], "inner", [], values[1:], [weight])
        nodes = [helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)]
        initializers = []
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (folder / name).write_bytes(model.SerializeToString())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write_onnx(folder)
    (folder / "model.onnx.data").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "tokenizer.json").write_text("{}")
    write_bundle(folder, INFO)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of bundle.json; None removes one."""
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest = {key: value for key, value in {**manifest, **changes}.items() if value != "remove"}
    (folder / "bundle.json").write_text(json.dumps(manifest))


def test_opens_with_its_facts(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.info.eos_ids == (2, 5)
    assert bundle.info.taps == ("final",)
    assert bundle.model_path == folder / "model.onnx"
    assert bundle.has("tokenizer.json")
    assert not bundle.has("chat_template.jinja")
    bundle.verify_hashes()
    with pytest.raises(BundleError, match="no file 'other'"):
        bundle.path("other")


def test_written_twice_is_the_same_bytes(folder: Path) -> None:
    before = (folder / "bundle.json").read_bytes()
    write_bundle(folder, dict(reversed(INFO.items())))
    assert (folder / "bundle.json").read_bytes() == before


def test_moved_to_a_folder_with_a_space_and_an_accent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    target = folder.parent / "mes modèles" / "le bundle"
    target.parent.mkdir()
    shutil.move(folder, target)
    monkeypatch.chdir(target.parent)
    for path in (target, Path("le bundle")):
        bundle = Bundle.open(path)
        bundle.verify_hashes()
        session = ort.InferenceSession(str(bundle.model_path), providers=["CPUExecutionProvider"])
        result = session.run(None, {"x": np.ones(4, np.float32)})[0]
        np.testing.assert_array_equal(result, np.arange(4) + 1)


@pytest.mark.parametrize("name", ["model.onnx.data", "model.onnx", "tokenizer.json"])
def test_a_deleted_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        Bundle.open(folder)


def test_a_cut_file_is_named_with_both_sizes(folder: Path) -> None:
    (folder / "model.onnx.data").write_bytes(b"123")
    with pytest.raises(BundleError, match=r"model\.onnx\.data has 3 bytes and bundle\.json says 16"):
        Bundle.open(folder)


def test_an_altered_file_of_the_same_size_is_found_by_its_hash(folder: Path) -> None:
    (folder / "model.onnx.data").write_bytes(bytes(16))
    with pytest.raises(BundleError, match=r"model\.onnx\.data was altered"):
        Bundle.open(folder).verify_hashes()


@pytest.mark.parametrize("where", ["initializer", "attribute", "subgraph"])
@pytest.mark.parametrize("location", ["../x", "/etc/passwd", "sub/x", "..\\x", "C:\\x", ".."])
def test_weights_outside_of_the_bundle_are_refused_by_name(folder: Path, location: str, where: str) -> None:
    """Opening a bundle used to trust the graph's own locations and leave it to the runtime to look at them."""
    (folder.parent / "x").write_bytes(bytes(16))
    write_onnx(folder, location, where)
    write_bundle(folder, INFO)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert f"'{location}', which is outside" in str(caught.value)


@pytest.mark.parametrize("name", ["tree.onnx", "fuse.onnx"])
def test_every_graph_of_a_bundle_is_looked_at(folder: Path, name: str) -> None:
    """Only model.onnx was, so that any other graph could have reached outside."""
    write_onnx(folder, name=name)
    write_bundle(folder, INFO)
    assert Bundle.open(folder).has(name)
    write_onnx(folder, "../x", name=name)
    write_bundle(folder, INFO)
    with pytest.raises(BundleError, match=f"{name} takes weights from '../x', which is outside"):
        Bundle.open(folder)


def test_bundles_without_the_optional_keys_are_targets(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert (bundle.info.draft, bundle.info.exit_layer, bundle.vocabulary()) == (None, None, None)
    write_bundle(folder, {**INFO, "exit_layer": 3, "draft": None})
    assert Bundle.open(folder).info.exit_layer == 3


def test_a_draft_has_a_vocabulary_of_its_own(folder: Path) -> None:
    (folder / "vocabulary.i32").write_bytes(np.array([0, 2, 3, 7, 8, 11], "<i4").tobytes())
    write_bundle(folder, {**INFO, "draft": DRAFT})
    bundle = Bundle.open(folder)
    ids = bundle.vocabulary()
    assert ids is not None
    assert (ids.dtype, ids.tolist()) == (np.int64, [0, 2, 3, 7, 8, 11])
    assert bundle.info.draft == DRAFT


@pytest.mark.parametrize(("ids", "message"), [
    ([0, 2, 3, 7, 8], "holds 5 token ids and bundle.json says 6"),
    ([0, 2, 3, 7, 8, 12], "ids of the target's 12 tokens"),
    ([0, 3, 2, 7, 8, 9], "ascending"),
    ([-1, 2, 3, 7, 8, 9], "ascending"),
    ([0, 0, 3, 7, 8, 9], "ascending"),
])  # fmt: skip
def test_vocabularies_that_do_not_fit_are_refused(folder: Path, ids: list[int], message: str) -> None:
    (folder / "vocabulary.i32").write_bytes(np.array(ids, "<i4").tobytes())
    write_bundle(folder, {**INFO, "draft": DRAFT})
    with pytest.raises(BundleError, match=message):
        Bundle.open(folder).vocabulary()


def test_weights_that_the_manifest_lacks_are_refused(folder: Path) -> None:
    write_onnx(folder, "other.data")
    write_bundle(folder, INFO)
    with pytest.raises(BundleError, match=r"'other\.data', which bundle\.json lacks"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", "", "a\\b", "c:x", "a\nb"])
def test_file_names_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    files = json.loads((folder / "bundle.json").read_text())["files"]
    edit(folder, files={**files, name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(BundleError, match="only plain names"):
        Bundle.open(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_that_lead_out_are_refused(folder: Path) -> None:
    outside = folder.parent / "outside.data"
    (folder / "model.onnx.data").rename(outside)
    (folder / "model.onnx.data").symlink_to(outside)
    with pytest.raises(BundleError, match=r"link to .*outside\.data, outside of the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize(("changes", "message"), [
    ({"schema_version": 2}, "schema version 2 and this edgespec reads version 1"),
    ({"schema_version": True}, "schema version True"),
    ({"format": "other"}, "belongs to another program"),
    ({"provider_options": {}}, "unknown provider_options"),
    ({"n_vocab": "remove"}, "missing n_vocab"),
    ({"n_vocab": 0}, "n_vocab = '0'"),
    ({"n_vocab": True}, "n_vocab = 'True'"),
    ({"eos_ids": ["2"]}, "eos_ids"),
    ({"taps": [1]}, "taps"),
    ({"name": None}, "name = 'None'"),
    ({"exit_layer": "3"}, "exit_layer = '3'"),
    ({"draft": []}, "draft"),
    ({"draft": {**DRAFT, "more": 1}}, "its draft is not understood.*more"),
    ({"draft": {"kind": "eagle"}}, "its draft is not understood.*acceptance"),
    ({"draft": {**DRAFT, "kind": "lookup"}}, "its draft is not understood"),
    ({"draft": {**DRAFT, "n_extra": -1}}, "its draft is not understood"),
    ({"draft": {**DRAFT, "taps": [3]}}, "taps"),
    ({"draft": {**DRAFT, "target": {}}}, "its draft is not understood"),
    ({"draft": {**DRAFT, "target": {**DRAFT["target"], "tokenizer_hash": 3}}}, "its draft is not understood"),
    ({"files": {}}, "lists no files"),
    ({"files": {"model.onnx": {"bytes": "1", "sha256": ""}}}, "size or hash"),
    ({"files": {"model.onnx": {"bytes": 1}}}, "must hold bytes and sha256"),
])  # fmt: skip
def test_manifests_that_are_not_understood_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(BundleError, match=message):
        Bundle.open(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, b'{"a": "\xff"}'])
def test_broken_manifests_are_bundle_errors(folder: Path, content: bytes) -> None:
    (folder / "bundle.json").write_bytes(content)
    with pytest.raises(BundleError):
        Bundle.open(folder)


def test_what_is_no_bundle_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="edgespec export"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match="not a folder"):
        Bundle.open(tmp_path / "nothing")


def test_every_cut_of_a_model_is_read_or_refused(folder: Path) -> None:
    content = (folder / "model.onnx").read_bytes()
    cut = folder / "cut.onnx"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        try:
            found = external_locations(cut)
        except BundleError:
            continue
        assert set(found) <= {"model.onnx.data"}


def test_writing_refuses_facts_that_could_not_be_read_back(folder: Path) -> None:
    with pytest.raises(BundleError, match="unknown threads"):
        write_bundle(folder, {**INFO, "threads": 2})
    with pytest.raises(BundleError, match="missing taps"):
        write_bundle(folder, {key: value for key, value in INFO.items() if key != "taps"})
