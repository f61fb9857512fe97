"""Tokenizers rebuilt from GGUF metadata and read from tokenizer.json: ids, bytes, BOS and EOS, comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from edgespec.errors import ConfigError, FormatError, MissingDependencyError
from edgespec.text import Tokenizer
from edgespec.text.gguf_vocab import vocabulary_from_gguf
from edgespec.text.pretokenizers import _BY_NAME, find_pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: itself where it can be printed, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """Three control tokens, all bytes, and the merges for ` he`, `he` and digits."""
    alphabet = byte_alphabet()
    space = alphabet[0x20]
    merges = ["h e", f"{space} he", "1 2", "l l"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", f"{space}he", "12", "ll", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * 260 + [USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """unk, BOS, EOS, 256 byte tokens, single characters and pieces with falling scores."""
    pieces = [
        "\u2581",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "\u2581he",
        "\u2581hell",
        "\u2581hello",
        "\u2581w",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(8, 8 + len(pieces))]
    scores[259 + pieces.index("\u2581hello")] = -1.0
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(vocabulary_from_gguf(metadata))


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    if "tokenizer.ggml.merges" in metadata:
        writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
        writer.add_token_merges(metadata["tokenizer.ggml.merges"])
        writer.add_add_bos_token(metadata["tokenizer.ggml.add_bos_token"])
    else:
        writer.add_token_scores(metadata["tokenizer.ggml.scores"])
        writer.add_unk_token_id(metadata["tokenizer.ggml.unknown_token_id"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(metadata["tokenizer.chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


PROBES = [
    "hello he 12 121 3",
    " leading and trailing ",
    "tab\tand\n\nnewlines\r\n",
    "caf\u00e9 e\u0301 \u00df",
    "\ud55c\uae00 \u4f60\u597d\u3002",
    "\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "<|im_start|>user\nhe<|im_end|>",
    "a<tool>b",
    "x\x00y\x7f\xa0\u200b\ufeff\ufffd",
    "",
]


@pytest.mark.parametrize("make", [byte_level_metadata, sentencepiece_metadata])
class TestBothKinds:
    @pytest.mark.parametrize("text", PROBES)
    def test_text_comes_back(self, make: Any, text: str) -> None:
        found = tokenizer(make())
        ids = found.encode(text, add_special=False)
        assert found.decode(ids, skip_special=False) == text

    def test_a_written_file_reads_as_the_metadata_does(self, make: Any, tmp_path: Path) -> None:
        read = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", make()))
        assert read.hash == tokenizer(make()).hash
        assert (read.bos_id, read.eos_ids, read.add_bos) == (1, (2,), make is sentencepiece_metadata)
        assert read.n_vocab == len(make()["tokenizer.ggml.tokens"])

    def test_its_json_gives_the_same_ids_and_the_same_json(self, make: Any, tmp_path: Path) -> None:
        first = tokenizer(make())
        path = tmp_path / "tokenizer.json"
        path.write_text(first.to_json(), encoding="utf-8")
        again = Tokenizer.load(path)
        assert [again.encode(text) for text in PROBES] == [first.encode(text) for text in PROBES]
        assert (again.to_json(), again.hash) == (first.to_json(), first.hash)
        assert (again.add_bos, again.strips_leading_space) == (first.add_bos, first.strips_leading_space)

    def test_valid_text_decodes_as_in_the_tokenizers_package(self, make: Any) -> None:
        found = tokenizer(make())
        for text in PROBES:
            ids = found.encode(text)
            assert found.decode(ids) == found._backend.decode(ids)

    def test_bytes_of_tokens_join_to_the_text(self, make: Any) -> None:
        found = tokenizer(make())
        text = "he \ud55c\U0001f44d"
        joined = b"".join(found.token_bytes(token) for token in found.encode(text, add_special=False))
        assert joined.decode().removeprefix(" ") == text

    def test_a_lone_surrogate_is_named_with_its_field(self, make: Any) -> None:
        with pytest.raises(ConfigError, match=r"^stop holds half of a surrogate pair \(U\+D83D\) at character 1"):
            tokenizer(make()).encode("a\ud83d", field="stop")


class TestByteLevel:
    def test_digits_are_split_one_by_one_by_smollm_and_not_by_gpt2(self) -> None:
        digits = [tokenizer(byte_level_metadata(pre)).encode("12") for pre in ("smollm", "gpt-2")]
        assert [len(ids) for ids in digits] == [2, 1]

    @pytest.mark.parametrize("name", sorted(_BY_NAME))
    def test_every_known_kind_splits_text_and_puts_it_together(self, name: str) -> None:
        """The letters of deepseek-llm held a range that ended before it began, so that the kind could not load."""
        found = tokenizer(byte_level_metadata(name))
        text = "It's 12345 \u1f08\u212a caf\u00e9\n\n  x=[1]; \ud55c\uae00 \u4f60\u597d\u3002"
        assert found.decode(found.encode(text, add_special=False)) == text

    def test_an_unknown_kind_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is 'martian'"):
            tokenizer(byte_level_metadata("martian"))
        with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is 'bert'"):
            tokenizer(byte_level_metadata() | {"tokenizer.ggml.model": "bert"})

    def test_bos_is_added_where_the_file_or_its_kind_says_so(self) -> None:
        silent = {"tokenizer.ggml.add_bos_token": None}
        assert not tokenizer(byte_level_metadata("smollm", **silent)).add_bos
        assert tokenizer(byte_level_metadata("llama-bpe", **silent)).add_bos
        assert tokenizer(byte_level_metadata(**{"tokenizer.ggml.add_bos_token": True})).encode("he") == [1, 259]

    def test_a_special_token_is_found_once_in_text_and_left_out_of_decoded_text(self) -> None:
        found = tokenizer(byte_level_metadata())
        ids = found.encode("<|im_start|>he<|im_end|><tool>")
        assert ids == [1, 259, 2, 263]
        assert found.decode(ids) == "he<tool>"
        assert found.special_ids == {0, 1, 2}

    def test_an_added_token_outside_ascii_keeps_its_bytes(self) -> None:
        """Its characters were looked up in the byte alphabet, where e with an accent is the lone byte E9."""
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"][-1] = "\u00e9\u00e9"
        found = tokenizer(metadata)
        assert found.token_bytes(263) == "\u00e9\u00e9".encode()
        assert found.decode(found.encode("a\u00e9\u00e9b")) == "a\u00e9\u00e9b"

    def test_padding_ids_have_no_text(self) -> None:
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"] += ["[PAD264]", "[PAD265]"]
        metadata["tokenizer.ggml.token_type"] += [UNUSED] * 2
        padded, plain = tokenizer(metadata), tokenizer(byte_level_metadata())
        assert padded.n_vocab == 266
        assert padded.token_bytes(264) == padded.token_bytes(999) == b""
        assert padded.hash == plain.hash
        assert padded.first_difference(plain) is None

    def test_a_turn_end_that_the_file_does_not_name_ends_generation(self) -> None:
        assert tokenizer(byte_level_metadata(**{"tokenizer.ggml.eos_token_id": 0})).eos_ids == (0, 2)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokenizer.ggml.tokens": None}, "no usable tokenizer.ggml.tokens"),
            ({"tokenizer.ggml.merges": ["h \u2603"]}, r"merges\[0\] is 'h "),
            ({"tokenizer.ggml.token_type": [1]}, "1 entries for 264 tokens"),
            ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "1 entries for 264 tokens"),
            (
                {
                    "tokenizer.ggml.model": "llama",
                    "tokenizer.ggml.scores": [0.0] * 264,
                    "tokenizer.ggml.unknown_token_id": 264,
                },
                "unknown_token_id is 264",
            ),
            ({"tokenizer.ggml.bos_token_id": 264}, "bos_token_id is 264 in a vocabulary of 264"),
            (
                {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None},
                "holds 'a' twice, as ids 0 and 1",
            ),
        ],
    )
    def test_damaged_metadata_is_a_format_error(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(FormatError, match=message):
            tokenizer(byte_level_metadata(**changes))


class TestSentencePiece:
    def test_merges_follow_the_scores(self) -> None:
        """`<s>`, then the best-scored piece that pairs can build up to."""
        found = tokenizer(sentencepiece_metadata())
        assert [found.token_string(token) for token in found.encode("hello world")] == (
            ["<s>", "\u2581hello", "\u2581w", "o", "r", "l", "d"]
        )

    def test_a_character_outside_the_vocabulary_becomes_its_bytes(self) -> None:
        found = tokenizer(sentencepiece_metadata())
        ids = found.encode("\u00e9", add_special=False)
        assert [found.token_string(token) for token in ids] == ["\u2581", "<0xC3>", "<0xA9>"]
        assert [found.token_bytes(token) for token in ids] == [b" ", b"\xc3", b"\xa9"]

    def test_the_space_in_front_is_dropped_unless_the_text_goes_on(self) -> None:
        found = tokenizer(sentencepiece_metadata())
        ids = found.encode("hello")
        assert (found.decode(ids), found.decode(ids, keep_leading_space=True)) == ("hello", " hello")
        bare = tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
        assert bare.decode(bare.encode(" hello")) == " hello"

    def test_a_template_that_writes_the_bos_does_not_double_it(self) -> None:
        """The tokenizer put its own BOS in front of the template's."""
        found = tokenizer(sentencepiece_metadata())
        assert found.encode_chat([{"role": "user", "content": "he"}]).count(1) == 1
        silent = tokenizer(sentencepiece_metadata(**{"tokenizer.chat_template": "{{ messages[0].content }}"}))
        assert silent.encode_chat([{"role": "user", "content": "he"}])[0] == 1


