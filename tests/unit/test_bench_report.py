"""Figures, the table of targets and the reports of a run, from its rows alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_rows
import pytest
from bench_rows import NGRAM, NGRAM_COUNTS, PEER, PEER8, PLAIN, run, side, small_run
from click.testing import CliRunner
from edgespec_bench.__main__ import main
from edgespec_bench.report.figures import Figures, tok_s, tpot_s
from edgespec_bench.report.markdown import markdown_table
from edgespec_bench.report.readme import MARKERS, newest_run, renew
from edgespec_bench.report.tables import Table, all_tables
from edgespec_bench.report.targets import TARGETS, Measured, Target, judge
from edgespec_bench.suite.rows import RowFile, read_rows

from edgespec.errors import ConfigError

COPYING = ["summarise", "edit", "json"]


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def verdicts(rows: list[dict[str, Any]]) -> dict[str, tuple[float | None, str]]:
    return {one.target.key: (one.measured.value, one.verdict) for one in judge(Figures(rows))}


def test_tokens_that_come_with_the_first_are_no_speed() -> None:
    row = run(PLAIN, 100, first_tokens=51, seconds=1.0)
    assert tok_s(row) == 50.0
    assert tpot_s(row) == 0.02


def test_ratios_are_of_the_same_prompt_and_turn() -> None:
    """The ratio of medians would be 150 x 0.75 over 100 x 0.75 as well, but its quartiles would not be one figure."""
    found = Figures(small_run()).compare("sides", NGRAM, PLAIN, ["chat"], "t0")
    assert (found.ratio.minimum, found.ratio.maximum, found.ratio.n) == (1.5, 1.5, 2)
    assert Figures(small_run()).compare("sides", None, PLAIN, ["chat"], "t0") is None
    assert Figures(small_run()).compare("sides", NGRAM, PLAIN, ["code"], "t0") is None


def test_a_repeated_request_counts_once() -> None:
    figures = Figures([*small_run(), run(PLAIN, 999)])
    assert len(figures.runs("sides", PLAIN, ["chat"], "t0")) == 2
    assert max(map(tok_s, figures.runs("sides", PLAIN, ["chat"], "t0"))) == pytest.approx(999)


def test_the_best_side_has_answered_every_kind() -> None:
    rows = [*small_run(), side("edgespec/partial", "speculative"), run("edgespec/partial", 9000, "edit")]
    figures = Figures(rows)
    assert figures.best("sides", figures.own("sides", "speculative"), COPYING, "t0") == NGRAM
    assert figures.best("sides", figures.own("sides", "speculative"), ["edit"], "t0") == "edgespec/partial"
    assert figures.best("sides", [], ["edit"], "t0") is None


def test_acceptance_weighs_rounds_and_length_counts_tokens_a_round() -> None:
    rows = [r for r in small_run() if r["row"] != "run"]
    rows.append(run(NGRAM, 100, rounds=10, by_position=[1.0]))
    rows.append(run(NGRAM, 100, prompt="p2", rounds=30, by_position=[0.2, 0.1]))
    figures = Figures(rows)
    assert figures.acceptance("sides", NGRAM, None, "t0") == pytest.approx([(10 + 6) / 40, 0.1])
    assert figures.tokens_a_round("sides", NGRAM, None, "t0") == 200 / 40


def test_texts_are_compared_with_plain_decoding_on_the_same_rows() -> None:
    exact = "edgespec/exact-plain"
    rows = [
        *small_run(),
        side(exact, "plain"),
        run(exact, 90),
        run(exact, 90, turn=1, text="y"),
        run(exact, 90, "edit"),
    ]
    assert Figures(rows).same_texts("sides") == (2, 3)
    assert Figures(small_run()).same_texts("sides") == (0, 0)


def test_every_row_of_the_table_is_measured_from_rows() -> None:
    found = verdicts(small_run())
    assert list(found) == [target.key for target in TARGETS]
    assert found["plain_vs_peer"] == (pytest.approx(1.25), "met")  # the peer of four bits, not the faster one of eight
    assert found["flat_v5"] == (2.0, "missed")
    assert found["chat_t0_vs_peer"] == (pytest.approx(150 / 90), "met")  # the best setting of any peer
    assert found["copy_vs_peer"] == (pytest.approx(250 / 90), "met")
    assert found["chat_t08_vs_peer"] == (None, "not measured")
    assert found["chat_t0_vs_plain"] == (pytest.approx(1.5), "met")
    assert found["copy_vs_plain"] == (pytest.approx(2.5), "met")
    assert found["scaled"] == (None, "not measured")
    assert found["predicted"] == (pytest.approx(0.8), "missed")
    assert found["bandwidth"] == (pytest.approx(75 / 200), "missed")  # 30 GB/s over 150 MB, the median of both turns


def test_the_scaled_row_is_of_its_own_part() -> None:
    rows = [*small_run(), side(PLAIN, "plain", "scaled", "m-x3"), side("edgespec/k3", "speculative", "scaled", "m-x3")]
    rows += [run(PLAIN, 20, part="scaled"), run("edgespec/k3", 50, part="scaled", **NGRAM_COUNTS)]
    assert verdicts(rows)["scaled"] == (pytest.approx(2.5), "stretch")


def test_a_flat_target_has_to_be_as_faithful_and_as_fast() -> None:
    def with_export(kld: float | None, v1: float) -> float | None:
        rows = small_run()
        rows += [
            {"row": "cost", "model": "flat", "rows": n, "ms": {"median": ms}} for n, ms in ((1, v1), (5, 1.2 * v1))
        ]
        if kld is not None:
            rows.append({"row": "fidelity", "model": "flat", "side": PLAIN, "kld": kld, "top1": 1, "rows": 9})
        return verdicts(rows)["flat_v5"][0]

    assert with_export(0.3, 5.0) == pytest.approx(1.2)
    assert with_export(0.31, 5.0) == 2.0
    assert with_export(None, 5.0) == 2.0
    assert with_export(0.3, 5.5) == 2.0


def test_a_peer_of_better_fidelity_is_said() -> None:
    rows = [row for row in small_run() if row["row"] != "fidelity"]
    for name, kld in ((PLAIN, 0.5), (PEER, 0.4)):
        rows.append({"row": "fidelity", "model": "m", "side": name, "kld": kld, "top1": 1, "rows": 9})
    (how,) = [one.measured.how for one in judge(Figures(rows)) if one.target.key == "plain_vs_peer"]
    assert "WORSE" in how


@pytest.mark.parametrize(
    ("value", "is_lower", "verdict"),
    [(1.3, False, "met"), (1.29, False, "missed"), (2.0, False, "stretch"), (None, False, "not measured"),
     (1.3, True, "stretch"), (2.0, True, "met"), (2.1, True, "missed")],
)  # fmt: skip
def test_verdicts(value: float | None, is_lower: bool, verdict: str) -> None:
    must, stretch = (2.0, 1.3) if is_lower else (1.3, 2.0)
    target = Target("key", "what", must, stretch, lambda figures: Measured(value, "how"), is_lower)
    from edgespec_bench.report.targets import Judged

    assert Judged(target, target.measure(Figures([]))).verdict == verdict


def test_nothing_measured_is_nothing_met() -> None:
    assert {verdict for _, verdict in verdicts([bench_rows.CARD]).values()} == {"not measured"}
    assert all(one.measured.how for one in judge(Figures([bench_rows.CARD])))


def test_what_was_missed_comes_with_its_profile() -> None:
    judged = {one.target.key: one for one in judge(Figures(small_run()))}
    assert "four further rows cost 4.00 ms more: qkv 4.00" in judged["flat_v5"].measured.bound
    assert "100% of it in matrix products, which compute 99 GOPS" in judged["flat_v5"].measured.bound
    assert "3.00 of 5.00 ms" in judged["bandwidth"].measured.bound
    assert "2.00 tokens a round" in judged["copy_vs_plain"].measured.bound
    assert "target 8.00, draft 1.00, host 0.40" in judged["copy_vs_plain"].measured.bound
    (table,) = [t for t in all_tables(Figures(small_run()), list(judged.values())) if t.title.startswith("What bounds")]
    missed = [one.target.what for one in judged.values() if one.verdict == "missed"]
    assert [row[0] for row in table.rows] == missed


def test_cells_cannot_break_a_table() -> None:
    text = markdown_table(Table("t", ("a", "b"), [("x | y", "1\n2"), ("", "z")]))
    assert text.splitlines()[2:] == ["| x \\| y | 1 2 |", "| - | z |"]


class Outside(HTMLParser):
    """Everything that a page would load from elsewhere, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]


