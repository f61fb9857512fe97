"""TextStream: whole characters only, stop strings wherever they fall, and why a text ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.text import TextStream, Tokenizer
from edgespec.text.gguf_vocab import vocabulary_from_gguf
from edgespec.types import StopSignal

N_BYTES = 256
EOS, USER, AB, BC = 256, 257, 258, 259  # <end>, <user>, "ab", "bc"


def byte_level() -> Tokenizer:
    """Token i is byte i; then two special tokens and two pairs of letters."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    alphabet = [chr(byte) if byte in printable else chr(next(others)) for byte in range(N_BYTES)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "<end>", "<user>", "ab", "bc"],
        "tokenizer.ggml.token_type": [1] * N_BYTES + [3, 3, 1, 1],
        "tokenizer.ggml.merges": ["a b", "b c"],
        "tokenizer.ggml.eos_token_id": EOS,
    }
    return Tokenizer(vocabulary_from_gguf(metadata))


def sentencepiece() -> Tokenizer:
    """Ids 3..258 are bytes; then `_`, `_a`, `a`, `b`, where `_` stands for the space."""
    pieces = ["\u2581", "\u2581a", "a", "b"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(N_BYTES)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * N_BYTES + [1] * 4,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Tokenizer(vocabulary_from_gguf(metadata))


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()


def run(stream: TextStream, tokens: Sequence[int], block: int = 1) -> tuple[list[str], list[int]]:
    """Deltas (one for each block of tokens, then the rest) and the tokens up to the stop."""
    deltas, used = [], []
    for start in range(0, len(tokens), block):
        signal = None
        for token in tokens[start : start + block]:
            used.append(token)
            signal = stream.push(token)
            if signal:
                break
        deltas.append(stream.take())
        if signal:
            break
    deltas.append(stream.finish())
    return deltas, used


def text_of(tokens: Sequence[int], **options: Any) -> str:
    stream = TextStream(BYTE_LEVEL, **options)
    deltas, _ = run(stream, tokens)
    assert "".join(deltas) == stream.text
    return stream.text


class TestCharacters:
    @pytest.mark.parametrize("text", ["\u00e9", "\ud55c\uae00", "\U0001f44d\U0001f3fd", "\U0001f469\u200d\U0001f467"])
    @pytest.mark.parametrize("block", [1, 2, 3, 5])
    def test_split_characters_come_out_whole(self, text: str, block: int) -> None:
        deltas, _ = run(TextStream(BYTE_LEVEL), list(text.encode()), block)
        assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas)

    def test_nothing_is_shown_before_the_last_byte(self) -> None:
        stream = TextStream(BYTE_LEVEL)
        shown = []
        for byte in "\uae00".encode():
            stream.push(byte)
            shown.append(stream.take())
        assert shown == ["", "", "\uae00"]

    def test_a_character_cut_by_the_limit_is_one_replacement_character(self) -> None:
        tokens = list("a\ud55c".encode())[:-1]
        deltas, _ = run(TextStream(BYTE_LEVEL), tokens)
        assert deltas == ["a", "", "", "\ufffd"]
        assert "".join(deltas) == BYTE_LEVEL.decode(tokens)

    @given(st.lists(st.integers(0, BC), max_size=40), st.booleans())
    @settings(deadline=None, max_examples=60)
    def test_deltas_join_to_the_one_shot_decode(self, tokens: list[int], skip_special: bool) -> None:
        stream = TextStream(BYTE_LEVEL, ignore_eos=True, skip_special=skip_special)
        deltas, used = run(stream, tokens)
        assert used == tokens
        assert "".join(deltas) == stream.text == BYTE_LEVEL.decode(tokens, skip_special=skip_special)

    @given(st.text(max_size=20), st.integers(1, 7))
    @settings(deadline=None, max_examples=60)
    def test_valid_text_never_shows_a_replacement_character(self, text: str, block: int) -> None:
        text = text.replace("\ufffd", "")
        deltas, _ = run(TextStream(BYTE_LEVEL), list(text.encode()), block)
        assert "".join(deltas) == text
        assert all("\ufffd" not in delta for delta in deltas)

    @given(st.lists(st.integers(0, 262), max_size=30), st.booleans())
    @settings(deadline=None, max_examples=60)
    def test_a_leading_space_is_dropped_as_in_the_one_shot_decode(self, tokens: list[int], keep: bool) -> None:
        stream = TextStream(SENTENCEPIECE, ignore_eos=True, keep_leading_space=keep)
        deltas, _ = run(stream, tokens)
        assert "".join(deltas) == SENTENCEPIECE.decode(tokens, keep_leading_space=keep)

    def test_only_the_first_space_is_dropped(self) -> None:
        assert run(TextStream(SENTENCEPIECE), [1, 259, 260, 260])[0] == ["", "", " a", " a", ""]


