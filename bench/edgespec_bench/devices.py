"""Speculation on two devices that are only times: real runs of the production code against the simulator's figures.

The target sleeps 20 ms a call and the draft 1 ms (a tenth of the tutorials' 200 and 10), with jitter; they agree by the
toss of a coin. So what is measured is the loop, the schedules and the controller, and nothing of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.sim import SCHEDULES, Scenario, predict, simulate
from edgespec.stats import RunStats
from edgespec.testing import LatencyModel, coin_pair
from edgespec_bench.spread import spread

__all__ = ["DeviceCase", "measure_devices"]

PLAIN_TOKENS = 100


@dataclass(frozen=True)
class DeviceCase:
    """Seconds, shares and counts of the two devices; see `edgespec.sim.Scenario`."""

    target_s: float = 0.02
    draft_s: float = 0.001
    acceptance: float = 0.8
    runner_up: float = 0.5
    k: int = 5
    jitter: float = 0.1
    n_tokens: int = 500
    repeats: int = 3

    @property
    def scenario(self) -> Scenario:
        return Scenario.flat(
            self.target_s,
            self.draft_s,
            self.acceptance,
            runner_up=self.runner_up,
            target_jitter=self.jitter,
            draft_jitter=self.jitter,
        )


def measure_devices(case: DeviceCase, say: Callable[[str], None]) -> dict[str, Any]:
    """Speed-ups over plain decoding of both schedules, measured in turn, beside expected and simulated ones.

    within: measured over expected. slow_draft: the same devices with a draft as slow as its target, under the adaptive
    controller: what it drafts at first and in the end.
    """
    speeds: dict[str, list[float]] = {name: [] for name in ("plain", *SCHEDULES)}
    overlaps, host_ms = [], []
    for repeat in range(case.repeats):
        say(f"plain, serial, overlapped: {repeat + 1} of {case.repeats}")
        for name in speeds:
            stats = _run(case, repeat, name)
            assert stats.decode_tok_s is not None
            speeds[name].append(stats.decode_tok_s)
            overlaps += [overlap] if (overlap := stats.overlap()) else []
            host_ms += [stats.host_ms_per_round] if name == "serial" else []
    result: dict[str, Any] = {
        "case": vars(case),
        "plain_tok_s": spread(speeds["plain"]).to_dict(2),
        "host_ms_per_round": spread(host_ms).to_dict(3),
        "overlap": overlaps,
    }
    for schedule in SCHEDULES:
        ratios = [a / b for a, b in zip(speeds[schedule], speeds["plain"], strict=True)]
        expected = predict(case.scenario, case.k, schedule).speedup
        simulated = simulate(case.scenario, case.k, schedule, n_tokens=20_000).speedup
        measured = spread(ratios)
        result[schedule] = {
            "speedup": measured.to_dict(3),
            "expected": round(expected, 3),
            "simulated": round(simulated, 3),
            "within": round(measured.median / expected - 1, 4),
        }
    say("a draft as slow as its target, adaptive controller")
    result["slow_draft"] = _slow_draft(case)
    return result


def _run(case: DeviceCase, seed: int, name: str) -> RunStats:
    """One request; plain decoding needs fewer tokens, as its steps are all alike."""
    n_tokens = PLAIN_TOKENS if name == "plain" else case.n_tokens
    options = {"draft": "none"} if name == "plain" else {"schedule": name, "num_speculative_tokens": case.k}
    return _generate(case, seed, case.draft_s, n_tokens, **options)


def _slow_draft(case: DeviceCase) -> dict[str, Any]:
    stats = _generate(case, 0, case.target_s, 4 * PLAIN_TOKENS, controller="adaptive", num_speculative_tokens=case.k)
    half = len(stats.records) // 2
    drafted = [sum(r.drafted for r in part) for part in (stats.records[:half], stats.records[half:])]
    return {
        "rounds": stats.rounds,
        "drafted_by_half": drafted,
        "rounds_that_drafted": sum(r.drafted > 0 for r in stats.records),
        "last_k": [r.drafted for r in stats.records[-5:]],
        "controller": stats.controller,
    }


def _generate(case: DeviceCase, seed: int, draft_s: float, n_tokens: int, **options: Any) -> RunStats:
    target, draft = coin_pair(case.acceptance, case.runner_up, seed=seed)
    slow = LatencyModel(target, case.target_s, jitter=case.jitter, seed=seed)
    if options.get("draft") != "none":
        options["draft_model"] = LatencyModel(draft, draft_s, jitter=case.jitter, seed=seed + 1)
    with LLM(slow, exact=False, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=n_tokens)
        return llm.generate([1, 2], params)[0].outputs[0].stats
