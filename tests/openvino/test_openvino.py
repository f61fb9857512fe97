"""OpenVINO's provider beside the CPU's: what it takes, and pairs with one of the two models on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from device_pairs import acceptance, check_draft, outputs, write_models

from edgespec.backends import load_model
from edgespec.cli import main
from edgespec.errors import BackendError
from edgespec.testing.onnx_models import quantize_matrix, write_bundle
from edgespec.testing.tiny import TinySpec, tiny_logits, tiny_weights

DEVICE = "openvino:cpu"
PROVIDER = "OpenVINOExecutionProvider"
TOKENS = np.random.default_rng(6).integers(0, 64, 40).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def test_it_takes_all_but_the_attention_operator(models: dict[str, Path]) -> None:
    info = load_model(models["target"], device=DEVICE).info
    assert info.device == DEVICE
    assert info.placement["CPUExecutionProvider"] == 2
    assert info.placement[PROVIDER] > 10
    assert info.fallbacks == ("GroupQueryAttention",)
    with pytest.raises(BackendError, match=r"2 of \d+ nodes .*'openvino:cpu'.*GroupQueryAttention"):
        load_model(models["target"], device=DEVICE, strict_device=True)


def test_it_takes_plain_operators_whole(models: dict[str, Path]) -> None:
    info = load_model(models["same"], device=DEVICE, strict_device=True).info
    assert set(info.placement) == {PROVIDER}
    assert info.fallbacks == ()


def test_int4_weights_are_the_decoded_ones(tmp_path: Path) -> None:
    """It multiplies in float where the CPU's kernel rounds activations to 8 bits."""
    spec = TinySpec()
    weights = tiny_weights(spec)
    for name, value in weights.items():
        if value.ndim == 2 and name != "embed":
            weights[name] = quantize_matrix(value)[2]
    model = load_model(write_bundle(tmp_path, spec, bits=4), device=DEVICE)
    logits = model.open_session().forward(TOKENS).logits
    np.testing.assert_allclose(logits, tiny_logits(spec, TOKENS, weights), atol=1e-3)


@pytest.mark.parametrize("draft", ["other", "other-plain"])
def test_a_draft_on_it_does_not_change_the_text(models: dict[str, Path], draft: str) -> None:
    check_draft(models, draft, DEVICE)


def test_a_draft_equal_to_the_target_is_always_right(models: dict[str, Path]) -> None:
    assert acceptance(check_draft(models, "same", DEVICE, strict_device=True)) == [1.0, 1.0]


@pytest.mark.parametrize("target", ["target", "same"])
def test_a_target_on_it_says_the_same_with_a_draft_on_the_cpu(models: dict[str, Path], target: str) -> None:
    plain = outputs(models[target], draft="none", device=DEVICE)
    drafted = outputs(models[target], draft_model=models["other"], device=DEVICE)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_command_line(models: dict[str, Path]) -> None:
    arguments = ["run", "--compare", "-m", str(models["target"]), "--draft-model", str(models["other-plain"])]
    arguments += ["--draft-device", DEVICE, "--strict-device", "-n", "16", "--ignore-eos", "--raw", "--json", "abcab"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert printed["identical"] is True
