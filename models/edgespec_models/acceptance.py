"""How often a draft is right, measured by the decoder that ships: real sessions, real rounds, held-out prompts.

Owns the choice of prompts from a corpus and the figures; runs `edgespec.LLM` with the draft under test. One definition
of every rate: that of `edgespec.stats`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.errors import ConfigError
from edgespec.options import BUNDLED_DRAFTS
from edgespec.stats import RunStats
from edgespec_models.corpus import Corpus

__all__ = ["draft_kind", "evaluate_zoo", "held_out_prompts", "measure"]

SETTINGS: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "T = 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
}
LONGEST_PROMPT = 256


def draft_kind(kind: str) -> str:
    """The engine's name of a draft kind that the zoo calls `kind`."""
    return next((name for name, ours in BUNDLED_DRAFTS.items() if ours == kind), kind)


def held_out_prompts(corpus: Corpus, n: int) -> list[list[int]]:
    """Up to `n` prompts from the corpus's held-out rows: each row up to its assistant's first token.

    Rows that are the assistant's throughout give their first 16 tokens. Raises ConfigError where no row serves.
    """
    prompts = []
    for i in range(len(corpus) - corpus.n_held_out, len(corpus)):
        marked = corpus.assistant[i]
        if not marked.any():
            continue
        start = int(marked.argmax()) or min(16, corpus.length // 2)
        if start <= LONGEST_PROMPT:
            prompts.append([int(token) for token in corpus.tokens[i, :start]])
    if not prompts:
        raise ConfigError(
            f"none of the {corpus.n_held_out} held-out rows has a prompt of at most {LONGEST_PROMPT} tokens before an "
            "answer: make a longer corpus"
        )
    return prompts[:n]


def measure(
    target: Path,
    draft: Path,
    kind: str,
    prompts: Sequence[Sequence[int]],
    *,
    k: int = 4,
    max_tokens: int = 96,
    settings: Sequence[str] = ("T = 0",),
    threads: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Acceptance of the draft bundle `draft` (zoo kind) on token prompts, for each of `settings`.

    mean_acceptance_length: 1 + accepted / rounds over the rounds that drafted. by_position: entry j is the share of
    rounds that accepted their token j. Raises ConfigError where target and draft do not go together.
    """
    options: dict[str, Any] = {"draft": draft_kind(kind), "draft_model": draft, "num_speculative_tokens": k}
    with LLM(target, threads=threads, **options) as llm:
        results = {}
        for name in settings:
            records = []
            for prompt in prompts:
                params = SamplingParams(max_tokens=max_tokens, **SETTINGS[name])
                records += llm.generate(list(prompt), params)[0].stats.records
            results[name] = _figures(records, len(prompts), k)
        return results


def _figures(records: list[Any], n_prompts: int, k: int) -> dict[str, Any]:
    """Only rounds that drafted count: the first round and those cut short by a limit say nothing of the draft."""
    stats = RunStats(records=[record for record in records if record.drafted and record.source != "filler"])
    n_rounds, accepted = stats.rounds, stats.accepted
    return {
        "mean_acceptance_length": round(1.0 + accepted / n_rounds, 4) if n_rounds else 1.0,
        "by_position": [round(share, 4) for share in stats.acceptance_by_position()],
        "k": k,
        "rounds": n_rounds,
        "prompts": n_prompts,
    }


def evaluate_zoo(
    zoo: Path,
    target: Path,
    kind: str,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    settings: Sequence[str] = ("T = 0",),
    max_tokens: int = 96,
    threads: int | None = None,
) -> dict[str, Any]:
    """`measure` for trained weights: exports them to a folder that is deleted again.

    The figures of the first setting, and those of the others by name.
    """
    from edgespec_export.drafts import export_draft

    with tempfile.TemporaryDirectory(prefix="edgespec-draft-") as folder:
        bundle = export_draft(zoo, target, Path(folder) / "draft", bits=8)  # of the training, not of 4 bits
        results = measure(target, bundle, kind, prompts, k=k, max_tokens=max_tokens, settings=settings, threads=threads)
    first, *others = settings
    return {**results[first], "setting": first, **{name: results[name] for name in others}}
