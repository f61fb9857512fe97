"""Early exit: the target's lower layers and a small trained exit draft for the whole target.

The draft has no weights and no cache of its own: the lower layers run on the target's session, ahead of the rest, and
their rows of drafted tokens are kept, so that verification runs only the upper layers on them (LayerSkip, arXiv
2404.16710). Knows the session's `exit_rows` and the exit's graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from edgespec.draft.base import DraftSetup, EarlyStop
from edgespec.draft.choice import choose_chain
from edgespec.draft.heads import ExitSession, LoadedHead, kind_of
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.errors import IncompatibleError
from edgespec.types import Candidates, DraftContext, FloatArray, Offer, Proposal

__all__ = ["EarlyExitDrafter", "create"]


class EarlyExitDrafter:
    """Drafts chains on `session`, the target's own; `head` turns the lower layers' output into logits."""

    source = "early-exit"
    taps: tuple[str, ...] = ()

    def __init__(
        self, session: ExitSession, head: LoadedHead, n_vocab: int, n_ctx: int, stop: EarlyStop | None = None
    ) -> None:
        self.session = session
        self.head = head
        self.n_ctx = n_ctx
        self.stop = stop or EarlyStop()
        self._track = AcceptanceTrack()
        self.vocabulary = DraftVocabulary(head.vocabulary, n_vocab, int(kind_of(head).get("n_extra", 0)))

    def reset(self) -> None:
        self._track.reset()
        self.vocabulary.reset()

    def offer(self, context: DraftContext) -> Offer:
        """As many tokens as the target's own cache has places for."""
        self._track.learn(context.tokens)
        return Offer(max(0, self.n_ctx - len(context.tokens)), self._track.rate())

    def propose(self, context: DraftContext, k: int) -> Proposal:
        return self._track.ask(self._draft(context, k), len(context.tokens))

    def _draft(self, context: DraftContext, k: int) -> Proposal:
        self.vocabulary.update(context.tokens)
        drafted: list[int] = []
        dists: list[Candidates | None] = []
        scores: list[float] = []
        history, stop = list(context.tokens), self.stop.chain(context.min_survival)
        rows, run_s = context.tokens[self.session.n_past :], 0.0
        while True:
            hidden, exit_s = self.session.exit_rows(rows)
            logits = self._logits(hidden)
            run_s += exit_s + self.head.run_s
            choice = choose_chain(context, self.vocabulary, logits, history, wants_confidence=stop.wants_confidence)
            if choice is None:
                break
            drafted.append(choice.token)
            dists.append(choice.dist)
            scores.append(choice.confidence)
            history.append(choice.token)
            if len(drafted) == k or stop.after(choice.confidence, len(drafted)):
                break
            rows = [choice.token]
        return Proposal(drafted, self.source, None, dists, scores if context.min_survival else None, run_s)

    def _logits(self, hidden: FloatArray) -> FloatArray:
        """The exit's logits after the last row."""
        feeds = {"features": np.ascontiguousarray(hidden[-1:], dtype=np.float32)}
        if self.vocabulary.base is None:
            return cast(FloatArray, self.head.run(feeds)["logits"][-1])
        return cast(FloatArray, self.head.run({**feeds, "extra_ids": self.vocabulary.feed()})["logits"][-1])

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features: it runs the target's own layers."""

    def close(self) -> None:
        """The session belongs to the slot."""


def create(setup: DraftSetup) -> EarlyExitDrafter:
    """The drafter on `setup.session`; raises IncompatibleError for trees, or a target that was not loaded in parts."""
    if setup.tree is not None:
        raise IncompatibleError(
            "Early exit drafts chains on the target's own cache, and trees were asked for: drop --tree, or draft with "
            "eagle, medusa or tinydraft."
        )
    if setup.target is None or not hasattr(setup.session, "exit_rows"):
        raise IncompatibleError(
            "Early exit needs a target in parts (lower.onnx, upper.onnx, head.onnx) and this one was loaded whole: "
            "export it with an exit layer, or use another draft."
        )
    head: LoadedHead = setup.head("early-exit")
    session = cast(ExitSession, setup.session)
    return EarlyExitDrafter(session, head, setup.n_vocab, setup.target.info.n_ctx, setup.stop)
