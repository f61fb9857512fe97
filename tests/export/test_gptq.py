"""GPTQ against the textbook recursion, against rounding, through the operator itself, and over a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from edgespec_export import CheckOptions, ExportOptions, export_model
from edgespec_export.calibration import Calibration, second_moments
from edgespec_export.exporter import KeptWeights
from edgespec_export.gptq import DAMPING, quantize_gptq
from edgespec_export.options import QUANTIZERS
from edgespec_export.parity import GraphRunner, compare
from edgespec_export.quantize import QuantizedMatrix, dequantize, quantize
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import open_source
from edgespec_export.texts import CALIBRATION_FILE, check_tokens
from tiny_models import tiny_config, write_hf

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError, ExportError

SHAPES = [(24, 172, 128), (16, 192, 128), (40, 192, 32), (12, 576, 128), (8, 256, 16)]  # n, k, block


def correlated(n_rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Inputs whose channels differ in size and depend on each other, as a model's do."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((k, k)) * rng.random(k) ** 2 / np.sqrt(k)
    return (rng.standard_normal((n_rows, k)) @ mixing).astype(np.float32)


def moments(inputs: np.ndarray) -> np.ndarray:
    return inputs.T.astype(np.float64) @ inputs / len(inputs)


def weights(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)


def output_error(inputs: np.ndarray, weight: np.ndarray, matrix: QuantizedMatrix) -> float:
    return float(np.square(inputs @ (dequantize(matrix) - weight).T).mean())


def codes(matrix: QuantizedMatrix) -> np.ndarray:
    low, high = matrix.packed & 15, matrix.packed >> 4
    return np.stack((low, high), axis=-1).reshape(matrix.n, -1)


def textbook(weight: np.ndarray, hessian: np.ndarray, matrix: QuantizedMatrix, block: int) -> np.ndarray:
    """Codes by algorithm 1 of arXiv 2210.17323, from the inverse, with the (symmetric) scales that `matrix` found."""
    damped = hessian + DAMPING * np.mean(np.diagonal(hessian)) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, found = weight.astype(np.float64), np.zeros(weight.shape, np.int64)
    for j in range(weight.shape[1]):
        scale = matrix.scales[:, j // block].astype(np.float64)
        steps = np.clip(np.rint(left[:, j] / scale), -8, 7)
        found[:, j] = steps + 8
        error = (left[:, j] - steps * scale) / upper[j, j]
        left[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
    return found


@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_are_nearer_than_by_rounding(n: int, k: int, block: int, symmetric: bool) -> None:
    inputs, weight = correlated(900, k), weights(n, k)
    matrix = quantize_gptq(weight, moments(inputs), 4, block, symmetric=symmetric)
    errors = [output_error(inputs, weight, quantize(weight, 4, block, symmetric=symmetric, search=s)) for s in (0, 16)]
    assert output_error(inputs, weight, matrix) < 0.75 * min(errors)


@pytest.mark.parametrize(("k", "block"), [(64, 32), (172, 128)])
def test_codes_are_those_of_the_textbook_recursion(k: int, block: int) -> None:
    inputs, weight = correlated(500, k), weights(20, k)
    matrix = quantize_gptq(weight, moments(inputs), 4, block, search=8)
    found = codes(matrix)[:, :k]
    # float32 sums may tip a value that lies halfway, which then changes the rest of that row
    assert (found == textbook(weight, moments(inputs), matrix, block)).all(axis=1).mean() >= 0.8


@pytest.mark.parametrize(("n", "k", "block"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_operator_reads_what_was_written(n: int, k: int, block: int, bits: int, symmetric: bool) -> None:
    inputs, weight = correlated(300, k), weights(n, k)
    matrix = quantize_gptq(weight, moments(inputs), bits, block, symmetric=symmetric, search=4)
    np.testing.assert_allclose(multiplied(matrix, inputs[:3]), inputs[:3] @ dequantize(matrix).T, atol=1e-3)


def multiplied(matrix: QuantizedMatrix, inputs: np.ndarray) -> np.ndarray:
    """inputs @ matrix.T by onnxruntime's MatMulNBits in float32."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    arrays = {"B": matrix.packed, "s": matrix.scales}
    if matrix.zero_points is not None:
        arrays["z"] = matrix.zero_points
    sizes = {"K": matrix.k, "N": matrix.n, "bits": matrix.bits, "block_size": matrix.block, "accuracy_level": 1}
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **sizes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "g", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": inputs})[0]
    return result


