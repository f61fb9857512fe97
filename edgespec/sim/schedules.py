"""Rounds of the serial and the overlapped schedule on two simulated devices: by expectation, and by events.

The overlapped rounds follow `edgespec.engine.lookahead`: while the target verifies, the draft prepares a continuation
for the outcomes of `rank_outcomes` in turn, each as long as a proposal, until a step would not pay any more or the
verdict is there; the step in flight is finished. `predict` takes expectations, `simulate` draws outcomes and jitter
from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from edgespec.engine.ahead import Outcome, is_worth_starting, rank_outcomes
from edgespec.errors import ConfigError
from edgespec.sim.scenario import Scenario

__all__ = ["SCHEDULES", "Prediction", "Simulation", "Span", "predict", "simulate"]

SCHEDULES = ("serial", "overlapped")

JITTER_SAMPLES = 300  # the standard error of a mean over times that vary by 20 % is then under 1 %

Jitter = Callable[[float], float]  # a share -> a random factor around 1


class Span(NamedTuple):
    """What a device did from start_s to end_s. lane: target | draft. what: verify | draft | ahead."""

    lane: str
    what: str
    start_s: float
    end_s: float


class Prediction(NamedTuple):
    """Expected figures of a round. speedup: over the target alone, one row a step. hit_rate: rounds whose proposal, or
    a part of it, was there before it was asked for."""

    tokens_per_round: float
    round_s: float
    speedup: float
    hit_rate: float


@dataclass
class Simulation:
    """A simulated run. late_s: seconds that verdicts waited for a draft step in flight. hits: rounds whose outcome was
    being or had been prepared."""

    schedule: str
    k: int
    seed: int
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    steps_ahead: int = 0
    late_s: float = 0.0
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the spans."""
        data = asdict(self)
        del data["spans"]
        return {**data, "speedup": self.speedup, "tok_s": self.tokens / self.seconds}


class _Verification(NamedTuple):
    """One target call with the draft beside it. done: outcome -> steps prepared. steps: draft steps run."""

    target_s: float
    late_s: float
    done: dict[tuple[int, int], int]
    steps: list[float]


def predict(scenario: Scenario, k: int, schedule: str = "serial") -> Prediction:
    """Expected speed at a fixed k: S(k) = V(1) (1 + sum s_j) / (k t_draft + V(k+1) + host).

    The overlapped schedule pays only for what was not prepared, and for the step in flight; how far it comes in a round
    is averaged over a fixed sample of the jitter.
    """
    _check(scenario, k, schedule)
    tokens, survival = 1.0, 1.0
    chances: dict[tuple[int, int], float] = {}  # outcome -> chance that it is the real one
    for position in range(k + 1):
        chance = scenario.chance(position)
        chances[position, 1] = survival * (1 - chance) * scenario.runner_up
        survival *= chance
        tokens += survival * (position < k)
    chances[k, 0] = survival
    draft_s, hit_rate = k * scenario.draft_s, 0.0
    target_s, late_s = scenario.verify_s(k + 1), 0.0
    if schedule == "overlapped" and k:
        outcomes, jitter = _outcomes(scenario, k), _jitter(random.Random(0))
        n = JITTER_SAMPLES if scenario.target_jitter or scenario.draft_jitter else 1
        phases = [_verify(scenario, k, outcomes, jitter) for _ in range(n)]
        target_s, late_s = sum(phase.target_s for phase in phases) / n, sum(phase.late_s for phase in phases) / n
        saved = sum(chances[outcome] * done for phase in phases for outcome, done in phase.done.items()) / n
        hit_rate = sum(chances[outcome] for phase in phases for outcome in phase.done) / n
        draft_s = (k - saved) * scenario.overlapped_draft_s
    round_s = draft_s + target_s + late_s + scenario.host_s
    return Prediction(tokens, round_s, tokens * scenario.plain_s / round_s, hit_rate)


