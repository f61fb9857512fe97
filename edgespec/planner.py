"""What to run where: every way to decode with its predicted speed and memory, "do not speculate" among them.

Works on measured profiles alone and loads nothing. A fixed k is predicted by S(k) = (1 + sum s_j) / (V(k + 1) +
t_draft(k) + host) with the measured V, whose steps are kept; n-gram drafts, and mixes that take the better source each
round, by replaying the calibration texts under the real controllers; the overlapped schedule by `edgespec.sim`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.draft.base import DRAFTERS
from edgespec.engine.controller import CONTROLLERS
from edgespec.errors import ConfigError
from edgespec.options import AUTO, IN_FLIGHT_DRAFTS, EngineOptions
from edgespec.profile import MOST_K, DraftProfile, Profiles, TargetProfile, refuse_tree
from edgespec.replay import Mix, Yield, chances_at, replay
from edgespec.sim import SCHEDULES, Scenario, predict

__all__ = ["ENERGY_SHARES", "MOST_K", "PREFERENCES", "Asked", "Candidate", "Plan", "make_plan", "scenario_json"]

LEAST_GAIN = 1.03  # over plain decoding; less is within what costs vary by
MODEL_GAIN = 1.05  # of a draft with weights over the best without: acceptance in a few short texts is no surer
PREFERENCES = ("speed", "energy")
# Energy of a plain step by its causes, where nothing measures it: what runs as long as the step, reading the weights,
# computing the rows. Assumed (the orders of magnitude of PAPERS on DRAM and int4 arithmetic), never measured here.
STATIC_SHARE, READ_SHARE, COMPUTE_SHARE = 0.4, 0.4, 0.2
ENERGY_SHARES = {"time": STATIC_SHARE, "reading": READ_SHARE, "computing": COMPUTE_SHARE}


@dataclass(frozen=True)
class Candidate:
    """One way to decode. k: tokens drafted a round, at most so many if adaptive. energy: a token's over plain's.

    speedup: over plain decoding in the same mode (with exact rows where they are on). obstacle: why it may not be used.
    """

    draft: str
    k: int
    controller: str
    schedule: str
    target_device: str
    draft_device: str | None
    tok_s: float
    speedup: float
    tokens_per_round: float
    bytes: int
    energy: float
    obstacle: str | None = None

    @property
    def label(self) -> str:
        if self.draft == "none":
            return f"no speculation on {self.target_device}"
        devices = (
            self.target_device
            if self.draft_device in (None, self.target_device)
            else (f"{self.draft_device} -> {self.target_device}")
        )
        most = "=" if self.controller == "fixed" else "<="
        return f"{self.draft}, k {most} {self.k}, {self.schedule}, on {devices}"

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "label": self.label}


@dataclass(frozen=True)
class Asked:
    """What a user decided, and a plan does not; None leaves it open. drafts: kinds that may be used.

    most, least: tokens of a proposal. What differs is among a plan's candidates with that as its obstacle.
    """

    drafts: tuple[str, ...] | None = None
    schedule: str | None = None
    controller: str | None = None
    most: int | None = None
    least: int = 0

    def __post_init__(self) -> None:
        known = {"drafts": DRAFTERS, "schedule": SCHEDULES, "controller": CONTROLLERS}
        for name, values in known.items():
            given = getattr(self, name)
            for value in (given or ()) if name == "drafts" else [given] if given is not None else []:
                if value not in values:
                    raise ConfigError(f"{name}={value!r} is not known: use {', '.join(values)}")
        if self.most is not None and self.most < 1:
            raise ConfigError(f"most={self.most}: it must be a whole number from 1 up")
        if self.least > (most := min(MOST_K, self.most or MOST_K)):
            raise ConfigError(
                f"min_speculative_tokens={self.least}: a plan drafts up to {most} tokens a round; ask for fewer, or "
                "allow more (num_speculative_tokens, --draft-max)"
            )

    @classmethod
    def by(cls, options: EngineOptions) -> Asked:
        """What `options` leave no choice about; raises IncompatibleError for trees."""
        refuse_tree(options)
        return cls(
            drafts=None if options.draft == AUTO else options.drafts,
            schedule=options.schedule,
            controller=options.controller,
            most=options.num_speculative_tokens,
            least=options.min_speculative_tokens,
        )

    @property
    def steering(self) -> str:
        """The controller of candidates whose length is not fixed."""
        return self.controller if self.controller not in (None, "fixed") else "adaptive"

    def obstacle(self, kinds: Sequence[str], controller: str, schedule: str, k: int, reach: int) -> str | None:
        """Why these are not what was asked for; None where they are. reach: tokens that could be drafted at most."""
        if self.drafts is not None and not set(kinds) <= set(self.drafts):
            return f"draft={','.join(self.drafts) or 'none'!r} is asked for"
        for name, given in (("schedule", schedule), ("controller", controller)):
            if getattr(self, name) not in (None, given):
                return f"{name}={getattr(self, name)!r} is asked for"
        if self.most is not None and (k > self.most or (k < min(self.most, reach) and self.controller == "fixed")):
            return f"num_speculative_tokens={self.most} is asked for"
        return f"min_speculative_tokens={self.least} is asked for" if k < self.least else None


@dataclass(frozen=True)
class Plan:
    """candidates: best first by what was preferred, those with an obstacle last. chosen: not always the first, see
    `MODEL_GAIN`."""

    model: str
    prefer: str
    chosen: Candidate
    runner_up: Candidate | None
    reason: str
    native_tok_s: float
    candidates: tuple[Candidate, ...] = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """What was chosen and why, in a few words, for the report of a run."""
        return {
            "chosen": self.chosen.label,
            "reason": self.reason,
            "runner_up": self.runner_up.label if self.runner_up else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model,
            "prefer": self.prefer,
            "chosen": self.chosen.to_dict(),
            "runner_up": self.runner_up.to_dict() if self.runner_up else None,
            "reason": self.reason,
            "native_plain_tok_s": self.native_tok_s,
            "energy_assumed": ENERGY_SHARES,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


def make_plan(
    profiles: Sequence[Profiles],
    *,
    memory_budget: int | None = None,
    prefer: str = "speed",
    asked: Asked | None = None,
) -> Plan:
    """The plan over all profiled combinations of devices. memory_budget: bytes for weights and caches of both models.

    asked: a schedule that is asked for is also used where a draft shares cores with the target. Raises ConfigError
    where there are no profiles, and where nothing fits the budget.
    """
    if not profiles:
        raise ConfigError("profiles: there is nothing to plan with; give at least one (`profile_llm` measures it)")
    if prefer not in PREFERENCES:
        raise ConfigError(f"prefer={prefer!r} is not known: use {' or '.join(PREFERENCES)}")
    asked = asked or Asked()
    found = [candidate for one in profiles for candidate in _candidates(one, memory_budget, asked)]
    able = sorted((c for c in found if c.obstacle is None), key=lambda c: _order(c, prefer))
    if not able:
        least = min(found, key=lambda c: c.bytes)
        raise ConfigError(
            f"memory_budget={_mb(memory_budget or 0)}: the least that {profiles[0].target.name} needs is "
            f"{_mb(least.bytes)} ({least.label}); allow more, or load with a smaller context (-c)"
        )
    plain = min((c for c in able if c.draft == "none"), key=lambda c: _order(c, prefer))
    chosen = _choose(able, plain, prefer)
    others = [c for c in able if (c.draft, c.schedule) != (chosen.draft, chosen.schedule)]
    rest = sorted((c for c in found if c.obstacle is not None), key=lambda c: _order(c, prefer))
    obstacle = rest[0].obstacle if rest and all(c.draft == "none" for c in able) else None
    target = profiles[0].target
    return Plan(
        target.name,
        prefer,
        chosen,
        others[0] if others else None,
        _reason(chosen, able[0], plain, prefer, obstacle) + _passed_over(chosen, able[0]),
        1.0 / _native_s(target),
        (*able, *rest),
    )


def _order(candidate: Candidate, prefer: str) -> float:
    return candidate.energy if prefer == "energy" else -candidate.tok_s


def _gain(candidate: Candidate, over: Candidate, prefer: str) -> float:
    return over.energy / candidate.energy if prefer == "energy" else candidate.tok_s / over.tok_s


def _choose(able: Sequence[Candidate], plain: Candidate, prefer: str) -> Candidate:
    """The best of them, unless it hardly gains on plain decoding, or on what drafts without weights. able: the best
    first."""
    light = next(c for c in able if c.draft_device is None)  # plain decoding is always there
    light = light if _gain(light, plain, prefer) >= LEAST_GAIN else plain
    return able[0] if able[0].draft_device is not None and _gain(able[0], light, prefer) >= MODEL_GAIN else light


def _reason(chosen: Candidate, best: Candidate, plain: Candidate, prefer: str, obstacle: str | None) -> str:
    """obstacle: where no draft may be used, why not the one that would be best."""
    if chosen.draft == "none":
        if obstacle is not None:
            return f"no draft can be used: {obstacle}"
        if best.draft == "none":
            return "no draft is predicted to be faster than plain decoding here"
        what = "the energy" if prefer == "energy" else "the speed"
        gain = best.energy / plain.energy if prefer == "energy" else best.tok_s / plain.tok_s
        return f"the best draft ({best.label}) is predicted at {gain:.2f}x {what} of plain: not worth it"
    what = (
        f"{1 - chosen.energy / plain.energy:.0%} less energy a token"
        if prefer == "energy"
        else (f"{chosen.tok_s / plain.tok_s:.2f}x of plain")
    )
    return f"{what} predicted, {chosen.tokens_per_round:.2f} tokens a round"


def _passed_over(chosen: Candidate, best: Candidate) -> str:
    """Why it is not the best; empty where it is, or where nothing is drafted."""
    if chosen is best or chosen.draft == "none":
        return ""
    return f"; {best.label} is not predicted to gain what its weights are worth"


def _mb(n_bytes: int) -> str:
    mb = n_bytes / 1e6
    return f"{mb:,.0f} MB" if mb >= 10 else f"{mb:.2g} MB"


# --- candidates of one target and its drafts --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Maker:
    """Makes candidates of one target: everything is compared with `plain`, decoding without speculation."""

    target: TargetProfile
    plain: Yield
    memory_budget: int | None
    asked: Asked
    shared: Mapping[str, str]
    free_bytes: Mapping[str, int]

    def make(
        self,
        kinds: str,
        k: int,
        yields: Yield,
        draft: DraftProfile | None = None,
        controller: str = "fixed",
        schedule: str = "serial",
    ) -> Candidate:
        target, plain = self.target, self.plain
        n_bytes = target.bytes + (draft.bytes if draft else 0)
        n_bytes += sum(self.free_bytes.get(kind, 0) for kind in kinds.split(","))
        obstacle = None
        if kinds != "none":
            reach = min(target.most_k, draft.most if draft else target.most_k)
            obstacle = self.asked.obstacle(kinds.split(","), controller, schedule, k, reach)
            obstacle = obstacle or self._obstacle(draft, schedule)
        if self.memory_budget is not None and n_bytes > self.memory_budget:
            obstacle = f"needs {_mb(n_bytes)}, the budget is {_mb(self.memory_budget)}"
        return Candidate(
            draft=kinds,
            k=k,
            controller=controller,
            schedule=schedule,
            target_device=target.device,
            draft_device=draft.device if draft else None,
            tok_s=1.0 / yields.seconds_per_token,
            speedup=plain.seconds_per_token / yields.seconds_per_token,
            tokens_per_round=yields.tokens_per_round,
            bytes=n_bytes,
            energy=self._energy(yields, draft) / self._energy(plain, None),
            obstacle=obstacle,
        )

    def _obstacle(self, draft: DraftProfile | None, schedule: str) -> str | None:
        """Why a draft cannot be run under a schedule, or would not pay; None where it may."""
        if schedule == "serial" or draft is None:
            return None
        return IN_FLIGHT_DRAFTS.get(draft.kind) or (None if self.asked.schedule else self.shared.get(draft.kind))

    def _energy(self, yields: Yield, draft: DraftProfile | None) -> float:
        """Of a token, where a plain step takes 1."""
        weight = draft.bytes / self.target.bytes if draft and self.target.bytes else 0.0
        static = STATIC_SHARE * yields.seconds / (self.plain.seconds / self.plain.rounds)
        read = READ_SHARE * (yields.rounds + yields.steps * weight)
        compute = COMPUTE_SHARE * (yields.rows / self.target.width(1) + yields.steps * weight)
        return (static + read + compute) / yields.tokens


def _candidates(profiles: Profiles, memory_budget: int | None, asked: Asked) -> list[Candidate]:
    target, drafts = profiles.target, profiles.drafts
    names = [kind for kind in asked.drafts or profiles.free if kind in profiles.free]
    free = tuple(profiles.free[kind] for kind in names)
    most, steering = target.most_k, asked.steering
    longest, expected = min(most, asked.most or most), profiles.expected
    plain = replay(target, Mix())
    maker = _Maker(target, plain, memory_budget, asked, profiles.shared, profiles.free_bytes)
    found = [maker.make("none", 0, plain)]
    for n in range(1, len(free) + 1):
        kinds = ",".join(names[:n])
        found += [maker.make(kinds, k, replay(target, Mix({}, free[:n], k))) for k in range(1, most + 1)]
        mix = Mix({}, free[:n], longest, steering, asked.least, expected=expected)
        found.append(maker.make(kinds, longest, replay(target, mix), None, steering))
    for draft in drafts.values():
        scenarios = {k: _scenario(target, draft, k) for k in range(1, min(most, draft.most) + 1)}
        for k, scenario in scenarios.items():
            found += _fixed(maker, draft, k, scenario)
        for is_mixed, name in itertools.product((True, False) if free else (False,), SCHEDULES):
            saved = _saved(scenarios) if name == "overlapped" else {}
            mix = Mix({draft.kind: draft}, free if is_mixed else (), longest, steering, asked.least, saved, expected)
            kinds = ",".join([*(names if is_mixed else ()), draft.kind])
            found.append(maker.make(kinds, longest, replay(target, mix), draft, steering, name))
    return found


def _fixed(maker: _Maker, draft: DraftProfile, k: int, scenario: Scenario) -> list[Candidate]:
    """The serial and the overlapped candidate of a draft model at a fixed k."""
    found = []
    for schedule in SCHEDULES:
        expected = predict(scenario, k, schedule)
        yields = Yield(expected.tokens_per_round, 1, expected.round_s, maker.target.width(1 + k), k)
        found.append(maker.make(draft.kind, k, yields, draft, "fixed", schedule))
    return found


def _scenario(target: TargetProfile, draft: DraftProfile, k: int) -> Scenario:
    """The pair's figures at proposals of `k` tokens, in the middle of the calibration texts."""
    at, acceptance = mean_past(target), chances_at(target, draft, k)
    survival = itertools.accumulate((acceptance[min(j, len(acceptance) - 1)] for j in range(k)), operator.mul)
    return Scenario(
        target_s={n: target.costs.seconds(target.width(n), at) for n in range(1, target.most_k + 2)},
        draft_s=draft.costs.seconds(k) / k,
        acceptance=acceptance,
        host_s=target.costs.host_s + target.costs.token_s * sum(survival),
        target_slowdown=draft.contention[0],
        draft_slowdown=draft.contention[1],
    )


