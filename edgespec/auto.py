"""`--draft auto`: which drafts a target could have here, their profile, and the plan turned into options.

Puts together what the zoo, the profile and the planner know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import zoo
from edgespec.bundle import Bundle
from edgespec.contention import shared_place
from edgespec.devices import Device
from edgespec.draft.base import FREE_DRAFTS
from edgespec.errors import ConfigError, EdgeSpecError
from edgespec.loading import Loaded, ModelSource, kind_of, load
from edgespec.options import AUTO, IN_FLIGHT_DRAFTS, EngineOptions
from edgespec.pairs import resolve
from edgespec.planner import MOST_K, Asked, Plan, make_plan
from edgespec.profile import QUICK, profile_llm

if TYPE_CHECKING:
    from edgespec.llm import LLM
    from edgespec.text import Tokenizer

__all__ = ["PLANNED", "add_table", "auto_options", "candidate_kinds", "is_plannable", "open_models"]

MOST_TRAINED = 1  # trained drafts that are measured at first use: each takes some seconds
PLANNED = ("schedule", "controller", "num_speculative_tokens", "min_speculative_tokens")  # options that a plan takes
OF_DRAFT_MODELS = ("draft_n_ctx", "draft_device", "draft_device_options", "draft_p_min")
Progress = Callable[..., None]


def is_plannable(options: Mapping[str, Any]) -> bool:
    """Whether drafts may be left to the plan where none is named: it must not matter to the text what it chooses.

    options: fields of EngineOptions. A rule that redraws, or rows that depend on their neighbours, would give other
    texts as the machine's speed changes; trees are for drafts that are named.
    """
    defaults = {name: EngineOptions.__dataclass_fields__[name].default for name in ("verifier", "exact", "tree")}
    return all(options.get(name, default) == default for name, default in defaults.items())


def candidate_kinds(folder: Path | None, most: int | None = None, *, ahead: bool = False) -> tuple[str, ...]:
    """Draft kinds worth measuring for the target in `folder`: those that run no model, then the most accepted first.

    Early exit is left out: it needs the target in parts, which is slower without it. most: trained kinds at most.
    ahead: only those that can draft while the target verifies.
    """
    if folder is None or not (folder / "bundle.json").is_file():
        return ("ngram",)
    target = Bundle.open(folder)
    free = ("ngram", "table") if zoo.find_table(target.info) else ("ngram",)
    left_out = {"early-exit", *(IN_FLIGHT_DRAFTS if ahead else ())}
    known = [draft for draft in zoo.list_drafts(target.info.name) if draft.kind not in left_out]
    fitting = [draft for draft in known if zoo.fits(draft, target)]
    fitting.sort(key=lambda draft: -_promise(draft.acceptance))
    return (*free, *(draft.kind for draft in fitting[:most]))


def _promise(acceptance: Mapping[str, Any]) -> float:
    """Tokens a round that the draft's own card names, 0 where it names none."""
    value = acceptance.get("mean_acceptance_length")
    return float(value) if isinstance(value, (int, float)) else 0.0


def add_table(llm: LLM, kinds: Sequence[str]) -> list[str]:
    """`kinds`, and "table" where the zoo has one for a target that is no bundle, which is known once it is loaded.

    Loads it into `llm`; one that cannot be used is left out.
    """
    folder = None if "table" in kinds else zoo.find_table(llm.target.info)
    if folder is None:
        return list(kinds)
    try:
        llm.loaded.table = zoo.open_table(llm.target.info, folder)
    except EdgeSpecError:
        return list(kinds)
    return [*kinds, "table"]