def simulate(
    scenario: Scenario,
    k: int,
    schedule: str = "serial",
    *,
    n_tokens: int = 2000,
    seed: int = 0,
    n_spans: int = 0,
) -> Simulation:
    """Run rounds until `n_tokens` tokens are out; the same seed gives the same run. n_spans: spans to keep."""
    _check(scenario, k, schedule)
    dice = random.Random(seed)
    jitter = _jitter(dice)
    run, n_ready = Simulation(schedule, k, seed), 0
    outcomes = _outcomes(scenario, k) if schedule == "overlapped" and k else []
    step_s = scenario.overlapped_draft_s if schedule == "overlapped" else scenario.draft_s
    while run.tokens < n_tokens:
        for _ in range(k - n_ready):
            _advance(run, "draft", "draft", step_s * jitter(scenario.draft_jitter), n_spans)
        phase = _verify(scenario, k, outcomes, jitter)
        at = run.seconds
        _advance(run, "target", "verify", phase.target_s, n_spans)
        for step in phase.steps:
            _keep(run, Span("draft", "ahead", at, at + step), n_spans)
            at += step
        run.late_s += phase.late_s
        run.steps_ahead += len(phase.steps)
        run.seconds += phase.late_s + scenario.host_s
        outcome = _draw_outcome(scenario, k, dice)
        n_ready = phase.done.get(outcome, 0)
        run.hits += n_ready > 0
        run.rounds += 1
        run.drafted += k
        run.accepted += outcome[0]
        run.tokens += outcome[0] + 1
    run.plain_seconds = run.tokens * scenario.plain_s
    return run


def _jitter(dice: random.Random) -> Jitter:
    return lambda share: 1 + share * dice.uniform(-1, 1) if share else 1.0


def _outcomes(scenario: Scenario, k: int) -> list[Outcome]:
    return rank_outcomes([scenario.chance(position) for position in range(k + 1)])


def _check(scenario: Scenario, k: int, schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule={schedule!r} is not known: use {', '.join(SCHEDULES)}")
    if k < 0:
        raise ConfigError(f"k={k}: it must be from 0 (plain decoding) up")
    scenario.verify_s(k + 1)


def _draw_outcome(scenario: Scenario, k: int, dice: random.Random) -> tuple[int, int]:
    """(accepted, rank of the next token): 0 the draft's own guess after all, 1 its second choice, 2 any other."""
    for position in range(k + 1):
        if dice.random() >= scenario.chance(position):
            return position, 1 if dice.random() < scenario.runner_up else 2
    return k, 0


def _verify(scenario: Scenario, k: int, outcomes: Sequence[Outcome], jitter: Jitter) -> _Verification:
    """The target verifies k + 1 rows while the draft prepares; each slows the other down while both are busy."""
    left_s = scenario.verify_s(k + 1) * jitter(scenario.target_jitter)
    elapsed_s, done, steps = 0.0, dict[tuple[int, int], int](), list[float]()
    usual_s = scenario.verify_s(k + 1) * scenario.target_slowdown  # what both expect of each other
    pass_s = scenario.draft_s * scenario.draft_slowdown
    for outcome, n_ready in _steps_ahead(outcomes, k):
        if not is_worth_starting(outcome.chance, pass_s, usual_s - elapsed_s):
            break
        share = jitter(scenario.draft_jitter)
        alone_s, beside_s = scenario.overlapped_draft_s * share, pass_s * share
        progress_s = beside_s / scenario.target_slowdown  # what the target gets done in the meantime
        if n_ready:
            done[outcome.accepted, outcome.rank] = n_ready
        if progress_s >= left_s:
            target_s = left_s * scenario.target_slowdown
            late_s = alone_s * (1 - left_s / progress_s)
            steps.append(target_s + late_s)
            return _Verification(elapsed_s + target_s, late_s, done, steps)
        elapsed_s, left_s = elapsed_s + beside_s, left_s - progress_s
        steps.append(beside_s)
    return _Verification(elapsed_s + left_s, 0.0, done, steps)


def _steps_ahead(outcomes: Sequence[Outcome], k: int) -> Iterator[tuple[Outcome, int]]:
    """Draft steps in the order in which they are run, with the tokens of the continuation that are then ready; a guess
    at the token after all of them takes a step before its continuation."""
    for outcome in outcomes:
        is_guess = int(outcome.rank == 0)
        for step in range(k + is_guess):
            yield outcome, step + 1 - is_guess


def _advance(run: Simulation, lane: str, what: str, seconds: float, n_spans: int) -> None:
    _keep(run, Span(lane, what, run.seconds, run.seconds + seconds), n_spans)
    run.seconds += seconds


def _keep(run: Simulation, span: Span, n_spans: int) -> None:
    if len(run.spans) < n_spans:
        run.spans.append(span)
