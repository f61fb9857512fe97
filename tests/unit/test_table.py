"""Tables of what a target usually writes: counting against a slow reader, proposals, damaged and foreign files."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_models.table import UNSEEN, count_table
from table_world import table_after, table_of, write_table_of
from test_profile import SMALL, slow_table

from edgespec import LLM, SamplingParams, zoo
from edgespec.cli import main
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.table import MOST_TOKENS, WHOLE, NgramTable, TableDrafter, context_keys, entry_type
from edgespec.engine.costs import MeasuredCosts, Spread
from edgespec.engine.learned import Expectation, Key, Learned
from edgespec.errors import ConfigError, EdgeSpecError, IncompatibleError
from edgespec.rehearsal import rehearse
from edgespec.testing import TableModel
from edgespec.types import DraftContext

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]


def context(tokens: list[int]) -> DraftContext:
    none = cast(Any, None)
    return DraftContext(tokens, none, none, none, 1)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_the_table_says_what_follows_most_often(tmp_path: Path) -> None:
    table = table_of(tmp_path, TEXT, 6)
    assert table.guess([1]) == (2, pytest.approx(6 / 7, abs=0.002))  # three times in each of two copies
    assert table.guess([9, 2]) == (3, pytest.approx(4 / 7, abs=0.002))
    assert table.guess([4, 1, 2]) == (3, pytest.approx(2 / 3, abs=0.002)), "the longer context is surer"
    assert table.guess([5]) is None
    assert table.guess([]) is None


@pytest.mark.parametrize("seed", range(4))
def test_counting_agrees_with_a_slow_reader(seed: int) -> None:
    """Every guess at every place of random texts, among them rows that are partly the user's."""
    dice, order, n_vocab = random.Random(seed), 3, 5
    rows = [[min(dice.randrange(n_vocab), dice.randrange(n_vocab)) for _ in range(40)] for _ in range(6)]
    marks = [[dice.random() < 0.7 for _ in row] for row in rows]
    seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row, own in zip(rows, marks, strict=True):
        for i, token in enumerate(row):
            for n in range(1, order + 1):
                if own[i] and i >= n:
                    seen[tuple(row[i - n : i])][token] += 1
    entries = count_table(np.array(rows), np.array(marks), order, n_vocab, 10_000)
    packed = (entries["chance"].astype(np.int64) << 32) | entries["token"]
    table = NgramTable(dict(zip(entries["context"].tolist(), packed.tolist(), strict=True)), order, n_vocab, None, {})
    for row in rows:
        for i in range(1, len(row)):
            best = 0.0
            for n in range(1, min(order, i) + 1):
                counts = seen[tuple(row[i - n : i])]
                if counts and max(counts.values()) >= 2:
                    best = max(best, max(counts.values()) / (sum(counts.values()) + UNSEEN))
            found = table.guess(row[:i])
            assert (found[1] if found else 0.0) == pytest.approx(best, abs=0.003)


def test_keys_are_those_that_a_guess_looks_up() -> None:
    dice = random.Random(1)
    tokens = [dice.randrange(50_000) for _ in range(30)]
    for order in (1, 2, 4):
        keys = context_keys(np.array([tokens]), order)[0]
        for start, key in enumerate(keys.tolist()):
            table = NgramTable({key: 200 << 32 | 7}, order, 50_000, None, {})
            assert table.guess(tokens[: start + order]) == (7, pytest.approx(200 / WHOLE))


def test_no_context_is_kept_that_says_no_more_than_a_shorter_one() -> None:
    """Keys of 2**31 and above were negative where chances are looked up: half of the longer contexts were in vain."""
    dice = np.random.default_rng(2)
    tokens = np.minimum(dice.integers(0, 40, (30, 60)), dice.integers(0, 40, (30, 60)))
    everywhere = np.ones(tokens.shape, bool)
    entries = {int(e["context"]): int(e["chance"]) for e in count_table(tokens, everywhere, 3, 40, 10_000)}
    kept = 0
    for row in tokens:
        for end in range(3, len(row)):
            keys = [int(context_keys(row[end - n : end], n)[0]) for n in (1, 2, 3)]
            known = [entries[key] for key in keys if key in entries]
            assert known == sorted(set(known)), "each longer one that is kept is surer"
            kept += len(known) > 1
    assert kept > 100
    assert max(entries) >= 1 << 31


