"""Graphs of fixed shapes: what they compute, what bundle.json says of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from edgespec_export import CheckOptions, StaticOptions, export_static, export_static_draft
from edgespec_export.exporter import KeptWeights
from edgespec_export.reference import ReferenceModel, ReferenceState
from edgespec_export.sources import open_source
from edgespec_export.target_tables import TargetTables
from npu.emulator import own_cache
from test_drafts import EXTRA, VOCABULARY, make_draft, make_target
from tiny_models import N_VOCAB, tiny_config, write_hf

from edgespec.backends import load_model
from edgespec.backends.onnx.socs import SOCS, find_soc
from edgespec.bundle import Bundle, write_bundle
from edgespec.cli import main
from edgespec.errors import BundleError, ConfigError, ExportRefusedError, IncompatibleError, MissingDependencyError

TOKENS = np.random.default_rng(4).integers(0, 256, 40).tolist()


def weights_of(source: Path, keep: tuple[int, ...] | None = None) -> KeptWeights:
    return KeptWeights(open_source(source), keep)


def tensors_of(source: Path) -> list[np.ndarray]:
    opened = open_source(source)
    return [opened.tensor(name) for name in opened.shapes]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports are measured on the emulator too if it is installed; what it compiles stays out of the user's cache."""
    with own_cache(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("weights") / "source", tiny_config("llama-tied"))


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    options = StaticOptions(widths=(1, 4, 8), n_ctx=48, taps=("layer.0", "final"))
    return export_static(source, source.parent / "bundle", options, check=CheckOptions(n_tokens=40))


def test_plain_operators_and_one_file_of_weights(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.info.static == {"widths": [1, 4, 8], "dtype": "fp16", "mask": -1e4, "contexts": {}}
    assert bundle.info.flavour == "npu"
    assert bundle.info.n_ctx == 48
    for width in (1, 4, 8):
        graph = onnx.load(str(folder / f"width-{width}.onnx"), load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}
        assert not any(size.dim_param for port in graph.input for size in port.type.tensor_type.shape.dim)
    floats = sum(value.size for value in tensors_of(folder.parent / "source")) * 4
    assert bundle.files["model.onnx.data"]["bytes"] < 1.5 * floats


def test_figures_are_those_of_the_float_model(folder: Path) -> None:
    parity = Bundle.open(folder).info.parity
    assert parity["top1_agreement"] == 1
    assert parity["max_abs_error"] < 5e-3
    assert Counter(row["past"] for row in parity["grid"]) == {0: 4, 1: 4, 9: 3}


def test_taps_are_the_float_models(source: Path, folder: Path) -> None:
    opened = open_source(source)
    taps: dict[str, np.ndarray] = {}
    state = ReferenceState(opened.config)
    ReferenceModel(opened.config, weights_of(source)).forward(TOKENS[:11], state, taps)
    session = load_model(folder, threads=1).open_session()
    hidden = session.forward(TOKENS[:11], taps=("layer.0", "final")).hidden
    for tap, values in taps.items():
        if tap in hidden:
            np.testing.assert_allclose(hidden[tap], values, atol=5e-3)
    assert set(hidden) == {"layer.0", "final"}


def test_large_values_do_not_overflow_half_precision(source: Path, tmp_path: Path) -> None:
    """The square of a residual of 1,000 is beyond fp16; what the norm's nodes hold must not be."""
    weights = {name: open_source(source).tensor(name) for name in open_source(source).shapes}
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"] * np.float32(8000)
    big = write_hf(tmp_path / "big", tiny_config("llama-tied"), weights)
    bundle = export_static(big, tmp_path / "bundle", StaticOptions(widths=(2,), n_ctx=8))
    model = onnx.load(str(bundle / "width-2.onnx"))
    names = [
        node.output[0] for node in model.graph.node if ".input_layernorm" in node.output[0] or "norm/" in node.output[0]
    ]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = load_model(bundle, threads=1).open_session()
    runtime = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip(names, runtime.run(names, session.feeds([3, 5])), strict=True))
    assert max(float(np.abs(values).max()) for values in found.values()) < 65_504
    assert max(float(np.abs(values).max()) for name, values in found.items() if name.endswith("/sum")) > 1000


