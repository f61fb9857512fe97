"""What runs where: the Snapdragon NPU, emulated by Qualcomm's own library, beside the CPU.

Graphs of three operators, one of which (Erf) the NPU does not take; with an open dimension it takes none.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from spoiled import spoil

from edgespec import LLM, SamplingParams
from edgespec.backends import load_model
from edgespec.backends.onnx.devices import Place, create_runtime, find_device, placement
from edgespec.backends.onnx.stateless import StatelessGraph
from edgespec.devices import Device
from edgespec.errors import BackendError, ConfigError, MissingDependencyError
from edgespec.testing.onnx_models import write_bundle
from edgespec.types import Model

WIDTH = 32
needs_qnn = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or util.find_spec("onnxruntime_qnn") is None,
    reason="needs the emulator of the NPU: pip install 'edgespec[qnn]' on Linux x86-64",
)


def write_graph(path: Path, *operators: str, is_open: bool = False) -> np.ndarray:
    """x [4, 32] (or [n, 32]) -> MatMul -> operators -> y; returns the matrix."""
    weights = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    shape = ["n" if is_open else 4, WIDTH]
    names = ["product", *(f"r{index}" for index in range(len(operators) - 1)), "y"] if operators else ["y"]
    nodes = [helper.make_node("MatMul", ["x", "w"], [names[0]])]
    for operator, source, result in zip(operators, names, names[1:], strict=False):
        nodes.append(helper.make_node(operator, [source], [result]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return weights


@needs_qnn
def test_the_emulated_npu_runs_what_it_takes_and_the_rest_is_named(tmp_path: Path) -> None:
    weights = write_graph(tmp_path / "g.onnx", "Softmax", "Erf")
    device = find_device("qnn")
    runtime = create_runtime(tmp_path / "g.onnx", device, 2)
    found = placement(runtime, device)
    assert found.nodes == {"QNNExecutionProvider": 2, "CPUExecutionProvider": 1}
    assert (found.fallbacks, found.n_fallen) == (("Erf",), 1)
    x = np.random.default_rng(1).normal(size=(4, WIDTH)).astype(np.float32)
    scores = np.exp(x @ weights - (x @ weights).max(-1, keepdims=True))
    (erf,) = runtime.run(None, {"x": x})
    expected = np.vectorize(__import__("math").erf)(scores / scores.sum(-1, keepdims=True))
    assert np.abs(erf - expected).max() < 2e-2  # half precision


@needs_qnn
def test_strict_refuses_any_fallback_with_its_count_and_operators(tmp_path: Path) -> None:
    write_graph(tmp_path / "g.onnx", "Softmax", "Erf")
    with pytest.raises(BackendError, match=r"1 of 3 nodes .*'qnn:htp'.*\(Erf\).*--strict-device"):
        create_runtime(tmp_path / "g.onnx", find_device("qnn"), 2, strict=True)
    write_graph(tmp_path / "whole.onnx", "Softmax")
    assert create_runtime(tmp_path / "whole.onnx", find_device("qnn"), 2, strict=True) is not None
    write_graph(tmp_path / "open.onnx", "Softmax", is_open=True)
    with pytest.raises(BackendError, match=r"2 of 2 nodes .*\(MatMul, Softmax\)"):
        create_runtime(tmp_path / "open.onnx", find_device("qnn"), 2, strict=True)


@needs_qnn
def test_a_stateless_graph_runs_on_its_place(tmp_path: Path) -> None:
    weights = write_graph(tmp_path / "g.onnx")
    graph = StatelessGraph(tmp_path / "g.onnx", place=Place(find_device("npu"), 2, strict=True))
    x = np.ones((4, WIDTH), np.float32)
    for _ in range(2):  # the first call shows the shapes, later ones reuse what it bound
        assert np.abs(graph.run({"x": x})["y"] - x @ weights).max() < 0.1
    assert graph.placement.nodes == {"QNNExecutionProvider": 1}


@needs_qnn
def test_the_library_of_the_vendor_prints_nothing_on_stdout(tmp_path: Path) -> None:
    """It greets on stdout when its first session is made, which broke `--json`."""
    write_graph(tmp_path / "g.onnx")
    code = (
        "import sys\nfrom pathlib import Path\nfrom edgespec.backends.onnx.devices import *\n"
        "create_runtime(Path(sys.argv[1]), find_device('qnn'), 1)\nprint('done')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "g.onnx")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "done\n"


@needs_qnn
def test_options_reach_the_provider(tmp_path: Path) -> None:
    """A chip that the emulator does not know is refused by the provider itself, so the option arrived."""
    write_graph(tmp_path / "g.onnx")
    with pytest.raises(BackendError, match=r"on device 'qnn:htp'.*soc_model"):
        create_runtime(tmp_path / "g.onnx", find_device("qnn"), 2, options={"soc_model": "none"})
    assert create_runtime(tmp_path / "g.onnx", find_device("qnn"), 2, options={"soc_model": "69"}) is not None


@needs_qnn
def test_generic_names_take_the_first_provider_that_works() -> None:
    assert find_device("npu").name == "qnn:htp"
    with pytest.raises(BackendError, match=r"device 'gpu'.*onnxruntime-qnn finds no gpu here \(it finds: cpu\)"):
        find_device("gpu")


def test_cpu_takes_all_nodes_and_no_options(tmp_path: Path) -> None:
    write_graph(tmp_path / "g.onnx", "Softmax", "Erf", is_open=True)
    cpu = Device.parse("cpu")
    found = placement(create_runtime(tmp_path / "g.onnx", cpu, 1, strict=True), cpu)
    assert (dict(found.nodes), found.fallbacks) == ({"CPUExecutionProvider": 3}, ())
    with pytest.raises(ConfigError, match="'use_arena' has no effect"):
        create_runtime(tmp_path / "g.onnx", cpu, 1, options={"use_arena": "0"})


def test_an_onnxruntime_that_does_not_load_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an uninstall leaves behind was an internal error, a library that is not found \"pip install\"."""
    from edgespec.backends.onnx.providers import import_onnxruntime

    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(
        BackendError, match=r"onnxruntime is installed, but does not load .*InferenceSession.*install it"
    ):
        import_onnxruntime()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", "device 'cuda' needs CUDAExecutionProvider.*pip install onnxruntime-gpu"),
        ("openvino:npu", r"device 'openvino:npu' needs .*pip install 'edgespec\[openvino\]'"),
        ("webgpu:0", r"pip install 'edgespec\[webgpu\]'"),
        ("qnn:htp", r"pip install 'edgespec\[qnn\]'"),
        ("npu:1", r"that numbers its devices \(or write npu\), and none is installed. Known: openvino"),
        ("npu", r"none is installed. Known: qnn \(pip install 'edgespec\[qnn\]'\), coreml"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.backends.onnx import providers

    def absent(module: str) -> Any:
        return None

    monkeypatch.setattr(providers, "locate", providers.locate.__wrapped__)
    monkeypatch.setattr(providers.util, "find_spec", absent)
    ort = providers.import_onnxruntime()
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])  # no plugin registered yet
    with pytest.raises(MissingDependencyError, match=said):
        find_device(name)


