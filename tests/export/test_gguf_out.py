"""GGUF files and Hugging Face folders that are written hold the model and the words that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from draft_reference import DraftReference, tensors, write_zoo
from edgespec_export import ExportOptions, export_model
from edgespec_export.gguf_out import write_gguf as write_out
from edgespec_export.hf_out import write_hf_folder
from edgespec_export.rope import RopeConfig, frequencies
from edgespec_export.sources import open_source
from graph_runs import Graph
from tiny_models import EOS, FAMILIES, N_VOCAB, tiny_config, tiny_weights, write_gguf, write_hf

from edgespec.cli.export import command
from edgespec.errors import ConfigError, ExportError, ExportRefusedError, IncompatibleError
from edgespec.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}é{% endfor %}"
TEXT = "the thin thread: 1234, it's\n\n  done"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))
    return source


@pytest.mark.parametrize("family", [family for family in FAMILIES if "window" not in family])
def test_float_files_hold_the_very_weights(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    source = write_hf(tmp_path / "source", config)
    opened = open_source(write_out(source, tmp_path / "out.gguf", type="f32"))
    for name, value in tiny_weights(config).items():
        np.testing.assert_array_equal(opened.tensor(name), value, err_msg=name)
    for key in ("n_ctx", "n_heads", "n_kv_heads", "head_dim", "is_tied", "has_qkv_bias", "has_qk_norm", "rope"):
        assert getattr(opened.config, key) == getattr(config, key), key
    assert opened.config.norm_eps == pytest.approx(config.norm_eps)


@pytest.mark.parametrize(("type", "limit"), [("q8_0", 0.02), ("f16", 1e-3)])
def test_rounded_files_hold_near_weights(type: str, limit: float, llama: Path, tmp_path: Path) -> None:
    opened = open_source(write_out(llama, tmp_path / "out.gguf", type=type))
    for name, value in tiny_weights(tiny_config("llama")).items():
        assert np.abs(opened.tensor(name) - value).max() < limit * np.abs(value).max(), name
        assert value.ndim == 2 or (opened.tensor(name) == value).all(), name


def test_rows_that_blocks_do_not_divide_are_kept_in_f16(tmp_path: Path) -> None:
    config = tiny_config("llama", n_ff=80)
    out = write_out(write_hf(tmp_path / "source", config), tmp_path / "out.gguf")
    kinds = {name: info.type for name, info in open_source(out).file.tensors.items()}  # type: ignore[attr-defined]
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_words_survive(llama: Path, tmp_path: Path) -> None:
    out = write_out(llama, tmp_path / "out.gguf")
    before, after = Tokenizer.load(llama), Tokenizer.load(out)
    assert after.hash == before.hash
    assert after.encode(TEXT) == before.encode(TEXT)
    assert (after.bos_id, after.add_bos) == (before.bos_id, before.add_bos)
    assert open_source(out).chat_template() == TEMPLATE
    assert EOS in after.eos_ids
    again = write_out(out, tmp_path / "again.gguf", type="f32")
    assert Tokenizer.load(again).encode(TEXT) == before.encode(TEXT)
    assert open_source(again).chat_template() == TEMPLATE


def test_same_input_same_bytes_and_the_same_graph(llama: Path, tmp_path: Path) -> None:
    first = write_out(llama, tmp_path / "one.gguf", type="f32").read_bytes()
    assert write_out(llama, tmp_path / "two.gguf", type="f32").read_bytes() == first
    options = ExportOptions(bits=32)
    export_model(llama, tmp_path / "from-hf", options)
    export_model(tmp_path / "one.gguf", tmp_path / "from-gguf", options)
    data = [(tmp_path / name / "model.onnx.data").read_bytes() for name in ("from-hf", "from-gguf")]
    assert data[0] == data[1]


def test_scaled_rotations_become_divisors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    source = write_hf(tmp_path / "source", tiny_config("llama"), rope_scaling=rope)
    found = open_source(write_out(source, tmp_path / "out.gguf")).config.rope
    expected = frequencies(open_source(source).config.rope, 16)
    np.testing.assert_allclose(frequencies(found, 16), expected, rtol=1e-6)
    assert np.abs(frequencies(RopeConfig(), 16) - expected).max() > 1e-3
    linear = {"rope_type": "linear", "factor": 4.0}
    source = write_hf(tmp_path / "linear", tiny_config("llama"), rope_scaling=linear)
    assert open_source(write_out(source, tmp_path / "linear.gguf")).config.rope.factor == 4.0


def test_models_that_would_become_others_are_refused(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "window", tiny_config("mistral-window"))
    with pytest.raises(ExportRefusedError, match="sliding window of 8"):
        write_out(source, tmp_path / "out.gguf")
    yarn = {"rope_type": "yarn", "factor": 2.0}
    source = write_hf(tmp_path / "yarn", tiny_config("llama"), rope_scaling=yarn)
    with pytest.raises(ExportRefusedError, match="rope scaling 'yarn'"):
        write_out(source, tmp_path / "out.gguf")
    weights = tiny_weights(tiny_config("llama"))
    weights["layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    source = write_hf(tmp_path / "large", tiny_config("llama"), weights)
    with pytest.raises(ExportRefusedError, match="beyond the range of float16"):
        write_out(source, tmp_path / "out.gguf", type="f16")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["large", "window", "yarn"]


@pytest.mark.parametrize(("change", "message"), [
    ({"model": {"type": "Unigram", "vocab": []}}, "no byte-level BPE"),
    ({"pre_tokenizer": None}, "no byte-level BPE"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "h"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}},
     "splits words in a way"),
])  # fmt: skip
def test_other_tokenizers_are_refused(change: dict[str, Any], message: str, llama: Path, tmp_path: Path) -> None:
    from edgespec_export.gguf_tokenizer import tokenizer_metadata

    content = json.loads((llama / "tokenizer.json").read_text())
    content.update(change)
    if "Unigram" not in str(change):
        (llama / "tokenizer.json").write_text(json.dumps(content))
    opened, tokenizer = open_source(llama), Tokenizer.load(llama)
    (llama / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ExportRefusedError, match=message):
        tokenizer_metadata(opened, tokenizer, N_VOCAB)


def test_places_that_are_taken_are_left_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(ExportRefusedError, match="exists"):
        write_out(llama, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "mine"
    for name, message in (("out", r"end in \.gguf"), ("folder.gguf", "is a folder")):
        (tmp_path / "folder.gguf").mkdir(exist_ok=True)
        with pytest.raises(ExportRefusedError, match=message):
            write_out(llama, tmp_path / name)
    with pytest.raises(ConfigError, match="type is 'q4_0'"):
        write_out(llama, tmp_path / "new.gguf", type="q4_0")

    def stop(step: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_out(llama, tmp_path / "out.gguf", force=True, progress=stop)
    assert (tmp_path / "out.gguf").read_text() == "mine"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["folder.gguf", "out.gguf", "source"]


def test_command_line(llama: Path, tmp_path: Path) -> None:
    arguments = [str(llama), str(tmp_path / "out.gguf"), "--format", "gguf", "--gguf-type", "f16"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "f16" in result.output
    result = CliRunner().invoke(command, [*arguments, "--force", "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert printed["bytes"] == (tmp_path / "out.gguf").stat().st_size
    with pytest.raises(ConfigError, match="--taps does not go with --format gguf"):
        CliRunner().invoke(command, [*arguments, "--taps", "final"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--quant does not go with --flavour cpu"):
        CliRunner().invoke(command, [str(llama), str(tmp_path / "out"), "--gguf-type", "f16"], catch_exceptions=False)


def test_a_tinydraft_is_a_model_of_its_own(tmp_path: Path) -> None:
    vocabulary, ids = np.arange(0, N_VOCAB, 3), np.arange(N_VOCAB)
    for family in ("llama", "llama-tied"):
        config = tiny_config(family)
        source = write_gguf(tmp_path / f"{family}.gguf", config, extra={"tokenizer.chat_template": TEMPLATE})
        worth = write_zoo(tmp_path / "zoo", "tinydraft", tensors("tinydraft"), vocabulary, int8=True)
        folder = write_hf_folder(tmp_path / "zoo", source, tmp_path / f"{family}-hf")
        weights = tiny_weights(config)
        head = weights["embed_tokens.weight" if config.is_tied else "lm_head.weight"]
        reference = DraftReference(worth, weights["embed_tokens.weight"], head, ids)
        tokens = np.random.default_rng(1).integers(0, N_VOCAB, 9)
        export_model(folder, tmp_path / f"{family}-out", ExportOptions(bits=32))
        found = Graph(tmp_path / f"{family}-out/model.onnx").run(0, 9, input_ids=tokens[None])["logits"]
        np.testing.assert_allclose(found, reference.tinydraft(tokens), atol=1e-4)
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.hash == Tokenizer.load(source).hash
        assert tokenizer.chat_template_source == TEMPLATE
        assert tokenizer.eos_ids == Tokenizer.load(source).eos_ids
        write_out(folder, tmp_path / f"{family}-draft.gguf", type="f32")


@pytest.mark.parametrize("scaling", [
    {"kind": "llama3", "factor": 8.0, "original_ctx": 32},
    {"kind": "yarn", "factor": 4.0, "original_ctx": 32},
    {"kind": "linear", "factor": 4.0},
])  # fmt: skip
def test_a_tinydraft_keeps_its_scaled_rope(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Used to be written with plain rope."""
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    write_zoo(tmp_path / "zoo", "tinydraft", tensors("tinydraft"), np.arange(5), rope_scaling=scaling)
    rope = open_source(write_hf_folder(tmp_path / "zoo", source, tmp_path / "out")).config.rope
    expected = frequencies(RopeConfig(10_000.0, **scaling), 16)
    np.testing.assert_array_equal(frequencies(rope, 16), expected)
    assert np.abs(expected / frequencies(RopeConfig(10_000.0), 16) - 1).max() > 0.5
    write_zoo(tmp_path / "one", "tinydraft", tensors("tinydraft"), np.arange(5), rope_scaling={"divisors": [2.0] * 8})
    with pytest.raises(ExportRefusedError, match="divided one by one"):
        write_hf_folder(tmp_path / "one", source, tmp_path / "refused")