def _saved(scenarios: Mapping[int, Scenario]) -> dict[int, float]:
    """k -> seconds that a round is expected to be shorter overlapped than serially."""
    found = {}
    for k, scenario in scenarios.items():
        serial, overlapped = (predict(scenario, k, name).round_s for name in SCHEDULES)
        found[k] = serial - overlapped
    return found


def scenario_json(target: TargetProfile, draft: DraftProfile) -> dict[str, Any]:
    """What `edgespec.sim.Scenario.from_json` reads: the pair's figures in the middle of the calibration texts."""
    at, longest = mean_past(target), max(draft.costs.steps)
    return {
        "target_ms": {str(n): 1e3 * target.costs.seconds(target.width(n), at) for n in range(1, target.most_k + 2)},
        "draft_ms": 1e3 * draft.costs.seconds(longest) / longest,
        "acceptance": list(draft.chances),
        "host_ms": 1e3 * target.costs.host_s,
        "contention": {"target": draft.contention[0], "draft": draft.contention[1]},
    }


def mean_past(target: TargetProfile) -> int:
    """Cached tokens in the middle of the calibration texts."""
    lengths = [len(prompt) + len(text) // 2 for prompt, text in target.texts]
    return sum(lengths) // len(lengths) if lengths else 64


def _native_s(target: TargetProfile) -> float:
    """Seconds of a native one-row step."""
    return target.costs.seconds(1, mean_past(target)) + target.costs.host_s
