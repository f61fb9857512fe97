"""The NPU path on Qualcomm's emulator: compiled code, its figures, crashes of the compiler, and the shows."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export import CheckOptions, StaticOptions, export_static
from edgespec_export.exporter import KeptWeights
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import open_source
from export.tiny_models import tiny_config, write_hf
from npu.emulator import blind_logits, own_cache, require_qnn

from edgespec.backends import load_model
from edgespec.backends.onnx import contexts
from edgespec.bundle import Bundle
from edgespec.errors import BackendError, BundleError, ConfigError

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("emulator")]

SOCS = ("sm8650", "sm8750")
OTHER = np.random.default_rng(8).integers(0, 256, 24).tolist()  # not the text that was measured


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    require_qnn()
    with own_cache(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("weights") / "source", tiny_config("llama", n_ctx=64))


@pytest.fixture(scope="module")
def compiled(source: Path, emulator: None) -> Path:
    """fp16, measured, with code for two chips."""
    options = StaticOptions(widths=(4,), n_ctx=64, socs=SOCS)
    return export_static(source, source.parent / "compiled", options, check=CheckOptions(n_tokens=24))


def float_logits(source: Path, tokens: list[int]) -> np.ndarray:
    opened = open_source(source)
    return ReferenceModel(opened.config, KeptWeights(opened, None)).forward(tokens)


@pytest.mark.parametrize("soc", SOCS)
def test_code_for_a_chip_gives_the_float_model_within_the_stated_error(
    source: Path, compiled: Path, soc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both chips' code runs in the emulator; nothing is compiled again. What used to be stated here was measured
    elsewhere, and was a quarter of what the emulator showed."""
    monkeypatch.setattr(contexts, "run_child", None)
    model = load_model(compiled, device="qnn:htp", device_options={"soc": soc}, strict_device=True, threads=1)
    assert dict(model.info.placement) == {
        "QNNExecutionProvider": Bundle.open(compiled).info.static["contexts"][soc]["n_nodes"]
    }
    figures = Bundle.open(compiled).info.parity["npu"]
    error = np.abs(model.open_session().forward(OTHER).logits - float_logits(source, OTHER)).max()
    assert error <= figures["stated_error"]
    assert 0 < figures["max_abs_error"] < figures["stated_error"] < 0.05 * figures["max_abs_logit"]
    assert figures["is_emulated"]


def test_a_row_that_sees_nothing_is_finite_in_half_precision(compiled: Path) -> None:
    """CASES 34, where it matters: 10,000 below any score is still a number of fp16."""
    session = load_model(compiled, device="qnn:htp", device_options={"soc": "sm8650"}, threads=1).open_session()
    assert np.isfinite(blind_logits(session, session._tables.mask)).all()


def test_compiled_files_are_listed_and_hashed(compiled: Path) -> None:
    bundle = Bundle.open(compiled)
    bundle.verify_hashes()
    for soc in SOCS:
        assert bundle.has(f"width-4.{soc}.onnx")
        assert bundle.has(f"width-4.{soc}_qnn.bin")
    assert {path.name for path in compiled.iterdir()} == {*bundle.files, "bundle.json"}


def test_code_that_the_bundle_does_not_list_is_refused(compiled: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(compiled, tmp_path / "other"))
    fields = json.loads((other / "bundle.json").read_text())
    fields["static"]["contexts"] = {}
    (other / "bundle.json").write_text(json.dumps(fields))
    with pytest.raises(BundleError, match=r"holds code compiled for a device \('width-4\.sm8650_qnn\.bin'\)"):
        Bundle.open(other)


def test_a_path_out_of_the_bundle_is_refused(compiled: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(compiled, tmp_path / "other"))
    graph = other / "width-4.sm8650.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"width-4.sm8650_qnn.bin", b"../../etc/secret_q.bin"))
    with pytest.raises(BundleError, match=r"secret_q\.bin"):
        Bundle.open(other)


def test_graphs_are_compiled_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_static(source, tmp_path / "bundle", StaticOptions(widths=(1, 2), n_ctx=32))
    asked: list[str] = []
    plain = contexts.run_child
    monkeypatch.setattr(
        contexts, "run_child", lambda request, what: (asked.append(request["task"]), plain(request, what))
    )
    for device in ("qnn:htp", "npu"):  # the same one here
        model = load_model(folder, device=device, threads=1, strict_device=True)
        assert model.info.device == "qnn:htp"
        model.close()
    assert asked == ["compile", "load"]


