"""Conversations over a table model with a tiny tokenizer: what is kept of them, and what is not run again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from chat_world import N_VOCAB, SYSTEMLESS, make_llm

from edgespec import LLM, SamplingParams
from edgespec.conversation import Conversation
from edgespec.errors import ConfigError
from edgespec.testing import TableModel

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def answer(conversation: Conversation, text: str) -> str:
    return "".join(delta.text for delta in conversation.ask(text))


def test_answers_are_those_to_the_whole_conversation(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    talk = Conversation(llm, PARAMS, "be kind")
    said = [answer(talk, "hello"), answer(talk, "and then")]
    assert all(said)
    assert talk.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": "and then"},
        {"role": "assistant", "content": said[1]},
    ]
    assert talk.last is not None
    assert talk.last.text == talk.answer == said[1]
    llm.forget()
    assert llm.chat(talk.messages[:-1], PARAMS).outputs[0].text == said[1]


def test_what_is_in_the_cache_is_not_run_again(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), PARAMS)
    answer(talk, "hello")
    first = talk.last
    answer(talk, "more")
    assert first is not None
    assert talk.last is not None
    assert talk.last.stats.cached_tokens >= first.stats.prompt_tokens


def test_an_answer_that_is_cut_stays_as_far_as_it_came(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), PARAMS)
    deltas = talk.ask("hello")
    came = "".join(delta.text for delta in islice(deltas, 2))
    deltas.close()  # type: ignore[attr-defined]
    assert talk.last is None
    assert talk.turns == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": came}]
    assert came
    assert answer(talk, "go on")
    assert len(talk.turns) == 4


def test_a_message_that_got_no_answer_at_all_is_taken_back(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), PARAMS)
    answer(talk, "hello")
    before = list(talk.turns)

    def fails(*_: object) -> object:
        yield from ()
        raise KeyboardInterrupt

    talk.llm.stream = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        answer(talk, "now")
    assert talk.turns == before


def test_again_replaces_the_last_answer(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5))
    with pytest.raises(ConfigError, match="nothing has been asked"):
        talk.again()
    answer(talk, "hello")
    first = list(talk.turns)
    others = {"".join(delta.text for delta in talk.again()) for _ in range(4)}
    assert len(others) > 1
    assert talk.turns[0] == first[0]
    assert len(talk.turns) == 2


def test_again_cut_before_its_first_text_changes_nothing(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), PARAMS)
    answer(talk, "hello")
    answer(talk, "more")
    before = list(talk.turns)
    deltas = talk.again()
    talk.llm.slots.take = _interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(deltas)
    assert talk.turns == before


def _interrupted(_: object) -> object:
    raise KeyboardInterrupt


def test_another_system_message_begins_again(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path), PARAMS, "be kind")
    answer(talk, "hello")
    talk.begin(None)
    assert talk.messages == []
    assert talk.last is None


def test_a_conversation_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    talk = Conversation(make_llm(tmp_path, n_ctx=40), PARAMS)
    answer(talk, "hello")
    before = list(talk.turns)
    with pytest.raises(ConfigError, match="the context holds 40"):
        talk.ask("x" * 40)
    assert talk.turns == before


def test_models_that_cannot_chat_are_refused(tmp_path: Path) -> None:
    for tokenizer in (None, make_llm(tmp_path, None).tokenizer):
        with pytest.raises(ConfigError, match="no chat template"):
            Conversation(LLM(TableModel(N_VOCAB), draft="none", tokenizer=tokenizer))


def test_a_template_without_a_place_for_the_system_says_so_at_once(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, SYSTEMLESS)
    with pytest.raises(ConfigError, match="no system"):
        Conversation(llm, PARAMS, "be kind")
    talk = Conversation(llm, PARAMS)
    answer(talk, "hello")
    before = list(talk.turns)
    with pytest.raises(ConfigError, match="no system"):
        talk.begin("be kind")
    assert talk.turns == before
