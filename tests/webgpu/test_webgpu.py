"""WebGPU on a software GPU beside the CPU: what it takes, what it gets wrong, and a draft on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from device_pairs import SPEC, acceptance, check_draft, write_models

from edgespec.backends import load_model
from edgespec.backends.onnx.inventory import list_devices
from edgespec.cli import main
from edgespec.errors import BackendError
from edgespec.testing.tiny import tiny_logits

DEVICE = "webgpu"
PROVIDER = "WebGpuExecutionProvider"
TOKENS = np.random.default_rng(6).integers(0, 64, 12).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def test_wrong_rows_are_found_at_load_and_single_ones_asked_for(models: dict[str, Path]) -> None:
    """On SwiftShader the attention operator is wrong where several rows see more than 4 keys."""
    model = load_model(models["target"], device=DEVICE, strict_device=True)
    assert set(model.info.placement) == {PROVIDER}
    assert model.info.placement[PROVIDER] > 20
    assert model.info.fallbacks == ()
    assert model.info.max_rows == 1
    logits = model.open_session().forward(TOKENS).logits
    np.testing.assert_allclose(logits, tiny_logits(SPEC, TOKENS), atol=1e-4)


def test_doctor_says_so() -> None:
    (row,) = [row for row in list_devices() if row["name"] == DEVICE]
    assert (row["usable"], row["dynamic_shapes"], row["several_rows"], row["tree"]) == (True, True, False, False)


def test_the_cache_stays_on_the_gpu_and_grows(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it used to be copied to the GPU and back at every call."""
    monkeypatch.setattr("edgespec.backends.onnx.cached.MIN_CAPACITY", 4)
    session = load_model(models["target"], device=DEVICE).open_session()
    logits = []
    for start in range(0, len(TOKENS), 2):
        logits.append(session.forward(TOKENS[start : start + 2]).logits.copy())
        assert session._graph.cache == []
    assert session._graph.capacity == 16
    np.testing.assert_allclose(np.concatenate(logits), tiny_logits(SPEC, TOKENS), atol=1e-4)
    session.keep(3)
    again = session.forward(TOKENS[5:9]).logits
    np.testing.assert_allclose(again, tiny_logits(SPEC, [*TOKENS[:3], *TOKENS[5:9]])[3:], atol=1e-4)


def test_plain_operators_take_several_rows_and_what_falls_back_is_named(models: dict[str, Path]) -> None:
    info = load_model(models["same"], device=DEVICE).info
    assert info.max_rows is None
    assert info.placement[PROVIDER] > 50
    assert 0 < info.placement["CPUExecutionProvider"] < 20
    assert "Shape" in info.fallbacks
    with pytest.raises(BackendError, match=r"\d+ nodes are not taken by device 'webgpu' .*Shape"):
        load_model(models["same"], device=DEVICE, strict_device=True)


def test_a_draft_on_it_does_not_change_the_text(models: dict[str, Path]) -> None:
    check_draft(models, "other", DEVICE, strict_device=True)


def test_a_draft_equal_to_the_target_is_always_right(models: dict[str, Path]) -> None:
    assert acceptance(check_draft(models, "same", DEVICE)) == [1.0, 1.0]


def test_command_line(models: dict[str, Path]) -> None:
    arguments = ["run", "--compare", "-m", str(models["target"]), "--draft-model", str(models["other"])]
    arguments += ["--draft-device", DEVICE, "--target-device", "cpu", "--strict-device", "-n", "16"]
    result = CliRunner().invoke(main, [*arguments, "--ignore-eos", "--raw", "--json", "abcab"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert printed["identical"] is True
    (draft,) = printed["devices"]["draft"].values()
    assert (draft["device"], list(draft["nodes"])) == (DEVICE, [PROVIDER])
    assert printed["devices"]["target"]["device"] == "cpu"


@pytest.mark.parametrize("model", ["other", "other-plain"])
def test_programs_end_well(models: dict[str, Path], model: str, child_env: dict[str, str]) -> None:
    """Bindings that outlived the runtime used to end the process with a segmentation fault: those of a session that
    outlives its model, and those of one that is still open at the end."""
    code = (
        "import sys; from edgespec.backends import load_model; "
        "model = load_model(sys.argv[1], device='webgpu'); session = model.open_session(); session.forward([1, 2]); "
        "left = model.open_session(); left.forward([1]); model.close(); del model, session; print('done')"
    )
    command = [sys.executable, "-c", code, str(models[model])]
    child = subprocess.run(command, env=child_env, capture_output=True, text=True, check=False, timeout=250)
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr
