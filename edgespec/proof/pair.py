"""Is this pair lossless on this machine? Three levels, each with its own evidence.

*Algorithm*: exact enumeration of the shipped rules, and broken rules that the same test must catch. *Numerics*: which
row counts give bit-identical logits here. *Pair*: the user's own target and draft, token by token against plain
decoding, and for the rules that redraw a goodness-of-fit test of the emitted tokens, with a lossy rule beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.compare import Difference, first_difference
from edgespec.errors import BackendError, ConfigError
from edgespec.llm import LLM
from edgespec.outputs import CompletionOutput
from edgespec.proof.faults import enumerate_faults
from edgespec.proof.goodness import Emission, RecordingVerifier, pit_pvalue
from edgespec.proof.rules import coupled_mismatches, enumerate_rules
from edgespec.sampling import SamplingParams
from edgespec.verify import VERIFIERS, create_verifier

__all__ = ["PROMPTS", "CheckReport", "check_pair"]

ALPHA = 1e-6
N_COUPLED_MODELS = 1000
MIN_EMISSIONS = 500
MIN_DRAFTED = 300
MAX_EMISSIONS = 8000
REDRAWING_RULES = ("rejection", "block")  # those that judge chains alone are left out where trees are drafted
LOSSY_RULE = "typical"  # the negative control at the pair's level
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list without using slices.",
    "List the planets of the solar system, one a line, then list them again.",
    "Write a short story about a lighthouse keeper and a lost whale.",
)

Progress = Callable[..., None]


@dataclass
class CheckReport:
    """Plain data of the three levels; `lossless` is True where all that was claimed held."""

    algorithm: dict[str, Any]
    numerics: dict[str, Any]
    pair: dict[str, Any]

    @property
    def lossless(self) -> bool:
        return bool(self.algorithm["passed"] and self.pair["passed"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "algorithm": self.algorithm,
            "numerics": self.numerics,
            "pair": self.pair,
        }


def check_pair(
    llm: LLM,
    prompts: Sequence[str] = PROMPTS,
    *,
    max_tokens: int = 128,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> CheckReport:
    """Check `llm`'s target with its drafters. Takes the time of about 20 x max_tokens x prompts target steps.

    Raises ConfigError where there is no drafter to check, BackendError where one failed and plain decoding would be
    held against itself.
    """
    if not llm.options.drafts:
        raise ConfigError("there is no draft to check: give --draft ngram, or a draft model with --draft-model")
    _require_drafts(llm)
    progress("enumerating the acceptance rules")
    algorithm = check_algorithm()
    progress("probing rows")
    numerics = _numerics(llm)
    ids = [llm.encode_chat([{"role": "user", "content": text}]) for text in prompts]
    report = CheckReport(algorithm, numerics, _pair(llm, ids, max_tokens, seed, progress))
    _require_drafts(llm)
    return report


def _require_drafts(llm: LLM) -> None:
    for kind, reason in llm.loaded.failed.items():
        raise BackendError(f"nothing to check with draft {kind}, which is off: {reason}")


def check_algorithm() -> dict[str, Any]:
    """Enumeration of the shipped rules, identity of the coupled rule, and the broken rules that must be caught."""
    proofs = enumerate_rules()
    mismatches = coupled_mismatches(N_COUPLED_MODELS)
    faults = enumerate_faults()
    missed = [fault.name for fault in faults if fault.passed]
    return {
        "passed": all(proof.passed for proof in proofs) and mismatches == 0 and not missed,
        "rules": sorted({proof.name for proof in proofs} | {"coupled"}),
        "n_enumerations": len(proofs),
        "max_total_variation": max(proof.total_variation for proof in proofs),
        "coupled_models": N_COUPLED_MODELS,
        "coupled_mismatches": mismatches,
        "broken_rules_caught": len(faults) - len(missed),
        "broken_rules_missed": missed,
    }


def _numerics(llm: LLM) -> dict[str, Any]:
    """What the probe says about rows; the claim of the pair level rests on it."""
    if llm.probe is None:
        return {"exact_rows": None, "mode": "fast", "note": "rows were not pinned (--fast): identity is not promised"}
    probe = llm.probe
    return {
        "mode": "exact" if probe.exact else "unavailable",
        "exact_rows": [probe.exact.min_rows, probe.exact.max_rows] if probe.exact else None,
        "exact_rows_multiple": probe.exact.multiple if probe.exact else None,
        "single_row_max_abs_diff": probe.single_row_max_abs_diff,
        "single_row_argmax_flips": probe.flips,
        "single_row_positions": probe.n_single,
        "flip_gap": probe.flip_gap,
    }


def _pair(llm: LLM, prompts: list[list[int]], max_tokens: int, seed: int, progress: Progress) -> dict[str, Any]:
    identities = []
    settings: dict[str, dict[str, Any]] = {"T=0": {"temperature": 0.0}, "T=0.8 top-p 0.95, coupled": SAMPLED}
    for name, setting in settings.items():
        progress(f"token identity at {name}")
        params = SamplingParams(**setting, seed=seed, max_tokens=max_tokens, logprobs=2)
        identities.append({"setting": name, **_identity(llm, prompts, params)})
    distributions = []
    rules = [rule for rule in REDRAWING_RULES if VERIFIERS[rule].supports_tree or not llm.options.tree]
    for rule in rules:
        progress(f"distribution under the {rule} rule")
        distributions.append(_distribution(llm, prompts, rule, max_tokens, seed))
    progress(f"distribution under the {LOSSY_RULE} rule, which is lossy and has to fail")
    control = _distribution(llm, prompts, LOSSY_RULE, max_tokens, seed)
    return {
        "passed": (all(i["identical"] for i in identities) or llm.exact is None)
        and all(d["p_value"] > ALPHA for d in distributions)
        and control["p_value"] < ALPHA,
        "identity_judged": llm.exact is not None,  # without exact rows identity is not promised
        "identity": identities,
        "distribution": distributions,
        "rules_without_trees": [rule for rule in REDRAWING_RULES if rule not in rules],
        "negative_control": {**control, "failed_as_it_should": control["p_value"] < ALPHA},
    }


def _identity(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Speculative against plain on the same kind of rows, over all prompts, under the rule that promises identity."""
    llm = llm.variant(verifier="coupled", lossy=None)
    plain, n_tokens, accepted = llm.variant(draft="none"), 0, 0
    differences: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        reference, output = _run(plain, prompt, params), _run(llm, prompt, params)
        n_tokens += len(output.token_ids)
        accepted += output.stats.accepted
        found: Difference | None = first_difference(reference, output)
        if found:
            differences.append({"prompt": number, **found.to_dict()})
    return {
        "identical": not differences,
        "tokens": n_tokens,
        "accepted": accepted,
        "first_differences": differences,
    }


