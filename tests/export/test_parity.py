"""The exported graph computes what the weights say, for every family, on queries of several lengths over a past."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export import CheckOptions, ExportOptions, export_model
from edgespec_export.config import kept_layers
from edgespec_export.exporter import KeptWeights
from edgespec_export.parity import GraphRunner, compare
from edgespec_export.reference import ReferenceModel
from edgespec_export.rope import RopeConfig
from edgespec_export.sources import open_source
from tiny_models import FAMILIES, N_VOCAB, tiny_config, tiny_weights, write_gguf, write_hf

from edgespec.bundle import Bundle
from edgespec.errors import ExportError

FLOAT = ExportOptions(bits=32)
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 60).tolist()


def largest_error(source: Path, out: Path, options: ExportOptions = FLOAT) -> float:
    """Exports, then compares on the grid and a text; the reference reads the source anew."""
    export_model(source, out, options)
    opened = open_source(source)
    parity = compare(GraphRunner(out, opened.config, n_ctx=64), ReferenceModel(opened.config, opened.tensor), TEXT)
    assert len(parity.grid) == 12
    return max(parity.max_abs_error, *(row["max_abs_error"] for row in parity.grid))


@pytest.mark.parametrize("family", FAMILIES)
def test_float_graph_equals_reference_for_hf_folders(family: str, tmp_path: Path) -> None:
    assert largest_error(write_hf(tmp_path / "source", tiny_config(family)), tmp_path / "out") < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_gguf_and_hf_of_the_same_weights_give_the_same_model(family: str, tmp_path: Path) -> None:
    """Rotated rows are stored in another order in a llama GGUF, which used to garble attention when left alone."""
    config = tiny_config(family)
    write_hf(tmp_path / "hf", config)
    write_gguf(tmp_path / "model.gguf", config)
    assert largest_error(tmp_path / "model.gguf", tmp_path / "out-gguf") < 1e-4
    export_model(tmp_path / "hf", tmp_path / "out-hf", FLOAT)
    files = [(tmp_path / out / "model.onnx.data").read_bytes() for out in ("out-gguf", "out-hf")]
    assert files[0] == files[1]


@pytest.mark.parametrize("options", [
    ExportOptions(bits=32, fuse_qkv=False, fuse_gate_up=False, quick_gelu=False),
    ExportOptions(bits=32, embed_bits=32, taps=("final", "layer.0", "layer.1")),
])  # fmt: skip
def test_graph_shapes_do_not_change_the_numbers(options: ExportOptions, tmp_path: Path) -> None:
    assert largest_error(write_hf(tmp_path / "source", tiny_config("qwen3")), tmp_path / "out", options) < 1e-4


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_kinds(kind: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama"), rope_scaling=ROPES[kind])
    assert open_source(source).config.rope.kind == kind
    assert largest_error(source, tmp_path / "out") < 1e-4


def test_dynamic_rope_is_refused_beyond_the_switch(tmp_path: Path) -> None:
    settings = {**ROPES["dynamic"], "original_max_position_embeddings": 32}
    source = write_hf(tmp_path / "source", tiny_config("llama"), rope_scaling=settings)
    with pytest.raises(ExportError, match=r"passes 32 tokens.*asked for is 128"):
        export_model(source, tmp_path / "out", FLOAT)
    export_model(source, tmp_path / "out", ExportOptions(bits=32, n_ctx=32))
    opened = open_source(source)
    runner = GraphRunner(tmp_path / "out", opened.config, n_ctx=32)
    assert compare(runner, ReferenceModel(opened.config, opened.tensor), TEXT[:32]).max_abs_error < 1e-4


def test_taps_are_the_references_features(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    taps = ("final", "layer.0", "layer.1")
    export_model(source, tmp_path / "out", replace(FLOAT, taps=taps))
    opened = open_source(source)
    runner = GraphRunner(tmp_path / "out", opened.config, taps, n_ctx=32)
    runner.forward(TEXT[:7], 0)
    expected: dict[str, np.ndarray] = {}
    ReferenceModel(opened.config, opened.tensor).forward(TEXT[:7], taps=expected)
    assert set(runner.hidden) == set(taps)
    for tap in taps:
        np.testing.assert_allclose(runner.hidden[tap], expected[tap], atol=1e-4)


def test_keep_layers_is_the_model_without_the_others(tmp_path: Path) -> None:
    config = tiny_config("llama", n_layers=4, windows=(None,) * 4)
    source = write_hf(tmp_path / "source", config)
    export_model(source, tmp_path / "out", replace(FLOAT, keep_layers=(0, 3)))
    assert Bundle.open(tmp_path / "out").info.n_layers == 2
    pruned = kept_layers(config, (0, 3))
    reference = ReferenceModel(pruned, KeptWeights(open_source(source), (0, 3)))
    runner = GraphRunner(tmp_path / "out", pruned, n_ctx=64)
    assert compare(runner, reference, TEXT).max_abs_error < 1e-4
    with pytest.raises(ExportError, match="within 0 to 3"):
        export_model(source, tmp_path / "bad", replace(FLOAT, keep_layers=(0, 4)))


def test_a_window_limits_what_a_token_sees(tmp_path: Path) -> None:
    """With both layers seeing 8 tokens, a token 20 back must not change the logits; without windows it must."""
    for family, sees in (("mistral-window", False), ("llama", True)):
        config = tiny_config(family)
        export_model(write_hf(tmp_path / family, config), tmp_path / f"{family}-out", FLOAT)
        runner = GraphRunner(tmp_path / f"{family}-out", config, n_ctx=64)
        first = runner.forward(TEXT[:30], 0)[-1].copy()
        second = runner.forward([TEXT[0] ^ 1, *TEXT[1:30]], 0)[-1]
        assert bool(np.abs(first - second).max() > 1e-6) is sees


@pytest.mark.parametrize("options", [
    ExportOptions(bits=8, block_size=32),
    ExportOptions(bits=8, block_size=32, symmetric=False),
    ExportOptions(bits=4, block_size=16, head_bits=8, accuracy_level=1),
])  # fmt: skip
def test_quantized_exports_pass_their_own_check(options: ExportOptions, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("qwen2"))
    limits = CheckOptions(min_top1=0.4, max_kld=0.2, n_tokens=64)
    export_model(source, tmp_path / "out", options, check=limits)
    parity = Bundle.open(tmp_path / "out").info.parity
    assert parity is not None
    assert 0 < parity["kld_mean"] < 0.2
    assert len(parity["grid"]) == 12


def test_the_gate_refuses_a_model_that_is_too_far_off(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", tiny_config("llama"))
    with pytest.raises(ExportError, match=r"agrees with the float one on .*at most 1e-09"):
        export_model(source, tmp_path / "out", ExportOptions(bits=4), check=CheckOptions(max_kld=1e-9, n_tokens=40))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source"]


def test_a_wrong_rope_theta_fails_the_float_check(tmp_path: Path) -> None:
    """The check would be worthless if a graph that is a little wrong passed it."""
    config = tiny_config("llama")
    export_model(write_hf(tmp_path / "source", config), tmp_path / "out", FLOAT)
    wrong = replace(config, rope=RopeConfig(theta=20_000.0))
    weights = tiny_weights(config)
    runner = GraphRunner(tmp_path / "out", config, n_ctx=64)
    assert compare(runner, ReferenceModel(wrong, weights.__getitem__), TEXT).max_abs_error > 1e-3


@pytest.mark.parametrize(("name", "problem"), [("norm.weight", "same logit"), ("lm_head.weight", "NaN or infinite")])
def test_dead_logits_fail_the_export(name: str, problem: str, tmp_path: Path) -> None:
    """A final norm of zeros makes every logit 0; weights whose products overflow make them infinite."""
    config = tiny_config("llama")
    weights = tiny_weights(config)
    weights[name] = weights[name] * 0 if name == "norm.weight" else np.full_like(weights[name], 3e38)
    source = write_hf(tmp_path / "source", config, weights)
    with pytest.raises(ExportError, match=problem), np.errstate(all="ignore"):
        export_model(source, tmp_path / "out", FLOAT, check=CheckOptions(n_tokens=40))
    assert not (tmp_path / "out").exists()


def test_nan_weights_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    weights["layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    source = write_hf(tmp_path / "source", config, weights)
    for options in (FLOAT, ExportOptions()):
        with pytest.raises(ExportError, match=r"layers\.1\.mlp\.down_proj.*NaN"):
            export_model(source, tmp_path / "out", options)
