"""An EAGLE head: one decoder layer over pairs of a target feature and the token after it.

Pair p is (feature of position p, token at p + 1) and predicts the token at p + 2; it lies at place p of the head's own
KV cache. Features of committed positions are the target's, fused from its taps, and are kept for the whole request;
those of drafted tokens are the head's own output and never outlive a proposal. So the cache is cut back to the last
pair with a true feature and caught up in one pass when a proposal begins; rounds without one only queue features.
EAGLE 2401.15077, dynamic trees 2406.16858, fused features 2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from edgespec.draft.base import DraftSetup, EarlyStop, TreePlan
from edgespec.draft.choice import choose_chain, choose_siblings
from edgespec.draft.features import FeatureStore
from edgespec.draft.heads import EagleModel, HeadSession, as_row, check_taps, kind_of
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.tree import DraftTree
from edgespec.draft.vocabulary import DraftVocabulary
from edgespec.errors import CacheError, IncompatibleError
from edgespec.types import Candidates, DraftContext, FloatArray, Offer, Proposal, Rows

__all__ = ["EagleDrafter", "create"]

CATCH_UP_ROWS = 256
OWN = "own"  # the head's tap: the feature of a row's token as the head predicts it


class EagleDrafter:
    """Drafts chains, or trees where `tree` is given and the head's graph can run them."""

    source = "eagle"

    def __init__(
        self,
        model: EagleModel,
        n_vocab: int,
        taps: tuple[str, ...],
        tree: TreePlan | None = None,
        stop: EarlyStop | None = None,
    ) -> None:
        self.model = model
        self.taps = taps
        self.tree = tree
        self.stop = stop or EarlyStop()
        self._track = AcceptanceTrack()
        self.vocabulary = DraftVocabulary(model.vocabulary, n_vocab, int(kind_of(model).get("n_extra", 0)))
        self.session = cast(HeadSession, model.open_session())
        self.store = FeatureStore(model.fuse, taps)
        self._n_ctx = model.info.n_ctx
        self._pairs: list[int] = []  # tokens of the cached pairs with true features
        self._n_agreed = 0  # of those, known to equal the committed tokens

    def reset(self) -> None:
        self._track.reset()
        self._n_agreed = 0
        self.store.reset()
        self.vocabulary.reset()

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        if start < len(self._pairs):  # their features were of another text
            del self._pairs[start:]
            self._n_agreed = min(self._n_agreed, start)
        self.store.observe(start, tokens, hidden)

    def offer(self, context: DraftContext) -> Offer:
        """Nothing without the features of all but the last token; else up to the end of the head's own context."""
        self._track.learn(context.tokens)
        room = self._room(context.tokens)
        return Offer(room, self._track.rate() if room else None)

    def _room(self, tokens: list[int]) -> int:
        n_tokens = len(tokens)
        if n_tokens < 2 or self.store.agree(tokens) < n_tokens - 1:
            return 0
        return max(0, self._n_ctx - n_tokens + 2)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        return self._track.ask(self._draft(context, k), len(context.tokens))

    def _draft(self, context: DraftContext, k: int) -> Proposal:
        if not self._room(context.tokens):
            return Proposal([], self.source)
        if self.vocabulary.update(context.tokens):
            self.session.set_extra(self.vocabulary.extra)
        rows, run_s = self._catch_up(context.tokens)
        if self.tree is None:
            return self._chain(context, k, rows, run_s)
        return self._grow(context, k, self.tree, rows, run_s)

    def _chain(self, context: DraftContext, k: int, rows: Rows, run_s: float) -> Proposal:
        drafted: list[int] = []
        dists: list[Candidates | None] = []
        scores: list[float] = []
        history, stop = list(context.tokens), self.stop.chain(context.min_survival)
        while True:
            choice = choose_chain(
                context, self.vocabulary, rows.logits[-1], history, wants_confidence=stop.wants_confidence
            )
            if choice is None:
                break
            drafted.append(choice.token)
            dists.append(choice.dist)
            scores.append(choice.confidence)
            history.append(choice.token)
            if len(drafted) == k or stop.after(choice.confidence, len(drafted)):
                break
            own = rows.hidden[OWN][-1:]  # a view: the session reads its features before it writes new ones
            rows = self.session.forward([choice.token], logits_rows=(0,), taps=(OWN,), features=own)
            run_s += rows.run_s
        return Proposal(drafted, self.source, None, dists, scores if context.min_survival else None, run_s)

    def _grow(self, context: DraftContext, k: int, plan: TreePlan, rows: Rows, run_s: float) -> Proposal:
        """Level by level: the most promising nodes get children, until no child could be among the best k."""
        tree, n_true = DraftTree(), self.session.n_past
        k = min(k, plan.rows)
        own: dict[int, FloatArray] = {-1: as_row(rows.hidden[OWN][-1])}  # a node's feature, for its children's rows
        tree.add(-1, choose_siblings(context, self.vocabulary, rows.logits[-1], context.tokens, plan.width))
        while chosen := tree.promising(k, plan.width, min(plan.depth, k)):
            tree.expanded.update(chosen)
            nodes = sorted(tree.expanded)
            if n_true + len(nodes) > self._n_ctx:
                break
            place = {node: row for row, node in enumerate(nodes)}
            rows = self.session.forward(
                [tree.tokens[node] for node in nodes],
                parents=[place.get(tree.parents[node], -1) for node in nodes],
                logits_rows=[place[node] for node in chosen],
                taps=(OWN,),
                features=np.concatenate([own[tree.parents[node]] for node in nodes]),
            )
            run_s += rows.run_s
            for node, logits in zip(chosen, rows.logits, strict=True):
                own[node] = as_row(rows.hidden[OWN][place[node]])
                history = [*context.tokens, *tree.path(node)]
                tree.add(node, choose_siblings(context, self.vocabulary, logits, history, plan.width))
            self._rewind(n_true)
            if len(self._pairs) < n_true:  # the cache could not be cut, so there is nothing left to grow on
                break
        return tree.proposal(k, self.source, run_s)

    def _catch_up(self, tokens: list[int]) -> tuple[Rows, float]:
        """Make the cache hold the pair of every position but the last; the last pair's logits and own feature."""
        run_s = self.store.fuse_queue()
        n_pairs = len(tokens) - 1
        keep = min(self._common_pairs(tokens), n_pairs - 1)
        self._rewind(keep)
        while True:
            start = len(self._pairs)
            piece = tokens[start + 1 : start + 1 + CATCH_UP_ROWS]
            is_last = start + len(piece) == n_pairs
            rows = self.session.forward(
                piece,
                logits_rows=(len(piece) - 1,) if is_last else (),
                taps=(OWN,) if is_last else (),
                features=self.store.features(start, start + len(piece)),
            )
            run_s += rows.run_s
            self._pairs += piece
            if is_last:
                self._n_agreed = len(self._pairs)
                return rows, run_s

    def _common_pairs(self, tokens: list[int]) -> int:
        """Cached pairs whose token is still the one at its position; `observe` saw to their features."""
        stop = min(len(self._pairs), len(tokens) - 1)
        for i in range(min(self._n_agreed, stop), stop):
            if self._pairs[i] != tokens[i + 1]:
                return i
        return stop

    def _rewind(self, n_pairs: int) -> None:
        """Cut drafted and outdated pairs, or start over where the cache cannot be cut."""
        if self.session.n_past != n_pairs:
            try:
                self.session.keep(n_pairs)
            except CacheError:
                n_pairs = 0
                self.session.keep(0)
        del self._pairs[n_pairs:]

    def close(self) -> None:
        self.session.close()


def create(setup: DraftSetup) -> EagleDrafter:
    """The drafter for `setup.head("eagle")`; raises IncompatibleError where target or tree do not fit."""
    model = cast(EagleModel, setup.head("eagle"))
    if setup.tree is not None and not model.info.tree:
        raise IncompatibleError(
            f"{model.info.name}: this EAGLE head was loaded without tree inputs, and trees were asked for: export it "
            "with them (tree.onnx), or drop --tree."
        )
    taps = check_taps("EAGLE", kind_of(model)["taps"], setup.target)
    return EagleDrafter(model, setup.n_vocab, taps, setup.tree, setup.stop)
