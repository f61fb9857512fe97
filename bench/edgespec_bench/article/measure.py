"""One way to decode beside native plain decoding of the same target: speeds, first token, acceptance, costs.

Both sides take turns on each prompt, end of sequence ignored, so that every run has the same number of tokens. Owns
what a row holds. Knows the Python API and the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.config import cache_dir
from edgespec.errors import ConfigError
from edgespec.pairs import ensure
from edgespec.stats import RunStats
from edgespec.types import FILLER, RoundRecord
from edgespec.zoo import list_drafts
from edgespec_bench.article.cases import Case
from edgespec_bench.machine_card import commit, machine_card
from edgespec_bench.prompts import load_prompts
from edgespec_bench.spread import paired_ratio, spread
from edgespec_bench.widen.heads import widen_draft

__all__ = ["Run", "acceptance_a_position", "measure_cases", "prompt_ids"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """model: what the target was widened from. n_prompts: of each kind. device_options: of target and draft alike."""

    model: str = "smollm2-135m"
    factor: int = 3
    kinds: tuple[str, ...] = ("chat",)
    n_prompts: int = 4
    n_tokens: int = 64
    temperature: float = 0.0
    threads: int = 2
    device_options: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{self.model}-x{self.factor}"

    @property
    def params(self) -> SamplingParams:
        top_p = 1.0 if self.temperature == 0 else 0.95
        return SamplingParams(temperature=self.temperature, top_p=top_p, seed=7, max_tokens=self.n_tokens,
                              ignore_eos=True)  # fmt: skip


def measure_cases(run: Run, cases: Sequence[Case], say: Say) -> list[dict[str, Any]]:
    """A row for each case and kind of prompt; the case `plain` is the other side of them all and has no row of its own.

    Raises ConfigError where the target was not made yet.
    """
    folder = _wide_target(run)
    rows = []
    for case in cases:
        if case.draft == "none":
            continue
        with ExitStack() as stack:
            llm = stack.enter_context(_open(run, folder, case))
            plain = stack.enter_context(llm.native_plain())
            _turn(plain, llm, prompt_ids(llm, run.kinds[0], 1)[0], SamplingParams(temperature=0, max_tokens=8))
            for kind in run.kinds:
                say(f"{run.target}: {case.label}, {kind}")
                rows.append(_row(run, case, kind, plain, llm))
    return rows


def _wide_target(run: Run) -> Path:
    from edgespec.manifest import known_manifests

    if run.target not in known_manifests():
        raise ConfigError(
            f"there is no {run.target} yet: `python -m edgespec_bench widen -m {run.model} --factor {run.factor}`"
        )
    return ensure(run.target)


def _open(run: Run, folder: Path, case: Case) -> LLM:
    if case.widened is not None:
        named = {draft.kind: draft for draft in list_drafts(run.model)}
        if case.widened not in named:
            raise ConfigError(f"{run.model} has no {case.widened} draft to widen; it has {', '.join(named) or 'none'}")
        out = cache_dir() / "synthetic" / f"{run.target}-{case.widened}"
        draft_model: str | Path | None = widen_draft(named[case.widened], run.factor, out)
    else:
        draft_model = case.draft_model and ensure(case.draft_model)
    places = {"device_options": run.device_options, "draft_device_options": run.device_options}
    if case.draft == "early-exit":  # drafts on the target's own graphs
        del places["draft_device_options"]
    return LLM(folder, draft=case.draft, draft_model=draft_model, threads=run.threads, **places, **case.options)


def prompt_ids(llm: LLM, kind: str, n_prompts: int) -> list[list[int]]:
    """The first prompts of a kind through the target's chat template."""
    return [llm.encode_chat(prompt.messages) for prompt in load_prompts(kind)[:n_prompts]]


