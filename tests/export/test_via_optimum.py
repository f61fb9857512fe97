"""What `--via optimum` says where it cannot go on; the exports themselves are tests/optimum (`make test-optimum`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import tiny_config, write_gguf, write_hf

from edgespec.cli.export import command
from edgespec.errors import ConfigError, ExportRefusedError, MissingDependencyError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", tiny_config("llama"))


def export(source: Path, *arguments: str) -> None:
    words = [str(source), str(source.parent / "out"), "--via", "optimum", *arguments]
    CliRunner().invoke(command, words, catch_exceptions=False)


def test_a_python_without_optimum_says_how_to_get_it(source: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"no optimum-onnx.*edgespec\[optimum\].*--optimum-python"):
        export(source, "--optimum-python", sys.executable)
    with pytest.raises(ExportRefusedError, match="no-such-python is no program"):
        export(source, "--optimum-python", "no-such-python")
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"has no config\.json: optimum takes a Hugging Face folder"),
        ("model.safetensors", r"holds no \*\.safetensors"),
        ("tokenizer.json", r"has no tokenizer\.json"),
    ],
)
def test_folders_that_lack_something(source: Path, missing: str, message: str) -> None:
    (source / missing).unlink()
    with pytest.raises(ExportRefusedError, match=message):
        export(source)


def test_a_gguf_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ExportRefusedError, match=r"is a file: .*--format hf"):
        export(write_gguf(tmp_path / "model.gguf", tiny_config("llama")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "4"], "--bits does not go with --via optimum"),
        (["--force"], "--force does not go with --via optimum"),
        (["--format", "hf"], "--format hf does not go with --via optimum"),
        (["--flavour", "npu"], "--flavour npu does not go with --via optimum"),
        (["--no-check", "--max-kld", "1"], "judge the check"),
    ],
)
def test_options_that_it_would_ignore(source: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(source, *arguments)


def test_its_own_option_goes_with_nothing_else(source: Path) -> None:
    words = [str(source), str(source.parent / "out"), "--optimum-python", sys.executable]
    with pytest.raises(ConfigError, match="--optimum-python does not go with --flavour cpu"):
        CliRunner().invoke(command, words, catch_exceptions=False)
