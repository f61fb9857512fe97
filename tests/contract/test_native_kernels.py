"""Our own kernels: what they compute, that rows do not depend on their call, and what they refuse."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgespec_export import ExportOptions, export_model
from edgespec_export.quantize import QuantizedMatrix, dequantize, quantize
from onnx import TensorProto, helper, numpy_helper

from edgespec import LLM, SamplingParams, kernels
from edgespec.backends import load_model
from edgespec.backends.onnx.devices import create_runtime, find_device
from edgespec.backends.onnx.native import with_own_operators
from edgespec.cpu import read_topology
from edgespec.engine.exact import probe_exact_rows
from edgespec.errors import BackendError, ConfigError, MissingDependencyError
from edgespec.testing.onnx_models import write_bundle

sys.path.append(str(Path(__file__).parents[1] / "export"))
from tiny_models import tiny_config, write_hf

NATIVE, OTHERS = {"kernels": "native"}, {"kernels": "onnxruntime"}
CASES = [(64, 64, 32), (48, 576, 128), (17, 40, 16), (5, 20, 32), (33, 300, 256)]  # n, k, block


def product(
    folder: Path, matrix: QuantizedMatrix, *, bias: np.ndarray | None = None, level: int = 4, op: str = "MatMulNBits"
) -> Path:
    """A model of one product, x [1, S, k] to y."""
    arrays = {"B": matrix.packed, "scales": matrix.scales.reshape(-1)}
    names = ["x", "B", "scales", "", "", ""]
    if matrix.zero_points is not None:
        arrays["zeros"], names[3] = matrix.zero_points.reshape(-1), "zeros"
    if bias is not None:
        arrays["bias"], names[5] = bias, "bias"
    while not names[-1]:
        names.pop()
    node = helper.make_node(
        op, names, ["y"], domain="com.microsoft", K=matrix.k, N=matrix.n, bits=matrix.bits, block_size=matrix.block,
        accuracy_level=level,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "S", matrix.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "S", matrix.n])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    return folder / "model.onnx"


def runner(path: Path, threads: int = 2, options: dict[str, str] | None = None) -> Callable[[np.ndarray], np.ndarray]:
    session = create_runtime(path, find_device("cpu"), threads, options=NATIVE if options is None else options)

    def run(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = session.run(None, {"x": x[None]})[0][0]
        return result

    return run


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """Rows as the kernel sees them: 8 bits with a scale a block."""
    out = np.empty_like(x)
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block]
        scale = np.abs(part).max(axis=1, keepdims=True) / 127
        out[:, start : start + block] = (
            np.rint(np.divide(part, scale, out=np.zeros_like(part), where=scale > 0)) * scale
        )
    return out


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "block"), CASES)
def test_products_are_those_of_the_weights(n: int, k: int, block: int, symmetric: bool, tmp_path: Path) -> None:
    """Sizes that fill no tile, no block and no byte too; against float64 on activations rounded in numpy."""
    rng = np.random.default_rng(n)
    matrix = quantize(rng.standard_normal((n, k)).astype(np.float32), 4, block, symmetric=symmetric)
    bias = rng.standard_normal(n).astype(np.float32)
    x = rng.standard_normal((19, k)).astype(np.float32)
    x[3] = 0
    wanted = rounded(x, block).astype(np.float64) @ dequantize(matrix).T.astype(np.float64)
    run = runner(product(tmp_path, matrix))
    # halves are rounded alike, but a quotient of floats may fall on either side of one: a step of one activation
    step = np.abs(x).max() / 127 * np.abs(dequantize(matrix)).max()
    assert np.abs(run(x) - wanted).max() < step
    assert np.median(np.abs(run(x) - wanted)) < 1e-4
    assert np.array_equal(run(x)[3], np.zeros(n))
    np.testing.assert_allclose(runner(product(tmp_path, matrix, bias=bias))(x), run(x) + bias, atol=1e-4)


def test_a_row_has_the_same_bits_in_every_call(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = quantize(rng.standard_normal((70, 576)).astype(np.float32), 4, 128, symmetric=False)
    x = rng.standard_normal((40, 576)).astype(np.float32)
    path = product(tmp_path, matrix)
    whole = runner(path)(x)
    for threads in (1, 3):
        run = runner(path, threads)
        for width in (*range(1, 18), 40):
            parts = [run(x[start : start + width]) for start in range(0, len(x), width)]
            assert np.array_equal(np.concatenate(parts), whole), (threads, width)
    assert runner(path)(x[:0]).shape == (0, 70)


def test_the_loops_that_every_cpu_can_run_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    matrix = quantize(rng.standard_normal((37, 200)).astype(np.float32), 4, 64, symmetric=False)
    x = rng.standard_normal((9, 200)).astype(np.float32)
    path = product(tmp_path, matrix)
    fast = runner(path)(x)
    plain = kernels.library(("-DPORTABLE",), tmp_path / "portable")
    monkeypatch.setattr("edgespec.backends.onnx.devices.library", lambda: plain)
    np.testing.assert_allclose(runner(path)(x), fast, atol=2e-5)


def test_what_is_no_number_stays_none(tmp_path: Path) -> None:
    """Rounding to 8 bits would make a number of it, and the check of the logits would find nothing."""
    matrix = quantize(np.ones((8, 64), np.float32), 4, 32)
    x = np.ones((3, 64), np.float32)
    x[1, 40], x[2, 3] = np.nan, np.inf
    found = runner(product(tmp_path, matrix))(x)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1:]).any()


def test_calls_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    matrix = quantize(rng.standard_normal((64, 256)).astype(np.float32), 4, 64)
    run = runner(product(tmp_path, matrix))
    inputs = [rng.standard_normal((5, 256)).astype(np.float32) for _ in range(4)]
    wanted = [run(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(index for _ in range(200) if not np.array_equal(run(inputs[index]), wanted[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_only_products_that_fit_are_replaced(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    for bits, level, count in ((4, 4, 1), (8, 4, 0), (4, 1, 0)):
        path = product(tmp_path / f"{bits}-{level}", quantize(weight, bits, 32), level=level)
        data, found = with_own_operators(path.read_bytes(), 3)
        assert found == ({"RowsProduct": 1} if count else {})
        node = onnx.load_from_string(data).graph.node[0]
        assert (node.domain, node.op_type) == (
            ("edgespec", "RowsProduct") if count else ("com.microsoft", "MatMulNBits")
        )
        assert {a.name: a.i for a in node.attribute}.get("pieces") == (3 if count else None)
    with pytest.raises(ConfigError, match="no products with 4-bit weights"):
        runner(tmp_path / "8-4" / "model.onnx")


@pytest.mark.parametrize("field", ["N", "block_size", "scales", "zeros"])
@pytest.mark.parametrize("options", [{}, NATIVE])
def test_weights_of_another_size_than_their_node_says_are_refused(
    field: str, options: dict[str, str], tmp_path: Path
) -> None:
    """Read as they are, they would give numbers from behind their end, or end the process."""
    weight = np.random.default_rng(6).standard_normal((64, 128)).astype(np.float32)
    path = product(tmp_path, quantize(weight, 4, 32, symmetric=False))
    model = onnx.load(path)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == field:
            attribute.i = {"N": 80, "block_size": 0}[field]
    for array in model.graph.initializer:
        if array.name == field:
            array.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(array)[:5], field))
    onnx.save(model, path)
    with pytest.raises(BackendError, match=r"cannot load .*model\.onnx"):
        runner(path, options=options)


def test_products_whose_zero_points_or_weights_are_of_another_kind_stay(tmp_path: Path) -> None:
    weight = np.random.default_rng(7).standard_normal((16, 64)).astype(np.float32)
    path = product(tmp_path, quantize(weight, 4, 32, symmetric=False))
    floats, input_ = onnx.load(path), onnx.load(path)
    zeros = next(array for array in floats.graph.initializer if array.name == "zeros")
    zeros.CopyFrom(numpy_helper.from_array(np.full(32, 8, np.float32), "zeros"))
    moved = next(array for array in input_.graph.initializer if array.name == "zeros")
    input_.graph.initializer.remove(moved)
    input_.graph.input.append(helper.make_tensor_value_info("zeros", TensorProto.UINT8, [*moved.dims]))
    for model in (floats, input_):
        assert with_own_operators(model.SerializeToString(), 2)[1] == {}


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"), bits=4, tree=True, exit_layer=1)


def test_a_model_is_the_same_but_for_rounding(bundle: Path) -> None:
    tokens = list(range(3, 33))
    plain, native = (load_model(bundle, threads=1, device_options=options) for options in (OTHERS, NATIVE))
    expected, found = (model.open_session().forward(tokens).logits.copy() for model in (plain, native))
    assert np.abs(found - expected).max() < 0.2 * expected.std()
    assert not np.array_equal(found, expected)
    assert plain.content_key != native.content_key
    assert kernels.source_hash() in native.content_key
    for options in ({"tree": True}, {"split": True}):
        logits = load_model(bundle, threads=1, device_options=NATIVE, **options).open_session().forward(tokens).logits
        np.testing.assert_allclose(logits, found, atol=1e-3)


def test_they_are_the_choice_where_they_can_be_had(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the report says whose kernels run: nothing falls back in silence."""
    native = load_model(bundle, threads=1, device_options=NATIVE)
    for reason, same in (
        (None, native),
        ("this CPU has no avx512_vnni", load_model(bundle, threads=1, device_options=OTHERS)),
    ):
        monkeypatch.setattr("edgespec.backends.onnx.providers.obstacle", lambda reason=reason: reason)
        model = load_model(bundle, threads=1)
        session = model.open_session()
        session.forward([1, 2, 3])
        same.open_session().forward([1, 2, 3])
        assert model.content_key.replace(" kernels=native", "") == same.content_key.replace(
            " kernels=native", ""
        ).replace(" kernels=onnxruntime", "")
        assert model.info.placement == same.info.placement
        assert ("edgespec" in model.info.placement) == (reason is None)
    half = write_bundle(bundle.parent / "half", is_half=True)
    assert "edgespec" not in load_model(half, threads=1).info.placement
    with pytest.raises(ConfigError, match="no products with 4-bit weights"):
        load_model(half, threads=1, device_options=NATIVE)


