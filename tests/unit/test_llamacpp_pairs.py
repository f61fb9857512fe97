"""llama.cpp and ONNX together: any of them as target, any as draft, and what happens where one cannot do its part."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from llama_models import write_recurrent, write_windowed

import edgespec
from edgespec import SamplingParams
from edgespec.errors import BackendError, ConfigError, IncompatibleError, MissingDependencyError
from edgespec.pairs import default_draft, resolve
from edgespec.testing.gguf_models import write_gguf
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec
from edgespec.testing.tokenizer import paired_strings

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'")

SPEC, DRAFT = TinySpec(), TinySpec(n_layers=1, seed=1)
STRINGS = paired_strings(SPEC.n_vocab)
PROMPT = [5, 9, 5, 9, 11, 5, 9]
LLAMA = "llamacpp:cpu"
LLM = partial(edgespec.LLM, threads=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models é")
    return {
        "gguf": write_gguf(base / "target.gguf", SPEC),
        "gguf-q8": write_gguf(base / "target-q8.gguf", SPEC, type="Q8_0"),
        "onnx": write_bundle(base / "onnx", SPEC, bits=4, strings=STRINGS),
        "gguf-draft": write_gguf(base / "draft.gguf", DRAFT),
        "gguf-near": write_gguf(base / "near.gguf", SPEC, type="Q4_0"),
        "onnx-draft": write_bundle(base / "draft", DRAFT, bits=4, strings=STRINGS),
    }


def place(name: str) -> str:
    return LLAMA if name.startswith("gguf") else "cpu"


@pytest.mark.parametrize("draft", ["ngram", "gguf-draft", "gguf-near", "onnx-draft"])
@pytest.mark.parametrize("target", ["gguf", "gguf-q8", "onnx"])
def test_any_pair_writes_what_the_target_writes(files: dict[str, Path], target: str, draft: str) -> None:
    options = (
        {"draft": "ngram", "prompt_lookup_min": 1}
        if draft == "ngram"
        else {"draft_model": files[draft], "draft_device": place(draft)}
    )
    with LLM(files[target], device=place(target), **options) as llm:
        plain = llm.variant(draft="none")
        for k, temperature in itertools.product((1, 4), (0.0, 0.8)):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
            expected = plain.generate(PROMPT, params)[0].outputs[0]
            output = llm.variant(num_speculative_tokens=k).generate(PROMPT, params)[0].outputs[0]
            assert output.token_ids == expected.token_ids
            assert len(output.token_ids) == 40
            stats = output.stats
            assert len(output.token_ids) == stats.accepted + stats.rounds - stats.cut + stats.accepted_fillers
        assert output.stats.drafted > 0
        if draft == "gguf-near" and target != "onnx":
            assert output.stats.accepted > 10  # the same model, a little rounded


def test_a_target_drafting_for_itself_is_always_right(files: dict[str, Path]) -> None:
    """Acceptance stays 1 over the whole context: a cache that is off by one would show as a decay."""
    with LLM(files["gguf"], device=LLAMA, draft_model=files["gguf"], draft_device=LLAMA) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        stats = llm.generate(PROMPT, params)[0].outputs[0].stats
        assert stats.drafted == stats.accepted > 50


def test_caches_are_reused_between_requests(files: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(files["gguf"], device=LLAMA) as llm:
        first = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        again = llm.generate([*PROMPT, *first, 7], params)[0].outputs[0]
        assert again.stats.cached_tokens >= len(PROMPT) + 10
        llm.forget()
        assert llm.generate([*PROMPT, *first, 7], params)[0].outputs[0].token_ids == again.token_ids


# --- a cache that cannot be cut ---------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_rewound_turns_speculation_off(tmp_path: Path) -> None:
    target = write_recurrent(tmp_path / "mamba.gguf")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    with LLM(target, device=LLAMA, draft="ngram", prompt_lookup_min=1) as llm:
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert [note for note in output.stats.notes if "speculation off" in note] == [
            "speculation off: the target's cache cannot be rewound"
        ]
        plain = llm.variant(draft="none", exact=False).generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == plain.token_ids
        assert output.stats.drafted == 0


def test_a_refused_removal_is_survived_by_a_full_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp answers False to a removal that its loader did not announce: the text stays that of a fresh session."""
    from edgespec.backends.llamacpp.library import library

    target = write_gguf(tmp_path / "tiny.gguf", SPEC)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(target, device=LLAMA, draft="none", exact=False) as llm:
        expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    llama, calls = library(), []
    real = llama.llama_memory_seq_rm

    def refuse(memory: object, sequence: int, first: int, last: int) -> bool:
        calls.append(first)
        return False if first > 0 else real(memory, sequence, first, last)

    with LLM(target, device=LLAMA, draft="ngram", prompt_lookup_min=1, exact=False) as llm:
        monkeypatch.setattr(llama, "llama_memory_seq_rm", refuse)
        output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.token_ids == expected
    assert any(first > 0 for first in calls)
    notes = [note for note in output.stats.notes if note.startswith("speculation off")]
    assert len(notes) == 1
    assert "llama.cpp cannot take back" in notes[0]