class TestStopStrings:
    def test_cut_before_the_stop_or_after_it(self) -> None:
        assert text_of(b"one END two", stop=["END"]) == "one "
        assert text_of(b"one END two", stop=["END"], include_stop=True) == "one END"
        assert text_of(b"one END two", stop="END") == "one "

    @pytest.mark.parametrize("block", range(1, 8))
    def test_the_cut_is_the_same_however_tokens_are_blocked(self, block: int) -> None:
        """A stop string inside a block, or over its edge, was found only at the end of the block."""
        stream = TextStream(BYTE_LEVEL, stop=["xyz"])
        deltas, used = run(stream, list(b"ab xy xyz cd"), block)
        assert "".join(deltas) == "ab xy "
        assert len(used) == 9
        assert stream.stop_reason == "xyz"

    def test_the_token_that_completes_it_is_kept_but_not_its_text(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["ca"])
        _, used = run(stream, [AB, ord("c"), AB, ord("x")])
        assert (used, stream.text) == ([AB, ord("c"), AB], "ab")
        after = TextStream(BYTE_LEVEL, stop=["ca"], include_stop=True)
        run(after, [AB, ord("c"), AB, ord("x")])
        assert after.text == "abca"

    def test_the_earliest_end_wins_and_then_the_longest(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["abcd", "abc", "bc"])
        run(stream, list(b"xabcd"))
        assert (stream.text, stream.stop_reason) == ("x", "abc")

    def test_what_may_become_a_stop_is_held_back_and_no_more(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["aab"])
        shown = []
        for byte in b"xaaac":
            stream.push(byte)
            shown.append(stream.take())
        assert shown == ["x", "", "", "a", "aac"]
        assert stream.finish() == ""

    def test_held_text_comes_with_the_end(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["ab"])
        stream.push(ord("a"))
        assert (stream.take(), stream.text, stream.finish(), stream.finish()) == ("", "a", "a", "")

    def test_a_replacement_character_at_the_end_can_complete_one(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["a\ufffd"])
        run(stream, [ord("a"), 0xC3])
        assert (stream.text, stream.stop_reason) == ("", "a\ufffd")

    def test_strings_completed_among_the_first_tokens_do_not_count(self) -> None:
        assert text_of(b"abxab", stop=["ab"], min_tokens=2) == "abx"
        assert text_of(b"abxab", stop=["ab"], min_tokens=1) == ""
        assert text_of(b"aaa", stop=["aa"], min_tokens=2) == "a"

    @given(
        st.lists(st.sampled_from([ord("a"), ord("b"), ord("c"), AB, BC, 0xC3, 0xA9, USER]), max_size=24),
        st.lists(st.text("abc\u00e9\ufffd", min_size=1, max_size=4), max_size=3),
        st.booleans(),
        st.integers(1, 5),
    )
    @settings(deadline=None, max_examples=150)
    def test_the_cut_equals_a_search_in_the_whole_text(
        self, tokens: list[int], stops: list[str], include: bool, block: int
    ) -> None:
        text = BYTE_LEVEL.decode(tokens)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        end, _, first = min(ends, default=(len(text), 0, ""))
        expected = text[: end if include else end - len(first)]
        stream = TextStream(BYTE_LEVEL, stop=stops, include_stop=include)
        deltas, _ = run(stream, tokens, block)
        assert "".join(deltas) == stream.text == expected
        assert stream.stop_reason == (first or None)

    @pytest.mark.parametrize("stop", [[""], [None]])
    def test_what_is_no_stop_string_is_refused(self, stop: list[Any]) -> None:
        with pytest.raises(ConfigError, match="a stop string is"):
            TextStream(BYTE_LEVEL, stop=stop)