def test_a_runtime_that_cannot_take_them_runs_its_own(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "products.so").write_bytes(b"no library")
    monkeypatch.setattr("edgespec.backends.onnx.devices.library", lambda: tmp_path / "products.so")
    monkeypatch.setattr("edgespec.backends.onnx.providers.obstacle", lambda: None)
    assert "edgespec" not in load_model(bundle, threads=1).info.placement
    with pytest.raises(BackendError, match=r"cannot load .*model\.onnx"):
        load_model(bundle, threads=1, device_options=NATIVE)


def test_what_stands_against_them_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.obstacle.cache_clear()
    try:
        monkeypatch.setattr(kernels, "NEEDED", "avx2048")
        assert kernels.obstacle() == "this CPU has no avx2048"
        monkeypatch.setattr(kernels, "NEEDED", next(iter(read_topology().features)))
        kernels.obstacle.cache_clear()
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "need a C compiler" in (kernels.obstacle() or "")
    finally:
        kernels.obstacle.cache_clear()


def test_speculation_writes_what_plain_decoding_does(bundle: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    texts = []
    for draft in ("none", "ngram"):
        with LLM(bundle, draft=draft, device_options=NATIVE, threads=2) as llm:
            output = llm.generate([[5, 6, 7, 5, 6, 7]], params)[0]
            texts.append(output.outputs[0].token_ids)
            stats = output.stats
    assert texts[0] == texts[1]
    assert stats.drafted > 0
    report = probe_exact_rows(load_model(bundle, threads=1, device_options=["kernels=native"]))
    assert report.exact is not None
    assert (report.exact.min_rows, report.exact.multiple) == (1, 1)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kernels=fast"], "kernels is 'fast': use one of auto, native, onnxruntime"),
        (["kernel=native"], "'kernel' has no effect: the CPU takes kernels=auto"),
    ],
)
def test_options_of_the_cpu_that_do_not_exist_are_refused(bundle: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(bundle, device_options=options)


def test_a_missing_or_failing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"could not compile.*error"):
        kernels.library(("-include", "no-such-file.h"), tmp_path)
    assert not [item for item in tmp_path.iterdir() if item.suffix == ".so"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="none is on the PATH"):
        kernels.library((), tmp_path)


