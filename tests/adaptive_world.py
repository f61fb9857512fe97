"""A target with a cost on a virtual clock, a draft that is right where a test wants it, and the production loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loop_driver import Outcome, run

from edgespec.engine.adaptive import AdaptiveController, Learned
from edgespec.sampling import SamplingParams
from edgespec.testing import LatencyModel, TableModel
from edgespec.testing.latency import FakeClock
from edgespec.types import DraftContext, Drafter, FloatArray, Offer, Proposal

__all__ = ["KnowingDrafter", "World", "avoids_ngrams", "make_world"]

PROMPT = [1, 2, 3]
PLAIN_S = 4.0  # of a one-row call: far above what the test machine's own work takes


class KnowingDrafter:
    """Knows the target's text and proposes it, or something else where `is_right` says no. Costs step_s a token."""

    taps: tuple[str, ...] = ()

    def __init__(
        self, truth: Sequence[int], is_right: Callable[[int], bool], step_s: float, source: str = "model"
    ) -> None:
        self.truth, self.is_right, self.step_s, self.source = truth, is_right, step_s, source
        self.asked: list[tuple[int, int]] = []  # (position, k)
        self.cost_s = 0.0

    def reset(self) -> None: ...

    def offer(self, context: DraftContext) -> Offer:
        return Offer(max(0, len(self.truth) - len(context.tokens)))

    def propose(self, context: DraftContext, k: int) -> Proposal:
        start = len(context.tokens)
        self.asked.append((start, k))
        tokens = [
            self.truth[at] if self.is_right(at) else (self.truth[at] + 1) % 16
            for at in range(start, min(start + k, len(self.truth)))
        ]
        self.cost_s += self.step_s * len(tokens)
        return Proposal(tokens, self.source, run_s=self.step_s * len(tokens))

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None: ...

    def close(self) -> None: ...


@dataclass
class World:
    """One target, what earlier requests taught, and the bill."""

    target: LatencyModel
    row_s: float
    memory: Learned = field(default_factory=Learned)
    controller: AdaptiveController | None = None

    def truth(self, n: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        """Prompt and the text that plain decoding gives."""
        plain = run(self.target.model, [], list(prompt), params(n))  # type: ignore[arg-type]
        return [*prompt, *plain.tokens]

    def run(
        self, drafters: Sequence[Drafter], n: int, prompt: Sequence[int] = PROMPT, k: int = 8, **more: Any
    ) -> Outcome:
        self.controller = AdaptiveController(k, memory=self.memory, exact=more.get("exact"))
        temperature = more.pop("temperature", 0.0)
        outcome = run(self.target, drafters, list(prompt), params(n, temperature), controller=self.controller, **more)  # type: ignore[arg-type]
        outcome.check_identities()
        return outcome


def params(n: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True, temperature=temperature, seed=5)


def make_world(row_s: float = 1.0, **options: Any) -> World:
    """row_s: what a row costs beyond the first; the first one makes it PLAIN_S."""
    clock = FakeClock()
    table = TableModel(16, n_ctx=4096, **{"seed": 3, **options})
    return World(LatencyModel(table, PLAIN_S - row_s, row_s, clock=clock, sleep=clock.sleep), row_s)


def avoids_ngrams(prefix: tuple[int, ...]) -> list[float]:
    """Logits of a text that never goes on as it did after the latest of the longest earlier matches."""
    tokens, best = list(prefix), (0, -1)
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, end))
    wrong = tokens[best[1] + 1] if best[0] else -1
    token = (7 * len(tokens) + 3 * tokens[-1]) % 16
    token = (token + 1) % 16 if token == wrong else token
    return [5.0 if t == token else 0.0 for t in range(16)]