def test_other_drafts_are_no_models(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    write_zoo(tmp_path / "exit", "exit", tensors("exit"), np.arange(5))
    with pytest.raises(ConfigError, match="of kind exit"):
        write_hf_folder(tmp_path / "exit", source, tmp_path / "out")
    write_zoo(tmp_path / "far", "tinydraft", tensors("tinydraft"), np.array([1, N_VOCAB]))
    with pytest.raises(IncompatibleError, match=f"at least {N_VOCAB + 1} tokens"):
        write_hf_folder(tmp_path / "far", source, tmp_path / "out")
    write_zoo(tmp_path / "zoo", "tinydraft", tensors("tinydraft"), np.arange(5), tokenizer_hash="ab" * 32)
    with pytest.raises(IncompatibleError, match="trained with the tokenizer abab"):
        write_hf_folder(tmp_path / "zoo", source, tmp_path / "out")
    write_zoo(tmp_path / "zoo", "tinydraft", tensors("tinydraft"), np.arange(5))
    write_hf_folder(tmp_path / "zoo", source, tmp_path / "out")
    with pytest.raises(ExportError, match="holds other files"):
        write_hf_folder(tmp_path / "zoo", source, tmp_path / "out")


def test_command_line_for_a_tinydraft(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "target.gguf", tiny_config("llama-tied"))
    write_zoo(tmp_path / "zoo", "tinydraft", tensors("tinydraft"), np.arange(5))
    arguments = [str(tmp_path / "zoo"), str(tmp_path / "out"), "--format", "hf"]
    with pytest.raises(ConfigError, match="of a trained draft needs --target"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    result = CliRunner().invoke(command, [*arguments, "--target", str(source), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout.strip().splitlines()[-1])["path"] == str(tmp_path / "out")
    assert open_source(tmp_path / "out").config.n_layers == 2
    with pytest.raises(ConfigError, match="--target does not go with --flavour cpu"):
        CliRunner().invoke(command, [str(source), str(tmp_path / "o"), "--target", "x"], catch_exceptions=False)
