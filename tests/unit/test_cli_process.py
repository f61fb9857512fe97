"""The command line's process: closed streams, odd encodings, settings of the wrong type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def shell(command: str, env: dict[str, str], **more: str) -> subprocess.CompletedProcess[bytes]:
    program = f"{sys.executable} -m edgespec"
    return subprocess.run(
        ["bash", "-c", command.replace("edgespec", program, 1)],
        env={**env, **more},
        capture_output=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_without_a_traceback(child_env: dict[str, str], closed: str) -> None:
    """A stream that the caller had closed is None in Python, and the first look at it crashed."""
    done = shell(f"edgespec list {closed}", child_env)
    assert done.returncode == 0
    assert b"Traceback" not in done.stdout + done.stderr


def test_closed_standard_input_is_no_prompt(child_env: dict[str, str]) -> None:
    done = shell("edgespec run -m ./nowhere <&-", child_env)
    assert done.returncode == 2
    assert b"there is no prompt" in done.stderr


def test_standard_input_that_is_no_text_is_said(child_env: dict[str, str]) -> None:
    done = shell(r"edgespec run -m ./nowhere < <(printf '\377\376x')", child_env, LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr


@pytest.mark.parametrize(
    "text",
    ["max_tokens = 6.7", "max_tokens = true", "max_tokens = [1, 2]", "[run]\nexact = 7", "[run]\nmodel = {a = 1}"],
)
def test_settings_of_another_type_are_refused(child_env: dict[str, str], tmp_path: Path, text: str) -> None:
    """6.7 tokens became 6, true became 1, and a list ended in an internal error."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    done = shell(f"edgespec --config {path} run -m ./nowhere x", child_env)
    assert done.returncode == 2
    assert b"it must be" in done.stderr


def test_check_notices_a_file_that_was_altered(child_env: dict[str, str], tmp_path: Path) -> None:
    """A bundle whose weights had been overwritten was blamed on the device's precision."""
    from edgespec.testing.onnx_models import write_bundle

    folder = write_bundle(tmp_path / "tiny")
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b'"version": "1.0"', b'"version": "1.1"'))
    done = shell(f"edgespec check {folder} --json", child_env)
    assert done.returncode == 2
    assert b"tokenizer.json" in done.stderr
    assert done.stdout == b""
