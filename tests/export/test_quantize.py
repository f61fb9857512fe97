"""Packing against the operator itself, block sizes, row lengths, and what accuracy levels do to near ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export import CheckOptions, ExportOptions, export_model
from edgespec_export.options import BLOCK_SIZES
from edgespec_export.quantize import dequantize, plan_block, quantize
from tiny_models import tiny_config, tiny_weights, write_hf

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError, ExportError

RNG = np.random.default_rng(5)
WEIGHT = RNG.standard_normal((24, 256)).astype(np.float32)


def multiply(weight: np.ndarray, inputs: np.ndarray, bits: int, block: int, level: int, **how: Any) -> np.ndarray:
    """inputs @ weight.T by onnxruntime's MatMulNBits."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    matrix = quantize(weight, bits, block, **how)
    arrays = {"B": matrix.packed, "s": matrix.scales}
    if matrix.zero_points is not None:
        arrays["z"] = matrix.zero_points
    sizes = {"K": matrix.k, "N": matrix.n, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **sizes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "g", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": inputs})[0]
    return result


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_operator_reads_what_was_packed(bits: int, symmetric: bool, block: int) -> None:
    inputs = RNG.standard_normal((3, 256)).astype(np.float32)
    expected = inputs @ dequantize(quantize(WEIGHT, bits, block, symmetric=symmetric)).T
    found = multiply(WEIGHT, inputs, bits, block, level=1, symmetric=symmetric)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("columns", [172, 192])
def test_padded_last_blocks_multiply_right(columns: int) -> None:
    weight, inputs = WEIGHT[:, :columns], RNG.standard_normal((2, columns)).astype(np.float32)
    expected = inputs @ dequantize(quantize(weight, 4, 128)).T
    np.testing.assert_allclose(multiply(weight, inputs, 4, 128, level=1), expected, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_error_is_at_most_half_a_step(bits: int, symmetric: bool) -> None:
    matrix = quantize(WEIGHT, bits, 32, symmetric=symmetric)
    error = np.abs(dequantize(matrix) - WEIGHT).reshape(24, -1, 32).max(axis=-1)
    # the side without the extreme value has one code less, so its end may be a whole step off
    assert (error <= np.abs(matrix.scales) * 1.0001).all()
    assert np.median(error / np.abs(matrix.scales)) < 0.51


def test_searching_scales_never_hurts_and_helps_somewhere() -> None:
    for symmetric in (True, False):
        plain, searched = (
            np.square(dequantize(quantize(WEIGHT, 4, 64, symmetric=symmetric, search=steps)) - WEIGHT).sum()
            for steps in (0, 16)
        )
        assert searched < 0.95 * plain


@pytest.mark.parametrize("value", [0.0, 1e-30, -3.0])
def test_constant_blocks_keep_their_value(value: float) -> None:
    weight = np.full((2, 64), value, np.float32)
    for symmetric in (True, False):
        result = dequantize(quantize(weight, 4, 32, symmetric=symmetric))
        assert np.isfinite(result).all()
        np.testing.assert_allclose(result, weight, rtol=0.07, atol=1e-29)


@pytest.mark.parametrize("block", [8, 24, 48, 512])
def test_other_block_sizes_are_refused_with_the_ones_there_are(block: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size is {block}; use one of 16, 32, 64, 128, 256"):
        ExportOptions(block_size=block)


@pytest.mark.parametrize("n_ff", [172, 192])
def test_rows_that_blocks_do_not_divide_are_refused_before_anything_is_written(n_ff: int, tmp_path: Path) -> None:
    config = tiny_config("llama", n_ff=n_ff, n_embd=128, head_dim=32)
    source = write_hf(tmp_path / "source", config)
    options = ExportOptions(block_size=128)
    with pytest.raises(ExportError, match=rf"down_proj has rows of {n_ff} values, which blocks of 128 do not divide"):
        export_model(source, tmp_path / "out", options)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(("n_ff", "fallback", "note"), [
    (192, "smaller", "block 64 instead of 128"),
    (192, "pad", "last block of 128 padded"),
    (172, "pad", "last block of 128 padded"),
])  # fmt: skip
def test_fallbacks_are_listed_and_load(n_ff: int, fallback: str, note: str, tmp_path: Path) -> None:
    config = tiny_config("llama", n_ff=n_ff, n_embd=128, head_dim=32)
    options = ExportOptions(bits=8, block_size=128, fallback=fallback)
    limits = CheckOptions(min_top1=0.8, max_kld=0.01, n_tokens=40)
    export_model(write_hf(tmp_path / "source", config), tmp_path / "out", options, check=limits)
    notes = Bundle.open(tmp_path / "out").info.quantization["notes"]
    assert len(notes) == 2
    assert all("down_proj" in line and note in line for line in notes)


def test_a_row_that_no_block_divides_cannot_fall_back_to_a_smaller_one() -> None:
    with pytest.raises(ExportError, match="no block of 16 or more divides it"):
        plan_block(172, 128, "smaller", "w")


def test_accuracy_levels_on_an_outlier_channel_and_near_ties(capsys: pytest.CaptureFixture[str]) -> None:
    """int8 activations share a scale in a block, so a 200x channel drowns the rest there: near ties flip at level 4.

    Level 1 keeps float activations; only the rounding of weights is left, which is the same for both.
    """
    weight = WEIGHT[:2].copy()
    weight[1] = weight[0]
    weight[1, 40] += 0.05  # a near tie that one ordinary channel decides
    inputs = RNG.standard_normal((400, 256)).astype(np.float32)
    inputs[:, 33] *= 200
    exact = inputs @ dequantize(quantize(weight, 8, 32)).T
    flips = {}
    for level in (1, 4):
        found = multiply(weight, inputs, 8, 32, level)
        flips[level] = int((found.argmax(axis=-1) != exact.argmax(axis=-1)).sum())
    print(f"argmax flips of 400 against float: {flips}")
    assert "flips" in capsys.readouterr().out
    assert flips[1] <= 2
    assert flips[4] > flips[1]


@pytest.mark.parametrize("level", [0, 1, 4])
def test_the_accuracy_level_is_written_on_every_matrix(level: int, tmp_path: Path) -> None:
    import onnx

    source = write_hf(tmp_path / "source", tiny_config("llama"))
    export_model(source, tmp_path / "out", ExportOptions(accuracy_level=level))
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 2 * 4 + 1
    for node in nodes:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        assert attributes["accuracy_level"] == level
    assert Bundle.open(tmp_path / "out").info.quantization["accuracy_level"] == level


def test_outliers_in_the_weights_are_measured_and_gated(tmp_path: Path) -> None:
    """A 200x input channel: int4 loses the rest of its block, which the figures show and the gate refuses."""
    config = tiny_config("llama")
    weights = tiny_weights(config)
    for name, value in weights.items():
        if name.endswith("gate_proj.weight"):
            value[:, 5] *= 200
    source = write_hf(tmp_path / "source", config, weights)
    strict = CheckOptions(min_top1=0.95, n_tokens=64)
    with pytest.raises(ExportError, match=r"top tokens \(at least 95.0% wanted\)"):
        export_model(source, tmp_path / "int4", ExportOptions(block_size=64, fallback="smaller"), check=strict)
    loose = CheckOptions(min_top1=0, max_kld=10, n_tokens=64)
    export_model(source, tmp_path / "int8", ExportOptions(bits=8), check=loose)
    parity = Bundle.open(tmp_path / "int8").info.parity
    assert parity is not None
    assert 0 < parity["top1_agreement"] <= 1
