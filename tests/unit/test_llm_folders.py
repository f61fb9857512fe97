"""LLM over tiny model folders on the real runtime: every layout as target and draft, tokenizers compared by content."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import LLM, SamplingParams
from edgespec.errors import BackendError, ConfigError, IncompatibleError, NumericsError
from edgespec.testing.onnx_models import write_bundle, write_genai, write_optimum
from edgespec.testing.tiny import TinySpec, tiny_weights
from edgespec.testing.tokenizer import tiny_strings, write_tokenizer

SPEC = TinySpec(eos_ids=())
DRAFT = TinySpec(eos_ids=(), n_layers=1, seed=1)
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=32)
PROMPT = [5, 9, 5, 9, 11, 5, 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models é")
    found = {
        "int4": write_bundle(base / "int4", SPEC, bits=4),
        "float": write_bundle(base / "float", SPEC),
        "window": write_bundle(base / "window", TinySpec(eos_ids=(), window=8)),
        "genai": write_genai(base / "genai", SPEC),
        "optimum": write_optimum(base / "optimum", SPEC),
        "draft": write_bundle(base / "draft", DRAFT, bits=4),
    }
    for kind in ("genai", "optimum"):
        write_tokenizer(found[kind], SPEC.n_vocab)
    return found


@pytest.mark.parametrize("draft", ["ngram", "draft", "optimum"])
@pytest.mark.parametrize("target", ["int4", "float", "window", "genai", "optimum"])
def test_every_layout_as_target_and_draft(folders: dict[str, Path], target: str, draft: str) -> None:
    options = {"draft": "ngram", "prompt_lookup_min": 1} if draft == "ngram" else {"draft_model": folders[draft]}
    with LLM(folders[target], **options) as llm:
        plain = llm.variant(draft="none")
        for k, temperature in itertools.product((1, 4), (0.0, 0.8)):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
            expected = plain.generate(PROMPT, params)[0].outputs[0]
            output = llm.variant(num_speculative_tokens=k).generate(PROMPT, params)[0].outputs[0]
            assert output.token_ids == expected.token_ids
            assert len(output.token_ids) == 40
        assert output.stats.drafted > 0


def test_a_draft_with_two_token_strings_swapped_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Vocabularies of one size but other content drafted nonsense, and nobody said why acceptance was low."""
    strings = tiny_strings(SPEC.n_vocab)
    strings[7], strings[9] = strings[9], strings[7]
    swapped = write_bundle(tmp_path / "swapped", DRAFT, strings=strings)
    with pytest.raises(IncompatibleError, match=r"7.*'e'.*'g'"):
        LLM(folders["int4"], draft_model=swapped)


def test_a_draft_with_a_padded_vocabulary_is_accepted(folders: dict[str, Path], tmp_path: Path) -> None:
    strings = tiny_strings(SPEC.n_vocab)
    padded = TinySpec(eos_ids=(), n_layers=1, seed=1, n_vocab=SPEC.n_vocab + 16)
    draft = write_bundle(tmp_path / "padded", padded, strings=strings)
    with LLM(folders["float"], draft_model=draft) as llm:
        expected = llm.variant(draft="none").generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected


def test_a_draft_with_another_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", TinySpec(eos_ids=(), n_vocab=48))
    with pytest.raises(IncompatibleError, match="48"):
        LLM(folders["int4"], draft_model=other)


def test_weights_that_give_nan_end_in_an_error(tmp_path: Path) -> None:
    weights = tiny_weights(SPEC)
    name = next(key for key in weights if "head" in key or "norm" in key)
    weights = {**weights, name: weights[name] * float("nan")}
    broken = write_bundle(tmp_path / "nan", SPEC, weights=weights)
    with pytest.raises((NumericsError, BackendError)), LLM(broken) as llm:
        llm.generate(PROMPT, PARAMS)


def test_text_streams_stop_and_round_trip(folders: dict[str, Path]) -> None:
    with LLM(folders["float"], draft="ngram", prompt_lookup_min=1) as llm:
        free = llm.generate("abcab", PARAMS)[0].outputs[0]
        deltas = list(llm.stream("abcab", PARAMS))
        assert "".join(delta.text for delta in deltas) == free.text
        stop = free.text[6:8]
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=32, stop=(stop,))
        cut = llm.generate("abcab", params)[0].outputs[0]
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.stop_reason == stop


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
@pytest.mark.parametrize("n_cpus", [1, 2])
def test_threads_come_from_the_allowed_cpus(folders: dict[str, Path], child_env: dict[str, str], n_cpus: int) -> None:
    """Both models took a thread for every core of the machine, although the process was confined to one."""
    code = (
        "import os, sys\n"
        f"os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{n_cpus}])\n"
        "n = len(os.sched_getaffinity(0))\n"
        "from edgespec import LLM\n"
        "llm = LLM(sys.argv[1], draft_model=sys.argv[2])\n"
        "llm.generate([5, 9, 5, 9], None)\n"
        "allowed = [os.sched_getaffinity(int(t)) for t in os.listdir('/proc/self/task')]\n"
        "print(llm.target.threads <= n, llm.draft_model.threads <= n, max(map(len, allowed)) <= n)"
    )
    command = [sys.executable, "-c", code, str(folders["int4"]), str(folders["draft"])]
    child = subprocess.run(command, env=child_env, capture_output=True, text=True, check=False, timeout=120)
    assert child.stdout.split() == ["True"] * 3, child.stderr


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"bundle\.json"):
        LLM(tmp_path / "empty")
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(tmp_path / "missing")
