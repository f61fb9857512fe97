"""How far a quantized model is from the float weights it was made from: KLD and top-1 agreement, teacher-forced.

The reference is the same source exported in float32, kept under the user's cache folder; it writes the continuations
(T = 1, fixed seeds) that every side is then judged on, one row a call as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.config import cache_dir
from edgespec.types import Model

__all__ = ["Fidelity", "Passage", "fidelity", "float_bundle", "kl_divergence", "model_logits", "write_passages"]

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Passage:
    """A prompt, its continuation, and the reference's logits [len(continuation), n_vocab] for the latter."""

    prompt: list[int]
    continuation: list[int]
    reference: FloatArray


@dataclass(frozen=True)
class Fidelity:
    """Means over `n_rows` rows; KLD in nats, the reference's distribution first."""

    kld: float
    top1: float
    n_rows: int

    def to_dict(self) -> dict[str, Any]:
        return {"kld": round(self.kld, 4), "top1": round(self.top1, 4), "rows": self.n_rows}


def kl_divergence(reference: FloatArray, other: FloatArray) -> FloatArray:
    """KL(reference || other) of each row of logits [n, n_vocab], in nats, in float64: [n]."""
    a, b = _log_softmax(reference), _log_softmax(other)
    result: FloatArray = (np.exp(a) * (a - b)).sum(axis=-1)
    return result


def fidelity(passages: Sequence[Passage], logits: Sequence[FloatArray]) -> Fidelity:
    """Of one side's logits, an array for each passage, against the reference's."""
    kld = np.concatenate([kl_divergence(p.reference, x) for p, x in zip(passages, logits, strict=True)])
    same = [p.reference.argmax(-1) == x.argmax(-1) for p, x in zip(passages, logits, strict=True)]
    return Fidelity(float(kld.mean()), float(np.concatenate(same).mean()), len(kld))


def model_logits(model: Model, prompt: list[int], continuation: list[int]) -> FloatArray:
    """Logits [len(continuation), n_vocab]: the prompt in one call, then one row a call."""
    session = model.open_session()
    try:
        rows = [session.forward(prompt, logits_rows=[len(prompt) - 1]).logits[0].copy()]
        rows += [session.forward([token]).logits[0].copy() for token in continuation[:-1]]
    finally:
        session.close()
    return np.stack(rows)


def float_bundle(source: Path, name: str) -> Path:
    """The float32 export of `source`, made on first use."""
    from edgespec_export import ExportOptions, export_model

    folder = cache_dir() / "bench" / f"{name}-float"
    if not (folder / "bundle.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_model(source, folder, ExportOptions(bits=32, embed_bits=32), force=True)
    return folder


def write_passages(bundle: Path, prompts: Sequence[list[int]], n_tokens: int, threads: int) -> list[Passage]:
    """Continuations of the prompts by the float model, with its logits."""
    from edgespec import LLM, SamplingParams

    passages = []
    with LLM(bundle, draft="none", exact=False, threads=threads) as llm:
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=n_tokens, ignore_eos=True)
            tokens = llm.generate([prompt], params)[0].outputs[0].token_ids
            passages.append(Passage(prompt, tokens, model_logits(llm.target, prompt, tokens)))
    return passages


def _log_softmax(logits: FloatArray) -> FloatArray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    result: FloatArray = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return result
