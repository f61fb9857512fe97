"""Measures what target and drafts cost on this machine, and how often drafts are right, and keeps it for later runs.

Everything is run through the production code: calls on sessions for V(n), short generations of a few prompts for the
rest. Stored in the machine profile per (model, device, threads, onnxruntime, row counts, power state); figures older
than MOST_AGE_S, or of another version of this module, are measured again. Decides nothing: see `edgespec.planner`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from edgespec.calibration import CONTEXTS, PROMPTS, QUICK, ROWS, CalibrationRun, Effort
from edgespec.contention import measure_contention, shared_place
from edgespec.cpu import cpu_identity
from edgespec.draft.base import FREE_DRAFTS
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.table import TableDrafter
from edgespec.draft_records import chances, choice_s, draft_costs, in_place, token_s
from edgespec.engine.costs import DraftCosts, MeasuredCosts, Spread, spread, typical
from edgespec.engine.learned import Expectation
from edgespec.errors import IncompatibleError
from edgespec.judged import Judged
from edgespec.machine import Profile, open_profile
from edgespec.rehearsal import rehearse
from edgespec.sampling import SamplingParams
from edgespec.telemetry import read_power
from edgespec.types import FILLER, Drafter, ExactRows, Model, ModelInfo

if TYPE_CHECKING:
    from edgespec.llm import LLM
    from edgespec.options import EngineOptions

__all__ = [
    "MOST_K",
    "PROMPTS",
    "QUICK",
    "DraftProfile",
    "Effort",
    "Profiles",
    "TargetProfile",
    "measure_target",
    "profile_llm",
    "refuse_tree",
]

VERSION = 6
MOST_K = 8  # tokens that a plan drafts a round
LEAST_SWEPT = 10  # tokens of a text that say how calls last in place; a slow target's host time is nothing beside them
_TEXTS = ("name", "device", "kind", "power")  # fields that hold words
_NUMBERS = ("guess", "bytes", "load_s", "measured_at", "temperature", "most", "host_s", "token_s")
MOST_AGE_S = 30 * 86400.0
LONGEST = max(CONTEXTS) + max(ROWS)  # cached tokens that are measured at most
Progress = Callable[..., None]
Texts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # (prompt, answer)


@dataclass(frozen=True)
class TargetProfile:
    """texts: (prompt ids, generated ids) of the calibration. guess: acceptance of free guesses in exact mode.

    exact: the row counts that calls are padded to, as (min, max, multiple). bytes: weights and a full cache.
    choice_s: host seconds that the adaptive controller adds to a round that drafts, and to one that does not.
    """

    name: str
    device: str
    costs: MeasuredCosts
    exact: tuple[int, int, int] | None
    guess: float
    texts: Texts
    bytes: int
    load_s: float
    power: str
    measured_at: float
    temperature: float = 0.0
    choice_s: tuple[float, float] = (0.0, 0.0)

    @property
    def most_k(self) -> int:
        """Tokens that a round may draft as far as V(n) was measured, and exact rows hold."""
        measured = max(max(rows) for rows in self.costs.target.values())
        return max(0, min(MOST_K, measured - 1, self.exact[1] - 1 if self.exact else MOST_K))

    def width(self, n_rows: int) -> int:
        """Rows that are really run for `n_rows` wanted ones."""
        return ExactRows(*self.exact).width(n_rows) if self.exact else n_rows

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "costs": self.costs.to_json(),
            "texts": [[list(a), list(b)] for a, b in self.texts],
            "exact": None if self.exact is None else list(self.exact),
            "choice_s": list(self.choice_s),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TargetProfile:
        """What `to_json` wrote; raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        exact = fields["exact"]
        rows = None if exact is None else (int(exact[0]), int(exact[1]), int(exact[2]))
        texts = tuple((tuple(map(int, a)), tuple(map(int, b))) for a, b in fields["texts"])
        drafting, idle = map(float, fields["choice_s"])
        costs = MeasuredCosts.from_json(fields["costs"])
        if min(entry.median for row in costs.target.values() for entry in row.values()) <= 0.0:
            raise ValueError("a call takes no time")
        return cls(**{**fields, "costs": costs, "exact": rows, "texts": texts, "choice_s": (drafting, idle)})