def test_rows_shorter_than_the_longest_context_are_counted() -> None:
    tokens = np.array([[1, 2, 1]] * 3)
    assert len(count_table(tokens, np.ones(tokens.shape, bool), 8, 3, 100)) == 2


def test_of_too_many_entries_the_most_useful_stay() -> None:
    tokens = np.array([[1, 2] * 20 + [3, 4] * 2 + [3, 4]])
    entries = count_table(tokens, np.ones(tokens.shape, bool), 1, 6, 2)
    assert sorted(entries["context"].tolist()) == sorted(context_keys(np.array([1, 2]), 1).tolist())
    again = count_table(tokens, np.ones(tokens.shape, bool), 1, 6, 2)
    assert entries.tobytes() == again.tobytes()
    assert not len(count_table(tokens, np.zeros(tokens.shape, bool), 1, 6, 2))


# --- drafting ---------------------------------------------------------------------------------------------------------


def test_a_chain_ends_where_it_is_unlikely() -> None:
    sure, doubtful = table_after({1: 2, 2: 1}, 0.9), table_after({1: 2, 2: 1}, 0.45)
    assert sure.chain([1]) == ([2, 1, 2, 1][:MOST_TOKENS], pytest.approx(0.9, abs=0.003))
    assert doubtful.chain([1])[0] == [2, 1]  # a third one would survive with 0.09
    assert table_after({1: 2}, 0.1).chain([1]) == ([], 0.0)
    assert table_after({1: 2}).chain([5]) == ([], 0.0)


def test_offers_follow_what_came_of_earlier_ones() -> None:
    drafter = TableDrafter(table_after({1: 2, 2: 1}, 0.9))
    tokens, rates = [1], []
    for _ in range(6):
        offer = drafter.offer(context(tokens))
        assert (offer.max_k, offer.passes) == (MOST_TOKENS, 0)
        assert drafter.propose(context(tokens), 2).tokens == [3 - tokens[-1], tokens[-1]]
        rates.append(offer.acceptance)
        tokens.append(3 - tokens[-1])
    assert rates == sorted(rates)  # type: ignore[type-var]
    assert rates[-1] > rates[0]  # type: ignore[operator]
    assert drafter.offer(context([*tokens, 5])).max_k == 0
    drafter.reset()
    assert drafter.offer(context([1])).acceptance == rates[0]
    unsure = TableDrafter(table_after({1: 2}, 0.3))
    assert unsure.offer(context([1])).bucket < drafter.offer(context([1])).bucket


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("controller", ["fixed", "adaptive", "window"])
def test_every_rule_and_controller_takes_a_table(verifier: str, controller: str, tmp_path: Path) -> None:
    target, params = slow_table(10.0, 0.1), SamplingParams(temperature=0.0, max_tokens=60)
    expected = LLM(target, draft="none").generate([3, 1, 4], params)[0].outputs[0].token_ids
    folder = write_table_of(tmp_path / "t", [3, 1, 4, *expected], 16)
    options: dict[str, Any] = {"verifier": verifier, "controller": controller, "num_speculative_tokens": 4}
    with LLM(target, draft="ngram,table", draft_model=folder, exact=False, **options) as llm:
        output = llm.generate([3, 1, 4], params)[0].outputs[0]
        assert output.token_ids == expected
        assert output.stats.to_dict()["sources"]["table"]["accepted"] > 0
        assert llm.variant(draft="ngram").generate([3, 1, 4], params)[0].outputs[0].token_ids == expected


