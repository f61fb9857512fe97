"""An independent draft model with its own KV cache, sampled the way the verifier expects.

Before each proposal the cache is rewound to its common prefix with the committed tokens and catches up in one pass; the
committed tokens are never assumed, always compared. Its logits may be over a reduced vocabulary. In a cascade something
cheaper guesses its tokens and one pass judges them, as its own would be by the target: the chain is what the draft
would have drafted alone, with the distributions that it drew from, so any rule may judge it (staged speculation,
arXiv:2308.04623; CS-Drafting, arXiv:2312.11462). Knows sessions and candidates, not runtimes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import cast

from edgespec.draft.base import DraftSetup, EarlyStop, Guesser, TreePlan, finish
from edgespec.draft.choice import Choice, choose_chain, choose_siblings
from edgespec.draft.heads import HeadSession
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.track import AcceptanceTrack
from edgespec.draft.tree import as_proposal
from edgespec.draft.vocabulary import N_EXTRA, DraftVocabulary
from edgespec.errors import CacheError
from edgespec.types import Candidates, DraftContext, FloatArray, Model, Offer, Proposal, Rows

__all__ = ["ModelDrafter", "create", "create_tinydraft"]

CATCH_UP_ROWS = 256


class ModelDrafter:
    """Drafts with a small language model that shares the target's tokens: a chain, or a tree where `tree` is given.

    A tree is several first tokens, each continued as a chain; it needs no tree inputs of the draft. source: what
    proposals are counted under. stop: when a chain ends early. ahead: proposals name runners-up. guesser: drafts for
    this draft; owned by it.
    """

    taps: tuple[str, ...] = ()

    def __init__(
        self,
        model: Model,
        n_vocab: int,
        source: str = "model",
        tree: TreePlan | None = None,
        stop: EarlyStop | None = None,
        ahead: bool = False,
        guesser: Guesser | None = None,
    ) -> None:
        self.model = model
        self.guesser = guesser
        self.ahead = ahead
        self.n_vocab = n_vocab
        self.source = source
        self.tree = tree
        self.stop = stop or EarlyStop()
        self.session = model.open_session()
        self.most_rows = min(CATCH_UP_ROWS, model.info.max_rows or CATCH_UP_ROWS)
        entry = getattr(model, "draft", None) or {}
        base = getattr(model, "vocabulary", None)
        self._track = AcceptanceTrack()
        self.vocabulary = DraftVocabulary(base, n_vocab, int(entry.get("n_extra", N_EXTRA)))
        self._cached: list[int] = []  # tokens in the session's cache
        self._n_agreed = 0  # of those, known to equal the committed tokens
        self.n_ids = n_vocab if base is not None else min(n_vocab, model.info.n_vocab)

    def reset(self) -> None:
        self._track.reset()
        self._n_agreed = 0
        self.vocabulary.reset()
        if self.guesser is not None:
            self.guesser.reset()

    def offer(self, context: DraftContext) -> Offer:
        """Up to the end of the draft's own context, and nothing once the text holds a token that it does not know."""
        self._track.learn(context.tokens)
        most = self._most(context.tokens)
        return Offer(most, self._track.rate()) if most else Offer(max_k=0)

    def _most(self, tokens: list[int]) -> int:
        """Most tokens that can be drafted after `tokens`."""
        n_vocab = self.model.info.n_vocab
        if self.vocabulary.base is None and n_vocab < self.n_vocab and max(tokens) >= n_vocab:
            return 0
        return max(0, self.model.info.n_ctx - len(tokens) + 1)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        return self.adopt(context, finish(self.steps(context, k)))

    def adopt(self, context: DraftContext, proposal: Proposal) -> Proposal:
        return self._track.ask(proposal, len(context.tokens))

    def steps(self, context: DraftContext, k: int) -> Generator[None, None, Proposal]:
        """As `edgespec.types.AheadDrafter`. Guesses do not change the reduced vocabulary: they are in it already."""
        if context.n_ahead:
            k = min(k, self._most(context.tokens))
        elif self.vocabulary.update(context.tokens):
            cast(HeadSession, self.session).set_extra(self.vocabulary.extra)
        if k < 1:
            return Proposal([], self.source)
        if self.tree is not None:
            rows, run_s = yield from self._catch_up(context.tokens, len(context.tokens) - context.n_ahead)
            history = list(context.tokens)
            return self._spread(context, history, rows.logits[-1], min(k, self.tree.rows), self.tree, run_s)
        chain, run_s = yield from self._chain(context, k)
        return Proposal(
            [choice.token for choice in chain],
            self.source,
            dists=[choice.dist for choice in chain],
            scores=[choice.confidence for choice in chain] if context.min_survival else None,
            runners_up=[choice.runner_up for choice in chain] if self.ahead else None,
            run_s=run_s,
        )

    def guess(self, context: DraftContext, k: int) -> list[int]:
        """As `edgespec.draft.base.Guesser`: a smaller draft may guess for a larger one."""
        k = min(k, self._most(context.tokens))
        return finish(self.steps(context._replace(min_survival=0.0), k)).tokens

    def _chain(self, context: DraftContext, n: int) -> Generator[None, None, tuple[list[Choice], float]]:
        """Up to `n` tokens, pausing between passes, each of which judges what was guessed; seconds in the runtime."""
        history, run_s = list(context.tokens), 0.0
        chain: list[Choice] = []
        stop = self.stop.chain(context.min_survival)
        while True:
            guesses = self._guess(context, history, len(chain), n)
            n_true = len(context.tokens) - context.n_ahead
            rows, pass_s = yield from self._catch_up([*history, *guesses], n_true, 1 + len(guesses))
            run_s += pass_s
            for row, guessed in zip(rows.logits, [*guesses, None], strict=True):
                choice = self._choose(context, row, history)
                if choice is None:
                    return chain, run_s
                chain.append(choice)
                history.append(choice.token)
                if len(chain) == n or stop.after(choice.confidence, len(chain)):
                    return chain, run_s
                if choice.token != guessed:
                    break
            yield

    def _guess(self, context: DraftContext, history: list[int], n_drafted: int, n: int) -> list[int]:
        """Tokens that may follow `history`, for one pass to judge; no more than the cache can take back."""
        most, rewind = n - n_drafted - 1, self.model.info.max_rewind
        most = min(most, self.most_rows - 1, *([] if rewind is None else [rewind - n]))
        if self.guesser is None or most < 1:
            return []
        ahead = context._replace(tokens=history, n_ahead=context.n_ahead + n_drafted)
        guesses = self.guesser.guess(ahead, most)
        unknown = (i for i, token in enumerate(guesses) if token >= self.n_ids)
        return guesses[: next(unknown, None)]

    def _choose(self, context: DraftContext, logits: FloatArray, history: list[int], index: int = 0) -> Choice | None:
        wants = self.stop.chain(context.min_survival).wants_confidence
        return choose_chain(
            context,
            self.vocabulary,
            logits,
            history,
            index=index,
            wants_confidence=wants,
            wants_runner_up=self.ahead and self.tree is None,
        )

    def _continue(
        self, context: DraftContext, history: list[int], first: Choice, n: int, node: int
    ) -> tuple[list[Choice], float]:
        """A branch of a tree: `first` and up to n - 1 tokens after it; seconds in the runtime.

        node: the place of `first` in the tree, which tells its draws from those of other branches.
        """
        history, chain, run_s = list(history), [first], 0.0
        stop = self.stop.chain(context.min_survival)
        while len(chain) < n and not stop.after(chain[-1].confidence, len(chain)):
            token = chain[-1].token
            history.append(token)
            rows = self.session.forward([token], logits_rows=(0,))
            run_s += rows.run_s
            self._cached.append(token)
            choice = self._choose(context, rows.logits[-1], history, node + len(chain))
            if choice is None:
                break
            chain.append(choice)
        return chain, run_s

    def _spread(
        self, context: DraftContext, history: list[int], logits: FloatArray, n_rows: int, plan: TreePlan, run_s: float
    ) -> Proposal:
        """Several first tokens, each continued; how far does not depend on which they are, so any rule may judge it."""
        tokens: list[int] = []
        parents: list[int] = []
        dists: list[Candidates | None] = []
        width = min(plan.width, n_rows)
        siblings = choose_siblings(context, self.vocabulary, logits, history, width, is_ranked=False)
        for first, length in zip(siblings, _lengths(n_rows, len(siblings), plan.depth), strict=True):
            if len(self._cached) > len(history):
                self._rewind(len(history))
            node = len(tokens)
            if len(self._cached) < len(history):  # the cache could not be cut: the other branches stay single tokens
                length = 1
            chain, chain_s = self._continue(context, history, first, length, node)
            run_s += chain_s
            tokens += [choice.token for choice in chain]
            parents += [-1, *range(node, node + len(chain) - 1)]
            dists += [choice.dist for choice in chain]
        return as_proposal(tokens, parents, dists, self.source, run_s)

    def _catch_up(self, tokens: list[int], n_true: int, n_rows: int = 1) -> Generator[None, None, tuple[Rows, float]]:
        """Make the cache equal `tokens` in as few passes as the chunk size allows; logits of the last `n_rows`.

        n_true: of the tokens, so many are committed. Pauses between passes.
        """
        keep = min(_common_prefix(self._cached, tokens, self._n_agreed), len(tokens) - n_rows)
        if keep != len(self._cached):
            keep = self._rewind(keep)
        run_s = 0.0
        while True:
            left = len(tokens) - keep
            piece = tokens[keep : keep + min(self.most_rows, left if left <= self.most_rows else left - n_rows)]
            keep += len(piece)
            is_last = keep == len(tokens)
            wanted = range(len(piece) - n_rows, len(piece)) if is_last else ()
            rows = self.session.forward(piece, logits_rows=wanted)
            run_s += rows.run_s
            self._cached += piece
            self._n_agreed = min(len(self._cached), n_true)
            if is_last:
                return rows, run_s
            yield

    def _rewind(self, n_past: int) -> int:
        """Rewind, or start over where the cache cannot; returns the tokens kept."""
        try:
            self.session.keep(n_past)
        except CacheError:
            n_past = 0
            self.session.keep(0)
        del self._cached[n_past:]
        return n_past

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.session.close()
        if self.guesser is not None:
            self.guesser.close()