@dataclass(frozen=True)
class DraftProfile:
    """chances: conditional acceptance by position. contention: times of (target, draft) side by side over in turn.

    places: of each calibration text, what the draft got right at every place, from the end of the prompt on. most,
    passes: tokens of a proposal, and runs of the draft's model for it, as in `Offer`.
    """

    kind: str
    device: str
    costs: DraftCosts
    chances: tuple[float, ...]
    contention: tuple[float, float]
    bytes: int
    load_s: float
    measured_at: float
    places: tuple[tuple[Judged, ...], ...] = ()
    most: int = MOST_K
    passes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "costs": self.costs.to_json(),
            "chances": list(self.chances),
            "contention": list(self.contention),
            "places": [[place.to_json() for place in text] for text in self.places],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DraftProfile:
        """What `to_json` wrote; raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        target, draft = fields["contention"]
        return cls(
            **{
                **fields,
                "costs": DraftCosts.from_json(fields["costs"]),
                "chances": tuple(map(float, fields["chances"])),
                "contention": (float(target), float(draft)),
                "places": tuple(tuple(map(Judged.from_json, text)) for text in fields["places"]),
            }
        )


@dataclass
class Profiles:
    """What is known of one loaded target and its drafts. shared: kind -> what that draft takes from the target.

    free: kind -> makes the drafter of a kind that runs no model. free_bytes: what of those takes memory. buckets:
    how often those were right (`rehearse`).
    """

    target: TargetProfile
    drafts: dict[str, DraftProfile] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    free: Mapping[str, Callable[[], Drafter]] = field(default_factory=lambda: {"ngram": NgramDrafter}, compare=False)
    free_bytes: dict[str, int] = field(default_factory=dict)
    buckets: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)

    @property
    def expected(self) -> Expectation:
        """What a controller starts with: all costs in one table, and how often drafts were right."""
        costs = replace(self.target.costs, drafts={kind: draft.costs for kind, draft in self.drafts.items()})
        chances = {kind: draft.chances for kind, draft in self.drafts.items()}
        return Expectation(costs, chances, self.target.guess, self.target.temperature > 0.0, self.buckets)


def refuse_tree(options: EngineOptions) -> None:
    """Raises IncompatibleError where the options ask for trees."""
    if options.tree:
        raise IncompatibleError("tree=True (--tree): what is profiled and planned are chains; drop the tree")


def profile_llm(
    llm: LLM,
    *,
    effort: Effort = QUICK,
    fresh: bool = False,
    prompts: Sequence[list[int]] | None = None,
    temperature: float = 0.0,
    load_s: float = 0.0,
    progress: Progress | None = None,
    store: Profile | None = None,
) -> Profiles:
    """The figures of `llm`'s target and of the drafts that it was loaded with, measured where none are kept.

    fresh: measure in any case. temperature: of the texts and the acceptance, which falls where it rises. prompts: token
    ids to calibrate on instead of the built-in ones. Nothing is kept then, nor of a model without a `content_key`,
    which says what it is.
    """
    SamplingParams(temperature=temperature)  # refuses what is none
    refuse_tree(llm.options)
    store = store or open_profile()
    content = getattr(llm.target, "content_key", None)
    is_kept = prompts is None and content is not None
    key = f"v{VERSION} {content} {cpu_identity()} exact={llm.exact} power={read_power().name}"
    key += f" ctx={_context(llm.target)} rule={llm.options.verifier}"
    key += f" T={temperature:g}" if temperature else ""
    found = None if fresh or not is_kept else _load(store, key, TargetProfile.from_json)
    run = CalibrationRun(llm, prompts, effort, temperature)
    if found is None:
        found = _measure_target_profile(llm, run, effort, load_s, progress)
        _keep(store, key, found, is_kept)
    found = replace(found, bytes=_model_bytes(llm.target.info))  # of this context, whichever it was measured in
    run.fit(effort, found.costs.target)
    run.prompts = [list(prompt) for prompt, _ in found.texts]  # a kept target's may be others than `effort` has
    texts_key = hashlib.sha256(repr(found.texts).encode()).hexdigest()[:12]
    free = _free_drafts(llm)
    profiles = Profiles(found, free=free, buckets=rehearse(found.texts, free.values()))
    if llm.loaded.table is not None:
        profiles.free_bytes["table"] = llm.loaded.table.n_bytes
    for kind in llm.working_drafts:
        if kind in FREE_DRAFTS:
            continue  # it costs nothing, and what it yields is replayed on the texts
        identity = _draft_identity(llm, kind)
        draft_key, is_known = f"{key} draft={kind} {identity} {texts_key}", is_kept and identity is not None
        draft = None if fresh or not is_known else _load(store, draft_key, DraftProfile.from_json)
        if draft is None:
            draft = _measure_draft(llm, kind, run, effort, found.texts, progress)
            if kind not in llm.working_drafts:  # it failed meanwhile: that is no figure of it
                continue
            _keep(store, draft_key, draft, is_known)
        profiles.drafts[kind] = replace(draft, bytes=_draft_bytes(llm, kind))
        device = llm.loaded.draft_uses[kind].device
        if shared := shared_place(llm.target.info.device, device, llm.options.threads):
            profiles.shared[kind] = shared
    return profiles


def _free_drafts(llm: LLM) -> dict[str, Callable[[], Drafter]]:
    """Kind -> makes that drafter as `llm` would."""
    table = llm.loaded.table
    found: dict[str, Callable[[], Drafter]] = {"ngram": partial(NgramDrafter, llm.options.prompt_lookup_min)}
    if table is not None:
        found["table"] = partial(TableDrafter, table)
    return found


def _draft_identity(llm: LLM, kind: str) -> str | None:
    """What the figures of a draft depend on beside the target's; None where nothing says which draft it is."""
    if kind in llm.loaded.bundles:
        content: str | None = f"{llm.loaded.bundles[kind].name} device={llm.options.draft_device}"
    else:
        content = getattr(llm.draft_model, "content_key", None)
    if content is None:
        return None
    head = _draft_head(llm, kind)
    options = llm.options
    return f"{content} ctx={_context(head)} p_min={options.draft_p_min:g} draft_draft={options.draft_draft}"


