"""Every kind of draft head on table models, made by the production factories, and the production loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loop_driver import Outcome, draft_model, run

from edgespec.draft import DraftSetup, EarlyStop, TreePlan, create_drafter
from edgespec.sampling import SamplingParams
from edgespec.testing import TableModel
from edgespec.testing.heads import (
    EagleHead,
    ExitHead,
    MedusaHead,
    ReducedTable,
    SplitTable,
    encode_feature,
    feature_target,
)
from edgespec.types import Drafter, Session

__all__ = ["HEADS", "World", "make_world", "plain"]

HEADS = ["tinydraft", "eagle", "medusa", "early-exit"]


@dataclass
class World:
    """A target, its session, one drafter and the head behind it."""

    target: TableModel
    session: Session
    drafter: Drafter
    head: Any
    calls: list[int] = field(default_factory=list)

    def run(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Outcome:
        """One request; the session's cache is cut to what the prompt shares with it, as `edgespec.llm` does."""
        cached = list(self.session.tokens)  # type: ignore[attr-defined]
        shared = 0
        while shared < min(len(cached), len(prompt) - 1) and cached[shared] == prompt[shared]:
            shared += 1
        self.session.keep(shared)
        self.drafter.reset()
        outcome = run(self.target, [self.drafter], list(prompt), params, session=self.session, **options)
        outcome.check_identities()
        return outcome


def target_of(kind: str, **options: Any) -> TableModel:
    options = {"seed": 11, **options}
    if kind == "early-exit":
        return SplitTable(16, feature=encode_feature, **options)
    return feature_target(16, **options)


def make_world(
    kind: str,
    distance: str = "noisy",
    *,
    vocabulary: Sequence[int] | None = None,
    n_extra: int = 4,
    tree: TreePlan | None = None,
    p_min: float = 0.0,
    head_options: dict[str, Any] | None = None,
    **target_options: Any,
) -> World:
    """kind: one of HEADS. distance: same | noisy | wrong (see `loop_driver.draft_model`)."""
    target = target_of(kind, **target_options)
    session = target.open_session()
    draft = draft_model(distance, target, feature=None)
    options = head_options or {}
    head: Any
    if kind == "tinydraft":
        head = ReducedTable(draft, vocabulary, n_extra)
    elif kind == "eagle":
        head = EagleHead(draft, vocabulary, n_extra, **{"n_ctx": target.info.n_ctx, **options})
    elif kind == "medusa":
        head = MedusaHead(draft, vocabulary=vocabulary, n_extra=n_extra, **options)
    else:
        head = ExitHead(draft, vocabulary, n_extra)
    setup = DraftSetup(16, draft_models={kind: head}, target=target, session=session, tree=tree, stop=EarlyStop(p_min))
    return World(target, session, create_drafter(kind, setup), head)


def plain(prompt: Sequence[int], params: SamplingParams, **target_options: Any) -> list[int]:
    """What the target says alone."""
    return run(target_of("eagle", **target_options), [], list(prompt), params).tokens
