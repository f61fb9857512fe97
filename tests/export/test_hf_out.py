"""Whole models written as Hugging Face folders are the models that they were made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_export.hf_out import write_hf_model
from edgespec_export.sources import open_source
from tiny_models import EOS, FAMILIES, tiny_config, tiny_weights, write_gguf, write_hf

from edgespec.cli.export import command
from edgespec.errors import ConfigError, ExportRefusedError
from edgespec.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}é{% endfor %}"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_config_and_weights_come_back(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    source = write_hf(tmp_path / "source", config)
    written = open_source(write_hf_model(source, tmp_path / "out"))
    assert replace(written.config, name=family) == replace(open_source(source).config, name=family)
    for name, value in tiny_weights(config).items():
        np.testing.assert_array_equal(written.tensor(name), value)
    assert Tokenizer.load(tmp_path / "out").hash == Tokenizer.load(source).hash


@pytest.mark.parametrize(
    ("family", "layers"), [("llama", "LlamaForCausalLM"), ("mistral-window", "MistralForCausalLM")]
)
def test_a_gguf_comes_out_in_the_order_of_hugging_face(family: str, layers: str, tmp_path: Path) -> None:
    """llama.cpp stores rotated rows in pairs, and calls a Mistral a llama with a window."""
    config = tiny_config(family)
    source = write_gguf(tmp_path / "model.gguf", config, extra={"tokenizer.chat_template": TEMPLATE})
    arguments = [str(source), str(tmp_path / "out"), "--format", "hf", "--json"]
    assert CliRunner().invoke(command, arguments, catch_exceptions=False).exit_code == 0
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["architectures"] == [layers]
    assert settings["eos_token_id"] == [EOS]
    written = open_source(tmp_path / "out")
    assert written.config.windows == config.windows
    for name, value in tiny_weights(config).items():
        np.testing.assert_array_equal(written.tensor(name), value)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert (tokenizer.hash, tokenizer.chat_template_source) == (Tokenizer.load(source).hash, TEMPLATE)
    with pytest.raises(ConfigError, match="is no trained draft"):
        CliRunner().invoke(command, [*arguments, "--target", str(source)], catch_exceptions=False)


def test_what_a_config_cannot_say_is_refused(tmp_path: Path) -> None:
    biased = write_gguf(tmp_path / "biased.gguf", tiny_config("llama", has_qkv_bias=True))
    with pytest.raises(ExportRefusedError, match=r"query, key and value biases, which config\.json of a llama"):
        write_hf_model(biased, tmp_path / "out")
    normed = write_gguf(tmp_path / "normed.gguf", tiny_config("llama", has_qk_norm=True))
    with pytest.raises(ExportRefusedError, match="query and key norms"):
        write_hf_model(normed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
