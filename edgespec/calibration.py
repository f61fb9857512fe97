"""Short texts that the production code writes for a profile: how many and how long, from which prompts and drafts.

Knows no figures: what the rounds say is for `edgespec.draft_records`, and what is kept for `edgespec.profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.draft.base import FREE_DRAFTS
from edgespec.engine.controller import Controller
from edgespec.engine.costs import Spread
from edgespec.engine.learned import Expectation, Learned
from edgespec.errors import ConfigError
from edgespec.judged import Asking, Judge, Judged
from edgespec.sampling import SamplingParams
from edgespec.steering import Steering
from edgespec.types import DraftContext, Drafter, ExactRows, RoundRecord

if TYPE_CHECKING:
    from edgespec.llm import LLM

__all__ = ["PROMPTS", "QUICK", "CalibrationRun", "Effort", "JudgedTexts"]

ROWS = (*range(1, 17), 24, 32)
CONTEXTS = (64, 1024)  # cached tokens
PROMPTS = (
    "Why do leaves change colour in autumn?",
    "Write a Python function that counts the vowels of a word, with a docstring.",
    "Correct the spelling of this text and change nothing else: The old bridge over the river was closd last winter. "
    "Every morning the children had to walk to the next one, and many of them came to shool too late.",
    "Give me a JSON list of three animals, each with a name, a colour and the number of its legs.",
)


@dataclass(frozen=True)
class Effort:
    """How much is measured. rows: V(n) of these. contexts: cached tokens that it is measured on. repeats: of V(n).

    budget_s: for V(n) at one context, after one pass over the row counts. depths: k of the runs that measure drafts,
    the deepest of them once more at every place of the texts.
    texts_s: for all texts of one draft, at the speed of plain decoding; slow targets write shorter ones.
    """

    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = CONTEXTS
    repeats: int = 7
    budget_s: float = 4.0
    n_tokens: int = 96
    n_prompts: int = len(PROMPTS)
    depths: tuple[int, ...] = (1, 3, 6)
    texts_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("rows", "contexts", "depths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(f"{name}={values!r}: give at least one number, from 1 up")
        for name in ("repeats", "n_tokens", "n_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: it must be a whole number from 1 up")

    def tokens_within(self, step_s: float) -> int:
        """Tokens of each text where a plain step takes `step_s`; eight at least, or n_tokens where that is less."""
        affordable = self.texts_s / (self.n_prompts * (len(self.depths) + 1) * max(step_s, 1e-9))
        return max(min(8, self.n_tokens), min(self.n_tokens, int(affordable)))


# At first use: V(n) as far as a plan drafts, and a few seconds in all.
QUICK = Effort(
    rows=tuple(range(1, 10)),
    contexts=(64, 512),
    repeats=5,
    budget_s=0.5,
    n_tokens=80,
    n_prompts=4,
    depths=(1, 4),
    texts_s=5.0,
)


class JudgedTexts(NamedTuple):
    """A draft at every place of some texts. most, passes: what it offers, as in `Offer`."""

    texts: list[list[int]]
    places: tuple[tuple[Judged, ...], ...]
    records: list[RoundRecord]
    most: int
    passes: int | None

    def places_in(self, texts: Sequence[Sequence[int]]) -> tuple[tuple[Judged, ...], ...]:
        """The places of other texts from the same prompts, as far as they agree: rules that redraw write others."""
        found = []
        for ours, theirs, places in zip(self.texts, texts, self.places, strict=True):
            agreed = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            found.append(places[: agreed + 1])
        return tuple(found)


class CalibrationRun:
    """Short generations from one set of prompts at one temperature; every prompt begins with empty caches.

    Raises ConfigError where there is no prompt, or an empty one.
    """

    def __init__(self, llm: LLM, prompts: Sequence[list[int]] | None, effort: Effort, temperature: float) -> None:
        self.llm, self.temperature = llm, temperature
        self.prompts = (
            [list(prompt) for prompt in prompts] if prompts is not None else _own_prompts(llm, effort.n_prompts)
        )
        if not self.prompts or not all(self.prompts):
            raise ConfigError("prompts: give at least one prompt to calibrate on, and no empty one")
        self.n_tokens = max(2, min(effort.n_tokens, llm.target.info.n_ctx - max(map(len, self.prompts)) - 1))

    def fit(self, effort: Effort, target: Mapping[int, Mapping[int, Spread]]) -> None:
        """Shorten the texts to what `effort` allows at the target's speed."""
        self.n_tokens = min(self.n_tokens, effort.tokens_within(target[min(target)][1].median))

    def most_k(self, k: int) -> int:
        """`k`, or as many tokens as a round can draft on this target."""
        return min(k, self.llm.most_k)

    def generate(self, draft: str, k: int) -> tuple[list[list[int]], list[RoundRecord]]:
        """(texts, round records) at a fixed length."""
        return self._run(self._variant(draft, k, "fixed"))

    def adapt(self, draft: str, k: int, expected: Expectation) -> list[RoundRecord]:
        """Round records under the adaptive controller, which begins with what a profile expects."""
        variant = self._variant(draft, k, "adaptive")
        variant.steering.learned = Learned.expecting(expected)
        return self._run(variant)[1]

    def sweep(self, k: int) -> list[RoundRecord]:
        """Round records with n-gram drafts of 0 to `k` tokens in turn, from any match at all.

        Plain steps are among them, so that how much longer other calls take does not depend on the machine's mood.
        """
        variant = self._variant("ngram", k, "fixed", prompt_lookup_min=1)
        variant.steering = _Steered(variant, _Sweep(k))
        return self._run(variant)[1]

    def judge(self, draft: str, k: int) -> JudgedTexts:
        """What the draft would have got right at every place; greedy drafts also say how sure they were."""
        variant = self._variant(draft, k, "fixed")
        judge = Judge(variant.verifier_factory())
        asking = Asking(k, wants_scores=self.temperature == 0.0)
        variant.verifier_factory, variant.steering = lambda: judge, _Steered(variant, asking)
        texts, records = self._run(variant)
        starts = [i for i, record in enumerate(records) if record.index == 0]
        accepted = iter(judge.take(records, draft))
        places = tuple(
            tuple(next(accepted) for _ in range(end - start))
            for start, end in zip(starts, [*starts[1:], len(records)], strict=True)
        )
        return JudgedTexts(texts, places, records, asking.most, asking.passes)

    def _variant(self, draft: str, k: int, controller: str, **changes: Any) -> LLM:
        changes |= {"draft": draft, "controller": controller, "min_speculative_tokens": 0, "tree": False}
        changes["schedule"] = "serial"
        if draft == "none" or draft in FREE_DRAFTS:
            changes["draft_p_min"] = 0.0
        return self.llm.variant(num_speculative_tokens=k, **changes)

    def _run(self, variant: LLM) -> tuple[list[list[int]], list[RoundRecord]]:
        params = SamplingParams(temperature=self.temperature, max_tokens=self.n_tokens, seed=1)
        texts, records = [], []
        for prompt in self.prompts:
            variant.forget()
            output = variant.generate([prompt], params)[0].outputs[0]
            texts.append(list(output.token_ids))
            records += output.stats.records
        variant.forget()
        return texts, records


