"""What a mix of drafts would have yielded on texts that the target wrote: the rounds are run again without any model.

N-gram drafts are exactly the production drafter's; a model's acceptance is drawn from its measured chances, with a seed
of its own. In the adaptive pace each round takes the source and length with the most expected tokens a second, as
`edgespec.engine.adaptive` does, but with the costs and chances of the profile from the start.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from edgespec.draft.ngram import NgramDrafter
from edgespec.profile import DraftProfile, TargetProfile
from edgespec.types import DraftContext

__all__ = ["Pace", "Yield", "replay"]

TURNS = 6  # over the texts where acceptance is drawn


class Pace(enum.Enum):
    """FIXED: always k tokens where a source has a proposal. ADAPTIVE: as many as pay, up to k."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


@dataclass
class Yield:
    """Totals over all texts. rows: of the target's calls, padding included. steps: tokens drafted by a model."""

    tokens: float = 0
    rounds: float = 0
    seconds: float = 0.0
    rows: float = 0
    steps: float = 0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


class _Choice(NamedTuple):
    source: str | None
    k: int
    rate: float


def replay(
    target: TargetProfile,
    drafts: Mapping[str, DraftProfile],
    has_ngram: bool,
    k: int,
    pace: Pace,
    saved: Mapping[int, float] | None = None,
) -> Yield:
    """Run the rounds of every text with these drafts, at most `k` tokens each.

    saved: tokens drafted by a model -> seconds that such a round is shorter because some of it was drafted ahead.
    """
    total = Yield()
    has_luck = bool(drafts) or target.guess > 0.0
    for turn in range(TURNS if has_luck else 1):
        for index, (prompt, text) in enumerate(target.texts):
            dice = random.Random(f"{turn} {index}")
            _Replay(target, drafts, has_ngram, k, pace, dice, saved or {}).run(prompt, text, total)
    if not total.tokens:  # every text was empty: a single plain step stands for them
        total = Yield(1, 1, target.costs.seconds(target.width(1), 64) + target.costs.host_s, target.width(1))
    return total


class _Replay:
    def __init__(
        self,
        target: TargetProfile,
        drafts: Mapping[str, DraftProfile],
        has_ngram: bool,
        k: int,
        pace: Pace,
        dice: random.Random,
        saved: Mapping[int, float],
    ) -> None:
        self.saved = saved
        self.target, self.drafts, self.k, self.pace, self.dice = target, drafts, k, pace, dice
        self.ngram = NgramDrafter() if has_ngram else None

    def run(self, prompt: Sequence[int], text: Sequence[int], total: Yield) -> None:
        """Add the rounds of one text; the first token comes with the prompt and is left out, as in `decode_tok_s`."""
        tokens, end = [*prompt, *text[:1]], len(prompt) + len(text)
        truth = [*prompt, *text]
        while len(tokens) < end:
            room = min(self.k, end - len(tokens) - 1)
            choice, proposal = self._choose(tokens, room)
            accepted = self._judge(choice, proposal, truth[len(tokens) :])
            total.seconds += self._seconds(choice, len(tokens))
            n_new = min(accepted + 1, end - len(tokens))
            total.tokens += n_new
            total.rounds += 1
            total.rows += self.target.width(1 + choice.k)
            total.steps += choice.k if choice.source in self.drafts else 0
            tokens += truth[len(tokens) : len(tokens) + n_new]

    def _choose(self, tokens: list[int], room: int) -> tuple[_Choice, list[int]]:
        at = len(tokens)
        guess = self.target.guess if self.target.width(1) > 1 else 0.0
        best = _Choice(None, 0, (1 + guess) / self._seconds(_Choice(None, 0, 0.0), at))
        sources: dict[str, Sequence[float]] = {}
        context = DraftContext(tokens, cast(Any, None), cast(Any, None), cast(Any, None), 0)
        if self.ngram is not None:
            offer = self.ngram.offer(context)
            if offer.max_k:
                sources["ngram"] = [offer.acceptance or 0.5]
        sources.update({kind: draft.chances for kind, draft in self.drafts.items()})
        for source, chances in sources.items():
            best = self._longest(source, chances, room, at, best)
        if best.source != "ngram" or self.ngram is None:
            return best, []
        return best, self.ngram.propose(context, best.k).tokens

    def _longest(self, source: str, chances: Sequence[float], room: int, at: int, best: _Choice) -> _Choice:
        """The better of `best` and this source's own best length; in the fixed pace the full length always is."""
        survival, tokens = 1.0, 1.0
        for k in range(1, room + 1):
            survival *= chances[min(k, len(chances)) - 1]
            tokens += survival
            choice = _Choice(source, k, tokens / self._seconds(_Choice(source, k, 0.0), at))
            if self.pace is Pace.FIXED:
                best = choice if k == room else best
            elif choice.rate > best.rate:
                best = choice
        return best

    def _judge(self, choice: _Choice, proposal: Sequence[int], truth: Sequence[int]) -> int:
        if choice.source is None:
            is_free = self.target.width(1) > 1
            return int(is_free and self.dice.random() < self.target.guess)
        if choice.source == "ngram":
            n = 0
            while n < len(proposal) and n < len(truth) and proposal[n] == truth[n]:
                n += 1
            return n
        chances = self.drafts[choice.source].chances
        n = 0
        while n < choice.k and self.dice.random() < chances[min(n, len(chances) - 1)]:
            n += 1
        return n

    def _seconds(self, choice: _Choice, at: int) -> float:
        costs = self.target.costs
        call = costs.seconds(self.target.width(1 + choice.k), at) + costs.host_s
        if choice.source in (None, "ngram"):
            return call
        return call + self.drafts[choice.source].costs.seconds(choice.k) - self.saved.get(choice.k, 0.0)
