"""`edgespec profile`, `plan` and `run --draft auto` on tiny ONNX bundles: figures kept, JSON, pictures, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgespec import LLM, SamplingParams
from edgespec.cli import main
from edgespec.profile import Effort
from edgespec.sim import Scenario
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec

SMALL = Effort(repeats=2, budget_s=5.0, n_tokens=12, n_prompts=2, depths=(1, 3), texts_s=1e6)
PAIR = ("--draft", "ngram,model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("bundles é")
    return {
        "target": write_bundle(base / "target", TinySpec(eos_ids=()), bits=4),
        "draft": write_bundle(base / "draft", TinySpec(eos_ids=(), n_layers=1, seed=1), bits=4),
    }


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    for module in ("profile", "auto"):
        monkeypatch.setattr(f"edgespec.{module}.QUICK", SMALL)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_profile_is_kept_and_the_plan_made_of_it(folders: dict[str, Path], tmp_path: Path) -> None:
    target, draft = folders["target"], folders["draft"]
    scenario = tmp_path / "scenario.json"
    result = invoke("profile", target, *PAIR, "-md", draft, "--quick", "--json", "--scenario", scenario)
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert "1" in next(iter(fields["target"]["costs"]["target"].values()))
    assert set(fields["drafts"]) == {"model"}
    assert fields["target"]["load_s"] > 0
    assert Scenario.from_json(json.loads(scenario.read_text())).most_k >= 4
    kept = json.loads((tmp_path / "home" / "machine.json").read_text())["sections"]["costs"]
    assert len(kept) == 2

    picture = tmp_path / "plan.svg"
    result = invoke("plan", target, *PAIR, "-md", draft, "--json", "--plot", picture)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert {c["draft"] for c in plan["candidates"]} == {"none", "ngram", "model", "ngram,model"}
    assert {c["schedule"] for c in plan["candidates"]} == {"serial", "overlapped"}
    assert all(c["tok_s"] > 0 and c["label"] for c in plan["candidates"])
    assert plan["runner_up"]["label"] != plan["chosen"]["label"]
    assert sum(plan["energy_assumed"].values()) == pytest.approx(1.0)
    assert b"<svg" in picture.read_bytes()
    assert json.loads((tmp_path / "home" / "machine.json").read_text())["sections"]["costs"] == kept, "measured once"


def test_a_plan_for_people_names_choice_and_runner_up(folders: dict[str, Path]) -> None:
    result = invoke("plan", folders["target"], "--draft", "ngram", "--try-device", "cuda:0")
    assert result.exit_code == 0, result.stderr
    assert "energy is not measured: a plain step's is assumed to be time 40%, reading 40%, computing 20%" in " ".join(
        result.stdout.split()
    )
    for words in ("chosen: ", "runner-up: ", "no speculation on cpu", "not possible: cpu -> cuda:0: "):
        assert words in result.stdout


def test_what_fits_no_budget_is_refused_with_both_sizes(folders: dict[str, Path]) -> None:
    result = invoke("plan", folders["target"], "--draft", "ngram", "--memory-budget", "1kB")
    assert (result.exit_code, "memory_budget=0.001 MB" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        (("--draft", "none"), {"no speculation on cpu"}),
        (("--draft", "ngram", "--draft-max", 2, "--controller", "fixed"), {"no speculation", "ngram, k = 2, serial"}),
        (("--draft", "model", "--draft-min", 6, "--schedule", "serial", "--verifier", "rejection"), {"model, k"}),
        (
            ("--draft", "model", "--draft-draft", "ngram", "--draft-p-min", 0.1, "--controller", "window"),
            {"model, k <="},
        ),
    ],
    ids=str,
)
def test_a_plan_keeps_to_what_the_command_line_says(
    folders: dict[str, Path], arguments: tuple[Any, ...], labels: set[str]
) -> None:
    """`plan` listed and chose what `run` with the same flags would never do."""
    model = ("-md", folders["draft"]) if "model" in arguments else ()
    result = invoke("plan", folders["target"], *arguments, *model, "--json")
    assert result.exit_code == 0, result.stderr
    able = [c for c in json.loads(result.stdout)["candidates"] if c["obstacle"] is None]
    for label in labels:
        assert any(c["label"].startswith(label) for c in able), able
    assert len(labels) == 1 or len(able) == len(labels)
    drafted = [c for c in able if c["draft"] != "none"]
    assert {c["draft"] for c in drafted} == set(arguments[1:2]) - {"none"}
    assert all(c["k"] >= 6 and c["schedule"] == "serial" for c in drafted if "--draft-min" in arguments)
    assert {c["controller"] for c in drafted if "window" in arguments} <= {"window"}


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft-max", 0), "num_speculative_tokens=0"),
        (("--draft-min", 9), "min_speculative_tokens=9"),
        (("--tree", "--fast"), "tree=True (--tree) with draft='auto'"),
        (("--tree", "--fast", "--draft", "ngram"), "what is profiled and planned are chains"),
        (("--draft-draft", "ngram"), "draft_draft='ngram' (--draft-draft ngram) with draft='auto'"),
    ],
    ids=str,
)
def test_what_no_plan_is_made_of_is_refused(
    folders: dict[str, Path], command: str, arguments: tuple[Any, ...], message: str
) -> None:
    result = invoke(command, folders["target"], *arguments)
    assert result.exit_code == 2, result.stdout
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_auto_runs_what_was_planned(folders: dict[str, Path]) -> None:
    target, draft = folders["target"], folders["draft"]
    texts = []
    for arguments in (("--draft", "none"), ("--draft", "auto", "-md", draft), ("--draft", "auto")):
        result = invoke(
            "run", "-m", target, "-n", 24, "--raw", "--seed", 3, "--temp", 0.8, *arguments, "--json", "5 9 5 9"
        )
        assert result.exit_code == 0, result.stderr
        fields = json.loads(result.stdout)
        texts.append(fields["token_ids"])
        if "auto" in arguments:
            assert fields["stats"]["controller"]["plan"]["chosen"]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tree", "--fast"), "tree=True (--tree) with draft='auto'"),
        (("--schedule", "overlapped"), "(--schedule overlapped) with draft='auto': there is no draft with weights"),
        (("--lossy", "typical", "--verifier", "magic"), "Invalid value for '--verifier'"),
    ],
)
def test_what_auto_cannot_do_is_refused(folders: dict[str, Path], arguments: tuple[str, ...], message: str) -> None:
    result = invoke("run", "-m", folders["target"], "--draft", "auto", *arguments, "hello")
    assert result.exit_code == 2
    assert message in result.stderr


def test_auto_measures_within_a_small_context(folders: dict[str, Path]) -> None:
    """The profiler's own prompts did not fit, and the user was told to shorten a prompt that was not theirs."""
    target, draft = folders["target"], folders["draft"]
    result = invoke(
        "run", "-m", target, "-n", 8, "-c", 16, "--raw", "--draft", "auto", "-md", draft, "-cd", 16, "--json", "5 9"
    )
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["token_ids"]) == 8


