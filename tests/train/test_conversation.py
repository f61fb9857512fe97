"""Conversations: rows are what the template renders, whoever samples; the seed decides; interruptions cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_models.conversation import (
    OPENING,
    DataSettings,
    Row,
    Script,
    read_script,
    repetition,
    write_corpus,
    write_rows,
)
from edgespec_models.corpus import Corpus
from train_world import CHATML, END, START, TableBatch

from edgespec.errors import ConfigError
from edgespec.text import Tokenizer

Maker = Callable[[str | None], Tokenizer]
FACTS = {"target": "table", "n_vocab": 264, "n_ctx": 512, "tokenizer_hash": "x"}
LAX = {"max_repetition": 1.0, "min_assistant": 0}


def settings(**changes: Any) -> DataSettings:
    return DataSettings(**{"rows": 10, "length": 60, "batch": 4, "top_k": 0, **LAX, **changes})


def turns(tokens: list[int], script: Script) -> list[list[int]]:
    """The texts of a row's turns, cut at the forced pieces; the last one may be cut off."""
    rest, texts = tokens[len(script.head) :], []
    pieces = [list(script.reply), list(script.back)]
    while True:
        piece = pieces[len(texts) % 2]
        starts = [i for i in range(len(rest) - len(piece) + 1) if rest[i : i + len(piece)] == piece]
        if not starts:
            return [*texts, rest]
        texts.append(rest[: starts[0]])
        rest = rest[starts[0] + len(piece) :]


