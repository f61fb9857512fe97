"""The real model's own GGUF in llama.cpp: an ONNX draft changes nothing in its text, and both tokenizers agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec import LLM, SamplingParams
from edgespec.backends.llamacpp.vocabulary import PROBES, llama_ids
from edgespec.text import Tokenizer

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'")
pytestmark = pytest.mark.real_model

N_TOKENS = 32


@pytest.mark.timeout(900)
def test_a_gguf_target_with_an_onnx_draft(real_gguf: Path, real_bundle: Path) -> None:
    """The draft is the same model in another quantization, on another runtime: often right, never the target."""
    messages = [{"role": "user", "content": "Explain rain to a child."}]
    where = {"device": "llamacpp:cpu", "draft_device": "cpu", "n_ctx": 1024, "draft_n_ctx": 1024}
    with LLM(real_gguf, draft_model=real_bundle, num_speculative_tokens=3, **where) as llm:
        assert llm.exact is not None
        plain = llm.variant(draft="none")
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, top_p=0.95, seed=3, max_tokens=N_TOKENS)
            expected, output = (which.chat(messages, params).outputs[0] for which in (plain, llm))
            assert output.token_ids == expected.token_ids
            assert output.text == expected.text
            assert output.stats.exact
            assert output.stats.accepted > 5
            assert output.stats.rounds < expected.stats.rounds


def test_the_tokenizers_agree(real_gguf: Path) -> None:
    from edgespec.backends import load_model

    model = load_model(real_gguf, device="llamacpp:cpu", n_ctx=256)
    ours = Tokenizer.load(real_gguf)
    vocab = model._weights.vocab  # type: ignore[attr-defined]
    for text in (*PROBES, "<|im_start|>user\nHi<|im_end|>\n"):
        assert llama_ids(model._weights.llama, vocab, text) == ours.encode(text, add_special=False), text  # type: ignore[attr-defined]
    assert model.info.eos_ids == (2,)
    model.close()
