"""Does the plan hold? Predictions against measurements, and auto against plain decoding and the best fixed length.

Half of the prompts calibrate the profile, the other half judges; or the profile is that of first use, made from texts
of its own, and all prompts judge. Nothing is compared on prompts that it was made from.
All ways to decode take turns on each prompt, so that a slow minute hits all of them. Plain is native plain decoding, a
row a step; plain with exact rows is listed beside it. Speeds are given as they were, and at standard costs
(`standard`), as the same call takes half as long again when the machine has other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.auto import auto_options, candidate_kinds
from edgespec.draft.base import FREE_DRAFTS
from edgespec.errors import ConfigError
from edgespec.pairs import ensure
from edgespec.planner import Asked, Candidate, Plan, make_plan
from edgespec.profile import QUICK, Effort, Profiles, profile_llm
from edgespec.stats import RunStats
from edgespec.types import RoundRecord
from edgespec_bench.prompts import KINDS, load_prompts
from edgespec_bench.spread import paired_ratio
from edgespec_bench.standard import Pace, standard_paces, together

__all__ = ["AutoOptions", "measure_auto"]

Say = Callable[[str], None]
PLAIN, AUTO = "plain", "auto"
CALIBRATE = ("half", "first-use")


@dataclass(frozen=True)
class AutoOptions:
    """n_prompts: of each kind. calibrate: on "half" of them, or as at "first-use". ks: what auto has to keep up with.

    n_turns: how often every way to decode answers each prompt that judges. Raises ConfigError for fewer than two
    prompts, and for a temperature that is none.
    """

    model: str = "smollm2-135m"
    threads: int = 2
    n_tokens: int = 160
    n_prompts: int = 8
    kinds: tuple[str, ...] = KINDS
    ks: tuple[int, ...] = (1, 2, 3, 5)
    most_trained: int = 1
    temperature: float = 0.0
    exact: bool = True
    n_turns: int = 1
    calibrate: str = "half"

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature)  # refuses what is none
        if self.calibrate not in CALIBRATE:
            raise ConfigError(f"calibrate={self.calibrate!r}: use one of {', '.join(CALIBRATE)}")
        if self.n_prompts < (2 if self.calibrate == "half" else 1):
            raise ConfigError(f"prompts={self.n_prompts}: at least 2 of each kind, one to calibrate and one to judge")


def measure_auto(options: AutoOptions, say: Say) -> dict[str, Any]:
    """The plan with its errors, and a row for each kind of prompt."""
    folder = Path(ensure(options.model))
    drafts = ",".join(candidate_kinds(folder, most=options.most_trained))
    with LLM(folder, draft=drafts, threads=options.threads, exact=options.exact) as llm:
        prompts = {kind: _prompts(llm, kind, options.n_prompts) for kind in options.kinds}
        profiles, judges = _calibrate(llm, prompts, options, say)
        plan = make_plan([profiles], asked=Asked(schedule="serial"))
        say(f"plan: {plan.chosen.label}, {plan.reason}")
        llm.loaded.expected = profiles.expected
        with _sides(llm, plan, options) as sides:
            measured = {kind: _measure(sides, kind, own, options, say) for kind, own in judges.items()}
    paces = {kind: found[0] for kind, found in measured.items()}
    return {
        "plan": plan.summary(),
        "predictions": _predictions(plan, paces),
        "rows": [_row(kind, *found) for kind, found in measured.items()],
    }


def _calibrate(
    llm: LLM, prompts: Mapping[str, list[list[int]]], options: AutoOptions, say: Say
) -> tuple[Profiles, dict[str, list[list[int]]]]:
    """The profile, measured anew, and the prompts of each kind that judge."""
    if options.calibrate == "first-use":
        say(f"calibrating as at first use, drafts {llm.options.draft}")
        return profile_llm(llm, effort=QUICK, fresh=True), dict(prompts)
    say(f"calibrating on {options.n_prompts // 2} prompts of each kind, drafts {llm.options.draft}")
    calibration = [prompt for kind in prompts.values() for prompt in kind[::2]]
    effort = Effort(n_tokens=options.n_tokens)
    profiles = profile_llm(llm, effort=effort, prompts=calibration, temperature=options.temperature)
    return profiles, {kind: own[1::2] for kind, own in prompts.items()}


def _prompts(llm: LLM, kind: str, n: int) -> list[list[int]]:
    return [llm.encode_chat(prompt.messages) for prompt in load_prompts(kind)[:n]]


@contextmanager
def _sides(llm: LLM, plan: Plan, options: AutoOptions) -> Iterator[dict[str, LLM]]:
    """Label -> an LLM for every way to decode; all but native plain share the loaded models."""
    with ExitStack() as stack:
        sides = {PLAIN: stack.enter_context(llm.native_plain())}
        free = [kind for kind in llm.options.drafts if kind in FREE_DRAFTS]
        unset = replace(llm.options, draft="auto", num_speculative_tokens=None)  # as if nobody had named a length
        chosen = auto_options(unset, plan, free=free)
        changes = {name: getattr(chosen, name) for name in ("draft", "controller", "num_speculative_tokens")}
        sides[AUTO] = llm.variant(**changes)
        for c in _wanted(plan, options.ks):
            k = max(1, c.k)
            sides[c.label] = llm.variant(draft=c.draft, controller=c.controller, num_speculative_tokens=k)
        yield sides
        for side in sides.values():
            side.forget()


def _wanted(plan: Plan, ks: Sequence[int]) -> list[Candidate]:
    """Plain with the same rows, every draft at the fixed lengths, every adaptive mix, and what the plan chose."""
    return [
        c
        for c in plan.candidates
        if c.schedule == "serial"
        and c.obstacle is None
        and (c.draft == "none" or c.controller == "adaptive" or c.k in ks or c == plan.chosen)
    ]


def _measure(
    sides: Mapping[str, LLM], kind: str, prompts: Sequence[list[int]], options: AutoOptions, say: Say
) -> tuple[dict[str, list[Pace]], dict[str, list[Pace]]]:
    """Label -> pace of each prompt's answer, as it was and at standard costs.

    Prompts that some side answers in one round are left out.
    """
    params = SamplingParams(max_tokens=options.n_tokens, temperature=options.temperature, seed=1)
    paces: dict[str, list[Pace]] = {label: [] for label in sides}
    answers: dict[str, list[list[RoundRecord]]] = {label: [] for label in sides}
    asked = [prompt for _ in range(options.n_turns) for prompt in prompts]
    for turn, prompt in enumerate(asked):
        say(f"{kind}, answer {turn + 1} of {len(asked)}, {len(sides)} ways")
        order = list(sides)
        order = order[turn % len(order) :] + order[: turn % len(order)]  # nobody is always first
        found: dict[str, RunStats] = {}
        for label in order:
            sides[label].forget()
            found[label] = sides[label].generate([prompt], params)[0].outputs[0].stats
        if all(stats.decode_tok_s is not None for stats in found.values()):
            for label, stats in found.items():
                paces[label].append(Pace.of(stats))
                answers[label].append(stats.records)
    if not paces[PLAIN]:
        raise ConfigError(f"every {kind} prompt was answered in one round: use more tokens (-n)")
    return paces, standard_paces(answers)


def _row(kind: str, paces: Mapping[str, list[Pace]], standard: Mapping[str, list[Pace]]) -> dict[str, Any]:
    """Auto against plain and against the fixed length that was best on this kind of prompt, known only afterwards.

    Speeds are of all answers of a kind together, as a user waits for them; ratios of single answers are the spread.
    """
    row: dict[str, Any] = {"kind": kind, "n_prompts": len(paces[PLAIN])}
    for suffix, values in (("", paces), ("_at_standard_costs", standard)):
        fixed = [label for label in values if "k =" in label]
        best = max(fixed, key=lambda label: together(values[label])) if fixed else PLAIN
        row |= {
            f"tok_s{suffix}": {label: round(together(own), 1) for label, own in values.items()},
            f"auto_vs_plain{suffix}": _ratio(values[AUTO], values[PLAIN]),
            f"best_fixed{suffix}": best,
            f"auto_vs_best_fixed{suffix}": _ratio(values[AUTO], values[best]),
        }
    return row


def _ratio(ours: Sequence[Pace], theirs: Sequence[Pace]) -> dict[str, Any]:
    by_answer = paired_ratio([pace.tok_s for pace in ours], [pace.tok_s for pace in theirs])
    return {"together": round(together(ours) / together(theirs), 3), **by_answer.to_dict(3)}


def _predictions(plan: Plan, paces: Mapping[str, Mapping[str, list[Pace]]]) -> dict[str, Any]:
    """Predicted and measured tokens a second over all kinds, and how far the chosen one is from the best measured."""
    measured = {
        c.label: together([pace for kind in paces.values() for pace in kind[c.label]])
        for c in plan.candidates
        if all(c.label in kind for kind in paces.values())
    }
    plain = next(c for c in plan.candidates if c.draft == "none")
    rows = [
        _prediction(c, measured[c.label], plain.tok_s / measured[plain.label])
        for c in plan.candidates
        if c.label in measured
    ]
    best = max(measured, key=lambda label: measured[label])
    return {
        "rows": rows,
        "worst_error": max(abs(row["error"]) for row in rows),
        "worst_relative_error": max(abs(row["relative_error"]) for row in rows),
        "best_measured": best,
        "chosen": plan.chosen.label,
        "chosen_vs_best": round(measured[plan.chosen.label] / measured[best], 3),
    }


def _prediction(candidate: Candidate, measured_tok_s: float, drift: float) -> dict[str, Any]:
    """relative_error: of the speed over plain decoding with the same rows, which a slower machine leaves as it is."""
    return {
        "label": candidate.label,
        "predicted_tok_s": round(candidate.tok_s, 1),
        "measured_tok_s": round(measured_tok_s, 1),
        "error": round(candidate.tok_s / measured_tok_s - 1, 3),
        "relative_error": round(candidate.tok_s / measured_tok_s / drift - 1, 3),
    }