def test_a_cut_is_recorded(source: Path, tmp_path: Path) -> None:
    cut = export_static(source, tmp_path / "cut", StaticOptions(widths=(2,), n_ctx=16, keep_layers=(1,)))
    info = Bundle.open(cut).info
    assert info.source["kept_layers"] == [1]
    assert info.n_layers == 1


def test_a_draft_computes_its_formula(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    reference = make_draft(tmp_path, "tinydraft", target)
    out = export_static_draft(
        tmp_path / "zoo",
        target,
        tmp_path / "npu",
        StaticOptions(widths=(1, 4), n_ctx=32),
        check=CheckOptions(n_tokens=24),
    )
    info = Bundle.open(out).info
    assert info.parity["max_abs_error"] < 0.02
    assert info.draft["target"]["n_vocab"] == N_VOCAB
    session = load_model(out, threads=1).open_session()
    extra = [token for token in dict.fromkeys(EXTRA.tolist()) if token not in set(VOCABULARY.tolist())]
    session.set_extra(extra)
    logits = session.forward(TOKENS[:9]).logits
    expected = reference.tinydraft(TOKENS[:9])
    n_known = len(VOCABULARY)
    np.testing.assert_allclose(logits[:, :n_known], expected[:, :n_known], atol=0.02)
    columns = [n_known + EXTRA.tolist().index(token) for token in extra]
    np.testing.assert_allclose(logits[:, n_known : n_known + len(extra)], expected[:, columns], atol=0.02)
    assert np.isneginf(logits[:, n_known + len(extra) :]).all()


def test_a_draft_in_eight_bits(tmp_path: Path) -> None:
    """Its calibration fills the extra rows as well: ranges of zero width would leave those columns 0."""
    target = make_target(tmp_path)
    make_draft(tmp_path, "tinydraft", target)
    (tmp_path / "text.txt").write_text("The moon has phases, and the third thing is that they come back. " * 4)
    options = StaticOptions(widths=(4,), n_ctx=32, dtype="w8a16", calibration=tmp_path / "text.txt")
    out = export_static_draft(tmp_path / "zoo", target, tmp_path / "npu", options)
    session = load_model(out, threads=1).open_session()
    extra = sorted(set(range(N_VOCAB)) - set(VOCABULARY.tolist()))[:64]
    session.set_extra(extra)
    plain = export_static_draft(tmp_path / "zoo", target, tmp_path / "float", StaticOptions(widths=(4,), n_ctx=32))
    expected = load_model(plain, threads=1).open_session()
    expected.set_extra(extra)
    found, wanted = session.forward(TOKENS[:8]).logits.copy(), expected.forward(TOKENS[:8]).logits
    spread = wanted[:, -64:].std()
    assert np.abs(found - wanted)[:, -64:].max() < spread
    assert found[:, -64:].std() > 0.5 * spread


def test_a_draft_may_have_a_target_of_fixed_shapes(source: Path, folder: Path) -> None:
    """The target's tables are read from the host's file and from its graph."""
    tables = TargetTables.read(Bundle.open(folder))
    weight = open_source(source).tensor("embed_tokens.weight")
    np.testing.assert_allclose(tables.embedding.rows(np.arange(N_VOCAB)), weight, atol=1e-2)
    np.testing.assert_allclose(tables.head.rows(np.arange(N_VOCAB)), weight, atol=1e-6)
    assert tables.is_tied


def test_other_drafts_and_windows_are_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    make_draft(tmp_path, "eagle", target)
    with pytest.raises(ConfigError, match="kind eagle"):
        export_static_draft(tmp_path / "zoo", target, tmp_path / "npu")
    window = write_hf(tmp_path / "window", tiny_config("mistral-window"))
    with pytest.raises(ExportRefusedError, match="window of 8 tokens and the graphs would have a context of 16"):
        export_static(window, tmp_path / "npu", StaticOptions(n_ctx=16))
    short = write_hf(tmp_path / "short", tiny_config("llama", n_ctx=4))
    with pytest.raises(ConfigError, match="widest graph has 8 rows and short a context of 4"):
        export_static(short, tmp_path / "npu")
    assert not (tmp_path / "npu").exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"widths": ()}, "widths are none"),
    ({"widths": (4, 1)}, "widths 4,1"),
    ({"widths": (0, 1)}, "widths 0,1"),
    ({"widths": (1, 128)}, "widths 1,128"),
    ({"n_ctx": 4}, "n_ctx is 4 and the widest graph has 8"),
    ({"dtype": "int4"}, "dtype is int4"),
    ({"dtype": "w8a16"}, "--calibration"),
    ({"calibration": Path("x")}, "drop --calibration"),
    ({"socs": ("sm8650", "SM8650")}, "name one twice"),
    ({"socs": ("",)}, "chip '' is unknown"),
    ({"socs": ("sm9999",)}, r"'sm9999' is unknown: known are .*sm8650 \(Snapdragon 8 Gen 3\)"),
])  # fmt: skip
def test_options_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StaticOptions(**changes)  # type: ignore[arg-type]


