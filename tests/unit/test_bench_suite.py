"""The suite end to end on a tiny model with edgespec's real child processes, its order of turns, and what fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from edgespec_bench.__main__ import main
from edgespec_bench.prompts import Prompt
from edgespec_bench.report.figures import Figures
from edgespec_bench.report.targets import judge
from edgespec_bench.sides import edgespec_side, find_side
from edgespec_bench.suite import commands, runner, turns
from edgespec_bench.suite.parts import QUICK, Cell, Part
from edgespec_bench.suite.rows import RowFile, read_rows
from edgespec_bench.suite.runner import RunOptions, run_suite
from edgespec_bench.suite.turns import run_part
from pair_world import write_tiny_gguf

from edgespec.cli import main as edgespec_command
from edgespec.errors import BackendError, ConfigError

SIDES = (find_side("edgespec/plain"), find_side("edgespec/ngram-3"))
TINY = dataclasses.replace(
    QUICK, name="tiny", cells=(Cell("chat", "t0"), Cell("chat", "t08")), n_prompts=2, n_tokens=12, turns=1, slowest=0.0,
    scaled_prompts=1, cost_repeats=2,
)  # fmt: skip


def quiet(stage: str, done: float = 0, total: float | None = None) -> None:
    return None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The pair `tiny`: two layers, 64 tokens of context, in a cache of its own."""
    base = tmp_path_factory.mktemp("suite")
    models = base / "config" / "edgespec" / "models"
    models.mkdir(parents=True)
    write_tiny_gguf(models / "tiny.gguf")
    (models / "tiny.toml").write_text(
        'schema_version = 1\nname = "tiny"\ndescription = "a test"\nlicense = "CC0-1.0"\n[target.source]\n'
        'kind = "path"\npath = "tiny.gguf"\n[target.export]\nbits = 32\nembed_bits = 32\n',
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(base / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
        prompts = [Prompt(f"chat-{i}", "chat", text) for i, text in enumerate(("abab", "a b a b", "baba"))]
        patch.setattr(turns, "load_prompts", lambda kind: prompts)  # the real ones are longer than this model's context
        patch.setattr(runner, "list_sides", lambda: SIDES)
        yield base


def test_a_run_from_the_machine_to_the_reports(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(commands, "QUICK", TINY)
    command = ["quick", "-m", "tiny", "--folder", str(tmp_path), "-t", "1", "--note", "a test"]
    result = CliRunner().invoke(main, [*command, "--part", "costs", "--part", "sides", "--part", "scaled"])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "rows.jsonl")
    kinds = Counter(row["row"] for row in rows)
    assert kinds["run"] == len(SIDES) * 2 * 2
    assert (kinds["side"], kinds["card"], kinds["bandwidth"], kinds["weights"]) == (2, 1, 1, 1)
    assert {row["rows"] for row in rows if row["row"] == "cost"} >= {1, 5}
    assert [row["part"] for row in rows if row["row"] == "done"] == ["costs", "sides"]
    (skipped,) = [row for row in rows if row["row"] == "skip"]
    assert "widen -m tiny --factor 3" in skipped["reason"]
    texts = {(row["setting"], row["prompt"], row["side"]): row["text"] for row in rows if row["row"] == "run"}
    assert all(row["n_tokens"] == 12 and row["seconds"] > 0 for row in rows if row["row"] == "run")
    assert len(texts) == 8
    last = json.loads(result.stdout.splitlines()[-1])
    found = {one["key"]: one for one in last["targets"]}
    assert found["chat_t0_vs_plain"]["measured"] > 0
    assert found["bandwidth"]["measured"] > 0
    assert found["scaled"]["verdict"] == "not measured"
    assert last["note"] == "a test"
    assert (tmp_path / "report.html").is_file()
    again = CliRunner().invoke(main, [*command, "--part", "costs", "--part", "sides", "--json"])
    assert again.exit_code == 0
    assert read_rows(tmp_path / "rows.jsonl") == rows  # both parts are there already
    other = CliRunner().invoke(main, ["quick", "-m", "tiny", "--folder", str(tmp_path), "-t", "2", "--part", "costs"])
    assert other.exit_code == 2
    assert "threads 1, this one has 2" in other.stderr


def part(**changes: Any) -> Part:
    return dataclasses.replace(Part("sides", "tiny", "all", (Cell("chat", "t0"),), 3, 12, 2), **changes)


def encode(messages: list[dict[str, str]]) -> list[int]:
    return list(messages[0]["content"].encode())


def test_everybody_answers_every_prompt_and_takes_turns_at_being_first(tiny: Path, tmp_path: Path) -> None:
    with RowFile(tmp_path / "rows.jsonl") as out:
        run_part(part(), SIDES, encode, 1, out, quiet)
        rows = [row for row in out.rows if row["row"] == "run"]
    assert Counter((row["prompt"], row["turn"]) for row in rows) == {
        (f"chat-{i}", turn): 2 for i in range(3) for turn in range(2)
    }
    first = [row["side"] for row in rows if row["place"] == 0]
    assert first == [side.name for side in SIDES] * 3


def test_a_side_that_cannot_start_leaves_the_others(tiny: Path, tmp_path: Path) -> None:
    broken = edgespec_side("broken", "speculative", draft="ngram", num_speculative_tokens=0)
    with RowFile(tmp_path / "rows.jsonl") as out:
        run_part(part(turns=1), [SIDES[0], broken], encode, 1, out, quiet)
        rows = list(out.rows)
    (skipped,) = [row for row in rows if row["row"] == "skip"]
    assert skipped["side"] == "edgespec/broken"
    assert "num_speculative_tokens=0" in skipped["reason"]
    assert {row["side"] for row in rows if row["row"] == "run"} == {"edgespec/plain"}
    assert rows[-1] == {"row": "done", "part": "sides"}


class Answers:
    """A side's process that answers at a given speed, and fails at given requests (the first one warms up)."""

    def __init__(self, tok_s: float, fails: Collection[int] = (), what: str = "plain") -> None:
        self.side = SimpleNamespace(what=what)
        self.tok_s, self.fails, self.asked = tok_s, fails, 0

    def decode(self, prompt: list[int], n_tokens: int, **_: Any) -> dict[str, Any]:
        self.asked += 1
        if self.asked in self.fails:
            raise BackendError("it failed")
        return {
            "tokens": ([1] * (prompt[0] - 1) + [7] * n_tokens)[:n_tokens],
            "first_tokens": 1,
            "ttft_s": 0.1,
            "seconds": (n_tokens - 1) / self.tok_s,
        }


def take_turns(running: dict[str, Any], tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    prompts = {"chat": [(f"chat-{i}", [1, 2]) for i in range(3)]}
    with RowFile(tmp_path / "rows.jsonl") as out:
        turns._Turns(part(**changes), running, out, quiet).run(prompts)
        return list(out.rows)


def test_a_slow_side_sits_out_a_short_run(tmp_path: Path) -> None:
    lucky = Answers(1000, what="speculative")  # a draft that hits on one prompt is no yardstick
    rows = take_turns({"fast": Answers(100), "slow": Answers(30), "lucky": lucky}, tmp_path, slowest=0.4)
    assert Counter(row["side"] for row in rows if row["row"] == "run") == {"fast": 6, "slow": 1, "lucky": 6}
    (skipped,) = [row for row in rows if row["row"] == "skip"]
    assert "30 tok/s on the first prompt, under 0.4 of the fastest plain side's 100" in skipped["reason"]
    whole = take_turns({"fast": Answers(100), "slow": Answers(30)}, tmp_path / "whole", slowest=0.4, slow_prompts=2)
    assert Counter(row["side"] for row in whole) == {"fast": 6, "slow": 4}


def test_sides_run_as_far_as_an_answer_goes(tmp_path: Path) -> None:
    """An answer of 30 tokens was followed by 66 that nobody asked for, and counted as copying."""
    prompts = {"chat": [("long", [99, 2]), ("short", [30, 2]), ("tiny", [3, 2])]}
    with RowFile(tmp_path / "rows.jsonl") as out:
        running: dict[str, Any] = {"draft": Answers(9, what="speculative"), "plain": Answers(9)}
        turns._Turns(part(n_tokens=64, turns=1), running, out, quiet, frozenset({7})).run(prompts)
        rows = [row for row in out.rows if row["row"] == "run"]
    assert {(row["prompt"], row["n_tokens"]) for row in rows} == {("long", 64), ("short", 30), ("tiny", 16)}
    assert Counter(row["side"] for row in rows) == {"draft": 3, "plain": 3}


def test_a_side_that_fails_keeps_its_rows_and_is_left_out_when_it_fails_again_and_again(tmp_path: Path) -> None:
    """One failed answer used to cost a side all the prompts that came after it."""
    once, dead = Answers(10, fails=(4,)), Answers(10, fails=range(4, 99))
    rows = take_turns({"a": Answers(10), "once": once, "dead": dead}, tmp_path)
    assert Counter(row["side"] for row in rows if row["row"] == "run") == {"a": 6, "once": 5, "dead": 2}
    skipped = [(row["side"], row.get("prompt")) for row in rows if row["row"] == "skip"]
    assert sorted(skipped, key=str) == [("dead", "chat-0"), ("dead", "chat-2"), ("dead", None), ("once", "chat-2")]
    assert dead.asked == 6


def test_an_interrupted_run_keeps_its_rows_and_goes_on_where_it_stopped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(commands, "QUICK", TINY)
    asked = turns._Turns._one

    def stop(self: Any, *arguments: Any) -> None:
        if self.count == 3:
            raise KeyboardInterrupt
        asked(self, *arguments)

    command = ["quick", "-m", "tiny", "--folder", str(tmp_path), "-t", "1", "--part", "sides"]
    with monkeypatch.context() as patch:
        patch.setattr(turns._Turns, "_one", stop)
        stopped = CliRunner().invoke(main, command)
    assert stopped.exit_code == 130
    assert "stopped" in stopped.stderr
    assert json.loads(stopped.stdout.splitlines()[-1])["size"] == "tiny"
    assert sum(row["row"] == "run" for row in read_rows(tmp_path / "rows.jsonl")) == 6
    assert CliRunner().invoke(main, command).exit_code == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert Counter(row["row"] for row in rows if row["row"] in ("run", "side", "done")) == {
        "run": 8,
        "side": 2,
        "done": 1,
    }


def test_a_model_that_is_unknown_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["quick", "-m", "nobody", "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert "nobody" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_failing_part_leaves_the_others(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("no reason")

    monkeypatch.setitem(runner._PARTS, "sides", fail)
    options = RunOptions(TINY, model="tiny", threads=1, parts=("sides", "costs"))
    rows = run_suite(options, tmp_path, quiet)
    assert [(row["part"], row["reason"]) for row in rows if row["row"] == "skip"] == [("sides", "no reason")]
    assert [row["part"] for row in rows if row["row"] == "done"] == ["costs"]


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(edgespec_command, ["bench", *arguments])


def test_a_users_own_model_is_measured_without_peers(tiny: Path, tmp_path: Path) -> None:
    arguments = ["tiny", "--kind", "chat", "--prompts", "2", "-n", "12", "-t", "1"]
    result = bench(*arguments, "--json", "--save", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {side["side"] for side in found["sides"]} == {"plain", "exact-plain", "ngram-3", "auto"}
    speeds = [side["tok_s"]["median"] for side in found["sides"]]
    assert speeds == sorted(speeds, reverse=True)
    assert found["best"] == found["sides"][0]["side"]
    assert found["left_out"] == {}
    (plain,) = [side for side in found["sides"] if side["side"] == "plain"]
    assert plain["over_plain"]["median"] == 1.0
    assert plain["tok_s_by_kind"]["chat"]["n"] == 2
    assert sum(row["row"] == "run" for row in read_rows(tmp_path / "rows.jsonl")) == 8
    again = bench(*arguments, "--save", str(tmp_path))  # measures nothing: all of it is there
    assert again.exit_code == 0, again.stderr
    assert f"{plain['tok_s']['median']:.1f}" in again.stdout
    assert "x plain" in again.stdout


def test_bad_input_of_the_command_is_one_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, words in ((["tiny", "--kind", "poetry"], "poetry"), (["nobody"], "nobody")):
        result = bench(*arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    monkeypatch.setitem(sys.modules, "edgespec_bench.suite.own", None)
    result = bench("tiny")
    assert result.exit_code != 0
    assert "comes in the same wheel" in result.stderr


def test_the_scaled_target_is_drafted_for_by_the_model_it_was_made_from(tiny: Path, tmp_path: Path) -> None:
    """Here the target is the draft itself, so that everything has to be accepted."""
    size = dataclasses.replace(TINY, scaled_keys=("k2", "ngram-model-p"), cost_repeats=1)
    options = RunOptions(size, model="tiny", scaled="tiny", threads=1, parts=("scaled",))
    rows = run_suite(options, tmp_path, quiet)
    assert [row["reason"] for row in rows if row["row"] == "skip"] == []
    assert {row["side"] for row in rows if row["row"] == "side"} == {
        "edgespec/plain", "edgespec/k2", "edgespec/ngram-model-p",
    }  # fmt: skip
    figures = Figures(rows)
    assert figures.acceptance("scaled", "edgespec/k2", ["chat"], "t0") == [1.0, 1.0]
    (scaled,) = [one for one in judge(figures) if one.target.key == "scaled"]
    assert scaled.measured.value is not None
    assert "accepted at the first position 1.00" in scaled.measured.how