def test_script_of_a_chat_template(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer(CHATML)
    script = read_script(tokenizer, "Be brief.")
    assert list(script.head) == tokenizer.encode("<s>system\nBe brief.<|im_end|>\n<s>user\n")
    assert list(script.reply) == tokenizer.encode("<|im_end|>\n<s>assistant\n")
    assert list(script.back) == tokenizer.encode("<|im_end|>\n<s>user\n")
    assert script.stop_ids == (END,)
    assert not script.is_raw


def test_script_leaves_the_word_its_space(make_tokenizer: Maker) -> None:
    """A token that begins in the template and ends in the text is the model's to choose."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[I]t' + m['content'] + '[/I]' }}{% else %}"
        "{{ 't' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    script = read_script(make_tokenizer(template))  # its one merge is "th", and the marked texts begin with an h
    assert bytes(script.head) == b"[I]"
    assert bytes(script.reply) == b"[/I]"
    assert script.back == (END, *b"[I]")
    assert script.stop_ids == (END,)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for m in messages %}{{ m['role'] ~ loop.index ~ m['content'] ~ '<|im_end|>' }}{% endfor %}", "stands"),
        ("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}", "drops"),
        ("{% for m in messages %}{{ m['content'] ~ m['content'] }}<|im_end|>{% endfor %}", "repeats"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "nothing between"),
    ],
)
def test_templates_without_a_script_are_refused(make_tokenizer: Maker, template: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        read_script(make_tokenizer(template))
    assert "--raw" in str(caught.value)
    assert read_script(make_tokenizer(template), is_raw=True).is_raw


def test_rows_are_what_the_template_renders(make_tokenizer: Maker, table: np.ndarray) -> None:
    """Every finished turn, put back through the template, gives the row's own tokens."""
    tokenizer = make_tokenizer(CHATML)
    script = read_script(tokenizer)
    tokens, assistant = write_rows(TableBatch(6, table), script, settings(length=120), range(6))
    assert tokens.shape == assistant.shape == (6, 120)
    for row in tokens.tolist():
        said = [bytes(turn).decode() for turn in turns(row, script)[:-1]]  # the last one is cut off
        assert len(said) >= 2
        assert all(said), "a turn is empty"
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        rendered = tokenizer.encode_chat(messages, add_generation_prompt=len(said) % 2 == 1)
        assert row[: len(rendered)] == rendered


def test_mask_marks_what_the_assistant_wrote(make_tokenizer: Maker, table: np.ndarray) -> None:
    """Its text and the token by which it ended its turn; nothing forced, nothing of the user's."""
    script = read_script(make_tokenizer(CHATML))
    tokens, assistant = write_rows(TableBatch(4, table), script, settings(length=120), range(4))
    for row, marks in zip(tokens.tolist(), assistant.tolist(), strict=True):
        wanted = [False] * len(script.head)
        for i, text in enumerate(turns(row, script)):
            piece = script.back if i % 2 else script.reply
            wanted += [i % 2 == 1] * len(text) + [i % 2 == 1] + [False] * (len(piece) - 1)
        assert marks == wanted[:120]


def test_a_user_who_never_stops_is_stopped() -> None:
    script = Script(head=(START,), reply=(END, 10), back=(END, 11), stop_ids=(END,))
    row = Row(script, max_user=3)
    for token in (1, 2, 3):
        assert row.needs_sample
        assert row.push(token) == token
    assert not row.needs_sample
    assert [row.push(None), row.push(None)] == [END, 10]
    assert row.needs_sample
    assert not row.is_user
    assert not any(row.assistant)


def test_the_templates_end_takes_the_place_of_another() -> None:
    """Where a model ends a turn with a token that the template does not write there, the row has the template's."""
    script = Script(head=(1,), reply=(20, 21), back=(30, 31), stop_ids=(9, 20, 30))
    row = Row(script, max_user=50)
    assert [row.push(5), row.push(9), row.push(None)] == [5, 20, 21]
    assert [row.push(6), row.push(20), row.push(None), row.push(7)] == [6, 30, 31, 7]
    assert row.tokens == [1, 5, 20, 21, 6, 30, 31, 7]
    assert row.assistant == [False, False, False, False, True, False, False, False]


def test_raw_rows_are_all_the_models_and_open_with_noise(make_tokenizer: Maker, table: np.ndarray) -> None:
    tokenizer = make_tokenizer(None)
    script = read_script(tokenizer)
    assert script.is_raw
    table[:, END] = -np.inf
    tokens, assistant = write_rows(TableBatch(5, table), script, settings(temp_assistant=(0.0,)), range(5))
    assert assistant.all()
    assert len({tuple(row) for row in tokens.tolist()}) == 5
    greedy = table[tokens[:, OPENING:-1]].argmax(-1)
    np.testing.assert_array_equal(tokens[:, OPENING + 1 :], greedy)
    assert (table[tokens[:, 1:OPENING]].argmax(-1) != tokens[:, 2 : OPENING + 1]).any()


def test_system_message_without_a_template_is_refused(make_tokenizer: Maker) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        read_script(make_tokenizer(None), "Be brief.")


def test_rows_take_the_assistants_temperatures_in_turn(make_tokenizer: Maker, table: np.ndarray) -> None:
    script = read_script(make_tokenizer(CHATML))
    tokens, assistant = write_rows(
        TableBatch(4, table), script, settings(length=200, temp_assistant=(0.0, 2.0)), range(4)
    )
    best = table[tokens[:, :-1]].argmax(-1)
    text = assistant[:, 1:] & (tokens[:, 1:] != END) & ~np.isin(tokens[:, :-1], (END, ord("\n")))
    right = tokens[:, 1:] == best
    assert right[::2][text[::2]].all()
    assert not right[1::2][text[1::2]].all()


def test_a_row_depends_on_its_number_and_the_seed_alone(make_tokenizer: Maker, table: np.ndarray) -> None:
    script = read_script(make_tokenizer(CHATML))
    together, _ = write_rows(TableBatch(6, table), script, settings(), range(6))
    parted = [write_rows(TableBatch(2, table), script, settings(), range(i, i + 2))[0] for i in (0, 2, 4)]
    np.testing.assert_array_equal(together, np.concatenate(parted))
    other, _ = write_rows(TableBatch(6, table), script, settings(seed=1), range(6))
    assert (together != other).any(1).all()


def test_shortcut_to_the_best_tokens_changes_nothing(
    make_tokenizer: Maker, table: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = read_script(make_tokenizer(CHATML))
    short, _ = write_rows(TableBatch(6, table), script, settings(top_k=5), range(6))
    monkeypatch.setattr("edgespec_models.conversation._head", lambda logits, top_k: None)
    long, _ = write_rows(TableBatch(6, table), script, settings(top_k=5), range(6))
    np.testing.assert_array_equal(short, long)


def test_all_rows_share_every_position(make_tokenizer: Maker, table: np.ndarray) -> None:
    """The header in one call, then one token a row and call; the last token is never run."""
    script = read_script(make_tokenizer(CHATML))
    session = TableBatch(3, table)
    tokens, _ = write_rows(session, script, settings(length=50), range(3))
    assert [call.shape[1] for call in session.seen] == [len(script.head), *[1] * (50 - len(script.head) - 1)]
    np.testing.assert_array_equal(np.concatenate(session.seen, axis=1), tokens[:, :-1])


def test_corpus_is_filtered_and_counted(make_tokenizer: Maker, table: np.ndarray, tmp_path: Path) -> None:
    chosen = settings(rows=6, length=80, min_assistant=8, max_repetition=0.9)
    made = write_corpus(
        lambda n: TableBatch(n, table), make_tokenizer(CHATML), tmp_path / "c.safetensors", chosen, FACTS
    )
    assert len(made) == 6
    assert (made.assistant.sum(1) >= 8).all()
    assert made.recipe is not None
    found = made.recipe["filters"]
    assert found["written"] % 4 == 0
    assert found["written"] - found["short"] - found["repetitive"] >= 6
    assert found["short"] > 0, "the filter had nothing to do"
    assert Corpus.load(tmp_path / "c.safetensors").recipe == made.recipe


def test_filters_that_let_nothing_through_end(make_tokenizer: Maker, table: np.ndarray, tmp_path: Path) -> None:
    chosen = settings(rows=4, min_assistant=60)
    with pytest.raises(ConfigError, match="0 of 4 rows passed"):
        write_corpus(lambda n: TableBatch(n, table), make_tokenizer(CHATML), tmp_path / "c.safetensors", chosen, FACTS)


def test_interrupted_corpus_goes_on_to_the_same_bytes(
    make_tokenizer: Maker, table: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableBatch, "n_calls", 0)
    tokenizer, whole, broken = make_tokenizer(CHATML), tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    write_corpus(lambda n: TableBatch(n, table), tokenizer, whole, settings(), FACTS)
    n_all, TableBatch.n_calls = TableBatch.n_calls, 0
    sessions: list[TableBatch] = []

    def failing(n: int) -> TableBatch:
        sessions.append(TableBatch(n, table, fail_at=n_all // 2))
        return sessions[-1]

    with pytest.raises(KeyboardInterrupt):
        write_corpus(failing, tokenizer, broken, settings(), FACTS)
    assert sessions[-1].is_closed
    assert not broken.exists()
    TableBatch.n_calls = 0
    write_corpus(lambda n: TableBatch(n, table), tokenizer, broken, settings(), FACTS)
    assert 0 < TableBatch.n_calls < n_all
    assert broken.read_bytes() == whole.read_bytes()
    assert broken.with_suffix(".json").read_bytes() == whole.with_suffix(".json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken.json",
        "broken.safetensors",
        "whole.json",
        "whole.safetensors",
    ]


def test_interrupted_corpus_does_not_go_on_with_other_settings(
    make_tokenizer: Maker, table: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableBatch, "n_calls", 0)
    tokenizer, out = make_tokenizer(CHATML), tmp_path / "c.safetensors"
    with pytest.raises(KeyboardInterrupt):
        write_corpus(lambda n: TableBatch(n, table, fail_at=5), tokenizer, out, settings(), FACTS)
    with pytest.raises(ConfigError, match="begun with settings"):
        write_corpus(lambda n: TableBatch(n, table), tokenizer, out, settings(seed=5), FACTS)


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    assert repetition(np.arange(100)) == 0.0
    assert repetition(np.zeros(27, np.int64)) == pytest.approx(19 / 20)
    assert repetition(np.tile(np.arange(10), 5)) == pytest.approx(1 - 10 / 43)
    assert repetition(np.arange(8)) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 1},
        {"length": 3},
        {"batch": 0},
        {"temp_assistant": ()},
        {"temp_assistant": (-1.0,)},
        {"temp_user": float("nan")},
        {"max_repetition": 0.0},
        {"min_assistant": 61},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        settings(**wrong)


def test_rows_must_fit_context_and_header(make_tokenizer: Maker, table: np.ndarray, tmp_path: Path) -> None:
    tokenizer, out = make_tokenizer(CHATML), tmp_path / "c.safetensors"
    for changes, facts, word in (
        ({}, {**FACTS, "n_ctx": 32}, "context holds 32"),
        ({"length": 16, "system": "Be very brief."}, FACTS, "header alone"),
    ):
        with pytest.raises(ConfigError, match=word):
            write_corpus(lambda n: TableBatch(n, table), tokenizer, out, settings(**changes), facts)