def _common_prefix(cached: list[int], tokens: list[int], n_agreed: int) -> int:
    """Length of the common prefix, looking only beyond what is known to agree."""
    stop = min(len(cached), len(tokens))
    for i in range(min(n_agreed, stop), stop):
        if cached[i] != tokens[i]:
            return i
    return stop


def _lengths(n_rows: int, n: int, depth: int) -> list[int]:
    """How far each of `n` branches goes: the first takes about half of the rows, the others share the rest."""
    if n <= 1:
        return [min(n_rows, depth)] * n
    first = min(depth, max(n_rows - n + 1 - (n_rows - n) // 2, 1))
    left, lengths = n_rows - first, [first]
    for i in range(1, n):
        lengths.append(max(1, min(depth, -(-left // (n - i)))))
        left -= lengths[-1]
    return lengths


def create(setup: DraftSetup) -> ModelDrafter:
    """The drafter for `setup.model`, which `edgespec.llm` has made sure is there."""
    assert setup.model is not None
    return _make(setup.model, "model", setup, setup.draft_draft)


def create_tinydraft(setup: DraftSetup) -> ModelDrafter:
    """The same drafter for the small model trained for this target, `setup.head("tinydraft")`."""
    guesser = setup.draft_draft if setup.draft_draft != "tinydraft" else "none"  # it does not guess for itself
    return _make(setup.head("tinydraft"), "tinydraft", setup, guesser)


def _make(model: Model, source: str, setup: DraftSetup, guesser: str) -> ModelDrafter:
    return ModelDrafter(
        model, setup.n_vocab, source, setup.tree, setup.stop, setup.ahead, guesser=_create_guesser(guesser, setup)
    )


def _create_guesser(kind: str, setup: DraftSetup) -> Guesser | None:
    """What drafts for a draft; None where nothing does, or where its device failed."""
    if kind == "ngram":
        return NgramDrafter(setup.prompt_lookup_min)
    if kind == "none" or kind not in setup.draft_models:
        return None
    return ModelDrafter(setup.head(kind), setup.n_vocab, kind)
