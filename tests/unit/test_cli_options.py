"""One name and one default for every setting, in the command line, the Python API and the configuration file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edgespec.cli import COMMANDS, LazyGroup, main
from edgespec.errors import ConfigError
from edgespec.options import BUNDLED_DRAFTS, EngineOptions


def parameters(command: str) -> dict[str, click.Option]:
    assert isinstance(main, LazyGroup)
    found = main.get_command(click.Context(main), command)
    assert found is not None
    return {option.name or "": option for option in found.params if isinstance(option, click.Option)}


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("field", fields(EngineOptions), ids=lambda field: field.name)
def test_engine_options_have_one_name_and_default(command: str, field: Any) -> None:
    option = parameters(command)[field.name]
    assert f"--{field.name.replace('_', '-')}" in option.opts
    if field.name != "draft" and field.default is not None:  # the model decides
        assert option.default == field.default


def test_llama_cpp_spells_the_confidence_limit_so() -> None:
    assert parameters("run")["draft_p_min"].opts == ["--draft-p-min"]


def test_the_configuration_file_takes_the_new_names(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[run]\ntree = true\ntree-rows = 0\nexact = false\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["--config", str(path), "run", "hello"])
    assert (result.exit_code, "tree_rows=0" in result.stderr) == (2, True), result.stderr
    path.write_text("[run]\ntree = 1\n", encoding="utf-8")
    assert "tree is 1, but it must be true or false" in CliRunner().invoke(main, ["--config", str(path), "list"]).stderr


def test_device_options_by_every_name(tmp_path: Path) -> None:
    """`--device-option` as llama.cpp's users expect one at a time; a list in the file; the same checks for both."""
    path = tmp_path / "config.toml"
    for text in ('[run]\ndevice-options = ["fast"]\n', '[run]\ndevice_option = ["fast"]\n'):
        path.write_text(text, encoding="utf-8")
        result = CliRunner().invoke(main, ["--config", str(path), "run", "hello"])
        assert (result.exit_code, "device_options: 'fast' is not KEY=VALUE" in result.stderr) == (2, True), (
            result.stderr
        )
    path.write_text('[run]\ndevice-options = "a=1"\n', encoding="utf-8")
    assert "must be a list" in CliRunner().invoke(main, ["--config", str(path), "list"]).stderr
    for flag in ("--device-option", "--draft-device-option"):
        result = CliRunner().invoke(main, ["run", "hello", flag, "a=1", flag, "a=2"])
        assert (result.exit_code, "'a' is given twice" in result.stderr) == (2, True), result.stderr
    for flag in ("--device", "--target-device", "--draft-device"):
        result = CliRunner().invoke(main, ["run", "hello", flag, "qnn:tpu"])
        assert (result.exit_code, "qnn has no 'tpu'" in result.stderr) == (2, True), result.stderr


def test_kinds_of_the_command_line_are_those_of_files() -> None:
    """`early-exit` is `exit` in files and in `edgespec train`; a wrong row here sends people to another command."""
    train = main.get_command(click.Context(main), "train")
    assert isinstance(train, click.Group)
    assert "train" in COMMANDS
    assert {*BUNDLED_DRAFTS.values()} <= {*train.commands}
    with pytest.raises(ConfigError, match="use none, ngram, table, model, tinydraft, eagle, medusa, early-exit"):
        EngineOptions(draft="exit")
