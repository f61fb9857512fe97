"""The command line as a user meets it, in child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import zoo
from edgespec.options import BUNDLED_DRAFTS

pytestmark = pytest.mark.real_model

TRAINED = [draft.kind for draft in zoo.list_drafts("smollm2-135m")]
FOX = "Write a short story about a fox who learns to swim."


def edgespec(
    *arguments: str, env: dict[str, str], stdin: str | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *arguments],
        env=env,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("settings", [["--temp", "0"], ["--temp", "0.8", "--top-p", "0.95", "--seed", "7"]])
@pytest.mark.parametrize("draft", ["ngram", "table", "model", *BUNDLED_DRAFTS])
def test_run_compare_is_identical(real_draft: Path, child_env: dict[str, str], draft: str, settings: list[str]) -> None:
    if draft in BUNDLED_DRAFTS and draft not in TRAINED:
        pytest.skip(f"the zoo has no {draft} draft for smollm2-135m")
    extra = ["-md", str(real_draft)] if draft == "model" else []
    done = edgespec("run", "--compare", "-n", "60", *settings, "--draft", draft, *extra, FOX, "--json", env=child_env)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["identical"] is True
    assert result["completion_tokens"] <= 60
    assert result["accepted"] <= result["drafted"]
    accepted = result["accepted"] + result["accepted_fillers"]
    assert result["completion_tokens"] == accepted + result["rounds"] - result["cut"]
    if draft != "ngram":
        assert result["sources"][draft]["drafted"] > 0
        assert len(result["acceptance_by_position"]) >= 1


@pytest.mark.parametrize("draft", ["eagle", "medusa", "tinydraft"])
def test_run_compare_with_trees_reports_the_first_difference(child_env: dict[str, str], draft: str) -> None:
    if draft not in TRAINED:
        pytest.skip(f"the zoo has no {draft} draft for smollm2-135m")
    trees = ["--draft", draft, "--fast", "--tree", "--tree-rows", "6"]
    done = edgespec("run", "--compare", "-n", "60", *trees, FOX, "--json", env=child_env)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["graphs"] == {"plain": "model.onnx", "speculative": "tree.onnx"}
    assert result["sources"][draft]["drafted"] > 0
    assert result["identical"] is (result["difference"] is None)
    if result["difference"] is not None:
        assert 0 <= result["difference"]["top2_gap"] < 2.0


def test_cli_and_api_play_the_same_rounds(real_bundle: Path, child_env: dict[str, str]) -> None:
    from edgespec import LLM, SamplingParams

    done = edgespec(
        *("run", "--draft", "ngram", "-n", "40", "--temp", "0.8", "--top-p", "0.95", "--seed", "5", "-t", "2"),
        *(FOX, "--json"),
        env=child_env,
    )
    ours = json.loads(done.stdout)
    with LLM(real_bundle, draft="ngram", threads=2) as llm:
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40)
        output = llm.chat([{"role": "user", "content": FOX}], params).outputs[0]
    assert ours["token_ids"] == output.token_ids
    for key in ("rounds", "drafted", "accepted"):
        assert ours["stats"][key] == getattr(output.stats, key)


def test_prompts_come_from_arguments_files_and_standard_input(tmp_path: Path, child_env: dict[str, str]) -> None:
    path = tmp_path / "prompt é.txt"
    path.write_text(FOX + "\n", encoding="utf-8")
    runs = [
        edgespec("run", "-n", "12", FOX, env=child_env),
        edgespec("run", "-n", "12", "--file", str(path), env=child_env),
        edgespec("run", "-n", "12", env=child_env, stdin=FOX + "\n"),
    ]
    assert len({run.stdout for run in runs}) == 1
    assert "\x1b" not in runs[0].stdout


def test_verbose_prints_the_same_text_and_the_figures(child_env: dict[str, str]) -> None:
    quiet = edgespec("run", "-n", "40", FOX, env=child_env)
    verbose = edgespec("run", "-n", "40", "-v", FOX, env=child_env)
    assert verbose.stdout == quiet.stdout
    assert "tokens in" in verbose.stderr
    assert "accepted by source: " in verbose.stderr
    edgespec("run", "-n", "100", "-v", "--ignore-eos", "Say hi.", env=child_env)


def test_the_plan_chooses_where_no_draft_is_named(child_env: dict[str, str]) -> None:
    """Not where the choice could change the text, and not where one is named."""
    planned = json.loads(edgespec("run", "-n", "12", "--json", FOX, env=child_env).stdout)
    assert planned["stats"]["controller"]["plan"]["chosen"]
    for named in (["--fast"], ["--verifier", "rejection"], ["--draft", "ngram"]):
        fixed = json.loads(edgespec("run", "-n", "12", "--json", *named, FOX, env=child_env).stdout)
        assert "plan" not in fixed["stats"].get("controller", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-m", "smollm3", "x"], "smollm"),
        (["run", "--file", "missing.txt"], "missing.txt"),
        (["run", "--draft", "magic", "x"], "magic"),
        (["run", "--draft-max", "0", "x"], "num_speculative_tokens=0"),
        (["run", "-c", "-5", "x"], "n_ctx=-5"),
        (["run", "--top-p", "1.5", "x"], "top_p"),
        (["run", "--temp", "-1", "x"], "temperature"),
        (["run", "-c", "16", FOX], "the context holds 16"),
        (["run", ""], "empty"),
        (["run", "--draft", "model", "x"], "needs a draft model"),
        (["run", "--draft", "pruned", "x"], "--draft-model smollm2-135m:pruned"),
        (["run", "--tree", "x"], "use exact=False (--fast)"),
        (["run", "--draft", "early-exit", "--tree", "--fast", "x"], "draft='early-exit'"),
        (["run", "--draft-p-min", "2", "x"], "draft_p_min=2.0"),
        (["run", "--stop", "\udce9", "x"], "--stop holds half of a surrogate pair"),
        (["run", "--device", "magic", "x"], "magic"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(child_env: dict[str, str], arguments: list[str], message: str) -> None:
    done = edgespec(*arguments, env=child_env, code=2)
    assert message in done.stderr
    assert done.stdout == ""


def start(env: dict[str, str]) -> subprocess.Popen[bytes]:
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore Ctrl-C
    program = f"{hears}; from edgespec.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "run", "-n", "4000", "--ignore-eos", FOX],
        env={**env, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    return process


def test_ctrl_c_keeps_the_partial_text_and_ends_cleanly(child_env: dict[str, str]) -> None:
    process = start(child_env)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"Traceback" not in err


def test_a_killed_run_has_printed_what_it_had(child_env: dict[str, str]) -> None:
    """Text held in a buffer was lost when the process was killed."""
    process = start(child_env)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 8)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
