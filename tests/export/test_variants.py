"""The graphs beside model.onnx compute what it computes: trees by branches, the halves and the head in turn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_export import ExportOptions, export_model
from graph_runs import Graph, branches, tree_inputs
from tiny_models import N_VOCAB, tiny_config, write_hf

from edgespec.bundle import Bundle
from edgespec.cli.export import command
from edgespec.errors import ConfigError, ExportRefusedError

RNG = np.random.default_rng(7)
PROMPT = RNG.integers(0, N_VOCAB, (1, 9))
TAPS = ("layer.0", "layer.1", "layer.2", "final")
PARENTS = [-1, 0, 0, 1, 1, 2, 5]


def export(folder: Path, family: str = "llama-tied", **options: object) -> Path:
    config = tiny_config(family, n_layers=3, windows=(None,) * 3)
    settings = {"bits": 32, "taps": TAPS, "exit_layer": 2, **options}
    return export_model(write_hf(folder / "source", config), folder / "out", ExportOptions(**settings))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_tree_call_equals_each_branch_alone(family: str, tmp_path: Path) -> None:
    out = export(tmp_path, family)
    tokens = RNG.integers(0, N_VOCAB, (1, len(PARENTS)))
    tree, model = Graph(out / "tree.onnx"), Graph(out / "model.onnx")
    tree.run(0, 9, input_ids=PROMPT, **tree_inputs(range(-1, 8), 0))
    model.run(0, 9, input_ids=PROMPT)
    found = tree.run(9, len(PARENTS), input_ids=tokens, **tree_inputs(PARENTS, 9))
    for path in branches(PARENTS):
        expected = model.run(9, len(path), input_ids=tokens[:, path])
        for name, values in expected.items():
            np.testing.assert_allclose(found[name][path], values, atol=1e-4, err_msg=f"{name} of {path}")
    other = tree.run(9, len(PARENTS), input_ids=tokens, **tree_inputs(range(-1, 6), 9))
    assert np.abs(other["logits"] - found["logits"]).max() > 1e-2, "the tree inputs change nothing"


@pytest.mark.parametrize("options", [{}, {"bits": 4, "block_size": 16}])
def test_halves_and_head_equal_the_whole_to_the_bit(options: dict[str, int], tmp_path: Path) -> None:
    out = export(tmp_path, **options)
    lower = Graph(out / "lower.onnx")
    upper, head, model = Graph(out / "upper.onnx", lower.cache), Graph(out / "head.onnx"), Graph(out / "model.onnx")
    assert "past_key_values.1.key" in lower.inputs
    assert "past_key_values.2.key" in upper.inputs
    assert len(upper.cache) == 6, "the halves hold layers of their own"
    for past, n in ((0, 9), (9, 3), (12, 1)):
        tokens = RNG.integers(0, N_VOCAB, (1, n))
        expected = model.run(past, n, input_ids=tokens)
        below = lower.run(past, n, input_ids=tokens)
        above = upper.run(past, n, features=below["hidden.exit"])
        logits = head.run(features=above["hidden.final"])["logits"]
        found = {**below, **above, "logits": logits}
        assert set(found) == {*expected, "hidden.exit"}
        np.testing.assert_array_equal(found["hidden.exit"], expected["hidden.layer.1"])
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_batch_equals_its_rows(tmp_path: Path) -> None:
    out = export(tmp_path, "qwen3", taps=("final",))
    model = Graph(out / "model.onnx")
    rows = RNG.integers(0, N_VOCAB, (3, 5))
    shape = (3, 2, 16, 32)
    feeds = {name: np.zeros(shape, np.float32) for name in model.inputs if name.startswith("past")}
    feeds |= {"input_ids": rows, "seqlens_k": np.full(3, 4, np.int32), "total_sequence_length": np.array(5, np.int32)}
    names = ["logits", "hidden.final"]
    found = model.session.run(names, {**feeds, "logits_rows": np.arange(15)})
    for index, row in enumerate(rows):
        expected = model.run(0, 5, input_ids=row[None])
        for name, values in zip(names, found, strict=True):
            np.testing.assert_allclose(values[5 * index : 5 * index + 5], expected[name], atol=1e-5)


def test_weights_are_written_once(tmp_path: Path) -> None:
    whole = export(tmp_path / "whole", tree=False, exit_layer=None, taps=())
    every = export(tmp_path / "every")
    assert (whole / "model.onnx.data").read_bytes() == (every / "model.onnx.data").read_bytes()
    assert not (whole / "tree.onnx").exists()
    assert not (whole / "lower.onnx").exists()
    assert "exit_layer" not in json.loads((whole / "bundle.json").read_text())
    bundle = Bundle.open(every)
    assert bundle.info.exit_layer == 2
    assert {name for name in bundle.files if name.endswith(".onnx")} == {
        f"{name}.onnx" for name in ("model", "tree", "lower", "upper", "head")
    }


def test_halves_with_calibrated_weights_share_them(tmp_path: Path) -> None:
    """Calibration forgets earlier layers, so the other graphs cannot round a matrix anew."""
    out = export(tmp_path, quantizer="gptq", bits=4, block_size=16, search=2)
    lower = Graph(out / "lower.onnx")
    upper, model = Graph(out / "upper.onnx", lower.cache), Graph(out / "model.onnx")
    below = lower.run(0, 9, input_ids=PROMPT)
    above = upper.run(0, 9, features=below["hidden.exit"])
    np.testing.assert_array_equal(above["hidden.final"], model.run(0, 9, input_ids=PROMPT)["hidden.final"])


@pytest.mark.parametrize("exit_layer", [0, 3, -1])
def test_exits_without_layers_on_both_sides_are_refused(exit_layer: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"exit_layer is {exit_layer}"):
        export(tmp_path, exit_layer=exit_layer)


def test_command_line(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama-tied"))
    out, plain = tmp_path / "out", ["--no-check", "--block-size", "16"]
    CliRunner().invoke(command, [str(source), str(out), *plain, "--exit-layer", "1"], catch_exceptions=False)
    bundle = Bundle.open(out)
    assert bundle.info.exit_layer == 1
    assert bundle.has("tree.onnx")
    CliRunner().invoke(command, [str(source), str(out), *plain, "--no-tree", "--force"], catch_exceptions=False)
    assert {name for name in Bundle.open(out).files if name.endswith(".onnx")} == {"model.onnx"}


def test_windows_have_no_trees(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("mistral-window"))
    with pytest.raises(ExportRefusedError, match="sliding window of 8 tokens"):
        export_model(source, tmp_path / "out", ExportOptions(tree=True))
    out = export_model(source, tmp_path / "out", ExportOptions(block_size=16))
    assert not Bundle.open(out).has("tree.onnx")