def test_a_number_that_a_built_in_provider_cannot_honour_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.backends.onnx import providers

    ort = providers.import_onnxruntime()
    monkeypatch.setattr(providers, "locate", providers.locate.__wrapped__)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["WebGpuExecutionProvider", "CUDAExecutionProvider"])
    assert find_device("cuda:1").name == "cuda:1"
    assert find_device("webgpu:0").name == "webgpu:0"
    with pytest.raises(BackendError, match=r"device 'webgpu:1'.*takes no number: write webgpu"):
        find_device("webgpu:1")


def test_devices_of_llamacpp_are_not_for_onnx_models() -> None:
    with pytest.raises(ConfigError, match="'llamacpp:cpu' runs GGUF files"):
        find_device("llamacpp")


# --- whole models -----------------------------------------------------------------------------------------------------


@needs_qnn
@pytest.mark.parametrize("how", ["rows", "rows-past"])
def test_a_device_that_gets_several_rows_wrong_is_asked_for_single_ones(tmp_path: Path, how: str) -> None:
    """A driver gave wrong logits for several rows, and nothing but the text showed it."""
    plain = load_model(write_bundle(tmp_path / "plain"), threads=1)
    broken = spoil(write_bundle(tmp_path / "broken"), how)
    on_cpu = load_model(broken, threads=1)  # the CPU is not suspected, so the fault shows
    assert on_cpu.info.max_rows is None
    first, tokens = [3], [5, 7, 9]
    expected = plain.open_session().forward([*first, *tokens]).logits[1:]

    def rows(model: Model) -> np.ndarray:
        session = model.open_session()
        session.forward(first)
        return session.forward(tokens).logits

    assert np.abs(rows(on_cpu) - expected).max() > 1
    model = load_model(broken, device="qnn", threads=1)
    assert (model.info.max_rows, model.info.tree, model.info.taps) == (1, False, ())
    assert np.abs(rows(model) - expected).max() < 1e-3
    prompt, params = [1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=12, temperature=0)
    output = LLM(model, draft="ngram").generate(prompt, params)[0].outputs[0]
    wanted = LLM(plain, draft="none").generate(prompt, params)[0].outputs[0]
    assert output.token_ids == wanted.token_ids
    assert sum("speculation off: the target gives logits for one row a call" in n for n in output.stats.notes) == 1