def test_the_same_input_gives_the_same_codes() -> None:
    inputs, weight = correlated(400, 192), weights(3000, 192)  # more rows than are taken at once
    first, second = (quantize_gptq(weight, moments(inputs), 4, 128, symmetric=False) for _ in range(2))
    for name in ("packed", "scales", "zero_points"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_rows_do_not_depend_on_each_other() -> None:
    inputs, weight = correlated(400, 64), weights(30, 64)
    whole = quantize_gptq(weight, moments(inputs), 4, 32)
    part = quantize_gptq(weight[10:20], moments(inputs), 4, 32)
    assert (codes(whole)[10:20] == codes(part)).all(axis=1).mean() >= 0.9  # sums of another order may tip a tie


def test_uncorrelated_inputs_leave_rounding_to_nearest() -> None:
    weight = weights(16, 96)
    matrix = quantize_gptq(weight, np.eye(96), 4, 32, search=0)
    np.testing.assert_array_equal(matrix.packed, quantize(weight, 4, 32).packed)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_channel_that_is_200_times_as_large_stays_right(symmetric: bool) -> None:
    inputs, weight = correlated(900, 192), weights(16, 192)
    inputs[:, 70] *= 200
    matrix = quantize_gptq(weight, moments(inputs), 4, 64, symmetric=symmetric)
    plain = quantize(weight, 4, 64, symmetric=symmetric, search=16)
    assert output_error(inputs, weight, matrix) < 0.2 * output_error(inputs, weight, plain)


def test_channels_without_input_are_rounded_as_well() -> None:
    inputs, weight = correlated(900, 128), weights(16, 128)
    inputs[:, 32:80] = 0
    matrix = quantize_gptq(weight, moments(inputs), 4, 32, symmetric=False)
    assert output_error(inputs, weight, matrix) < output_error(inputs, weight, quantize(weight, 4, 32, symmetric=False))
    dead = dequantize(matrix)[:, 32:80]  # another text may use them
    assert np.abs(dead - weight[:, 32:80]).mean() < 0.2


def test_a_matrix_without_any_input_is_rounded_to_nearest() -> None:
    weight = weights(8, 64)
    matrix = quantize_gptq(weight, np.zeros((64, 64)), 4, 32, search=0)
    np.testing.assert_array_equal(matrix.packed, quantize(weight, 4, 32).packed)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight, hessian = weights(4, 32), np.eye(32)
    damaged = weight.copy()
    damaged[2, 3] = value
    with pytest.raises(ExportError, match="weight to quantize holds NaN or infinite"):
        quantize_gptq(damaged, hessian, 4, 32)
    hessian[1, 1] = value
    with pytest.raises(ExportError, match="second moments hold NaN or infinite"):
        quantize_gptq(weight, hessian, 4, 32)
    with pytest.raises(ExportError, match="gives NaN or infinite values on the calibration text"):
        second_moments(damaged)


def test_moments_of_another_width_or_of_no_input_at_all_are_refused() -> None:
    with pytest.raises(ExportError, match=r"\[16, 16\] and the weight \[4, 32\]: \[32, 32\] is needed"):
        quantize_gptq(weights(4, 32), np.eye(16), 4, 32)
    with pytest.raises(ExportError, match="not those of any input"):
        quantize_gptq(weights(4, 32), np.eye(32) - 0.5 * np.ones((32, 32)), 4, 32)


def test_a_row_far_longer_than_the_others_counts_as_one_of_20_times_their_power() -> None:
    inputs = correlated(101, 16)
    usual = second_moments(inputs)
    inputs[0] *= 1000  # the first token of a text
    assert np.trace(second_moments(inputs)) < np.trace(usual) + 0.2 * np.median(np.square(inputs).sum(axis=1))
    np.testing.assert_allclose(usual, moments(correlated(101, 16)), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("hf"), tiny_config("llama-tied", n_ctx=96))


def test_moments_are_those_of_a_whole_forward(source: Path) -> None:
    opened = open_source(source)
    weight = KeptWeights(opened, None)
    texts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    seen: dict[str, list[np.ndarray]] = {}
    model = ReferenceModel(opened.config, weight)
    model.observe = lambda name, inputs: seen.setdefault(name, []).append(inputs)
    for tokens in texts:
        taps: dict[str, np.ndarray] = {}
        model.forward(tokens, taps=taps)
        seen.setdefault("lm_head", []).append(taps["final"])
    calibration = Calibration(opened.config, weight, texts)
    names = [
        f"layers.{i}.{part}_proj" for i in range(2) for part in ("self_attn.k", "self_attn.o", "mlp.up", "mlp.down")
    ]
    for name in [*names, "lm_head"]:
        np.testing.assert_allclose(
            calibration.moments(name), second_moments(np.concatenate(seen[name])), rtol=1e-4, atol=1e-6
        )
    assert calibration.n_tokens == 8


def test_a_whole_model(source: Path, tmp_path: Path) -> None:
    klds = {}
    for quantizer in QUANTIZERS:
        options = ExportOptions(block_size=128, symmetric=False, fallback="pad", quantizer=quantizer, embed_bits=8)
        folder = export_model(source, tmp_path / quantizer, options)
        config = open_source(source).config
        text = check_tokens(folder, config, 96)
        reference = ReferenceModel(config, open_source(source).tensor)
        klds[quantizer] = compare(GraphRunner(folder, config, n_ctx=96), reference, text).kld_mean
    assert klds["gptq"] < klds["rtn"]
    recorded = Bundle.open(tmp_path / "gptq").info.quantization
    assert recorded["quantizer"] == "gptq"
    assert recorded["search"] == 16
    assert len(recorded["calibration"]["sha256"]) == 64
    assert recorded["calibration"]["n_tokens"] > 1000
    assert Bundle.open(tmp_path / "mse").info.quantization["calibration"] is None


def test_the_same_model_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    options = ExportOptions(block_size=64, symmetric=False, fallback="pad", quantizer="gptq", search=4)
    first, second = (export_model(source, tmp_path / name, options, check=CheckOptions(n_tokens=16)) for name in "ab")
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_the_calibration_text_shares_nothing_with_what_models_are_judged_on() -> None:
    prompts = set()
    lines = CALIBRATION_FILE.read_text(encoding="utf-8").splitlines()
    for line in lines:
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        prompts |= {message["content"] for message in messages if message["role"] == "user"}
    judged = "".join(path.read_text(encoding="utf-8") for path in Path("bench/prompts").glob("*.jsonl"))
    judged += (CALIBRATION_FILE.parent / "texts.py").read_text(encoding="utf-8")
    assert len(lines) >= 40
    assert judged
    assert not [prompt for prompt in prompts if json.dumps(prompt)[1:-1] in judged or prompt in judged]


def test_a_search_without_a_quantizer_that_searches_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantizer rtn tries no scales"):
        ExportOptions(search=8)
    with pytest.raises(ConfigError, match="quantizer is best; use one of rtn, mse, gptq"):
        ExportOptions(quantizer="best")
