"""What a run consists of: parts, each a set of sides on one model that answer the same prompts in turns.

Owns the sizes of the quick and the whole run. Knows nothing of processes and files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgespec_bench.prompts import KINDS

__all__ = ["COPYING", "FULL", "QUICK", "SETTINGS", "SETTING_LABELS", "Cell", "Part", "Size", "parts_of"]

SETTINGS: dict[str, dict[str, Any]] = {
    "t0": {"temperature": 0.0, "top_p": 1.0},
    "t08": {"temperature": 0.8, "top_p": 0.95},
}
SETTING_LABELS = {"t0": "T = 0", "t08": "T = 0.8, top-p 0.95"}
COPYING = ("summarise", "edit", "json")  # kinds whose answers repeat their prompts


@dataclass(frozen=True)
class Cell:
    """One kind of prompt under one setting."""

    kind: str
    setting: str


@dataclass(frozen=True)
class Part:
    """who: `all` sides, or edgespec's `own`. turns: how often every side answers each prompt.

    slowest: a side below this share of the fastest plain one's speed on the first prompt answers only the first
    slow_prompts of each kind, and where those are 0 none at all.
    """

    name: str
    model: str
    who: str
    cells: tuple[Cell, ...]
    n_prompts: int
    n_tokens: int
    turns: int
    slowest: float = 0.0
    slow_prompts: int = 0


@dataclass(frozen=True)
class Size:
    """How much is measured. judged: prompts of each kind that predictions are judged on, as many calibrate."""

    name: str
    cells: tuple[Cell, ...]
    n_prompts: int
    n_tokens: int
    turns: int
    slowest: float
    slow_prompts: int
    scaled_prompts: int
    scaled_keys: tuple[str, ...]  # of `article.cases.scaled_cases`; none takes all
    fidelity_prompts: int
    fidelity_tokens: int
    judged: int
    cost_repeats: int


QUICK = Size(
    name="quick",
    cells=(Cell("chat", "t0"), Cell("chat", "t08"), *(Cell(kind, "t0") for kind in COPYING)),
    n_prompts=5,
    n_tokens=96,
    turns=1,
    slowest=0.35,
    slow_prompts=0,
    scaled_prompts=3,
    scaled_keys=("k2", "k3", "k5-p0.7", "ngram-model-p"),
    fidelity_prompts=4,
    fidelity_tokens=24,
    judged=2,
    cost_repeats=15,
)
FULL = Size(
    name="full",
    cells=tuple(Cell(kind, setting) for kind in KINDS for setting in SETTINGS),
    n_prompts=10,
    n_tokens=128,
    turns=1,
    slowest=0.2,
    slow_prompts=2,
    scaled_prompts=5,
    scaled_keys=(),
    fidelity_prompts=8,
    fidelity_tokens=48,
    judged=4,
    cost_repeats=41,
)


def parts_of(size: Size, model: str, scaled: str) -> tuple[Part, ...]:
    """The parts that compare sides: everybody on the model, and edgespec alone on the scaled target."""
    everybody = Part(
        "sides", model, "all", size.cells, size.n_prompts, size.n_tokens, size.turns, size.slowest, size.slow_prompts
    )
    chat = tuple(cell for cell in size.cells if cell.kind == "chat")
    return everybody, replace(
        everybody, name="scaled", model=scaled, who="own", cells=chat, n_prompts=size.scaled_prompts, slowest=0.0
    )
