"""The caches of finished requests, kept for the next one: a target session and its drafters, reused as far as a prompt
agrees with them.

Owns their lives. A drafter whose device fails is left out here and written down in `Loaded.failed`. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.draft import DraftSetup, EarlyStop, TreePlan, create_drafter
from edgespec.errors import BackendError, CacheError
from edgespec.loading import Loaded
from edgespec.options import EngineOptions
from edgespec.types import Drafter, ExactRows, Session

__all__ = ["Slot", "SlotPool"]


@dataclass
class Slot:
    """The caches of one sequence between requests. `tokens` is what the target's cache holds."""

    session: Session
    drafters: list[Drafter]
    tokens: list[int] = field(default_factory=list)

    def shared(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that are already cached; its last one always runs again, for its logits."""
        n = 0
        for ours, theirs in zip(self.tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            n += 1
        return n

    def close(self) -> None:
        self.session.close()
        for drafter in self.drafters:
            drafter.close()


class SlotPool:
    """`idle`: the slots of finished requests. exact: the row counts that the target is asked for."""

    def __init__(self, loaded: Loaded, options: EngineOptions, exact: ExactRows | None) -> None:
        self.idle: list[Slot] = []
        self._loaded = loaded
        self._options = options
        self._exact = exact

    def take(self, ids: list[int]) -> Slot:
        """The idle slot that shares most with the prompt, rewound to what they share; else a new one."""
        best = max(self.idle, key=lambda slot: slot.shared(ids), default=None)
        if best is None:
            return self._open()
        self.idle.remove(best)
        try:
            best.session.keep(best.shared(ids))
        except CacheError:  # it cannot go back that far, but to nothing it always can
            best.session.keep(0)
        for drafter in [drafter for drafter in best.drafters if drafter.source in self._loaded.failed]:
            best.drafters.remove(drafter)
            drafter.close()
        for drafter in best.drafters:
            drafter.reset()
        return best

    def give_back(self, slot: Slot, tokens: list[int], *, healthy: bool) -> None:
        """Keep the slot of a request that committed `tokens`; one that ended in an error is closed."""
        if not healthy:
            slot.close()
            return
        slot.tokens = tokens[: slot.session.n_past]
        self.idle.append(slot)

    def forget(self) -> None:
        """Free the caches, so that the next request starts from nothing."""
        for slot in self.idle:
            slot.close()
        self.idle.clear()

    def _open(self) -> Slot:
        loaded, options, exact = self._loaded, self._options, self._exact
        session = loaded.target.open_session()
        if hasattr(session, "exact"):  # a target in two halves runs the lower one ahead, in exact counts as well
            session.exact = exact
        setup = DraftSetup(
            n_vocab=loaded.target.info.n_vocab,
            prompt_lookup_min=options.prompt_lookup_min,
            table=loaded.table,
            model=loaded.draft_model,
            draft_models=loaded.heads,
            target=loaded.target,
            session=session,
            threads=options.threads,
            tree=_tree_plan(options),
            stop=EarlyStop(options.draft_p_min, exact.multiple if exact else 1),
            ahead=options.schedule == "overlapped",
            draft_draft=options.draft_draft,
        )
        slot = Slot(session, [])
        try:
            for kind in loaded.working(options.drafts):
                slot.drafters += self._drafter(kind, setup)
        except BaseException:
            slot.close()
            raise
        return slot

    def _drafter(self, kind: str, setup: DraftSetup) -> list[Drafter]:
        """The drafter of a kind; none where its device fails, which later requests are told too."""
        try:
            return [create_drafter(kind, setup)]
        except BackendError as error:
            if self._options.strict_device:
                raise
            self._loaded.failed[kind] = str(error)
            return []


def _tree_plan(options: EngineOptions) -> TreePlan | None:
    if not options.tree:
        return None
    return TreePlan(rows=options.tree_rows, width=options.tree_width, depth=options.depth)