@needs_qnn
def test_a_device_that_takes_no_node_is_said_once_counted_and_refused_when_strict(tmp_path: Path) -> None:
    """CASES 49. The NPU takes no graph of open shapes, so all of it runs on the CPU."""
    folder = write_bundle(tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(folder, draft="model", draft_model=folder, device="cpu", draft_device="qnn:htp") as llm:
        output = llm.generate([1, 2, 3], params)[0].outputs[0]
        plain = llm.variant(draft="none").generate([1, 2, 3], params)[0].outputs[0]
    assert output.token_ids == plain.token_ids
    devices = output.stats.to_dict()["devices"]
    nodes = devices["target"]["nodes"]
    assert {"CPUExecutionProvider"} <= {*nodes} <= {"CPUExecutionProvider", "edgespec"}
    assert devices["target"] == {
        "device": "cpu",
        "nodes": nodes,
        "n_fallen": 0,
        "fallbacks": [],
        "max_rows": None,
    }
    draft = devices["draft"]["model"]
    assert (draft["device"], draft["n_fallen"]) == ("qnn:htp", sum(draft["nodes"].values()))
    assert {"MatMul", "GroupQueryAttention"} <= {*draft["fallbacks"]}
    (note, emulated) = [note for note in output.stats.notes if "qnn" in note]
    assert emulated == "qnn:htp is emulated here: its times say nothing about the real one"
    assert note.endswith("qnn takes graphs of fixed shapes alone: use a bundle made with --flavour npu")
    assert note.startswith(f"draft model on qnn:htp: {draft['n_fallen']} of {draft['n_fallen']} nodes run on the CPU")
    assert "GroupQueryAttention" in note
    assert plain.stats.devices["draft"] == {}
    with pytest.raises(BackendError, match=r"nodes are not taken by device 'qnn:htp'.*GroupQueryAttention"):
        load_model(folder, device="qnn", strict_device=True)


@needs_qnn
@pytest.mark.parametrize(("options", "n_graphs"), [({"tree": True}, 1), ({"split": True}, 3)])
def test_every_graph_of_a_model_is_counted(tmp_path: Path, options: dict[str, bool], n_graphs: int) -> None:
    folder = write_bundle(tmp_path, tree=True, exit_layer=1)
    model = load_model(folder, device="qnn", **options)
    names = {1: ["tree.onnx"], 3: ["lower.onnx", "upper.onnx", "head.onnx"]}[n_graphs]
    cpu = Device.parse("cpu")
    counts = [sum(placement(create_runtime(folder / name, cpu, 1), cpu).nodes.values()) for name in names]
    assert sum(model.info.placement.values()) == sum(counts)
    assert model.info.device == "qnn:htp"
    with pytest.raises(BackendError, match="--strict-device"):
        load_model(folder, device="qnn", strict_device=True, **options)