def test_a_cache_that_cannot_be_written_is_said(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    kernels.obstacle.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"^edgespec's kernels cannot be kept in .*file/kernels .*EDGESPEC_HOME"):
            load_model(bundle, threads=1, device_options=NATIVE)
        assert "edgespec" not in load_model(bundle, threads=1).info.placement
        for is_trial in (False, True):
            assert "file/kernels" in (kernels.obstacle(is_trial=is_trial) or "")
    finally:
        kernels.obstacle.cache_clear()


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kernels.library((), tmp_path)
    monkeypatch.setattr(kernels, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert kernels.library((), tmp_path) == path
    assert path.is_file()


# --- what a product takes over ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the exporter, whose graphs have the norms and the gate before products."""
    folder = tmp_path_factory.mktemp("exported")
    source = write_hf(folder / "source", tiny_config("llama"))
    options = ExportOptions(bits=4, block_size=32, taps=("layer.0", "final"), exit_layer=1, tree=True)
    return export_model(source, folder / "bundle", options)


def test_norms_and_gates_before_products_become_part_of_them(exported: Path) -> None:
    graph = onnx.load_from_string(with_own_operators((exported / "model.onnx").read_bytes(), 2)[0]).graph
    operators = Counter(node.op_type for node in graph.node)
    assert operators["RowsProduct"] == 4 * 2 + 1
    assert operators["RowsAttention"] == 2
    assert operators["SkipSimplifiedLayerNormalization"] == 1, "the last norm's result is a tap"
    assert not operators.keys() & {"Split", "QuickGelu", "Mul", "SimplifiedLayerNormalization"}
    modes = Counter(a.i for node in graph.node for a in node.attribute if a.name == "mode")
    assert modes == {0: 3, 1: 2, 2: 4}


def test_what_others_use_too_stays(exported: Path) -> None:
    """A norm or gate whose result goes elsewhere as well cannot vanish into the product."""
    model = onnx.load(exported / "model.onnx", load_external_data=False)
    for node in list(model.graph.node):
        if node.op_type in ("SimplifiedLayerNormalization", "Mul"):
            value = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
            model.graph.output.append(value)
    graph = onnx.load_from_string(with_own_operators(model.SerializeToString(), 2)[0]).graph
    operators = Counter(node.op_type for node in graph.node)
    assert (operators["SimplifiedLayerNormalization"], operators["Mul"], operators["Split"]) == (1, 2, 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_they_compute_the_same_with_and_without(exported: Path, threads: int) -> None:
    tokens = np.random.default_rng(6).integers(0, 264, 120).tolist()
    found = {}
    for name, options in (("theirs", OTHERS), ("ours", NATIVE)):
        session = load_model(exported, threads=threads, device_options=options).open_session()
        rows = session.forward(tokens, taps=("layer.0", "final"))
        found[name] = rows.logits.copy(), {tap: array.copy() for tap, array in rows.hidden.items()}
        if name == "ours":
            for width in (1, 3, 8, 50):
                session.keep(0)
                parts = [session.forward(tokens[at : at + width]).logits.copy() for at in range(0, 120, width)]
                assert np.array_equal(np.concatenate(parts), found["ours"][0]), width
    spread = found["theirs"][0].std()
    assert np.abs(found["ours"][0] - found["theirs"][0]).mean() < 0.05 * spread
    for tap in ("layer.0", "final"):
        theirs, ours = found["theirs"][1][tap], found["ours"][1][tap]
        assert np.abs(ours - theirs).mean() < 0.05 * theirs.std()
    session.keep(0)
    assert session.forward(tokens[:5], logits_rows=()).logits.shape[0] == 0, "a head over no rows"
    halves = load_model(exported, threads=threads, split=True, device_options=NATIVE).open_session()
    assert np.array_equal(halves.forward(tokens).logits, found["ours"][0]), "an early exit drafts on the same bits"