def _run(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


def _distribution(llm: LLM, prompts: list[list[int]], rule: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """Do the tokens emitted under `rule` follow the target's distributions? Judged where there was a draft.

    The block rule decides where a round ends by looking ahead, so all its tokens are judged.
    """
    emissions = _emissions(llm, prompts, rule, max_tokens, seed)
    judged = [emission for emission in emissions if emission.draft is not None] or emissions
    return {"rule": rule, "tokens": len(judged), "p_value": pit_pvalue(judged)}


def _emissions(llm: LLM, prompts: list[list[int]], rule: str, max_tokens: int, seed: int) -> list[Emission]:
    """Tokens emitted by the production loop under a rule, with their distributions, from enough requests at T = 1.

    Fast rows: the rules' claim is about distributions, and the filler rows of exact mode would only dilute the test.
    """
    lossy = rule if rule == LOSSY_RULE else None
    variant = llm.variant(verifier=rule, lossy=lossy, exact=False)
    recorders: list[RecordingVerifier] = []

    def record() -> RecordingVerifier:
        recorders.append(RecordingVerifier(create_verifier(rule, lossy=lossy)))
        return recorders[-1]

    variant.verifier_factory = record
    for number in itertools.count():
        params = SamplingParams(temperature=1.0, seed=seed + number, max_tokens=max_tokens)
        _run(variant, prompts[number % len(prompts)], params)
        found = [emission for recorder in recorders for emission in recorder.emissions]
        drafted = sum(emission.draft is not None for emission in found)
        is_enough = len(found) >= MIN_EMISSIONS and (drafted >= MIN_DRAFTED or rule == "block")
        if number >= len(prompts) - 1 and (is_enough or len(found) >= MAX_EMISSIONS):
            break
    variant.forget()
    return found