def open_models(
    model: ModelSource,
    draft_model: ModelSource | None,
    options: EngineOptions,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> tuple[EngineOptions, Loaded]:
    """The models of `options`, and the options to run them with: the plan's for draft="auto", else as they are."""
    how = (model, draft_model, options, tokenizer, progress)
    return _decide(*how) if options.draft == AUTO else (options, load(*how))


def _decide(
    model: ModelSource,
    draft_model: ModelSource | None,
    options: EngineOptions,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> tuple[EngineOptions, Loaded]:
    """The options that the plan makes of `options`, and the models for them; measures where no profile is kept.

    Loads every candidate draft, and closes those that the plan does without. Raises what loading raises.
    """
    from edgespec.llm import LLM  # an LLM of all candidates is what is measured

    runtime = Device.parse(options.device).runtime
    folder = resolve(model, progress=progress, runtime=runtime) if isinstance(model, (str, Path)) else None
    kinds = _kinds(folder, draft_model, options)
    asked = Asked.by(options)
    fields = {name: getattr(options, name) for name in EngineOptions.names() if name not in ("draft", *PLANNED)}
    if set(kinds) <= {*FREE_DRAFTS}:
        fields.update({name: EngineOptions.__dataclass_fields__[name].default for name in OF_DRAFT_MODELS})
    llm = LLM(
        folder or model,
        draft=",".join(kinds),
        draft_model=draft_model,
        tokenizer=tokenizer,
        progress=progress,
        **fields,
    )
    try:
        kinds = add_table(llm, kinds)
        profiles = profile_llm(llm, effort=QUICK, progress=progress)
        plan = make_plan([profiles], asked=asked)
        free = [kind for kind in kinds if kind in FREE_DRAFTS]
        chosen, loaded = auto_options(options, plan, min(MOST_K, llm.most_k), free), llm.loaded
    except BaseException:
        llm.close()
        raise
    llm.forget()
    loaded.expected, loaded.plan = profiles.expected, plan.summary()
    for kind in [kind for kind in loaded.heads if kind not in chosen.drafts]:
        loaded.heads.pop(kind).close()
        loaded.bundles.pop(kind, None)
    if "table" not in chosen.drafts:
        loaded.table = None
    if loaded.draft_model is not None and "model" not in chosen.drafts:
        if isinstance(draft_model, (str, Path)):
            loaded.draft_model.close()
        loaded.draft_model = None
    return chosen, loaded


def _kinds(folder: Path | None, draft_model: ModelSource | None, options: EngineOptions) -> list[str]:
    """Draft kinds to measure; raises ConfigError where none of them can be run under the schedule that is asked for."""
    is_ahead = options.schedule == "overlapped"
    kinds = [*candidate_kinds(folder, MOST_TRAINED, ahead=is_ahead)]
    if options.schedule is None and not shared_place(options.device, options.draft_device, options.threads):
        kinds += candidate_kinds(folder, MOST_TRAINED, ahead=True)
    given = None if draft_model is None else kind_of(draft_model)
    if given is not None and not (is_ahead and given in IN_FLIGHT_DRAFTS):
        kinds.append(given)
    if is_ahead and set(kinds) <= {*FREE_DRAFTS}:
        raise ConfigError(
            "schedule='overlapped' (--schedule overlapped) with draft='auto': there is no draft with weights here that "
            "can work while the target verifies; give one (--draft-model), or drop the schedule"
        )
    return list(dict.fromkeys(kinds))


def auto_options(
    options: EngineOptions, plan: Plan, most: int = MOST_K, free: Sequence[str] = ("ngram",)
) -> EngineOptions:
    """`options` with the drafts and the schedule of the plan, under the adaptive controller.

    most: tokens that a round may draft here: exact rows hold fewer in a short context or on a narrow graph. The chosen
    drafts go with those that run no model (`free`, which are loaded) where the adaptive controller weighs them. A
    length or a controller that the user set stays.
    """
    chosen, is_fixed = plan.chosen, options.controller == "fixed"
    drafts = [] if chosen.draft == "none" else chosen.draft.split(",")
    if drafts and options.controller in (None, "adaptive"):
        drafts = list(dict.fromkeys([*free, *drafts]))
    return replace(
        options,
        draft=",".join(drafts) or "none",
        schedule=chosen.schedule if drafts else None,
        controller=options.controller or "adaptive",
        num_speculative_tokens=options.num_speculative_tokens
        or max(1, options.min_speculative_tokens, chosen.k if is_fixed else most),
    )
