"""The drafts that ship, side by side: acceptance by position and the cost of a draft token.

Acceptance is measured at a fixed k (4, or as many as a draft has heads) on every kind of prompt; cost is the wall time
of a proposal, host work included, over V(1), the runtime of a native one-row step in the same run.
Speeds are for the suite. Knows the Python API and the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.errors import ConfigError
from edgespec.outputs import CompletionOutput
from edgespec.types import FILLER
from edgespec_bench.prompts import load_prompts
from edgespec_bench.spread import spread
from edgespec_bench.suite.parts import SETTING_LABELS, SETTINGS

__all__ = ["DRAFTS", "DraftCase", "measure_drafts"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class DraftCase:
    """A draft kind at its k, and what it should reach on chat at T = 0: tokens a round, cost of a token over V(1)."""

    draft: str
    k: int = 4
    wanted_length: float | None = None
    wanted_cost: float | None = None
    is_cost_per_round: bool = False  # one pass drafts all the tokens


DRAFTS = (
    DraftCase("eagle", 4, 2.2, 0.10),
    DraftCase("tinydraft", 4, 2.0, 0.12),
    DraftCase("medusa", 3, 1.8, 0.06, is_cost_per_round=True),
    DraftCase("early-exit", 4, 2.0, 0.35),
    DraftCase("ngram", 4),
)


def measure_drafts(
    model: str, threads: int, n_tokens: int, n_prompts: int, kinds: Sequence[str], cases: Sequence[DraftCase], say: Say
) -> list[dict[str, Any]]:
    """A row for each draft, kind of prompt and setting."""
    rows = []
    for case in cases:
        options = {"num_speculative_tokens": case.k, "threads": threads}
        with LLM(model, draft=case.draft, **options) as llm, llm.native_plain() as plain:
            for kind in kinds:
                prompts = [llm.encode_chat(prompt.messages) for prompt in load_prompts(kind)[:n_prompts]]
                for name, setting in SETTINGS.items():
                    say(f"{case.draft}, {kind}, {SETTING_LABELS[name]}")
                    params = SamplingParams(max_tokens=n_tokens, seed=3, **setting)
                    rows.append({"draft": case.draft, "k": case.k, "kind": kind, "setting": SETTING_LABELS[name],
                                 **_acceptance(plain, llm, prompts, params, case)})  # fmt: skip
    return rows


def _acceptance(
    plain: LLM, llm: LLM, prompts: list[list[int]], params: SamplingParams, case: DraftCase
) -> dict[str, Any]:
    drafted: list[CompletionOutput] = []
    step_s: list[float] = []
    for prompt in prompts:
        for side, outputs in ((plain, None), (llm, drafted)):
            side.forget()
            output = side.generate(prompt, params)[0].outputs[0]
            if outputs is None:
                step_s += [record.target_s for record in output.stats.records[1:] if record.n_rows == 1]
            else:
                outputs.append(output)
    if not step_s:
        raise ConfigError("plain decoding answered every prompt with one token, so V(1) is unknown: use more (-n)")
    records = [r for output in drafted for r in output.stats.records[1:] if r.drafted and r.source != FILLER]
    full = [record for record in records if record.drafted == case.k]
    per = 1 if case.is_cost_per_round else case.k
    v1 = spread(step_s).median
    return {
        "mean_acceptance_length": round(1 + sum(r.accepted for r in records) / max(len(records), 1), 3),
        "acceptance_by_position": [round(value, 3) for value in by_position(records, case.k)],
        "v1_ms": round(1e3 * v1, 3),
        "draft_cost": round(spread([r.propose_s / per for r in full]).median / v1, 3) if full else None,
        "draft_cost_in_runtime": round(spread([r.draft_s / per for r in full]).median / v1, 3) if full else None,
    }


def by_position(records: Sequence[Any], k: int) -> list[float]:
    """Of the rounds that drafted a token for each position, the share that accepted one there."""
    offered = [[r for r in records if r.drafted > depth] for depth in range(k)]
    return [sum(r.accepted > depth for r in rounds) / len(rounds) for depth, rounds in enumerate(offered) if rounds]
