"""The article's table and the 1 B target's: what rows hold, how they are read, and drafts that are widened with it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgespec_bench.__main__ import main as bench
from edgespec_bench.article import command, measure
from edgespec_bench.article.cases import Case, article_cases, chosen, scaled_cases
from edgespec_bench.article.measure import Run, acceptance_a_position, measure_cases
from edgespec_bench.article.phone import phone_rows
from edgespec_bench.article.table import article_table, phone_table, scaled_table
from edgespec_bench.widen import targets
from edgespec_bench.widen.heads import widen_draft
from edgespec_bench.widen.targets import WidenOptions
from edgespec_export import export_draft
from pair_world import write_tiny_gguf
from zoo_world import TARGET_EXPORT, write_all

from edgespec import LLM, SamplingParams, zoo
from edgespec.errors import ConfigError
from edgespec.types import RoundRecord
from edgespec.verify import CoupledVerifier

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 6, 7], [90, 12, 44, 3], [201, 17]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tiny` in float32 with a zoo of all kinds, and `tiny-x2`, made of it without noise."""
    base = tmp_path_factory.mktemp("article")
    models = base / "config" / "edgespec" / "models"
    models.mkdir(parents=True)
    write_tiny_gguf(models / "tiny.gguf")
    (models / "tiny.toml").write_text(
        'schema_version = 1\nname = "tiny"\ndescription = "a test"\nlicense = "CC0-1.0"\n[target.source]\n'
        f'kind = "path"\npath = "tiny.gguf"\n[target.export]\nbits = 32\n{TARGET_EXPORT}',
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(base / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
        patch.setattr(zoo, "zoo_dir", lambda: base / "zoo")
        # in float32: int8 rounds sums of copies otherwise, and random weights have near ties
        patch.setattr("edgespec_export.export_draft", functools.partial(export_draft, bits=32))
        patch.setattr(measure, "prompt_ids", lambda *_: PROMPTS)  # the tiny model has no chat template
        write_all(base / "zoo")
        targets.widen(WidenOptions(model="tiny", noise=0.0), lambda text: None, lambda *_: None)
        yield base


@pytest.mark.parametrize("kind", ["medusa", "early-exit", "eagle", "tinydraft"])
def test_a_widened_draft_guesses_what_the_original_guesses(pair: Path, kind: str, tmp_path: Path) -> None:
    """Random drafts guess little right, so what they draft is compared, not only what is accepted."""
    drafts = {draft.kind: draft for draft in zoo.list_drafts("tiny")}
    wide = widen_draft(drafts[kind], 2, tmp_path / "wide")
    guesses = []
    for model, folder in (("tiny", drafts[kind].folder), ("tiny-x2", wide)):
        with LLM(model, draft=kind, draft_model=folder, num_speculative_tokens=3, threads=1) as llm:
            guesses.append([_drafted(llm, prompt) for prompt in PROMPTS])
    assert guesses[0] == guesses[1]
    assert len({token for texts in guesses[0] for token in texts}) > 5


def _drafted(llm: LLM, prompt: list[int]) -> list[int]:
    """Every token that was drafted for a text, as the verifier gets them."""
    found: list[int] = []
    real = CoupledVerifier.verify

    def verify(self: Any, proposal: Any, *rest: Any, **named: Any) -> Any:
        found.extend(int(token) for token in proposal.tokens)
        return real(self, proposal, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoupledVerifier, "verify", verify)
        llm.generate(prompt, GREEDY)
    return found


def record(drafted: int, accepted: int) -> RoundRecord:
    return RoundRecord(0, "model", 4, drafted, accepted, accepted + 1, 0, drafted + 1, "bonus")


def test_acceptance_a_position_counts_tokens_whose_predecessors_were_accepted() -> None:
    """Of 3 drafted and 1 accepted two were judged; the third, behind a rejected one, says nothing."""
    assert acceptance_a_position([record(3, 1)]) == 1 / 2
    assert acceptance_a_position([record(3, 3), record(3, 0)]) == 3 / 4
    assert acceptance_a_position([]) is None


def test_a_target_that_was_not_made_yet_is_said(pair: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tiny-x3 yet: `python -m edgespec_bench widen -m tiny --factor 3`"):
        measure_cases(Run(model="tiny", factor=3), scaled_cases("tiny"), lambda text: None)
    result = CliRunner().invoke(bench, ["scaled", "-m", "tiny", "--factor", "3"])
    assert result.exit_code == 2
    assert "no tiny-x3 yet" in result.stderr


def test_cases_are_chosen_by_key() -> None:
    cases = article_cases("tiny")
    assert chosen(cases, ()) == cases
    assert [case.key for case in chosen(cases, ("medusa", "k5"))] == ["k5", "medusa"]
    with pytest.raises(ConfigError, match="no case 'k6': use one of plain, k5, k8"):
        chosen(cases, ("k6",))
    for made in (cases, scaled_cases("tiny")):
        assert len({case.key for case in made}) == len(made)


@pytest.fixture(scope="module")
def rows(pair: Path) -> list[dict[str, Any]]:
    """Measured on the tiny pair: the draft is the target's equal, so that all is accepted."""
    run = Run(model="tiny", factor=2, n_tokens=24, threads=1)
    wanted = [case for case in article_cases("tiny") if case.key in ("plain", "k5", "medusa")]
    return measure_cases(run, wanted, lambda text: None)


def test_rows_hold_what_the_run_did(rows: list[dict[str, Any]]) -> None:
    model, medusa = rows
    assert [row["case"] for row in rows] == ["k5", "medusa"]
    assert model["acceptance_a_position"] == 1.0
    assert model["acceptance_by_position"] == [1.0] * 5
    assert 4.5 < model["mean_acceptance_length"] <= 6
    assert model["speedup"]["n"] == model["tok_s"]["n"] == len(PROMPTS)
    assert set(model["verify_ms"]) >= {"6"}
    assert "widened 2 times" in model["synthetic"]
    assert medusa["draft_model"] == "widened medusa of tiny"
    assert (medusa["k"], len(medusa["acceptance_by_position"])) == (3, 3)
    json.dumps(rows, allow_nan=False)


def test_the_tables_are_made_of_the_rows_alone(rows: list[dict[str, Any]]) -> None:
    text = article_table(article_cases("tiny"), json.loads(json.dumps(rows)))
    lines = text.splitlines()
    assert "SYNTHETIC" in lines[0]
    assert next(line for line in lines if line.startswith("| plain |")).startswith("| plain | 25.3 | 280 ms | 1.00x |")
    assert "| draft tiny, k = 5 | 58.7 | 285 ms | 2.32x | " in text
    assert "| 72.4 | 270 ms | 2.86x | not measured" in text
    assert "another machine" in text
    scaled = scaled_table(rows).splitlines()
    speeds = [float(line.split("|")[6].split("x")[0]) for line in scaled[4:]]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 2


def test_the_phone_is_simulated_and_says_so() -> None:
    rows = phone_rows()
    assert {row["schedule"] for row in rows} == {"serial", "overlapped"}
    free = [row for row in rows if row["verifying"].startswith("free") and row["schedule"] == "serial"]
    half_b = next(row for row in free if (row["acceptance"], row["k"]) == (0.8, 5))
    # 3.689 expected tokens a round over 1 + 5 x 25 / 333.3 target steps
    assert half_b["tok_s"] == pytest.approx(3 * 3.68928 / (1 + 5 * 0.075), abs=0.01)
    assert all(row["best_tok_s"] >= row["tok_s"] for row in rows)
    row = {"draft": "model", "v1_ms": 20.0, "verify_ms": {"2": 18.0, "4": 30.0, "9": 60.0}}
    halves = {"draft": "early-exit", "v1_ms": 20.0, "verify_ms": {"2": 200.0}}
    assert command._shape([row, halves]) == {1: 1.0, 2: 1.0, 4: 1.5, 9: 3.0}
    assert command._shape([halves]) is None
    dear = phone_rows({1: 10.0, 9: 90.0})
    assert all(row["tok_s"] < 3 for row in dear if row["verifying"].startswith("shaped"))
    text = phone_table(rows)
    assert "SIMULATED" in text
    assert "no phone measured" in text


def test_rows_are_kept_in_a_file_and_reported_from_there(
    pair: Path, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(run: Run, cases: list[Case], say: Any) -> list[dict[str, Any]]:
        asked.extend(case.key for case in cases)
        return [row for row in rows if row["case"] in {case.key for case in cases}]

    monkeypatch.setattr(command, "measure_cases", measured)
    out = str(tmp_path / "rows.jsonl")
    for key in ("k5", "medusa"):
        result = CliRunner().invoke(bench, ["article", "-m", "tiny", "--factor", "2", "--case", key, "-o", out])
        assert result.exit_code == 0, result.output
    assert asked == ["k5", "medusa"]
    again = CliRunner().invoke(bench, ["article", "-m", "tiny", "-o", out, "--report"])
    assert asked == ["k5", "medusa"]
    last = json.loads(again.stdout.splitlines()[-1])
    assert [row["case"] for row in last["rows"]] == ["k5", "medusa"]
    assert last["phone"] == phone_rows()
    missing = CliRunner().invoke(bench, ["scaled", "-o", str(tmp_path / "none.jsonl"), "--report"])
    assert missing.exit_code == 2
    assert "none.jsonl" in missing.stderr
