"""An independent draft model with its own KV cache, sampled the way the verifier expects.

Before each proposal the cache is rewound to its common prefix with the committed tokens and catches up in one pass; the
committed tokens are never assumed, always compared. Knows sessions and candidates, not runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgespec.draft.base import DraftSetup
from edgespec.errors import CacheError
from edgespec.types import Candidates, DraftContext, FloatArray, Model, Offer, Proposal, Rows

__all__ = ["ModelDrafter", "create"]

CATCH_UP_ROWS = 256


class ModelDrafter:
    """Drafts a chain with a small language model that shares the target's vocabulary."""

    source = "model"
    taps: tuple[str, ...] = ()

    def __init__(self, model: Model, n_vocab: int) -> None:
        self.model = model
        self.n_vocab = n_vocab
        self.session = model.open_session()
        self._cached: list[int] = []  # tokens in the session's cache
        self._n_agreed = 0  # of those, known to equal the committed tokens

    def reset(self) -> None:
        self._n_agreed = 0

    def offer(self, context: DraftContext) -> Offer:
        """Up to the end of the draft's own context, and nothing once the text holds a token that it does not know."""
        n_vocab = self.model.info.n_vocab
        if n_vocab < self.n_vocab and max(context.tokens) >= n_vocab:
            return Offer(max_k=0)
        return Offer(max_k=max(0, self.model.info.n_ctx - len(context.tokens) + 1))

    def propose(self, context: DraftContext, k: int) -> Proposal:
        rows, run_s = self._catch_up(context.tokens)
        drafted: list[int] = []
        dists: list[Candidates | None] = []
        history = list(context.tokens)
        while True:
            candidates = context.sampler.row(self._target_row(rows.logits[-1]), history)
            token = context.verifier.draw_draft(context.noise, candidates, len(history), context.round)
            drafted.append(token)
            dists.append(candidates)
            history.append(token)
            if len(drafted) == k:
                break
            rows = self.session.forward([token], logits_rows=(0,))
            run_s += rows.run_s
            self._cached.append(token)
        return Proposal(drafted, self.source, dists=dists, run_s=run_s)

    def _catch_up(self, tokens: list[int]) -> tuple[Rows, float]:
        """Make the cache equal `tokens` in as few passes as the chunk size allows; logits of the last token."""
        keep = min(_common_prefix(self._cached, tokens, self._n_agreed), len(tokens) - 1)
        if keep != len(self._cached):
            keep = self._rewind(keep)
        run_s = 0.0
        while True:
            piece = tokens[keep : keep + CATCH_UP_ROWS]
            keep += len(piece)
            is_last = keep == len(tokens)
            rows = self.session.forward(piece, logits_rows=(len(piece) - 1,) if is_last else ())
            run_s += rows.run_s
            self._cached += piece
            self._n_agreed = len(self._cached)
            if is_last:
                return rows, run_s

    def _rewind(self, n_past: int) -> int:
        """Rewind, or start over where the cache cannot; returns the tokens kept."""
        try:
            self.session.keep(n_past)
        except CacheError:
            n_past = 0
            self.session.keep(0)
        del self._cached[n_past:]
        return n_past

    def _target_row(self, logits: FloatArray) -> FloatArray:
        """The draft's row in the target's vocabulary size (padded vocabularies differ in unused tail ids)."""
        if len(logits) == self.n_vocab:
            return logits
        row = np.full(self.n_vocab, -np.inf, dtype=logits.dtype)
        n_shared = min(len(logits), self.n_vocab)
        row[:n_shared] = logits[:n_shared]
        return row

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.session.close()


def _common_prefix(cached: list[int], tokens: list[int], n_agreed: int) -> int:
    """Length of the common prefix, looking only beyond what is known to agree."""
    stop = min(len(cached), len(tokens))
    for i in range(min(n_agreed, stop), stop):
        if cached[i] != tokens[i]:
            return i
    return stop


def create(setup: DraftSetup) -> ModelDrafter:
    """The drafter for `setup.model`, which `edgespec.llm` has made sure is there."""
    assert setup.model is not None
    return ModelDrafter(setup.model, setup.n_vocab)