def test_calls_that_take_no_time_break_no_controller(tmp_path: Path) -> None:
    target, params = TableModel(16, seed=4, n_ctx=256), SamplingParams(temperature=0.0, max_tokens=60)
    folder = write_table_of(tmp_path / "t", [3, 1, 4, 1, 5], 16)
    with LLM(target, draft="ngram,table", draft_model=folder, exact=False, controller="adaptive") as llm:
        assert len(llm.generate([3, 1, 4], params)[0].outputs[0].token_ids) == 60


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2; 1 is read here"),
        ({"order": 0}, "order is 0"),
        ({"order": True}, "order is True"),
        ({"n_vocab": "many"}, "n_vocab is 'many'"),
        ({"n_vocab": 3}, "tokens below 3"),
        ({"n_vocab": 70_000}, "must be rows of"),
        ({"tokenizer_hash": 5}, "tokenizer_hash is 5"),
        ({"format": "x"}, "holds no table"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_table_of(tmp_path, TEXT, 6)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(EdgeSpecError, match=message):
        NgramTable.read(tmp_path)


HEAD = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        HEAD + b"\xff\xff",
        b"PK\x03\x04 is no archive",
        HEAD + b"\x10\x00((((((((((((((((",
        HEAD + b"\x06\x00{[]:1}",
        HEAD + b"\x3e\x00" + b"{'descr': '<u4', 'fortran_order': False, 'shape': (" + b"9" * 9 + b"00,)}",
        HEAD + b"\x50\x00" + (b"{'descr': '<u4', 'fortran_order': False, 'shape': (" + b"9" * 24 + b",)}").ljust(80),
        None,
    ],
    ids=str,
)
def test_entries_that_cannot_be_read_are_named(content: bytes | None, tmp_path: Path) -> None:
    write_table_of(tmp_path, TEXT, 6)
    path = tmp_path / "table.npy"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(EdgeSpecError, match=r"table\.npy"):
        NgramTable.read(tmp_path)
    with pytest.raises(EdgeSpecError, match=r"table\.npy"):
        LLM(TableModel(6), draft="table", draft_model=tmp_path)