def _draft_head(llm: LLM, kind: str) -> Any:
    return llm.loaded.heads.get(kind, llm.draft_model if kind == "model" else None)


def _context(model: Any) -> int | None:
    """Its context as far as a profile depends on it; None of a draft that has none."""
    info = getattr(model, "info", None)
    return None if info is None else min(info.n_ctx, LONGEST)


def _load(store: Profile, key: str, parse: Callable[[Mapping[str, Any]], Any]) -> Any | None:
    """A kept profile that is not too old; None where there is none that can be read."""
    fields = store.get("costs", key)
    if not isinstance(fields, Mapping) or not _is_sound(fields):
        return None
    try:
        found = parse(fields)
        is_young = 0 <= time.time() - found.measured_at < MOST_AGE_S
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # damaged, or written by another version
    return found if is_young else None


def _is_sound(value: Any, name: str = "") -> bool:
    """Whether stored figures are figures: texts and nothing only where they belong, numbers finite and not negative."""
    if isinstance(value, Mapping):
        return bool(value or name == "drafts" or name == "catch_up") and all(_is_sound(v, k) for k, v in value.items())
    if isinstance(value, list):
        return name not in _NUMBERS and all(_is_sound(entry) for entry in value)
    if name in _TEXTS:
        return isinstance(value, str)
    if value is None:
        return name in ("exact", "passes")
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _keep(store: Profile, key: str, found: TargetProfile | DraftProfile, is_kept: bool) -> None:
    if is_kept:
        store.put("costs", key, found.to_json())


# --- the target -------------------------------------------------------------------------------------------------------


def measure_target(
    model: Model, exact: ExactRows | None, effort: Effort, progress: Progress | None = None
) -> dict[int, dict[int, Spread]]:
    """Cached tokens -> rows -> seconds of a call, on a session of its own. Row counts that exact mode never runs are
    left out; one row, the native plain step, is always in. Row counts take turns, so that a slow moment hits all."""
    info = model.info
    widths = sorted({1, *(n if exact is None else exact.width(n) for n in effort.rows)})
    most = min(n for n in (widths[-1], info.max_rows, info.max_rewind, info.n_ctx - 1) if n is not None)
    widths = [n for n in widths if n <= most or n == 1]
    can_rewind = info.max_rewind is None or info.max_rewind > 0
    most = most if can_rewind else effort.repeats + 1  # rows beside the cached ones: single ones may as well go on
    contexts = [n for n in effort.contexts if n + most < info.n_ctx] or [max(1, info.n_ctx - most - 1)]
    session, table = model.open_session(), {}
    try:
        for n_past in contexts:
            _fill(session, n_past, min(256, info.max_rows or 256), info.n_vocab)
            table[n_past] = _time_widths(session, widths, effort, info.n_vocab, can_rewind, progress)
    finally:
        session.close()
    return table