def test_a_missing_compiler_is_said_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was after all graphs had been written."""
    from edgespec.backends.onnx import providers

    monkeypatch.setattr(providers, "locate", providers.locate.__wrapped__)
    monkeypatch.setattr(providers.util, "find_spec", lambda _module: None)
    monkeypatch.setattr(providers.import_onnxruntime(), "get_available_providers", lambda: ["CPUExecutionProvider"])
    steps: list[str] = []
    with pytest.raises(MissingDependencyError, match=r"edgespec\[qnn\]"):
        export_static(
            source, tmp_path / "npu", StaticOptions(socs=("sm8650",), n_ctx=16), lambda step, *_rest: steps.append(step)
        )
    assert steps == []


def test_chips() -> None:
    assert find_soc(" X Elite ").options == {"soc_model": "60", "htp_arch": "73"}
    assert find_soc("SM8750").options == {"soc_model": "69"}  # the provider refuses its architecture's number
    assert len({soc.soc_model for soc in SOCS.values()}) == len(SOCS)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--flavour", "npu", "--bits", "4"], "--bits does not go with --flavour npu"),
    (["--widths", "1,4"], "--widths does not go with --flavour cpu"),
    (["--flavour", "npu", "--format", "gguf"], "--flavour npu is of bundles"),
    (["--flavour", "npu", "--widths", "1,x"], "'x' is no number of rows"),
    (["--flavour", "npu", "--soc", ""], "chip '' is unknown"),
    (["--flavour", "npu", "--taps", "layer.9"], "tap 'layer.9' is not in the model"),
    (["--flavour", "npu", "--target", "smollm2-135m"], "--target is for trained drafts"),
    (["--flavour", "npu", "--dtype", "w8a16", "--calibration", "nowhere.txt"], "nowhere.txt"),
])  # fmt: skip
def test_the_command_refuses_what_it_would_ignore(
    source: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = CliRunner().invoke(main, ["export", str(source), str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_bundle(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--flavour", "npu", "--widths", "2", "--context", "16", "--no-check", "--json"]
    done = CliRunner().invoke(main, ["export", str(source), str(out), *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.strip().splitlines()[-1])["quantization"]["dtype"] == "fp16"
    assert Bundle.open(out).info.static["widths"] == [2]


def test_damaged_tables_are_refused(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    fields = json.loads((other / "bundle.json").read_text())
    info = {key: value for key, value in fields.items() if key not in ("files", "format", "schema_version")}
    np.save(other / "rope.npy", np.zeros((2, 47, 8), np.float32))
    write_bundle(other, info)
    with pytest.raises(BundleError, match=r"rope\.npy is \[2, 47, 8\] and bundle\.json says \[2, 48, 8\]"):
        load_model(other)
    np.save(other / "rope.npy", np.array([{}], object), allow_pickle=True)
    write_bundle(other, info)
    with pytest.raises(BundleError, match="no array that numpy can read"):
        load_model(other)
    for wrong in ({"widths": [4, 1]}, {"dtype": "int4"}):
        with pytest.raises(BundleError, match="widths or compiled contexts are not valid"):
            write_bundle(other, {**info, "static": {**info["static"], **wrong}})


def test_every_width_is_compared_with_the_bundle(folder: Path, tmp_path: Path) -> None:
    """Only the widest was, and another with a cache of its own length died inside the runtime."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    fields = json.loads((other / "bundle.json").read_text())
    shutil.copyfile(other / "width-4.onnx", other / "width-1.onnx")
    write_bundle(
        other, {key: value for key, value in fields.items() if key not in ("files", "format", "schema_version")}
    )
    session = load_model(other).open_session()
    with pytest.raises(IncompatibleError, match=r"bundle\.json says"):
        session.forward([1])
