"""The default model's tokenizer: the ids that llama.cpp gives for the same GGUF file, and its chat prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.text import Tokenizer

# ids by llama.cpp's own tokenizer (special tokens parsed), from the same GGUF file
LLAMA_CPP_IDS = [
    ("Hello, world!", "19556 28 905 17"),
    (" leading space", "2899 1898"),
    ("trailing space ", "4861 4966 1898 216"),
    ("two  spaces   three    four", "11355 216 5600 256 1296 333 1876"),
    ("tab\tand\n newline", "15999 197 397 198 725 1311"),
    ("\n\n\n", "16506"),
    ("\r\nwindows\r\nlines", "201 198 37066 201 198 5110"),
    ("   ", "333"),
    ("0123456789", "32 33 34 35 36 37 38 39 40 41"),
    (
        "year 2024, 3.14159, 1,000,000",
        "3610 216 34 32 34 36 28 216 35 30 33 36 33 37 41 28 216 33 28 32 32 32 28 32 32 32",
    ),
    (
        "\xbd \xb2 \u0663 \u2167 \u4e00\u4e8c\u4e09",
        "16738 216 19133 216 164 113 216 173 223 117 216 22924 16736 230 7906 227",
    ),
    ("don't we'll I'm they've he'd it's you're", "12420 982 392 3060 339 5248 502 3543 384 6737 357 506 346 2316"),
    ("DON'T WE'LL", "52 2154 23 68 26587 23 16421"),
    ("caf\xe9 na\xefve \xc5ngstr\xf6m", "83 1939 2756 15486 46494 5549 223 863 1321 45682"),
    ("e\u0301 combining", "85 151 219 9301"),
    ("\xdf\xe6\xf8\xc6 \xfe", "34878 16467 21817 142 224 5549 139"),
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! 123",
        "155 249 46879 16464 32547 28 41337 7872 9175 17 216 33 34 35",
    ),
    ("\u4f60\u597d\uff0c\u4e16\u754c\u3002", "18645 250 48392 138 12831 7906 240 178 239 230 19076"),
    (
        "\u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca",
        "7365 237 10391 237 41152 7365 111 7365 124 216 10391 121 10391 140 10391 121 11100 228",
    ),
    ("\ud55c\uae00\uacfc \u6f22\u5b57", "33085 246 181 133 218 181 128 137 17097 137 112 36518"),
    (
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
        "21706 20602 44626 31462 10805 45726 22208 34966 22208 21706",
    ),
    ("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", "38229 31838 23970 162 247 12960 112 23970 31838 162 247"),
    (
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
        "30658 35090 38770 16525 26293 30581 12335 116 42990 30658 27011 32932 18075",
    ),
    ("\u0e44\u0e17\u0e22", "31933 222 10283 241 10283 112"),
    (
        "\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
        " \U0001f1e9\U0001f1ea \u2764\ufe0f",
        "10813 235 231 10813 233 138 15107 235 119 321 231 10813 235 119 321 231 10813 235 117 321 231 "
        "10813 235 116 15107 225 119 10813 225 120 4636 247 114 31752",
    ),
    ("\u200b\xa0\u3000\ufeff", "321 229 15442 12109 218 186 136 140"),
    ("def f(x):\n    return x ** 2  # squared\n", "1604 275 24 104 727 472 1003 1792 1903 216 34 216 907 27402 198"),
    ("if (a && b) { c += 1; } // done", "342 365 81 1456 22 278 25 1662 265 4519 216 33 43 4029 13241 2294"),
    ("<|im_start|>user\nHi<|im_end|>\n", "1 4093 198 26843 2 198"),
    ("a<|endoftext|>b <|im_end|> <|im_start |>", "81 0 82 216 2 2067 108 306 79 3738 2504 46"),
    ("https://example.org/a?b=c&d=%20#e", "4687 1742 7434 30 2295 31 81 47 82 45 83 22 84 23446 34 32 19 85"),
    (
        "!@#$%^&*()_+-=[]{}|;':\",./<>?`~",
        "17 48 19 20 21 78 22 26 1000 79 34592 30208 6150 108 43 1539 1002 18380 44 46 47 80 110",
    ),
    ("x\x00y\x1b[0m", "104 190 105 212 75 32 93"),
    ("The quick brown fox jumps over the lazy dog.", "504 2365 6354 16438 27003 690 260 23790 2767 30"),
    ("$3.50 + 7% = \u20ac4", "20 35 30 37 32 1232 216 39 21 446 24927 36"),
    ("\U00010400\U0001f9ff\ufffd", "187 234 234 218 10813 117 140 24211"),
    ("foo\n\n  bar\n\t\tbaz \n", "15236 8866 2753 3354 197 45511 3717"),
    ("<file_sep><gh_stars>1", "5 7 33"),
]


@pytest.fixture(scope="module")
def smollm2(real_gguf: Path) -> Tokenizer:
    return Tokenizer.load(real_gguf)


@pytest.mark.real_model
class TestSmolLM2:
    @pytest.mark.parametrize(("text", "ids"), LLAMA_CPP_IDS)
    def test_ids_equal_llama_cpp(self, smollm2: Tokenizer, text: str, ids: str) -> None:
        found = smollm2.encode(text)
        assert " ".join(map(str, found)) == ids
        assert smollm2.decode(found, skip_special=False) == text

    def test_the_bundle_tokenizes_as_the_gguf_does(self, smollm2: Tokenizer, real_bundle: Path) -> None:
        bundle = Tokenizer.load(real_bundle)
        assert bundle.hash == smollm2.hash
        assert [bundle.encode(text) for text, _ in LLAMA_CPP_IDS] == [smollm2.encode(text) for text, _ in LLAMA_CPP_IDS]
        assert (bundle.bos_id, bundle.add_bos, bundle.eos_ids) == (1, False, (2,))
        assert bundle.chat_template_source == smollm2.chat_template_source

    def test_a_chat_has_one_system_block_and_no_second_start(self, smollm2: Tokenizer) -> None:
        """A tokenizer rebuilt from this file by another tool put a second `<|im_start|>` in front."""
        ids = smollm2.encode_chat([{"role": "user", "content": "Hi"}])
        assert (smollm2.n_vocab, smollm2.token_string(1), smollm2.token_string(2)) == (
            49152,
            "<|im_start|>",
            "<|im_end|>",
        )
        assert ids[:3] == [1, 9690, 198]
        assert ids.count(1) == 3
        text = smollm2.decode(ids, skip_special=False)
        assert text.count("<|im_start|>system") == 1
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
