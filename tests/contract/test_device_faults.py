"""Drafts whose device fails, on providers that really run: the emulated NPU refuses to start, a graph gives NaN or
raises in mid-run. The text is the target's throughout."""

from __future__ import annotations

import json
import platform
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from spoiled import spoil

from edgespec import LLM, SamplingParams
from edgespec.backends import load_model
from edgespec.cli import main
from edgespec.errors import BackendError, EdgeSpecError, MissingDependencyError, NumericsError
from edgespec.testing.onnx_models import write_bundle

PROMPT = [3, 1, 4, 1, 5, 9]
PARAMS = SamplingParams(temperature=0.7, seed=4, max_tokens=24, ignore_eos=True)
REFUSED = {"draft_device": "qnn:htp", "draft_device_options": {"soc_model": "none"}}
needs_qnn = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or util.find_spec("onnxruntime_qnn") is None,
    reason="needs the emulator of the NPU: pip install 'edgespec[qnn]' on Linux x86-64",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "target")


def run(folder: Path, draft: Path | None, **options: Any) -> tuple[list[int], list[str]]:
    """Token ids, and the notes that say what is off."""
    kind = {"draft": "none"} if draft is None else {"draft": "model", "draft_model": draft}
    with LLM(folder, **kind, **options) as llm:
        output = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        return output.token_ids, [note for note in output.stats.notes if " off: " in note]


@needs_qnn
def test_a_provider_that_refuses_to_start_costs_the_draft_alone(folder: Path) -> None:
    tokens, notes = run(folder, folder, **REFUSED)
    assert tokens == run(folder, None)[0]
    (note,) = notes
    assert note.startswith("speculation off: onnxruntime")
    assert "'qnn:htp'" in note
    assert "soc_model" in note  # what it was that the provider did not like
    with pytest.raises(BackendError, match=r"cannot load .* on device 'qnn:htp'"):
        run(folder, folder, strict_device=True, **REFUSED)


def test_an_absent_provider_is_said_once_and_names_its_package(folder: Path) -> None:
    """CASES 49."""
    tokens, notes = run(folder, folder, draft_device="directml:1")
    assert tokens == run(folder, None)[0]
    (note,) = notes
    assert note.startswith("speculation off: device 'directml:1' needs DmlExecutionProvider")
    assert "pip install onnxruntime-directml" in note
    with pytest.raises(MissingDependencyError, match="needs DmlExecutionProvider"):
        run(folder, folder, draft_device="directml:1", strict_device=True)
    with pytest.raises(MissingDependencyError, match="needs DmlExecutionProvider"):  # a target cannot be done without
        run(folder, None, device="directml:1")


@pytest.mark.parametrize("how", ["nan", "gone"])
def test_a_draft_that_breaks_in_mid_run(folder: Path, tmp_path: Path, how: str) -> None:
    """CASES 34 and the draft's half of 49."""
    draft = spoil(write_bundle(tmp_path / "draft"), how)
    tokens, notes = run(folder, draft, exact=False)
    assert tokens == run(folder, None, exact=False)[0]
    (note,) = notes
    assert note.startswith("speculation off: tiny: ")
    assert ("nan" in note) == (how == "nan")
    with pytest.raises(NumericsError if how == "nan" else BackendError, match="tiny"):
        run(folder, draft, strict_device=True)


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("how", ["nan", "gone"])
def test_a_target_that_breaks_is_one_line_and_exit_1(folder: Path, how: str, draft: str) -> None:
    spoil(folder, how)
    arguments = ["run", "-m", str(folder), "--raw", "--draft", draft, "-n", "40", "--ignore-eos", "a b c"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("Error: tiny: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("n_past", [0, 3])
def test_half_precision_with_rows_that_see_next_to_nothing(tmp_path: Path, n_past: int) -> None:
    """CASES 34: the lowest half below zero plus a score is -inf, and a softmax over nothing but -inf is NaN."""
    rows = []
    for name, is_half in (("half", True), ("float", False)):
        model = load_model(write_bundle(tmp_path / name, tree=True, is_half=is_half), tree=True, threads=1)
        session = model.open_session()
        if n_past:
            session.forward([3, 5, 7], logits_rows=())
        rows.append(session.forward([9, 11, 13, 15, 17, 19], parents=[-1, -1, -1, 0, 0, 3]).logits.copy())
    assert np.isfinite(rows[0]).all()
    np.testing.assert_allclose(rows[0], rows[1], atol=0.05)  # logits up to 12


def test_a_draft_of_another_vocabulary_is_refused_whatever_its_device(folder: Path, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", strings=[f"<{i}>" for i in range(64)])
    with pytest.raises(EdgeSpecError, match="different tokenizers"):
        run(folder, other, draft_device="qnn" if platform.machine() == "x86_64" else "cpu")


def test_check_does_not_hold_plain_decoding_against_itself(folder: Path) -> None:
    """With its draft off, a pair would pass whatever the draft does."""
    arguments = ["check", str(folder), "-md", str(folder), "--draft-device", "directml", "-n", "8"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert "nothing to check with draft model, which is off: device 'directml' needs" in result.stderr


@needs_qnn
def test_the_command_line_says_it_once_and_the_report_shows_it(folder: Path) -> None:
    common = ["run", "-m", str(folder), "-md", str(folder), "--raw", "-n", "8", "--ignore-eos", "--temp", "0", "a b"]
    refused = ["--draft-device", "qnn", "--draft-device-option", "soc_model=none"]
    result = CliRunner().invoke(main, [*common, *refused])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("speculation off: ") == 1
    plain = CliRunner().invoke(main, [*common[:3], "--draft", "none", *common[5:]])
    assert result.stdout == plain.stdout
    strict = CliRunner().invoke(main, [*common, *refused, "--strict-device"])
    assert (strict.exit_code, "cannot load" in strict.stderr) == (1, True), strict.output
    report = CliRunner().invoke(main, [*common, "--draft-device", "qnn", "--compare", "--json"])
    assert report.exit_code == 0, report.output
    fields = json.loads(report.stdout)
    assert fields["identical"] is True
    assert fields["devices"]["target"]["device"] == "cpu"
    assert fields["devices"]["draft"]["model"]["device"] == "qnn:htp"
    assert sum("nodes run on the CPU instead" in note for note in fields["notes"]) == 1
    shown = CliRunner().invoke(main, [*common, "--draft-device", "qnn", "-v"])
    assert "devices: target on cpu (CPUExecutionProvider: " in shown.stderr
