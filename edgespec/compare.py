"""Plain and speculative decoding of one prompt, side by side: are the tokens the same, and which is faster?

Three runs with one seed: native plain (one row a step, the fastest way without speculation), plain with exact rows
(what an exact speculative run has to equal), and the speculative run. Speed is always judged against native plain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.llm import LLM
from edgespec.outputs import CompletionOutput
from edgespec.sampling import SamplingParams

__all__ = ["Comparison", "Difference", "compare", "first_difference"]

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """The first token in which two runs differ; top2_gap: logit gap of the first run's two best tokens there."""

    index: int
    tokens: tuple[int | None, int | None]
    top2_gap: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "tokens": list(self.tokens), "top2_gap": self.top2_gap}


def first_difference(reference: CompletionOutput, other: CompletionOutput) -> Difference | None:
    """None where the token ids are the same. The gap needs the reference run to have logprobs >= 2."""
    ours, theirs = reference.token_ids, other.token_ids
    for i in range(max(len(ours), len(theirs))):
        pair = (ours[i] if i < len(ours) else None, theirs[i] if i < len(theirs) else None)
        if pair[0] != pair[1]:
            gap = None
            if reference.logprobs and i < len(reference.logprobs):
                best = sorted((entry.logprob for entry in reference.logprobs[i].values()), reverse=True)
                gap = best[0] - best[1] if len(best) > 1 else None
            return Difference(i, pair, gap)
    return None


@dataclass
class Comparison:
    """The runs, and where they first differ."""

    plain: CompletionOutput
    exact_plain: CompletionOutput | None
    speculative: CompletionOutput
    difference: Difference | None  # of the speculative run from what it has to equal
    native_difference: Difference | None  # of plain with exact rows from native plain
    notes: list[str]

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def speedup(self) -> float | None:
        """Speculative over native plain, tokens a second."""
        ours, theirs = self.speculative.stats.decode_tok_s, self.plain.stats.decode_tok_s
        return ours / theirs if ours and theirs else None

    @property
    def runs(self) -> dict[str, CompletionOutput]:
        runs = {"plain": self.plain}
        if self.exact_plain is not None:
            runs["plain, exact rows"] = self.exact_plain
        return {**runs, "speculative": self.speculative}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        exact = self.exact_plain
        return {
            "identical": self.identical,
            "plain_tok_s": self.plain.stats.decode_tok_s,
            "exact_plain_tok_s": exact.stats.decode_tok_s if exact else None,
            "spec_tok_s": self.speculative.stats.decode_tok_s,
            "speedup": self.speedup,
            **self.speculative.stats.to_dict(),
            "finish_reason": self.speculative.finish_reason,
            "difference": self.difference.to_dict() if self.difference else None,
            "native_difference": self.native_difference.to_dict() if self.native_difference else None,
            "text": self.speculative.text,
            "notes": self.notes,
        }

    def summary(self) -> list[str]:
        """Sentences for people."""
        stats, against = self.speculative.stats, "plain with exact rows" if self.exact_plain else "native plain"
        lines = [f"identical to {against}: {'yes' if self.identical else 'NO'}"]
        if self.difference:
            lines.append(_describe(self.difference, "the speculative run", against))
        if self.native_difference:
            lines.append(_describe(self.native_difference, "exact rows", "native one-row plain") + " (another kernel)")
        rate = "none drafted" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%} of {stats.drafted}"
        host = f"{stats.host_ms_per_round:.2f} ms" if stats.host_ms_per_round is not None else "-"
        lines.append(f"accepted: {rate}; host time a round: {host}; seed {stats.seed}")
        if self.speedup is not None:
            lines.append(f"speed-up over native plain: {self.speedup:.2f}x")
        return lines + [f"note: {note}" for note in self.notes]


def _describe(difference: Difference, who: str, whom: str) -> str:
    gap = "" if difference.top2_gap is None else f", where the two best tokens are {difference.top2_gap:.3g} apart"
    return f"{who} first differs from {whom} at token {difference.index}{gap}"


def compare(
    llm: LLM, prompt: list[int], params: SamplingParams, progress: Callable[..., None] | None = None
) -> Comparison:
    """Run `prompt` plain and under `llm`'s own options, same seed; every run starts with an empty cache."""
    seed = params.seed if params.seed is not None else 0
    params = dataclasses.replace(params, seed=seed, n=1)
    watched = dataclasses.replace(params, logprobs=max(2, params.logprobs or 0))
    variants = {"plain": llm.variant(draft="none", exact=False)}
    if llm.exact is not None:
        variants["exact_plain"] = llm.variant(draft="none")
    variants["speculative"] = llm.variant()
    runs: dict[str, CompletionOutput] = {}
    notes: list[str] = []
    for name, variant in variants.items():
        if progress:
            progress(f"{name.replace('_', ' ')} run")
        variant.generate(prompt, dataclasses.replace(params, max_tokens=WARM_UP_TOKENS))
        variant.forget()
        runs[name] = variant.generate(prompt, params)[0].outputs[0]
        variant.forget()
        notes += [note for note in runs[name].stats.notes if note not in notes]
    if llm.options.verifier != "coupled" and params.temperature > 0:
        notes.append(
            f"the {llm.options.verifier} rule promises the target's distribution, not its tokens: at T > 0 only the "
            "coupled rule gives identical text"
        )
    reference = runs.get("exact_plain", runs["plain"])
    return Comparison(
        plain=runs["plain"],
        exact_plain=runs.get("exact_plain"),
        speculative=runs["speculative"],
        difference=_explained(variants, prompt, watched, reference, runs["speculative"]),
        native_difference=_explained(variants, prompt, watched, runs["plain"], reference),
        notes=notes,
    )


def _explained(
    variants: dict[str, LLM],
    prompt: list[int],
    watched: SamplingParams,
    reference: CompletionOutput,
    other: CompletionOutput,
) -> Difference | None:
    """The first difference; its top-2 gap comes from a second run of the reference, as timed runs carry no logprobs."""
    difference = first_difference(reference, other)
    if difference is None:
        return None
    name = "exact_plain" if reference.stats.exact else "plain"
    again = variants[name].generate(prompt, dataclasses.replace(watched, max_tokens=difference.index + 1))
    variants[name].forget()
    return first_difference(again[0].outputs[0], other) or difference