def _fill(session: Any, n_past: int, chunk: int, n_vocab: int) -> None:
    while session.n_past < n_past:
        n = min(chunk, n_past - session.n_past)
        session.forward([(7 * i + session.n_past) % n_vocab for i in range(n)], logits_rows=())


def _time_widths(
    session: Any, widths: Sequence[int], effort: Effort, n_vocab: int, can_rewind: bool, progress: Progress | None
) -> dict[int, Spread]:
    seconds: dict[int, list[float]] = {n: [] for n in widths}
    n_past = session.n_past
    began = time.perf_counter()
    for turn in range(-1, effort.repeats):  # the first turn warms up: buffers are made then
        if turn >= 1 and time.perf_counter() - began > effort.budget_s:
            break
        for n in widths:
            if progress:
                progress("Measuring this machine", turn * len(widths) + n, effort.repeats * len(widths))
            rows = session.forward([(11 * i + n) % n_vocab for i in range(n)])
            if can_rewind:
                session.keep(n_past)
            if turn >= 0:
                seconds[n].append(rows.run_s)
    return {n: spread(values) for n, values in seconds.items()}


def _measure_target_profile(
    llm: LLM, run: CalibrationRun, effort: Effort, load_s: float, progress: Progress | None
) -> TargetProfile:
    target = measure_target(llm.target, llm.exact, effort, progress)
    run.fit(effort, target)
    texts, records = run.generate("none", 1)
    free = [r for r in records if r.source == FILLER]
    info, exact = llm.target.info, llm.exact
    found = TargetProfile(
        name=info.name,
        device=info.device,
        costs=MeasuredCosts(target, typical([r.host_s for r in records if r.index]), token_s=token_s(records)),
        exact=None if exact is None else (exact.min_rows, exact.max_rows, exact.multiple),
        guess=sum(r.accepted for r in free) / len(free) if free else 0.0,
        texts=tuple((tuple(prompt), tuple(text)) for prompt, text in zip(run.prompts, texts, strict=True)),
        bytes=_model_bytes(info),
        load_s=load_s,
        power=read_power().name,
        measured_at=time.time(),
        temperature=run.temperature,
    )
    if (k := run.most_k(found.most_k)) < 1 or run.n_tokens < LEAST_SWEPT:
        return found
    swept = run.sweep(k)
    found = replace(found, costs=in_place(found.costs, records, swept, [len(prompt) for prompt in run.prompts]))
    adapted = run.adapt("ngram", k, Profiles(found).expected)
    return replace(found, choice_s=choice_s(adapted, found.costs))


# --- drafts -----------------------------------------------------------------------------------------------------------


def _measure_draft(
    llm: LLM, kind: str, run: CalibrationRun, effort: Effort, texts: Texts, progress: Progress | None
) -> DraftProfile:
    if progress:
        progress(f"Measuring the {kind} draft")
    runs = {k: run.generate(kind, k)[1] for k in sorted({run.most_k(k) for k in effort.depths})}
    costs = draft_costs(runs, kind, [len(prompt) for prompt in run.prompts])
    judged = run.judge(kind, max(runs))
    return DraftProfile(
        kind=kind,
        device=llm.loaded.draft_uses[kind].device,
        costs=costs,
        chances=chances([record for record in runs[max(runs)] if record.source == kind]),
        contention=measure_contention(llm, kind, run.prompts[:2]),
        bytes=_draft_bytes(llm, kind),
        load_s=_load_seconds(llm, kind),
        measured_at=time.time(),
        places=judged.places_in([text for _, text in texts]),
        most=judged.most,
        passes=judged.passes,
    )


def _model_bytes(info: ModelInfo) -> int:
    """Weights and a full cache."""
    return int(info.weight_bytes + info.kv_bytes_per_token * info.n_ctx)


def _draft_bytes(llm: LLM, kind: str) -> int:
    """Weights and a full cache of a draft; the files of its bundle where it does not say."""
    info, bundle = getattr(_draft_head(llm, kind), "info", None), llm.loaded.bundles.get(kind)
    if info is not None:
        return _model_bytes(info)
    return sum(path.stat().st_size for path in bundle.iterdir() if path.is_file()) if bundle else 0


def _load_seconds(llm: LLM, kind: str) -> float:
    """How long the draft takes to load, by loading it once more."""
    from edgespec.draft_bundle import open_draft

    if kind not in llm.loaded.bundles:
        return 0.0
    began = time.perf_counter()
    open_draft(llm.loaded.bundles[kind], llm.options).close()
    return time.perf_counter() - began
