"""GGUF files in llama.cpp's block types: what is written loads, and what blocks do not divide is said or refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_export.gguf_quantize import ALL_TYPES, export_gguf
from edgespec_export.sources import open_source
from tiny_models import tiny_config, tiny_weights, write_gguf, write_hf

from edgespec.cli.export import GGUF_QUANTS, command
from edgespec.errors import ConfigError, ExportError, ExportRefusedError, MissingDependencyError
from edgespec.gguf import GGUFFile
from edgespec.testing.gguf_models import write_gguf as write_tiny
from edgespec.text.tokenizer import Tokenizer

needs_llama_cpp = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("llama_cpp") is None,
    reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'",
)
TOKENS = np.random.default_rng(3).integers(0, 256, 24).tolist()


def wide(**changes: int):
    return tiny_config(
        "llama", **{"n_embd": 256, "n_ff": 512, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, **changes}
    )


def logits(path: Path) -> np.ndarray:
    from edgespec.backends import load_model

    model = load_model(path, device="llamacpp:cpu", threads=1)
    result = model.open_session().forward(TOKENS).logits.copy()
    model.close()
    return result


def test_the_command_knows_every_type() -> None:
    assert set(GGUF_QUANTS) == set(ALL_TYPES)


@needs_llama_cpp
@pytest.mark.parametrize(("type", "limit"), [
    ("bf16", 0.05), ("q4_0", 1.0), ("q4_k_m", 1.0), ("q5_k_s", 0.7), ("q6_k", 0.3), ("iq4_nl", 1.0), ("q2_k", 3.0),
])  # fmt: skip
def test_what_is_written_loads_and_stays_near_the_floats(type: str, limit: float, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", wide())
    report = export_gguf(source, tmp_path / "out.gguf", type=type)
    floats = export_gguf(source, tmp_path / "floats.gguf", type="f32")
    assert report.fallbacks == ()
    assert sum(report.types.values()) == len(GGUFFile.open(report.path).tensors)
    main = {"q4_k_m": "q4_k", "q5_k_s": "q5_k"}.get(type, type)
    assert report.types[main] >= 8
    assert Tokenizer.load(report.path).hash == Tokenizer.load(source).hash
    error = np.abs(logits(report.path) - logits(floats.path)).mean()
    assert 0 < error < limit
    assert sorted(item.name for item in tmp_path.iterdir()) == ["floats.gguf", "out.gguf", "source"]


@needs_llama_cpp
@pytest.mark.parametrize(("n_embd", "n_ff", "type", "expected"), [
    (192, 172, "q4_k_m", {("q4_k", 192, "q5_0"), ("q6_k", 172, "f16"), ("q4_k", 172, "f16")}),
    (192, 172, "q4_0", {("q4_0", 172, "f16")}),
    (172, 192, "q6_k", {("q6_k", 172, "f16"), ("q6_k", 192, "q8_0")}),
    (192, 172, "q8_0", {("q8_0", 172, "f16")}),
])  # fmt: skip
def test_rows_that_blocks_do_not_divide(
    n_embd: int, n_ff: int, type: str, expected: set[tuple[str, int, str]], tmp_path: Path
) -> None:
    """Rows of 172 and 192 values: every tensor of another type than the blocks allow is listed, and the file runs."""
    source = write_hf(tmp_path / "source", wide(n_embd=n_embd, n_ff=n_ff))
    report = export_gguf(source, tmp_path / "out.gguf", type=type)
    found = {(item.wanted, item.n_columns, item.type) for item in report.fallbacks}
    assert expected <= found
    file = GGUFFile.open(report.path)
    for item in report.fallbacks:
        tensor = file.tensors[item.tensor]
        assert (tensor.shape[-1], tensor.type.lower()) == (item.n_columns, item.type)
    listed = {item.tensor for item in report.fallbacks}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2 and tensor.type == "F16":
            assert name in listed
    assert np.isfinite(logits(report.path)).all()


@needs_llama_cpp
def test_weights_that_are_low_bit_already_are_quantized_again_only_when_asked(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "low.gguf", wide(), quantization="Q4_1")
    with pytest.raises(ExportRefusedError, match=r"quantized already \(\d+ tensors of q4_1\).*--requantize"):
        export_gguf(source, tmp_path / "out.gguf", type="q4_k_m")
    assert not (tmp_path / "out.gguf").exists()
    report = export_gguf(source, tmp_path / "out.gguf", type="q4_k_m", requantize=True)
    assert report.types["q4_k"] > 4
    logits(report.path)
    with pytest.raises(ConfigError, match="would have no effect on q8_0"):
        export_gguf(source, tmp_path / "other.gguf", type="q8_0", requantize=True)


@needs_llama_cpp
def test_a_float_gguf_is_quantized_as_it_is(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "floats.gguf", wide(), quantization="F16", extra={"my.key": "kept"})
    report = export_gguf(source, tmp_path / "out.gguf", type="q5_0")
    assert GGUFFile.open(report.path).metadata["my.key"] == "kept"
    assert Counter(report.types)["q5_0"] >= 8
    assert open_source(report.path).config.n_embd == 256


@needs_llama_cpp
def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    weights = tiny_weights(wide())
    weights["layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    source = write_hf(tmp_path / "source", wide(), weights)
    with pytest.raises(ExportError):
        export_gguf(source, tmp_path / "out.gguf", type="q4_0")
    good = write_gguf(tmp_path / "good.gguf", wide())
    strange = good.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamo", 1)
    (tmp_path / "strange.gguf").write_bytes(strange)
    with pytest.raises(ExportError, match=r"llama.cpp cannot quantize .*strange.gguf to q4_0: .*llamo"):
        export_gguf(tmp_path / "strange.gguf", tmp_path / "out.gguf", type="q4_0")
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(ExportRefusedError, match="exists"):
        export_gguf(good, tmp_path / "out.gguf", type="q4_0")
    assert (tmp_path / "out.gguf").read_text() == "mine"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["good.gguf", "out.gguf", "source", "strange.gguf"]


@needs_llama_cpp
@pytest.mark.skipif(sys.platform == "win32", reason="no limit on a file's size to stand for a full disk")
@pytest.mark.parametrize(("type", "is_small", "message"), [
    ("q4_0", False, "llama.cpp cannot write into .*out: is there room"),
    ("q8_0", False, r"out.gguf could not be written whole \(\d+ requested and \d+ written\): is there room"),
    ("q8_0", True, r"out.gguf could not be written whole \(its end is missing\): is there room"),
])  # fmt: skip
def test_a_full_disk_is_named(type: str, is_small: bool, message: str, tmp_path: Path) -> None:
    """One was a reason with a progress line in it, the other a damaged file with a name that nobody knows."""
    import resource

    path = tmp_path / "source.gguf"
    source = write_tiny(path) if is_small else write_gguf(path, wide())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if is_small else 100_000, hard))
    try:
        with pytest.raises(ExportError, match=message) as caught:
            export_gguf(source, tmp_path / "out" / "out.gguf", type=type)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_without_llama_cpp_the_extra_is_named_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.backends.llamacpp import library as module

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    module.library.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"edgespec\[llamacpp\]"):
        export_gguf(write_hf(tmp_path / "source", wide()), tmp_path / "out.gguf", type="q4_0")
    module.library.cache_clear()
    with pytest.raises(ConfigError, match="type is 'q9'; use one of f32, f16, q8_0"):
        export_gguf(tmp_path / "source", tmp_path / "out.gguf", type="q9")


@needs_llama_cpp
def test_command_line(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", wide(n_embd=192))
    arguments = [str(source), str(tmp_path / "out.gguf"), "--flavour", "gguf", "--quant", "q4_k_m"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "q4_k_m" in result.stdout
    assert "rows of 192 values are no whole blocks of q4_k" in result.stderr
    result = CliRunner().invoke(command, [*arguments, "--force", "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert printed["type"] == "q4_k_m"
    assert {"tensor", "n_columns", "wanted", "type"} == set(printed["fallbacks"][0])
    with pytest.raises(ConfigError, match="--flavour npu is of bundles and --format is gguf"):
        CliRunner().invoke(command, [*arguments[:2], "--format", "gguf", "--flavour", "npu"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--requantize does not go with --flavour cpu"):
        CliRunner().invoke(command, [*arguments[:2], "--requantize"], catch_exceptions=False)
