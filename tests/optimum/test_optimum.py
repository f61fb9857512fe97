"""Exports through optimum: other families, the real model, and decoders with a growing cache in both roles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import edgespec_export
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from device_pairs import outputs
from edgespec_export import CheckOptions, ExportOptions, export_model, via_optimum, write_hf_model
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import open_source
from export.tiny_models import EOS, FAMILIES, N_VOCAB, tiny_config, tokenizer_json, write_hf

from edgespec.backends import load_model
from edgespec.cli import main
from edgespec.errors import ExportError
from edgespec.pairs import source_path

REFERENCE = Path(edgespec_export.__file__).with_name("optimum_reference.py")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
OTHERS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(n_positions=128, n_embd=64, n_layer=2, n_head=4),
    "gpt-neox": transformers.GPTNeoXConfig(max_position_embeddings=128, rotary_pct=0.25, **SIZES),
}


def write_random(folder: Path, config: Any, seed: int = 0) -> Path:
    """A random model as transformers saves it, with weights so large that its logits differ, and our tokenizer."""
    torch.manual_seed(seed)
    config.vocab_size, config.bos_token_id, config.eos_token_id, config.initializer_range = N_VOCAB, 256, EOS, 0.5
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return folder


def run(*arguments: str) -> dict[str, Any]:
    """What a command of edgespec prints as JSON."""
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> optimum folder; `name-source` -> what it was made of; `bundle`: a Llama of our own exporter."""
    base, found = tmp_path_factory.mktemp("optimum"), {}
    for name, config in OTHERS.items():
        found[f"{name}-source"] = write_random(base / f"{name}-source", config)
        found[name] = base / name
        printed = run("export", "--via", "optimum", str(found[f"{name}-source"]), str(found[name]))
        parity = printed["parity"]
        assert parity["max_abs_error"] < 1e-3
        assert parity["top1_agreement"] == 1.0
        assert [(row["query"], row["past"]) for row in parity["grid"]][-1] == (33, 9)
    source = write_hf(base / "llama", tiny_config("llama"))
    found["bundle"] = export_model(source, base / "bundle", ExportOptions(bits=32))
    return found


def test_a_folder_has_what_edgespec_needs(folders: dict[str, Path]) -> None:
    for name in OTHERS:
        info = load_model(folders[name]).info
        assert (info.n_vocab, info.n_ctx, info.eos_ids, info.max_rows) == (N_VOCAB, 128, (EOS,), None)
        assert (folders[name] / "tokenizer.json").read_text() == tokenizer_json()


@pytest.mark.parametrize("target", [*OTHERS, "bundle"])
def test_any_pair_says_what_the_target_says_alone(folders: dict[str, Path], target: str) -> None:
    plain = outputs(folders[target], draft="none")
    for draft in {*OTHERS, "bundle"} - {target}:
        drafted = outputs(folders[target], draft_model=folders[draft])
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
        assert all(output.stats.drafted > 20 for output in drafted)


def test_a_draft_equal_to_its_target_is_always_right(folders: dict[str, Path]) -> None:
    found = outputs(folders["gpt2"], draft_model=folders["gpt2"], verifier="coupled")
    assert all(output.stats.acceptance_rate == 1.0 for output in found)


def test_a_graph_of_other_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_random(tmp_path / "other", OTHERS["gpt2"], seed=1)
    parity = via_optimum._compare(other, folders["gpt2"], sys.executable, CheckOptions(n_tokens=40))
    with pytest.raises(ExportError, match=r"agrees with transformers on 0\.0% .*at most 1e-06 wanted"):
        via_optimum._gate(parity, CheckOptions())


def test_what_optimum_says_is_passed_on(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = write_random(tmp_path / "broken", OTHERS["gpt2"])
    settings = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**settings, "model_type": "no-such-family"}))
    with pytest.raises(ExportError, match=r"optimum's export ended with status 1: .*no-such-family"):
        via_optimum.export_with_optimum(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_that_we_write_are_what_transformers_reads(family: str, tmp_path: Path) -> None:
    """Each family's config.json, by the logits of transformers' own class against our float reference."""
    folder = write_hf_model(write_hf(tmp_path / "source", tiny_config(family)), tmp_path / "out")
    text = np.random.default_rng(2).integers(0, N_VOCAB, 40).tolist()
    (tmp_path / "ids.json").write_text(json.dumps(text))
    command = [sys.executable, str(REFERENCE), str(folder), str(tmp_path / "ids.json"), str(tmp_path / "logits.npy")]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    source = open_source(tmp_path / "source")
    expected = ReferenceModel(source.config, source.tensor).forward(text)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=2e-4)


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_the_real_model_from_its_gguf(tmp_path: Path) -> None:
    """SmolLM2 rebuilt as a Hugging Face folder goes through optimum and runs as target and as its own draft."""
    run("export", "--format", "hf", str(source_path("smollm2-135m")), str(tmp_path / "hf"))
    printed = run("export", "--via", "optimum", str(tmp_path / "hf"), str(tmp_path / "model"))
    assert printed["parity"]["kld_mean"] < 1e-9
    words = ["run", "--compare", "-m", str(tmp_path / "model"), "--draft-model", str(tmp_path / "model"), "-n", "16"]
    printed = run(*words, "--draft-max", "2", "-c", "256", "Name three colours.")
    assert printed["identical"] is True
    assert printed["acceptance_rate"] == 1.0
