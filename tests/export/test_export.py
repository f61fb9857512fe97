"""What an export refuses, what it keeps, and that it leaves nothing half-made behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_export import CheckOptions, ExportOptions, export_model
from edgespec_export.sources import open_source
from edgespec_export.writer import new_folder
from tiny_models import EOS, FAMILIES, N_VOCAB, tiny_config, tiny_weights, write_gguf, write_hf

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError, ExportError, ExportRefusedError, FormatError

FLOAT = ExportOptions(bits=32)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", tiny_config("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_same_input_same_bytes(family: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config(family))
    for out in ("one", "two"):
        export_model(source, tmp_path / out, ExportOptions(quantizer="mse", search=4, taps=("final",)), check=_loose())
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def _loose() -> CheckOptions:
    return CheckOptions(min_top1=0, max_kld=100, n_tokens=34)


def test_a_tied_table_is_kept_once(tmp_path: Path) -> None:
    sizes = {}
    for family in ("llama", "llama-tied"):
        export_model(write_hf(tmp_path / family, tiny_config(family)), tmp_path / f"{family}-out", FLOAT)
        sizes[family] = (tmp_path / f"{family}-out" / "model.onnx.data").stat().st_size
    assert sizes["llama"] - sizes["llama-tied"] >= N_VOCAB * 64 * 4


def test_sharded_folders_are_the_same_model(llama: Path, tmp_path: Path) -> None:
    write_hf(tmp_path / "shards", tiny_config("llama"), shards=3)
    export_model(llama, tmp_path / "one", FLOAT)
    export_model(tmp_path / "shards", tmp_path / "many", FLOAT)
    assert (tmp_path / "one/model.onnx.data").read_bytes() == (tmp_path / "many/model.onnx.data").read_bytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantized_ggufs_are_dequantized(kind: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    opened = open_source(write_gguf(tmp_path / "model.gguf", config, quantization=kind))
    step = {"Q4_0": 0.25, "Q4_1": 0.25, "Q5_0": 0.15, "Q5_1": 0.15, "Q8_0": 0.02, "F16": 1e-3, "BF16": 8e-3}[kind]
    for name, value in weights.items():
        if name != "layers.0.mlp.gate_proj.weight" and value.ndim == 2:
            assert np.abs(opened.tensor(name) - value).max() < step * 2, name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantized(kind: str, tmp_path: Path) -> None:
    """Random blocks with sane scales: the values must be those of the reference implementation."""
    import gguf

    config = tiny_config("llama", n_embd=256, n_ff=256, head_dim=64, n_layers=1, windows=(None,))
    path = write_gguf(tmp_path / "model.gguf", config)
    type_ = gguf.GGMLQuantizationType[kind]
    _, nbytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(1).integers(0, 256, (256, nbytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        is_down = tensor.name == "blk.0.ffn_down.weight"
        writer.add_tensor(tensor.name, raw if is_down else tensor.data, raw_dtype=type_ if is_down else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        found = open_source(tmp_path / "k.gguf").tensor("layers.0.mlp.down_proj.weight")
        expected = gguf.quants.dequantize(raw, type_)
    np.testing.assert_array_equal(found, expected.reshape(256, 256))


def test_all_end_ids_survive(tmp_path: Path) -> None:
    """Dropping all but the first id used to make chats run on past the end of a turn."""
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259, 261]}))
    export_model(source, tmp_path / "hf", FLOAT)
    assert Bundle.open(tmp_path / "hf").info.eos_ids == (EOS, 258, 259, 261)
    extra = {"tokenizer.ggml.eot_token_id": 260, "tokenizer.ggml.eom_token_id": 259}
    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), extra=extra)
    export_model(tmp_path / "model.gguf", tmp_path / "gguf", FLOAT)
    info = Bundle.open(tmp_path / "gguf").info
    assert info.eos_ids == (EOS, 259, 260)
    assert (info.bos_id, info.add_bos) == (256, False)


def test_texts_survive(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}é{% endfor %}"
    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), extra={"tokenizer.chat_template": template})
    export_model(tmp_path / "model.gguf", tmp_path / "gguf", FLOAT)
    assert (tmp_path / "gguf/chat_template.jinja").read_text(encoding="utf-8") == template
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    export_model(source, tmp_path / "hf", FLOAT)
    assert (tmp_path / "hf/chat_template.jinja").read_text(encoding="utf-8") == template
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_the_config_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", tiny_config("llama"))
    write_hf(tmp_path / "b", tiny_config("qwen2", n_ff=128, n_layers=3, windows=(None,) * 3))
    for first, second, parts in (
        ("a", "b", ["layers.2", "is missing", "gate_proj.weight is [96, 64] and the config says [128, 64]"]),
        ("b", "a", ["layers.2", "is not part of this model", "gate_proj.weight is [128, 64]"]),
    ):
        shutil.copytree(tmp_path / first, tmp_path / f"mixed-{first}")
        shutil.copy(tmp_path / second / "config.json", tmp_path / f"mixed-{first}")
        with pytest.raises(ExportError) as caught:
            export_model(tmp_path / f"mixed-{first}", tmp_path / "out", FLOAT)
        text = str(caught.value)
        assert "one and the same model" in text
        assert sum(part in text for part in parts) >= 2, text
    assert not (tmp_path / "out").exists()


def test_swapped_source_and_target_are_refused(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_config("llama"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="does not exist"):
        export_model(tmp_path / "out", path, FLOAT)
    with pytest.raises(ExportError, match="swapped"):
        export_model(llama, path, FLOAT)
    with pytest.raises(ExportError, match="holds other files and no bundle"):
        export_model(path, llama, FLOAT)
    assert path.read_bytes() == before


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama", n_vocab=200))
    with pytest.raises(ExportError, match="264 tokens and the model only 200"):
        export_model(source, tmp_path / "out", FLOAT)


@pytest.mark.parametrize(("settings", "message"), [
    ({"model_type": "gemma3"}, "'gemma3' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act = gelu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_local_experts": 8}, "num_local_experts = 8"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
    ({"layer_types": ["full_attention", "linear_attention"], "sliding_window": 4}, "linear_attention"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama"), **settings)
    with pytest.raises(ExportError, match=message):
        export_model(source, tmp_path / "out", FLOAT)


def test_unknown_ggufs_are_refused_by_name(tmp_path: Path) -> None:
    for extra, message in (
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.dimension_count": 8}, "only 8 of 16 channels"),
    ):
        path = write_gguf(tmp_path / "model.gguf", tiny_config("llama"), extra=extra)
        with pytest.raises(ExportError, match=message):
            export_model(path, tmp_path / "out", FLOAT)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", b"\x10\0\0\0\0\0\0\0" + b'{"a": [1,2,3]}  ']
)
def test_broken_safetensors_are_refused(content: bytes, llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises((FormatError, ExportError)):
        export_model(llama, tmp_path / "out", FLOAT)


def test_cut_safetensors_name_the_tensor(llama: Path, tmp_path: Path) -> None:
    content = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(FormatError, match="ends after the end of the file"):
        export_model(llama, tmp_path / "out", FLOAT)


def test_shards_outside_of_the_folder_are_refused(llama: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match=r"'\.\./other/model\.safetensors', which is not a file of the folder"):
        export_model(llama, tmp_path / "out", FLOAT)


def test_a_failure_half_way_leaves_the_old_bundle_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    export_model(llama, tmp_path / "out", FLOAT)
    before = (tmp_path / "out/bundle.json").read_bytes()

    def stop(step: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(llama, tmp_path / "out", ExportOptions(), stop, force=True)
    assert (tmp_path / "out/bundle.json").read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out", "source"]


def test_command_line(llama: Path, tmp_path: Path) -> None:
    from edgespec.cli.export import command

    arguments = [str(llama), str(tmp_path / "out"), "--bits", "8", "--taps", "final,layer.1", "--keep-layers", "0-1"]
    arguments += ["--check-tokens", "48", "--min-top1", "0.5", "--max-kld", "1"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "33 on a past of 9" in result.output
    assert "text of 48 tokens" in result.output
    with pytest.raises(ExportError, match="--force"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    result = CliRunner().invoke(command, [*arguments, "--force", "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert printed["quantization"]["bits"] == 8
    assert printed["parity"]["n_tokens"] == 48
    result = CliRunner().invoke(command, [*arguments, "--keep-layers", "a-b"])
    assert result.exit_code == 2
    assert "neither a layer number nor a range" in result.output


def test_force_never_takes_other_files_with_it(tmp_path: Path) -> None:
    """--force replaced the whole folder, the user's own notes in it included."""
    folder = tmp_path / "bundle"
    with new_folder(folder, force=False) as temporary:
        (temporary / "model.onnx").write_text("x")
        (temporary / "bundle.json").write_text('{"files": {"model.onnx": {}}}')
    with new_folder(folder, force=True) as temporary:
        (temporary / "bundle.json").write_text('{"files": {}}')
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ExportRefusedError, match=r"notes\.txt"), new_folder(folder, force=True):
        pass
    assert (folder / "notes.txt").read_text() == "mine"