def test_archives_of_arrays_are_not_read(tmp_path: Path) -> None:
    write_table_of(tmp_path, TEXT, 6)
    with (tmp_path / "table.npy").open("wb") as file:
        np.savez(file, np.zeros(3))
    with pytest.raises(EdgeSpecError, match=r"table\.npy"):
        NgramTable.read(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    write_table_of(tmp_path, TEXT, 6)
    np.save(tmp_path / "table.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(EdgeSpecError, match=r"table\.npy"):
        NgramTable.read(tmp_path)


def test_large_vocabularies_have_wide_tokens() -> None:
    assert entry_type(49_152).itemsize == 7
    assert entry_type(1 << 16)["token"].itemsize == 2
    assert entry_type((1 << 16) + 1)["token"].itemsize == 4


def test_the_table_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target = TableModel(6, tokenizer_hash="ours")
    with pytest.raises(IncompatibleError, match="another tokenizer's texts"):
        LLM(target, draft="table", draft_model=write_table_of(tmp_path / "a", TEXT, 6, tokenizer_hash="theirs"))
    with pytest.raises(IncompatibleError, match=r"another tokenizer's texts \(7 tokens\)"):
        LLM(target, draft="table", draft_model=write_table_of(tmp_path / "b", TEXT, 7))
    folder = write_table_of(tmp_path / "c", TEXT, 6, tokenizer_hash="ours")
    with LLM(target, draft_model=folder) as llm:
        assert llm.options.draft == "table"
    with pytest.raises(ConfigError, match="kind 'table' was given but draft='ngram'"):
        LLM(target, draft="ngram", draft_model=folder)
    with LLM(target, draft="ngram") as llm, pytest.raises(ConfigError, match="'table' was not loaded"):
        llm.variant(draft="table")


def test_the_zoos_table_is_found_by_name_then_by_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "zoo_dir", lambda: tmp_path)
    for pair, tokenizer in (("b", "one"), ("a", "one"), ("c", "two")):
        write_table_of(tmp_path / pair / "table", TEXT, 6, tokenizer_hash=tokenizer)
    for name, tokenizer, wanted in (("b", "one", "b"), ("x", "two", "c"), ("c", "one", "a"), ("x", "three", None)):
        info = TableModel(6, name=name, tokenizer_hash=tokenizer).info
        found = zoo.find_table(info)
        assert (found and found.parent.name) == wanted
    with pytest.raises(IncompatibleError, match="edgespec train table"):
        LLM(TableModel(6, name="x", tokenizer_hash="three"), draft="table")
    with LLM(TableModel(6, name="b", tokenizer_hash="one"), draft="ngram,table") as llm:
        assert llm.loaded.table is not None


def test_a_plan_weighs_the_table_on_the_calibration_texts(tmp_path: Path) -> None:

    from edgespec.planner import make_plan
    from edgespec.profile import profile_llm

    target = slow_table(10.0, 0.5)
    with LLM(target, draft="none", exact=False) as llm:
        texts = profile_llm(llm, effort=SMALL).target.texts
    folder = write_table_of(tmp_path / "t", [token for pair in texts for part in pair for token in part], 16, order=4)
    with LLM(target, draft="ngram,table", draft_model=folder, exact=False) as llm:
        profiles = profile_llm(llm, effort=SMALL)
        plan = make_plan([profiles])
    assert list(profiles.drafts) == []
    assert {c.draft for c in plan.candidates} == {"none", "ngram", "ngram,table"}
    assert plan.chosen.draft == "ngram,table"
    assert llm.loaded.table is not None
    assert plan.chosen.bytes == profiles.target.bytes + llm.loaded.table.n_bytes
    with LLM(target, draft="auto", draft_model=folder, exact=False) as llm:
        assert llm.options.draft == "ngram,table"


def test_a_rehearsal_says_how_often_free_drafts_are_right() -> None:
    """At every place of the texts: what follows 1 is right twice in three times, what follows 2 always."""
    table = table_after({1: 2, 2: 1}, 0.6)
    found = rehearse([([0], [1, 2, 1, 2, 1, 3] * 3)], [NgramDrafter, partial(TableDrafter, table)])
    assert {source for source, _bucket in found} == {"ngram", "table"}
    ((first, *_rest),) = [found[key] for key in found if key[0] == "table"]
    assert first == pytest.approx((6 + 6) / 15)  # 9 times after 1, 6 times after 2
    assert rehearse([], [NgramDrafter]) == {}
    assert rehearse([([1], [2])], [partial(TableDrafter, table)]) == {}, "one place says nothing"


def test_a_controller_begins_with_what_was_rehearsed() -> None:
    expected = Expectation(MeasuredCosts({64: {1: Spread(1, 1, 1, 1)}}), buckets={("table", 3): (0.6, 0.5)})
    learned = Learned.expecting(expected)
    assert learned.known_k == {"table": 2}
    assert learned.acceptance[Key("table", 3, False)].chances(2, 0.1) == pytest.approx([0.5, 0.5], abs=0.02)
    assert learned.acceptance[Key("table", 3, True)].evidence < learned.acceptance[Key("table", 3, False)].evidence


def test_bad_input_of_train_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_table_of(tmp_path / "there", TEXT, 6)
    for arguments, message in (
        (["-o", "x"], "--corpus"),
        (["-o", "x", "--corpus", "none.safetensors"], "there is no corpus at"),
        (["-o", str(tmp_path / "file"), "--corpus", "c"], "is a file: OUT is the folder"),
        (["-o", str(tmp_path / "there"), "--corpus", "c"], "holds a draft already: --force replaces it"),
        (["-o", "x", "--corpus", "c", "--order", "9"], "9 is not in the range 1<=x<=8"),
    ):
        result = CliRunner().invoke(main, ["train", "table", *arguments])
        assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.stderr
        assert "Traceback" not in result.stderr
