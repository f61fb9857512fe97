"""The draft measurements' own arithmetic and what their rows hold; nothing here measures time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgespec_bench import __main__ as command_line
from edgespec_bench.__main__ import _chosen_drafts
from edgespec_bench.drafts import DRAFTS, DraftCase, _acceptance, by_position, measure_drafts
from pair_world import write_tiny_gguf
from zoo_world import TARGET_EXPORT, write_all

from edgespec import LLM, SamplingParams, pairs, zoo
from edgespec.errors import ConfigError
from edgespec.testing import LatencyModel, TableModel
from edgespec.testing.latency import FakeClock
from edgespec.types import RoundRecord

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
PROMPTS = [[1, 2, 1, 2, 1], [3, 4, 3, 4]]


def table_model(**options: Any) -> LatencyModel:
    """A target whose every call takes one second on a clock of its own."""
    clock = FakeClock()
    return LatencyModel(TableModel(8, seed=1, **options), 1.0, clock=clock, sleep=clock.sleep)


def record(drafted: int, accepted: int, source: str = "eagle") -> RoundRecord:
    return RoundRecord(0, source, 4, drafted, accepted, accepted + 1, 0, drafted + 1, "bonus")


def test_positions_count_the_rounds_that_drafted_for_them() -> None:
    records = [record(3, 3), record(3, 1), record(3, 0), record(2, 2)]
    assert by_position(records, 3) == [3 / 4, 2 / 4, 1 / 3]
    assert by_position(records, 2) == [3 / 4, 2 / 4]


def test_positions_that_nothing_reached_are_left_out() -> None:
    assert by_position([], 4) == []
    assert by_position([record(2, 0), record(2, 0)], 4) == [0.0, 0.0]


def test_drafts_are_chosen_by_name_in_their_own_order() -> None:
    assert _chosen_drafts(()) == list(DRAFTS)
    assert [case.draft for case in _chosen_drafts(("medusa", "eagle"))] == ["eagle", "medusa"]
    with pytest.raises(ConfigError, match="no draft 'exit' to measure: use one of eagle, tinydraft"):
        _chosen_drafts(("exit",))


@pytest.mark.parametrize("is_round", [False, True])
def test_acceptance_of_a_draft_that_is_the_target(is_round: bool) -> None:
    target = table_model()
    case = DraftCase("model", 4, is_cost_per_round=is_round)
    llm = LLM(target, draft="model", draft_model=TableModel(8, seed=1), num_speculative_tokens=4, exact=False)
    row = _acceptance(llm.variant(draft="none"), llm, PROMPTS, GREEDY, case)
    assert row["acceptance_by_position"] == [1.0] * 4
    assert row["mean_acceptance_length"] == 5.0
    assert row["v1_ms"] == 1000.0
    assert row["draft_cost_in_runtime"] == 0.0  # the draft's own calls are free
    assert row["draft_cost"] is not None
    json.dumps(row, allow_nan=False)


def test_a_draft_that_is_never_asked_has_no_cost() -> None:
    llm = LLM(table_model(), draft="ngram", prompt_lookup_min=100, num_speculative_tokens=4, exact=False)
    row = _acceptance(llm.variant(draft="none"), llm, PROMPTS, GREEDY, DraftCase("ngram", 4))
    assert (row["acceptance_by_position"], row["draft_cost"], row["draft_cost_in_runtime"]) == ([], None, None)
    assert row["mean_acceptance_length"] == 1.0


def test_nothing_to_time_is_said() -> None:
    llm = LLM(table_model(), draft="ngram", exact=False)
    short = SamplingParams(temperature=0.0, max_tokens=1)
    with pytest.raises(ConfigError, match=r"V\(1\) is unknown"):
        _acceptance(llm.variant(draft="none"), llm, PROMPTS, short, DraftCase("ngram", 4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The pair `tiny`, which is a folder here, with a zoo of all kinds."""
    base = tmp_path_factory.mktemp("bench")
    models = base / "config" / "edgespec" / "models"
    models.mkdir(parents=True)
    write_tiny_gguf(models / "tiny.gguf")
    (models / "tiny.toml").write_text(
        'schema_version = 1\nname = "tiny"\ndescription = "a test"\nlicense = "CC0-1.0"\n[target.source]\n'
        f'kind = "path"\npath = "tiny.gguf"\n[target.export]\n{TARGET_EXPORT}',
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(base / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
        patch.setattr(zoo, "zoo_dir", lambda: base / "zoo")
        write_all(base / "zoo")
        yield base


def test_v1_is_that_of_the_whole_graph(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early exit loads the target in two halves, which are slower: costs over their one-row step looked too small."""
    graphs = []

    def noted(plain: LLM, llm: LLM, *_: Any) -> dict[str, Any]:
        graphs.append((plain.loaded.graph, llm.loaded.graph))
        return {}

    monkeypatch.setattr("edgespec_bench.drafts._acceptance", noted)
    monkeypatch.setattr(LLM, "encode_chat", lambda *_: [1, 2])  # the tiny model has no chat template
    rows = measure_drafts(str(pairs.pull("tiny")), 1, 4, 1, ["chat"], [DraftCase("early-exit", 2)], lambda _: None)
    assert [(row["draft"], row["k"], row["kind"]) for row in rows] == [("early-exit", 2, "chat")] * 2
    assert {row["setting"] for row in rows} == {"T = 0", "T = 0.8, top-p 0.95"}
    assert set(graphs) == {("model.onnx", "lower.onnx + upper.onnx + head.onnx")}


def test_a_missing_draft_is_said_before_anything_is_measured(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft used to be measured for minutes before the second one was found to be missing."""
    for path in write_all(pair / "part").glob("tiny/medusa/*"):
        path.unlink()
    monkeypatch.setattr(zoo, "zoo_dir", lambda: pair / "part")
    monkeypatch.setattr(command_line, "measure_drafts", lambda *_: pytest.fail("measured too early"))
    result = CliRunner().invoke(command_line.main, ["drafts", "-m", "tiny", "--draft", "eagle", "--draft", "medusa"])
    assert result.exit_code == 2
    assert "there is no medusa draft for tiny" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