def test_reports_are_made_from_the_rows_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = write(tmp_path / "run", small_run())
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {
        "rows.jsonl", "report.md", "report.html", "speedup.svg", "rows.svg", "acceptance.svg", "roofline.svg",
    }  # fmt: skip
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["missed"] == ["flat_v5", "predicted", "bandwidth"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "a &lt;small&gt; CPU" in page
    reader = Outside()
    reader.feed(page)
    assert reader.links == []
    assert reader.tags.count("svg") == 4
    assert "script" not in reader.tags
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    CliRunner().invoke(main, ["report", str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "rows.jsonl is missing" in result.stderr


README = "# a\n" + "\n".join(f"<!-- {name}: generated -->\nold\n<!-- /{name} -->" for name in MARKERS) + "\nb\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    write(tmp_path / "results" / "b-older", small_run())
    newer = [{**bench_rows.CARD, "started": "2026-02-01T00:00:00+00:00", "commit": "newer"}, *small_run()[1:]]
    write(tmp_path / "results" / "a-newer", newer)
    return tmp_path


def readme(folder: Path, *arguments: str) -> Any:
    where = ["--file", str(folder / "README.md"), "--results", str(folder / "results")]
    return CliRunner().invoke(main, ["readme", *where, *arguments])


def test_the_readme_is_written_from_the_newest_run_and_checked(checkout: Path) -> None:
    assert newest_run(checkout / "results").name == "a-newer"
    assert readme(checkout, "--check").exit_code == 1
    assert (checkout / "README.md").read_text(encoding="utf-8") == README
    assert readme(checkout).exit_code == 0
    text = (checkout / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^> .*100 tok/s|75 tok/s", text, re.MULTILINE)
    assert "bench/results/a-newer/report.md" in text
    assert text.startswith("# a\n")
    assert text.endswith("\nb\n")
    assert readme(checkout, "--check").exit_code == 0


def test_an_edited_readme_fails_the_check(checkout: Path) -> None:
    readme(checkout)
    path = checkout / "README.md"
    path.write_text(path.read_text(encoding="utf-8").replace("1.50x", "1.95x"), encoding="utf-8")
    result = readme(checkout, "--check")
    assert result.exit_code == 1
    assert "python -m edgespec_bench readme" in result.stderr


def test_a_readme_without_markers_and_results_without_a_run_are_refused(tmp_path: Path, checkout: Path) -> None:
    with pytest.raises(ConfigError, match="measured-line"):
        renew("# nothing", checkout / "results")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        renew(README, tmp_path / "empty")


def test_the_repository_says_what_was_measured() -> None:
    """What `make check` does."""
    result = CliRunner().invoke(main, ["readme", "--check"])
    assert result.exit_code == 0, result.output


def test_rows_that_were_cut_off_are_left_out_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowFile(path) as out:
        out.write("skip", part="a", side=None, reason="r")
        out.write("skip", part="b", side=None, reason="r")
    path.write_text(path.read_text(encoding="utf-8") + '{"row": "ru', encoding="utf-8")
    assert [row["part"] for row in read_rows(path)] == ["a", "b"]
    path.write_text('{"row": "poem"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        read_rows(path)


def test_a_part_that_is_measured_again_loses_its_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowFile(path) as out:
        for part in ("a", "b"):
            out.write("done", part=part)
        out.drop(lambda row: row["part"] == "a")
        out.write("skip", part="a", side=None, reason="r")
    assert [(row["row"], row["part"]) for row in read_rows(path)] == [("done", "b"), ("skip", "a")]
    with RowFile(path) as out:
        assert len(out.rows) == 2


def test_peers_are_there(tmp_path: Path) -> None:
    """Both of the peer's settings are listed in the report, the one of eight bits too."""
    titles = [t for t in all_tables(Figures(small_run()), []) if t.title.startswith("Tokens a second")]
    assert {row[0] for table in titles for row in table.rows} == {PLAIN, NGRAM, PEER, PEER8}