class TestStopTokens:
    def test_eos_ends_the_text_and_is_named(self) -> None:
        stream = TextStream(BYTE_LEVEL, skip_special=False)
        assert stream.push(ord("a")) is None
        assert stream.push(EOS) == StopSignal("stop")
        assert (stream.text, stream.stop_reason) == ("a", EOS)

    def test_eos_can_be_ignored_or_replaced(self) -> None:
        assert text_of([ord("a"), EOS, ord("b")], ignore_eos=True) == "ab"
        assert text_of([ord("a"), EOS, ord("b"), USER, ord("c")], eos_ids=[USER]) == "ab"

    def test_a_stop_token_holds_with_eos_ignored(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop_token_ids=[ord("b")], ignore_eos=True)
        run(stream, list(b"abc"))
        assert (stream.text, stream.stop_reason) == ("a", ord("b"))

    def test_its_text_is_kept_if_asked_for(self) -> None:
        assert text_of(b"abc", stop_token_ids=[ord("b")], include_stop=True) == "ab"
        assert text_of([ord("a"), EOS], include_stop=True, skip_special=False) == "a<end>"
        assert text_of([ord("a"), EOS], include_stop=True) == "a"

    def test_no_stop_among_the_first_tokens(self) -> None:
        assert text_of([EOS, ord("a"), EOS, ord("b")], min_tokens=1) == "a"
        assert text_of([EOS, ord("a"), EOS, ord("b")], min_tokens=3) == "ab"

    def test_a_stop_token_releases_what_was_held_for_a_stop_string(self) -> None:
        stream = TextStream(BYTE_LEVEL, stop=["ab", "b<end>"], skip_special=False, include_stop=True)
        deltas, _ = run(stream, [ord("b"), EOS])
        assert "".join(deltas) == "b<end>"
        assert stream.stop_reason == EOS

    def test_half_a_character_before_a_stop_token_is_shown_as_one(self) -> None:
        assert text_of([ord("a"), 0xC3, EOS]) == "a\ufffd"

    def test_no_token_may_follow_the_stop(self) -> None:
        stream = TextStream(BYTE_LEVEL)
        stream.push(EOS)
        with pytest.raises(AssertionError, match="push after the stop"):
            stream.push(ord("a"))


class TestCost:
    def test_each_token_is_looked_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Streaming decoded the whole text again for every token."""
        tokenizer = byte_level()
        calls = []
        look_up = tokenizer.text_bytes
        monkeypatch.setattr(
            tokenizer, "text_bytes", lambda token, **options: calls.append(token) or look_up(token, **options)
        )
        monkeypatch.delattr(Tokenizer, "decode")
        tokens = list(b"a long text ") * 50
        run(TextStream(tokenizer, stop=["never"]), tokens)
        assert calls == tokens

    def test_a_long_text_is_not_scanned_again_for_stops(self) -> None:
        """Characters that are held back stay bounded by the longest stop string."""
        stream = TextStream(BYTE_LEVEL, stop=["x" * 10])
        for _ in range(1000):
            stream.push(ord("y"))
        stream.push(ord("x"))
        assert len(stream._held) == 1
        assert stream.take() == "y" * 1000
