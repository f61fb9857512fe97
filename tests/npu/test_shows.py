"""Draft on the NPU with the target on the CPU, and the other way round, as a user starts them; the NPU is emulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from npu.emulator import require_qnn

pytestmark = [pytest.mark.npu, pytest.mark.real_model]

PROMPT = "Why is the sky blue?"
RUN = ["run", "--compare", "-n", "16", "--temp", "0", "--strict-device", "--json"]
CUT = ["--keep-layers", "0-1", "--context", "128", "--no-check"]


@pytest.fixture(autouse=True)
def emulator() -> None:
    require_qnn()


def edgespec(*arguments: str | Path, env: dict[str, str]) -> dict[str, Any]:
    """What the command prints as JSON; the trained drafts are converted in the user's cache, as ever."""
    command = [sys.executable, "-m", "edgespec", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def check_counts(result: dict[str, Any]) -> None:
    assert result["identical"] is True
    assert result["exact"] is True
    assert result["completion_tokens"] == 16
    accepted = result["accepted"] + result["accepted_fillers"]
    assert result["completion_tokens"] == accepted + result["rounds"] - result["cut"]
    assert all("is emulated here" in note for note in result["notes"])


def test_the_shipped_tinydraft_on_the_npu(real_bundle: Path, child_env: dict[str, str]) -> None:
    options = ["--draft", "tinydraft", "--draft-device", "qnn:htp", "--target-device", "cpu", "-cd", "128"]
    result = edgespec(*RUN, *options, PROMPT, env=child_env)
    check_counts(result)
    assert result["accepted"] > 0
    draft = result["devices"]["draft"]["tinydraft"]
    assert list(draft["nodes"]) == ["QNNExecutionProvider"]
    assert {*result["devices"]["target"]["nodes"]} <= {"CPUExecutionProvider", "edgespec"}


def test_a_target_on_the_npu(child_env: dict[str, str], tmp_path: Path) -> None:
    """The draft is the same cut in 8 bits, so that tokens are accepted as well as rejected."""
    npu = ["--flavour", "npu", "--widths", "4"]
    edgespec("export", "smollm2-135m", tmp_path / "target", *npu, *CUT, "--json", env=child_env)
    edgespec("export", "smollm2-135m", tmp_path / "draft", "--bits", "4", *CUT, "--json", env=child_env)
    env = {**child_env, "EDGESPEC_HOME": str(tmp_path / "home")}  # for the compiled graphs
    options = ["-m", tmp_path / "target", "--device", "qnn:htp", "-md", tmp_path / "draft", "--draft-device", "cpu"]
    result = edgespec(*RUN, *options, PROMPT, env=env)
    check_counts(result)
    assert 0 < result["accepted"] < result["drafted"]
    assert list(result["devices"]["target"]["nodes"]) == ["QNNExecutionProvider"]
    assert result["graphs"]["speculative"] == "width-4.onnx"
