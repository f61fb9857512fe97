"""Two real sessions that share this machine's cores: what overlap takes here, against what the simulator says.

The overlapped runs that the simulator is held against are no source of its figures: what the two cost each other is
measured on other prompts, as `edgespec profile` does; calls, draft passes, host time and acceptance come from the
serial runs, second choices from a replay. Knows the Python API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.contention import measure_contention as measure_pair
from edgespec.draft.model import ModelDrafter
from edgespec.sim import SCHEDULES, Scenario, predict
from edgespec.stats import RunStats
from edgespec.types import Proposal
from edgespec_bench.prompts import load_prompts
from edgespec_bench.standard import Pace, together

__all__ = ["measure_contention"]

CALIBRATION = 4  # further prompts, to measure what the two cost each other on


def measure_contention(
    model: str | Path,
    draft_model: str | Path | None,
    k: int,
    n_tokens: int,
    n_prompts: int,
    threads: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Tokens a second of both schedules, expected and measured in turn; `within`: measured over expected.

    identical: both schedules wrote the same tokens to every prompt.
    """
    options: dict[str, Any] = {"threads": threads, "num_speculative_tokens": k}
    with LLM(model, draft="tinydraft", draft_model=draft_model, schedule="overlapped", **options) as llm:
        sides = {"serial": llm.variant(schedule="serial"), "overlapped": llm}
        say("what the two cost each other")
        prompts = load_prompts("chat")[: n_prompts + CALIBRATION]
        own = [llm.encode_chat(prompt.messages) for prompt in prompts[-CALIBRATION:]]
        slowdown = measure_pair(llm, "tinydraft", own)
        n_rows = llm.exact.width(k + 1) if llm.exact else k + 1
        runs: dict[str, list[RunStats]] = {name: [] for name in SCHEDULES}
        n_identical = 0
        right = [0, 0]  # second choices that were right, and first ones that were wrong
        for i, prompt in enumerate(prompts[:-CALIBRATION]):
            say(f"serial, overlapped: prompt {i + 1} of {len(prompts) - CALIBRATION}")
            ids = llm.encode_chat(prompt.messages)
            texts = []
            for name, side in sides.items():
                output = side.generate(ids, SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True))
                runs[name].append(output[0].outputs[0].stats)
                texts.append(output[0].outputs[0].token_ids)
            n_identical += texts[0] == texts[1]
            text = [*ids, *texts[0]]
            for at, proposal in _replay(llm, text, len(ids), k):
                _count_second(right, proposal, text[at:])
    records = [record for stats in runs["serial"] for record in stats.records[1:]]
    full = [record for record in records if record.drafted == k]
    chances = [sum(r.accepted > j for r in full) / max(1, sum(r.accepted >= j for r in full)) for j in range(k)]
    scenario = Scenario(
        {1: fmean(r.target_s for r in full), n_rows: fmean(r.target_s for r in full)},
        fmean(r.propose_s / k for r in full),
        tuple(chances),
        runner_up=right[0] / max(1, right[1]),
        host_s=fmean(r.host_s + r.draft_s - r.propose_s for r in full),
        target_jitter=_jitter([r.target_s for r in full]),
        target_slowdown=slowdown[0],
        draft_slowdown=slowdown[1],
    )
    result: dict[str, Any] = {"scenario": vars(scenario), "overlap": [s.overlap() for s in runs["overlapped"]]}
    result["identical"] = n_identical == len(runs["serial"])
    for name in SCHEDULES:
        expected = predict(scenario, k, name)
        measured = together([Pace.of(stats) for stats in runs[name]])  # what means and pooled shares add up to
        tok_s = expected.tokens_per_round / expected.round_s
        result[name] = {"tok_s": measured, "expected": tok_s, "within": measured / tok_s - 1}
    return result


def _jitter(times: Sequence[float]) -> float:
    """How calls vary, as the half width of an even spread with the same quartiles."""
    ordered = sorted(times)
    return min((ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / median(ordered), 0.9)


def _replay(llm: LLM, text: Sequence[int], n_prompt: int, k: int) -> list[tuple[int, Proposal]]:
    """What the draft proposes at places of a text that is known, with its second choices."""
    from edgespec.noise import Noise
    from edgespec.sampling import Sampler
    from edgespec.types import DraftContext

    info = llm.target.info
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=info.n_vocab, eos_ids=info.eos_ids, n_prompt=n_prompt)
    drafter: Any = ModelDrafter(llm.loaded.heads["tinydraft"], info.n_vocab, "tinydraft", ahead=True)  # type: ignore[arg-type]
    found = []
    for at in range(n_prompt + 1, len(text) - k, k):
        context = DraftContext(list(text[:at]), sampler, Noise(0, 0), llm.verifier_factory(), 0)
        found.append((at, drafter.propose(context, k)))
    drafter.close()
    return found


def _count_second(right: list[int], proposal: Proposal, true: Sequence[int]) -> None:
    """Judge the second choice at the first token that is wrong."""
    for token, second, real in zip(proposal.tokens, proposal.runners_up or (), true, strict=False):
        if token != real:
            right[1] += 1
            right[0] += second is not None and second[0] == real
            return