def test_a_scenario_needs_a_draft_with_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    result = invoke("profile", folders["target"], "--draft", "ngram", "--quick", "--scenario", tmp_path / "s.json")
    assert (result.exit_code, "no draft with weights" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "options",
    [
        {"draft": "ngram,model", "prompt_lookup_min": 1},
        {"draft": "model", "schedule": "overlapped"},
        {"draft": "model", "draft_draft": "ngram", "verifier": "rejection", "exact": False},
        {"draft": "auto", "controller": "window", "num_speculative_tokens": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_command_line_and_python_run_the_same_rounds(
    folders: dict[str, Path], options: dict[str, Any], temperature: float
) -> None:
    """CASES 43. With auto both take the plan from the figures that are kept, so they also choose the same."""
    prompt = "5 9 5 9 5 9 11"
    settings = {"max_tokens": 30, "temperature": temperature, "seed": 3}
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in {**options, **settings}.items() if name != "exact"
    ]
    flags += ["--fast"] if options.get("exact") is False else []
    target, draft = folders["target"], folders["draft"]
    result = invoke("run", "-m", target, "-md", draft, "--raw", "--json", *flags, prompt)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    with LLM(target, draft_model=draft, **options) as llm:
        output = llm.generate(prompt, SamplingParams(**settings))[0].outputs[0]  # type: ignore[arg-type]
    counts = ("rounds", "drafted", "accepted", "accepted_fillers", "cut", "sources", "acceptance_by_position", "exact")
    ours = output.stats.to_dict()
    assert told["token_ids"] == list(output.token_ids)
    assert {name: told["stats"][name] for name in counts} == {name: ours[name] for name in counts}
    assert told["stats"]["controller"].get("plan") == ours["controller"].get("plan")
    assert ours["drafted"] > 0 or options["draft"] == "auto"


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_perfect_draft_needs_a_call_for_every_k_and_one_tokens(folders: dict[str, Path], k: int) -> None:
    """CASES 43, through the command line: the draft is the target's own weights."""
    target = folders["target"]
    result = invoke(
        "run",
        "-m",
        target,
        "-md",
        target,
        "--raw",
        "--json",
        "-n",
        25,
        "--draft-max",
        k,
        "--temp",
        0.8,
        "-s",
        3,
        "5 9 5",
    )
    assert result.exit_code == 0, result.stderr
    stats = json.loads(result.stdout)["stats"]
    assert stats["rounds"] == math.ceil(25 / (k + 1))
    assert stats["acceptance_rate"] == 1.0
