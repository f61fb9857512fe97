"""Which ways to decode are measured, and the figures of the tutorial beside them.

Its figures are from an A100 with a 7 B target (A100) and from a phone (SNAPDRAGON); those here from another machine and
a synthetic target of 1 B, so only the columns of one machine compare with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError

__all__ = ["A100", "Case", "Quoted", "article_cases", "chosen", "scaled_cases"]


@dataclass(frozen=True)
class Quoted:
    """The tutorial's row: tokens a second, milliseconds to the first token."""

    tok_s: float
    ttft_ms: float


@dataclass(frozen=True)
class Case:
    """draft: kinds in order of priority. draft_model: a name; None for none. widened: the zoo's draft of this kind is
    widened to the target. quoted: key of A100."""

    key: str
    label: str
    draft: str = "none"
    draft_model: str | None = None
    k: int = 1
    p_min: float = 0.0
    widened: str | None = None
    controller: str = "fixed"
    draft_draft: str = "none"
    quoted: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the LLM."""
        if self.draft == "none":
            return {"exact": False}
        return {"num_speculative_tokens": self.k, "draft_p_min": self.p_min, "controller": self.controller,
                "draft_draft": self.draft_draft}  # fmt: skip


A100 = {
    "plain": Quoted(25.3, 280),
    "0.5B k=5": Quoted(58.7, 285),
    "0.5B k=8": Quoted(63.2, 288),
    "1.5B k=5": Quoted(52.1, 295),
    "0.5B shared cache k=5": Quoted(72.4, 270),
    "Medusa 3 heads": Quoted(68.9, 285),
}


def article_cases(model: str) -> list[Case]:
    """The tutorial's configurations for the family of targets made from `model`."""
    small, big = model, f"{model}-x2"
    return [
        Case("plain", "plain", quoted="plain"),
        Case("k5", f"draft {small}, k = 5", "model", small, 5, quoted="0.5B k=5"),
        Case("k8", f"draft {small}, k = 8", "model", small, 8, quoted="0.5B k=8"),
        Case("bigger", f"bigger draft {big}, k = 5", "model", big, 5, quoted="1.5B k=5"),
        Case("shared", "shared cache: early exit, k = 5", "early-exit", None, 5, widened="early-exit",
             quoted="0.5B shared cache k=5"),
        Case("medusa", "Medusa, 3 heads", "medusa", None, 3, widened="medusa", quoted="Medusa 3 heads"),
        Case("best", f"best here: draft {small}, k = 3, p-min 0.5", "model", small, 3, 0.5),
    ]  # fmt: skip


def scaled_cases(model: str) -> list[Case]:
    """Ways to use the original as a draft at its best; the first is the plain side of all others."""
    cases = [Case("plain", "plain")]
    cases += [Case(f"k{k}", f"draft {model}, k = {k}", "model", model, k) for k in (1, 2, 3, 4, 5, 8)]
    cases += [
        Case(f"k{k}-p{p_min}", f"draft {model}, k = {k}, p-min {p_min}", "model", model, k, p_min)
        for k, p_min in ((3, 0.5), (5, 0.5), (5, 0.7), (8, 0.7))
    ]
    cases += [
        Case("ngram-model-k2", f"n-gram, then {model}, k = 2", "ngram,model", model, 2),
        Case("ngram-model-p", f"n-gram, then {model}, k = 5, p-min 0.7", "ngram,model", model, 5, 0.7),
        Case("cascade-k3", f"cascade: n-gram for {model}, k = 3", "model", model, 3, draft_draft="ngram"),
        Case(
            "cascade-p", f"cascade: n-gram for {model}, k = 8, p-min 0.7", "model", model, 8, 0.7, draft_draft="ngram"
        ),
        Case("adaptive", f"n-gram and {model}, adaptive k <= 5", "ngram,model", model, 5, controller="adaptive"),
    ]
    return cases


def chosen(cases: list[Case], keys: tuple[str, ...]) -> list[Case]:
    """Those named, in their own order; all where none is. Raises ConfigError for an unknown one."""
    known = [case.key for case in cases]
    for key in keys:
        if key not in known:
            raise ConfigError(f"there is no case {key!r}: use one of {', '.join(known)}")
    return [case for case in cases if not keys or case.key in keys]
