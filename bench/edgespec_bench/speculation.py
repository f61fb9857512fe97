"""Speculative decoding against native plain decoding of the same model, by kind of prompt.

Both sides take turns on each prompt, so that drift of the machine cancels; the speculative side runs on exact rows.
Knows the Python API and the prompt sets, nothing of peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec_bench.prompts import load_prompts
from edgespec_bench.spread import paired_ratio, spread

__all__ = ["KINDS", "SETTINGS", "measure_speculation"]

KINDS = ("chat", "code", "json", "edit", "summarise")
SETTINGS: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "T = 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
}


def measure_speculation(llm: LLM, n_tokens: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each kind and setting: medians of tokens a second, the paired ratio, mean tokens a round."""
    plain = llm.variant(draft="none", exact=False)
    rows = []
    for kind in KINDS:
        prompts = [llm.encode_chat(prompt.messages) for prompt in load_prompts(kind)]
        for name, setting in SETTINGS.items():
            say(f"{kind}, {name}")
            params = SamplingParams(max_tokens=n_tokens, **setting)
            rows.append({"kind": kind, "setting": name, **_row(plain, llm, prompts, params)})
    return rows


def _row(plain: LLM, llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"plain": [], "speculative": []}
    lengths: list[float] = []
    for prompt in prompts:
        stats = {}
        for name, side in (("plain", plain), ("speculative", llm)):
            side.forget()
            stats[name] = side.generate(prompt, params)[0].stats
        if any(run.decode_tok_s is None for run in stats.values()):
            continue  # answered in one round: nothing to time
        for name, run in stats.items():
            speeds[name].append(run.decode_tok_s or 0.0)
        lengths.append(stats["speculative"].mean_acceptance_length or 0.0)
    ratio = paired_ratio(speeds["speculative"], speeds["plain"])
    return {
        "plain_tok_s": round(spread(speeds["plain"]).median, 1),
        "spec_tok_s": round(spread(speeds["speculative"]).median, 1),
        "speedup": ratio.to_dict(3),
        "mean_acceptance_length": round(spread(lengths).median, 2),
    }