def test_a_window_that_forgets_is_refilled_between_requests(tmp_path: Path) -> None:
    """The second prompt agrees with the first up to a place that the window's cache has left behind."""
    target = write_windowed(tmp_path / "window.gguf")
    prompt = [3 + (7 * i) % 50 for i in range(700)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    where = {"device": LLAMA, "device_options": {"swa_full": "off"}, "exact": False}
    with LLM(target, draft="ngram", **where) as llm:
        llm.generate(prompt, params)
        other = llm.generate([*prompt[:50], 9, 9, 9], params)[0].outputs[0]
        assert other.stats.cached_tokens == 0
    with LLM(target, draft="none", **where) as llm:
        assert llm.generate([*prompt[:50], 9, 9, 9], params)[0].outputs[0].token_ids == other.token_ids


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_tokenizers_are_compared_by_content(files: dict[str, Path], tmp_path: Path) -> None:
    strings = list(STRINGS)
    strings[7], strings[9] = strings[9], strings[7]
    swapped = write_gguf(tmp_path / "swapped.gguf", DRAFT, strings=strings)
    for target in ("onnx", "gguf"):
        with pytest.raises(IncompatibleError, match=r"token 7 is 'e' in one vocabulary and 'g' in the other"):
            LLM(files[target], device=place(target), draft_model=swapped, draft_device=LLAMA)
    padded = TinySpec(n_layers=1, seed=1, n_vocab=SPEC.n_vocab + 8)
    more = [*STRINGS, *(f"[PAD{i}]" for i in range(SPEC.n_vocab, SPEC.n_vocab + 8))]
    longer = write_bundle(tmp_path / "padded", padded, strings=STRINGS)
    assert len(more) == padded.n_vocab
    with LLM(files["gguf"], device=LLAMA, draft_model=longer) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        expected = llm.variant(draft="none").generate(PROMPT, params)[0].outputs[0].token_ids
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == expected


def test_what_needs_an_onnx_bundle_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(IncompatibleError, match="is made for one bundle"):
        LLM(files["gguf"], device=LLAMA, draft="eagle")
    with pytest.raises(IncompatibleError, match=r"tree=True|--tree"):
        LLM(files["gguf"], device=LLAMA, draft="ngram", tree=True, exact=False)
    with pytest.raises(ConfigError, match=r"is no \.gguf file, which is what llama\.cpp runs: give the \.gguf file"):
        LLM(files["onnx"], device=LLAMA)
    with pytest.raises(ConfigError, match=r"is no \.gguf file"):
        LLM(files["onnx"], draft_model=files["onnx-draft"], draft_device=LLAMA)


def test_a_draft_whose_device_is_missing_is_left_out_unless_strict(files: dict[str, Path]) -> None:
    where = {"device": LLAMA, "draft_model": files["gguf-draft"], "draft_device": "llamacpp:gpu"}
    with LLM(files["gguf"], **where) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0]
        assert any("speculation off" in note and "llamacpp:gpu" in note for note in output.stats.notes)
    with pytest.raises((BackendError, MissingDependencyError), match="llamacpp:gpu"):
        LLM(files["gguf"], strict_device=True, **where)


def test_a_name_means_a_gguf_file_on_a_llamacpp_device(files: dict[str, Path], tmp_path: Path) -> None:
    """One rule: what runs a model is decided by the device; a .gguf is converted for ONNX devices, run by llama.cpp."""
    assert resolve(files["gguf"], runtime="llamacpp") == files["gguf"]
    with pytest.raises(ConfigError, match=r"nothing\.gguf does not exist"):
        resolve(tmp_path / "nothing.gguf", runtime="llamacpp")
    with pytest.raises(ConfigError, match="made as an ONNX bundle"):
        resolve("smollm2-135m:pruned", runtime="llamacpp")
    assert default_draft("smollm2-135m", "llamacpp") == ("ngram", None)