class TestFolders:
    def write(self, folder: Path, **files: Any) -> Path:
        (folder / "tokenizer.json").write_text(tokenizer(byte_level_metadata()).to_json(), encoding="utf-8")
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        return folder

    def test_hugging_face_files_give_bos_eos_and_template(self, tmp_path: Path) -> None:
        config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
        found = Tokenizer.load(self.write(tmp_path, tokenizer_config=config))
        assert (found.bos_id, found.add_bos, found.eos_ids, found.chat_template_source) == (1, True, (2,), "y")
        self.write(tmp_path, generation_config={"eos_token_id": [2, 0]})
        assert Tokenizer.load(tmp_path).eos_ids == (2, 0)

    def test_a_bundle_has_the_last_word(self, tmp_path: Path) -> None:
        config = {"bos_token": "<|im_end|>", "eos_token": "<|im_start|>", "add_bos_token": True, "chat_template": "no"}
        bundle = {"bos_id": 1, "add_bos": False, "eos_ids": [2]}
        self.write(tmp_path, tokenizer_config=config, bundle=bundle)
        (tmp_path / "chat_template.jinja").write_text("yes", encoding="utf-8")
        found = Tokenizer.load(tmp_path)
        assert (found.bos_id, found.add_bos, found.eos_ids, found.chat_template_source) == (1, False, (2,), "yes")

    def test_truncation_left_in_a_file_is_switched_off(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        path = tmp_path / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
        path.write_text(json.dumps(content), encoding="utf-8")
        assert len(Tokenizer.load(tmp_path).encode("a b c d")) == 7

    def test_what_is_missing_or_broken_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
            Tokenizer.load(tmp_path)
        with pytest.raises(ConfigError, match="no tokenizer at"):
            Tokenizer.load(tmp_path / "absent.json")
        (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
        with pytest.raises(FormatError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.load(tmp_path)
        self.write(tmp_path, bundle=[1])
        with pytest.raises(FormatError, match=r"bundle\.json holds list"):
            Tokenizer.load(tmp_path)
        self.write(tmp_path, bundle={"eos_ids": ["x"]})
        with pytest.raises(FormatError, match="must be token ids, not 'x'"):
            Tokenizer.load(tmp_path)

    def test_a_metaspace_decoder_drops_the_space_that_its_encoder_adds(self, tmp_path: Path) -> None:
        vocab = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        backend.decoder = tokenizers.decoders.Metaspace()
        (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        found = Tokenizer.load(tmp_path)
        ids = found.encode("a a")
        assert (ids, found.decode(ids), backend.decode(ids)) == ([3, 3], "a a", "a a")
        assert (found.bos_id, found.eos_ids, found.chat_template) == (None, (), None)

    def test_a_decoder_without_bytes_is_refused(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}))
        path = tmp_path / "tokenizer.json"
        path.write_text(backend.to_str(), encoding="utf-8")
        with pytest.raises(ConfigError, match="decoder is missing"):
            Tokenizer.load(path)
        backend.decoder = tokenizers.decoders.WordPiece()
        path.write_text(backend.to_str(), encoding="utf-8")
        with pytest.raises(ConfigError, match="decoder is WordPiece"):
            Tokenizer.load(path)

    def test_without_the_package_its_name_is_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(tmp_path)
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(MissingDependencyError, match="pip install 'tokenizers"):
            Tokenizer.load(tmp_path)


class TestArguments:
    def test_what_is_no_text_or_no_token_is_refused(self) -> None:
        found = tokenizer(byte_level_metadata(**{"tokenizer.chat_template": None}))
        with pytest.raises(ConfigError, match="prompt is bytes; it must be a string"):
            found.encode(b"he")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="token id -1 is negative"):
            found.decode([-1])
        with pytest.raises(ConfigError, match="no chat template"):
            found.apply_chat_template([{"role": "user", "content": "he"}])


class TestComparison:
    def test_two_swapped_strings_are_named(self) -> None:
        metadata = byte_level_metadata()
        tokens = metadata["tokenizer.ggml.tokens"]
        tokens[259], tokens[262] = tokens[262], tokens[259]
        difference = tokenizer(byte_level_metadata()).first_difference(tokenizer(metadata))
        assert difference == "token 259 is 'he' in one vocabulary and 'll' in the other"

    def test_a_real_token_more_is_a_difference(self) -> None:
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"].append("<more>")
        metadata["tokenizer.ggml.token_type"].append(CONTROL)
        difference = tokenizer(byte_level_metadata()).first_difference(tokenizer(metadata))
        assert difference == "token 264 is missing in one vocabulary and '<more>' in the other"

    def test_unknown_kind_lists_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"known are .*smollm"):
            find_pre_tokenizer("")
