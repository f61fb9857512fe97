"""Every engine that is set up on this machine, through the protocol, on the real model.

`python -m edgespec_bench peers --setup` sets them up (some 5 GB); what is missing is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_bench.fidelity import kl_divergence
from edgespec_bench.prompts import load_prompts
from edgespec_bench.sides import Side, SideProcess, list_sides, open_sides

from edgespec.errors import BackendError
from edgespec.text import Tokenizer

MODEL = "smollm2-135m"
N_TOKENS = 24
END = 2
ENGINES = tuple(dict.fromkeys(side.engine for side in list_sides()))
LOSSLESS = ("edgespec", "llama.cpp", "onnxruntime-genai")
"""Engines whose speculation wrote plain decoding's text on this prompt; on others the rows of a call differ more."""
SAME_WEIGHTS = {"llama.cpp/plain-as-is": 0.05, "transformers/plain": 0.05}
"""Sides that run the reference's own weights -> KLD that other arithmetic explains; 4 bits made anew have up to 0.6."""

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def prompt(real_gguf: Path) -> list[int]:
    return Tokenizer.load(real_gguf).encode_chat(load_prompts("chat")[0].messages)


@pytest.fixture(scope="module", params=ENGINES)
def running(request: pytest.FixtureRequest, real_bundle: Path) -> Iterator[dict[str, SideProcess]]:
    """The sides of one engine that are set up, on one thread."""
    ready: list[Side] = [side for side in list_sides() if side.engine == request.param and not side.missing(MODEL)]
    if not ready:
        missing = next(side.missing(MODEL) for side in list_sides() if side.engine == request.param)
        pytest.skip(f"{missing}: python -m edgespec_bench peers --setup")
    with open_sides(ready, MODEL, 1) as processes:
        yield processes


def decode(side: SideProcess, prompt: list[int], **how: Any) -> dict[str, Any]:
    return side.decode(prompt, N_TOKENS, **how)


def test_each_side_gives_as_many_tokens_as_asked_for(running: dict[str, SideProcess], prompt: list[int]) -> None:
    for side in running.values():
        answer = decode(side, prompt)
        assert len(answer["tokens"]) == N_TOKENS
        assert answer["tokens"] == decode(side, prompt)["tokens"], f"{side.name} remembers something"
        assert 1 <= answer["first_tokens"] < N_TOKENS
        assert answer["ttft_s"] > 0 < answer["seconds"]
        assert answer["cpu_s"] <= 1.3 * answer["seconds"] + 0.05, f"{side.name} uses more than the one thread"
        assert answer["peak_rss_mb"] > 50
        if side.side.what == "speculative":
            assert answer["accepted"] >= 0, side.name
            assert answer["rounds"] + answer["accepted"] >= N_TOKENS - answer["first_tokens"]
            assert answer["drafted"] is None or answer["drafted"] >= answer["accepted"]


def test_speculation_writes_what_plain_decoding_writes(running: dict[str, SideProcess], prompt: list[int]) -> None:
    (engine,) = {side.side.engine for side in running.values()}
    if engine not in LOSSLESS:
        pytest.skip(f"{engine}: rows of one call depend on their number")
    name = f"{engine}/exact-plain" if engine == "edgespec" else f"{engine}/plain"
    if name not in running:
        pytest.skip(f"{name} is not set up")
    expected = decode(running[name], prompt)["tokens"]
    for side in running.values():
        if side.side.what == "speculative":
            assert decode(side, prompt)["tokens"] == expected, side.name


def test_the_end_of_sequence_is_ignored(running: dict[str, SideProcess], real_gguf: Path) -> None:
    """onnxruntime-genai used to stop at it in sampled text: a list in its configuration was added to, not replaced."""
    prompt = Tokenizer.load(real_gguf).encode_chat([{"role": "user", "content": "Hi"}])
    texts = [side.decode(prompt, 96, temperature=t, seed=3)["tokens"] for side in running.values() for t in (0.0, 0.8)]
    assert {len(tokens) for tokens in texts} == {96}
    assert any(END in tokens[:-1] for tokens in texts), "no answer came to its end, so this shows nothing"


def test_sampling_follows_its_seed(running: dict[str, SideProcess], prompt: list[int]) -> None:
    for side in running.values():
        how = {"temperature": 0.8, "top_p": 0.95}
        one, again, other = (decode(side, prompt, seed=seed, **how)["tokens"] for seed in (1, 1, 2))
        assert one != other, f"{side.name} does not sample"
        assert one == again or side.side.what == "speculative", side.name


def test_each_engine_sees_the_ids_and_has_the_weights(
    running: dict[str, SideProcess], prompt: list[int], tmp_path: Path
) -> None:
    """A token in front, or other weights, would show in the distribution; decoding starts at its most likely token."""
    from edgespec_bench.fidelity import float_bundle, write_passages

    from edgespec.pairs import source_path

    (passage,) = write_passages(float_bundle(source_path(MODEL), MODEL), [prompt], 16, 2)
    for side in running.values():
        if side.side.what == "speculative":
            continue
        side.ask(do="logits", prompt=prompt, continuation=passage.continuation, path=str(tmp_path / "l.npy"))
        logits = np.load(tmp_path / "l.npy")
        assert logits.shape == passage.reference.shape
        assert kl_divergence(passage.reference, logits).mean() < SAME_WEIGHTS.get(side.name, 1.0), side.name
        assert decode(side, prompt)["tokens"][0] == logits[0].argmax(), side.name


def test_what_an_engine_cannot_do_is_said(running: dict[str, SideProcess], prompt: list[int]) -> None:
    side = next(iter(running.values()))
    with pytest.raises(BackendError, match="has no answer to"):
        side.ask(do="dance")
    assert len(decode(side, prompt)["tokens"]) == N_TOKENS