def _turn(plain: LLM, llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[RunStats, RunStats]:
    """Plain, then speculative, both without a cached prompt."""
    found = []
    for side in (plain, llm):
        side.forget()
        found.append(side.generate(prompt, params)[0].outputs[0].stats)
    return found[0], found[1]


def _row(run: Run, case: Case, kind: str, plain: LLM, llm: LLM) -> dict[str, Any]:
    turns = [_turn(plain, llm, prompt, run.params) for prompt in prompt_ids(llm, kind, run.n_prompts)]
    plains, ours = [turn[0] for turn in turns], [turn[1] for turn in turns]
    speeds, plain_speeds = ([stats.decode_tok_s or 0.0 for stats in side] for side in (ours, plains))
    records = [r for stats in ours for r in stats.records[1:]]
    rounds = [r for r in records if r.drafted and r.source != FILLER]
    v1_s = median(r.target_s for stats in plains for r in stats.records[1:])
    return {
        "what": "scaled case",
        "target": run.target,
        "synthetic": llm.target.info.synthetic,
        "case": case.key,
        "label": case.label,
        "draft": case.draft,
        "draft_model": case.draft_model or (f"widened {case.widened} of {run.model}" if case.widened else None),
        "k": case.k,
        "kind": kind,
        "temperature": run.temperature,
        "tok_s": spread(speeds).to_dict(),
        "plain_tok_s": spread(plain_speeds).to_dict(),
        "speedup": paired_ratio(speeds, plain_speeds).to_dict(),
        "ttft_ms": _ms(median(stats.ttft_s for stats in ours)),
        "plain_ttft_ms": _ms(median(stats.ttft_s for stats in plains)),
        "mean_acceptance_length": round(sum(r.emitted for r in records) / max(len(records), 1), 3),
        "acceptance_by_position": [round(value, 3) for value in _survival(rounds, case.k)],
        "acceptance_a_position": _rounded(acceptance_a_position(rounds)),
        "v1_ms": _ms(v1_s),
        "verify_ms": _by_rows(rounds),
        "draft_ms_a_token": _ms(median(r.propose_s / r.drafted for r in rounds)) if rounds else None,
        "host_ms": _ms(median(r.host_s for r in records)),
        "predicted_speedup": _rounded(_predicted(records, v1_s)),
        "n_prompts": run.n_prompts,
        "n_tokens": run.n_tokens,
        "threads": run.threads,
        "device_options": list(run.device_options),
        "machine": machine_card(),
        "commit": commit(),
    }


def acceptance_a_position(rounds: Sequence[RoundRecord]) -> float | None:
    """Of the drafted tokens whose predecessors were accepted, the share that was accepted too."""
    judged = sum(min(r.accepted + 1, r.drafted) for r in rounds)
    return sum(r.accepted for r in rounds) / judged if judged else None


def _survival(rounds: Sequence[RoundRecord], k: int) -> list[float]:
    """Of the rounds that drafted a token for each position, the share that accepted one there."""
    offered = [[r for r in rounds if r.drafted > depth] for depth in range(k)]
    return [sum(r.accepted > depth for r in these) / len(these) for depth, these in enumerate(offered) if these]


def _by_rows(rounds: Sequence[RoundRecord]) -> dict[str, float]:
    """Median milliseconds of the target's calls, by rows."""
    counts = sorted({r.n_rows for r in rounds})
    return {str(n): _ms(median(r.target_s for r in rounds if r.n_rows == n)) for n in counts}


def _predicted(records: Sequence[RoundRecord], v1_s: float) -> float | None:
    """The cost model's speed-up, S = V(1) tokens / (drafting + V(rows) + host), from this run's own medians."""
    if not records:
        return None
    tokens = sum(r.emitted for r in records)
    by_rows = {n: median(r.target_s for r in records if r.n_rows == n) for n in {r.n_rows for r in records}}
    drafted = [r.propose_s / r.drafted for r in records if r.drafted and r.source != FILLER]
    step_s = median(drafted) if drafted else 0.0
    n_drafted = sum(r.drafted for r in records if r.source != FILLER)
    host_s = median(r.host_s - (r.propose_s - r.draft_s) for r in records)  # drafting brings its own
    seconds = sum(by_rows[r.n_rows] for r in records) + n_drafted * step_s + host_s * len(records)
    return tokens * (v1_s + host_s) / seconds


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