@pytest.mark.parametrize("damage", ["empty", "other", "no binary", "short binary"])
def test_a_damaged_cache_is_made_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Half of a file, after a full disk or a tidy user, was an internal error on every later run."""
    folder = export_static(source, tmp_path / "bundle", StaticOptions(widths=(1,), n_ctx=24))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    load_model(folder, device="qnn:htp", threads=1).close()
    (kept,) = (tmp_path / "home" / "contexts").glob("device-*")
    (binary,) = kept.glob("*.bin")
    size = binary.stat().st_size
    if damage == "no binary":
        binary.unlink()
    elif damage == "short binary":
        binary.write_bytes(binary.read_bytes()[:1000])
    else:
        (kept / contexts.RESULT).write_text({"empty": "", "other": "{}"}[damage])
    load_model(folder, device="qnn:htp", threads=1, strict_device=True).close()
    assert binary.stat().st_size == size


def test_options_of_the_device_that_cannot_be_are_named(source: Path, tmp_path: Path) -> None:
    folder = export_static(source, tmp_path / "bundle", StaticOptions(widths=(1,), n_ctx=24))
    with pytest.raises(ConfigError, match="soc=sm8650 and soc_model=1 both name the chip: drop one"):
        load_model(folder, device="qnn:htp", device_options={"soc": "sm8650", "soc_model": "1"})
    with pytest.raises(BackendError, match="the device options were backend_path=/nowhere") as caught:
        load_model(folder, device="qnn:htp", device_options={"backend_path": "/nowhere.so"})
    assert "--flavour npu" not in str(caught.value)  # it is such a bundle


@pytest.mark.parametrize(("code", "message"), [
    ("import os; os.kill(os.getpid(), 4)", r"killed by signal 4 \(SIGILL\)"),
    ("import os; os.abort()", r"killed by signal 6 \(SIGABRT\)"),
    ("import sys; sys.exit('edgespec: no room')", "refused the model: no room"),
])  # fmt: skip
def test_a_compiler_that_dies_is_an_error_message(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(contexts, "CHILD", (sys.executable, "-c", code))
    folder = export_static(source, tmp_path / "bundle", StaticOptions(widths=(1,), n_ctx=48))
    with pytest.raises(BackendError, match=message):
        load_model(folder, device="qnn:htp", threads=1)


def test_code_that_crashes_when_it_is_loaded_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One binary for several graphs compiles, and crashed the whole program where it was loaded."""
    plain = contexts.run_child

    def run(request: dict[str, Any], what: str) -> None:
        if request["task"] == "load":
            monkeypatch.setattr(contexts, "CHILD", (sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"))
        plain(request, what)

    folder = export_static(source, tmp_path / "bundle", StaticOptions(widths=(1,), n_ctx=40))
    with monkeypatch.context() as patch:
        patch.setattr(contexts, "run_child", run)
        with pytest.raises(BackendError, match=r"loading what onnxruntime-qnn .* was killed by signal 11 \(SIGSEGV\)"):
            load_model(folder, device="qnn:htp", threads=1)
    monkeypatch.undo()
    load_model(folder, device="qnn:htp", threads=1).close()  # compiled anew


def test_eight_bits_are_measured_on_the_emulator(source: Path, tmp_path: Path) -> None:
    """What the bundle says of w8a16 holds for another text too, and every node runs on the NPU."""
    text = tmp_path / "calibration.txt"
    text.write_text("Why does the moon have phases? Half of it is always lit by the sun. " * 6)
    options = StaticOptions(widths=(1, 4), n_ctx=64, dtype="w8a16", calibration=text)
    check = CheckOptions(n_tokens=24, min_top1=0.5, max_kld=0.1)
    folder = export_static(source, tmp_path / "bundle", options, check=check)
    bundle = Bundle.open(folder)
    figures = bundle.info.parity["npu"]
    assert list(figures["nodes"]) == ["QNNExecutionProvider"]
    assert bundle.info.quantization["calibration"]["n_tokens"] == 64
    assert bundle.files["model.onnx.data"]["bytes"] < 150_000  # both widths share it; in float it is 500,000
    model = load_model(folder, device="qnn:htp", threads=1, strict_device=True)
    error = np.abs(model.open_session().forward(OTHER).logits - float_logits(source, OTHER)).max()
    assert error <= figures["stated_error"]
