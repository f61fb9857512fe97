"""The registry of drafters, and what they share.

A drafter kind is a name and a factory `(DraftSetup) -> Drafter`, looked up lazily so that a kind's imports load on use.
Adding one: a class with the methods of `edgespec.types.Drafter`, and a row in `DRAFTERS` (or `register_drafter`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from edgespec.errors import ConfigError
from edgespec.types import DraftContext, Drafter, Model, Session

if TYPE_CHECKING:
    from edgespec.draft.table import NgramTable

__all__ = [
    "DRAFTERS",
    "DRAFT_DRAFTS",
    "FREE_DRAFTS",
    "ChainStop",
    "DraftSetup",
    "EarlyStop",
    "Guesser",
    "TreePlan",
    "create_drafter",
    "finish",
    "register_drafter",
]


@dataclass(frozen=True)
class TreePlan:
    """How large a drafted tree may grow: nodes a round, children of a node, levels.

    A tree's nodes are what `k` counts, so the controller of a run with trees starts at `rows`.
    """

    rows: int = 8
    width: int = 3
    depth: int = 5


@dataclass(frozen=True)
class EarlyStop:
    """When a chain ends before its k tokens: after one that the draft itself gives less than `p_min`.

    multiple: row counts that the target runs exactly are multiples of it, so a chain goes on until the call is full:
    rows of padding cost as much as rows of drafts. The token that ends a chain stays in it, so the rule is fair under
    every verifier.
    """

    p_min: float = 0.0
    multiple: int = 1

    def chain(self, min_survival: float = 0.0) -> ChainStop:
        """The rule for one proposal. min_survival: it also ends where the joint confidence falls below this."""
        return ChainStop(self, min_survival)


class ChainStop:
    """Judges one chain while it grows. Only tokens that are in the chain count, so any verifier stays fair."""

    def __init__(self, stop: EarlyStop, min_survival: float) -> None:
        self._stop = stop
        self._min_survival = min_survival
        self._survival = 1.0  # chance that all tokens so far are accepted, as far as the draft can tell

    @property
    def wants_confidence(self) -> bool:
        return self._stop.p_min > 0.0 or self._min_survival > 0.0

    def after(self, confidence: float, n_drafted: int) -> bool:
        """Whether the chain ends at `n_drafted` tokens, the last of which has this confidence. Called once a token."""
        self._survival *= confidence
        is_doubtful = confidence < self._stop.p_min or self._survival < self._min_survival
        return is_doubtful and (n_drafted + 1) % self._stop.multiple == 0


@dataclass(frozen=True)
class DraftSetup:
    """What a factory may use; one setup serves one slot.

    model: the loaded draft model of the kind `model`. draft_models: kind -> loaded head of the other kinds (see
    `edgespec.draft.heads` for what each offers). target and session: the target and this slot's session on it.
    tree: None for chains. stop: when a chain ends early. ahead: the schedule drafts for rounds in flight. draft_draft:
    what guesses for drafts that are models (`edgespec.draft.model`). table: of the kind `table`.
    """

    n_vocab: int
    prompt_lookup_min: int = 2
    table: NgramTable | None = None
    model: Model | None = None
    draft_models: Mapping[str, Any] = field(default_factory=dict)
    target: Model | None = None
    session: Session | None = None
    threads: int | None = None
    tree: TreePlan | None = None
    stop: EarlyStop = field(default_factory=EarlyStop)
    ahead: bool = False
    draft_draft: str = "none"

    def head(self, kind: str) -> Any:
        """The loaded head of a kind; raises ConfigError where none was given."""
        if kind not in self.draft_models:
            raise ConfigError(f"draft={kind!r} has no trained head here: give its draft bundle, or use draft='ngram'")
        return self.draft_models[kind]


class Guesser(Protocol):
    """What drafts for a draft, which judges its guesses in one pass: they cost or save time, nothing else."""

    def reset(self) -> None: ...

    def guess(self, context: DraftContext, k: int) -> list[int]:
        """At most k tokens after `context.tokens`, of which the last `context.n_ahead` may turn out wrong."""

    def close(self) -> None: ...


Factory = Callable[[DraftSetup], Drafter]
Result = TypeVar("Result")

DRAFTERS: dict[str, str | Factory] = {
    "ngram": "edgespec.draft.ngram:create",
    "table": "edgespec.draft.table:create",
    "model": "edgespec.draft.model:create",
    "tinydraft": "edgespec.draft.model:create_tinydraft",
    "eagle": "edgespec.draft.eagle:create",
    "medusa": "edgespec.draft.medusa:create",
    "early-exit": "edgespec.draft.early_exit:create",
}


FREE_DRAFTS = ("ngram", "table")
"""Draft kinds that run no model: a proposal costs nothing but the rows that the target verifies."""
DRAFT_DRAFTS: Mapping[str, tuple[str, ...]] = {"none": (), "ngram": ("model", "tinydraft"), "tinydraft": ("model",)}
"""What may draft for a draft -> the kinds that it may draft for."""


def register_drafter(name: str, factory: str | Factory) -> None:
    """Add a kind; `factory` is a callable or "module:callable"."""
    DRAFTERS[name] = factory


def create_drafter(name: str, setup: DraftSetup) -> Drafter:
    """Raises ConfigError for an unknown kind."""
    if name not in DRAFTERS:
        raise ConfigError(f"unknown draft kind {name!r}: use one of none, {', '.join(DRAFTERS)}")
    factory = DRAFTERS[name]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    assert callable(factory)
    return factory(setup)


def finish(steps: Generator[None, None, Result]) -> Result:
    """Run a generator of passes to its end; what it returns."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result
