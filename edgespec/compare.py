"""Plain and speculative decoding of one prompt, side by side: are the tokens the same, and which is faster?

Three runs with one seed: native plain (one row a step, on the graph that is fastest without speculation), plain with
exact rows on the graph that speculates (what an exact speculative run has to equal), and the speculative run. Speed is
always judged against native plain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from edgespec.device_report import device_line
from edgespec.llm import LLM
from edgespec.outputs import CompletionOutput
from edgespec.sampling import SamplingParams
from edgespec.stats import RunStats

__all__ = ["Comparison", "Difference", "compare", "first_difference", "speculation_lines"]

WARM_UP_TOKENS = 8
UNREMARKABLE = ("prompt", "measuring", "room")  # reasons for plain rounds at the ends of every text


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
    graphs: dict[str, str] = field(default_factory=dict)  # run -> graph of the target that it ran on

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
            "graphs": self.graphs,
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
        lines += speculation_lines(stats)
        if self.speedup is not None:
            where = f" (on {self.graphs['plain']})" if len(set(self.graphs.values())) > 1 else ""
            lines.append(f"speed-up over native plain{where}: {self.speedup:.2f}x")
        return lines + [f"note: {note}" for note in self.notes]


def speculation_lines(stats: RunStats) -> list[str]:
    """Where the models ran, acceptance by position and by source, for people; nothing where nothing is known."""
    lines = [f"devices: {line}"] if (line := device_line(stats.devices)) else []
    if positions := stats.acceptance_by_position():
        lines.append(f"accepted by position: {', '.join(f'{share:.0%}' for share in positions)}")
    if stats.sources:
        parts = [f"{name} {source.accepted} of {source.drafted}" for name, source in stats.sources.items()]
        lines.append(f"accepted by source: {', '.join(parts)}")
    if plan := stats.controller.get("plan"):
        lines.append(f"plan: {plan['chosen']} ({plan['reason']})")
    for kind, entry in stats.controller.get("off", {}).items():
        if kind not in UNREMARKABLE:
            lines.append(f"no drafting in {entry['rounds']} rounds ({kind}): {entry['why']}")
    if overlap := stats.overlap():
        times = [
            f"{side} {overlap[f'{side}_slowdown']:.2f}x" for side in ("target", "draft") if overlap[f"{side}_slowdown"]
        ]
        beside = f"; beside each other {', '.join(times)} as long" if times else ""
        lines.append(
            f"prepared ahead: {overlap['hits']} hits, {overlap['misses']} misses, {overlap['passes_ahead']} draft "
            f"passes; verdicts waited {overlap['late_ms']:.1f} ms{beside}"
        )
    return lines


def _describe(difference: Difference, who: str, whom: str) -> str:
    gap = "" if difference.top2_gap is None else f", where the two best tokens are {difference.top2_gap:.3g} apart"
    return f"{who} first differs from {whom} at token {difference.index}{gap}"


def compare(
    llm: LLM, prompt: list[int], params: SamplingParams, progress: Callable[..., None] | None = None
) -> Comparison:
    """Run `prompt` plain and under `llm`'s own options, same seed; every run starts with an empty cache."""
    seed = params.seed if params.seed is not None else 0
    params = dataclasses.replace(params, seed=seed, n=1)
    runs: dict[str, CompletionOutput] = {}
    graphs: dict[str, str] = {}
    for name in ["plain", *(["exact_plain"] if llm.exact is not None else []), "speculative"]:
        if progress:
            progress(f"{name.replace('_', ' ')} run")
        with _variant(llm, name) as variant:
            variant.generate(prompt, dataclasses.replace(params, max_tokens=WARM_UP_TOKENS))
            variant.forget()
            runs[name] = variant.generate(prompt, params)[0].outputs[0]
            graphs[name] = variant.loaded.graph
    reference = "exact_plain" if "exact_plain" in runs else "plain"
    return Comparison(
        plain=runs["plain"],
        exact_plain=runs.get("exact_plain"),
        speculative=runs["speculative"],
        difference=_explained(llm, prompt, params, (reference, runs[reference]), runs["speculative"]),
        native_difference=_explained(llm, prompt, params, ("plain", runs["plain"]), runs[reference]),
        notes=_notes(llm, runs, params.temperature),
        graphs=graphs,
    )


@contextmanager
def _variant(llm: LLM, name: str) -> Iterator[LLM]:
    """The LLM of one run; only one of them has a cache, or a graph of its own, at a time."""
    if name == "plain":
        with llm.native_plain() as plain:
            yield plain
        return
    variant = llm.variant(draft="none") if name == "exact_plain" else llm.variant()
    try:
        yield variant
    finally:
        variant.forget()


def _notes(llm: LLM, runs: dict[str, CompletionOutput], temperature: float) -> list[str]:
    notes = list(dict.fromkeys(note for run in runs.values() for note in run.stats.notes))
    if llm.options.verifier != "coupled" and temperature > 0:
        notes.append(
            f"the {llm.options.verifier} rule promises the target's distribution, not its tokens: at T > 0 only the "
            "coupled rule gives identical text"
        )
    return notes


def _explained(
    llm: LLM,
    prompt: list[int],
    params: SamplingParams,
    reference: tuple[str, CompletionOutput],
    other: CompletionOutput,
) -> Difference | None:
    """The first difference; its top-2 gap comes from a second run of the reference, as timed runs carry no logprobs."""
    name, run = reference
    difference = first_difference(run, other)
    if difference is None:
        return None
    watched = dataclasses.replace(params, logprobs=max(2, params.logprobs or 0), max_tokens=difference.index + 1)
    with _variant(llm, name) as variant:
        again = variant.generate(prompt, watched)[0].outputs[0]
    return first_difference(again, other) or difference