class _Steered(Steering):
    """As an LLM's own, with one controller for all requests."""

    def __init__(self, llm: LLM, controller: Controller) -> None:
        super().__init__(llm.options, llm.loaded)
        self._controller = controller

    def controller(self, drafters: Sequence[Drafter], exact: ExactRows | None) -> Controller:
        return self._controller


class _Sweep(Controller):
    """Asks for 0, 1, 2, ... k tokens and begins again."""

    def choose(
        self, drafters: Sequence[Drafter], context: DraftContext, room: int, n_pending: int = 1
    ) -> tuple[Drafter | None, int]:
        self.k = (self.k + 1) % (self.max_k + 1)
        return super().choose(drafters, context, room, n_pending)


def _own_prompts(llm: LLM, n: int) -> list[list[int]]:
    """As much of the built-in prompts as leaves room for answers."""
    most, tokenizer = max(1, llm.target.info.n_ctx // 2), llm.tokenizer
    if tokenizer is None:
        n_vocab = llm.target.info.n_vocab
        prompts = [[(37 * i * (j + 1)) % n_vocab for j in range(12)] for i in range(1, n + 1)]
    elif tokenizer.chat_template is None:
        prompts = [tokenizer.encode(text) for text in PROMPTS[:n]]
    else:
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[:n]]
    return [prompt[-most:] for prompt in prompts]
