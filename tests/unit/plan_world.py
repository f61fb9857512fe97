"""Made-up profiles of a target and a draft, and the plan made of them."""

from __future__ import annotations

from typing import Any

from edgespec.engine.costs import DraftCosts, MeasuredCosts, Spread
from edgespec.planner import make_plan
from edgespec.profile import DraftProfile, Profiles, TargetProfile

__all__ = ["COPIED_TEXT", "RANDOM_TEXT", "draft", "plan", "table", "target"]

RANDOM_TEXT = tuple((i * i * 31 + i // 3) % 97 for i in range(200))
COPIED_TEXT = tuple(i % 9 for i in range(200))


def table(**rows: float) -> dict[int, Spread]:
    return {int(n[1:]): Spread(s, s, s, 5) for n, s in rows.items()}


def target(a_row: float, text: tuple[int, ...] = RANDOM_TEXT, **changes: Any) -> TargetProfile:
    """One row takes 1 s, each further one `a_row`."""
    rows = {n: Spread(1 + a_row * (n - 1), 0, 0, 5) for n in range(1, 17)}
    fields = {
        "name": "t",
        "device": "cpu",
        "costs": MeasuredCosts({64: rows}),
        "exact": None,
        "guess": 0.0,
        "texts": (((1, 2, 3), text),),
        "bytes": 1000,
        "load_s": 1.0,
        "power": "mains",
        "measured_at": 0.0,
    }
    return TargetProfile(**{**fields, **changes})


def draft(chances: tuple[float, ...], step_s: float, **changes: Any) -> DraftProfile:
    steps = {k: Spread(k * step_s, 0, 0, 5) for k in range(1, 9)}
    fields = {
        "kind": "model",
        "device": "cpu",
        "costs": DraftCosts(steps),
        "chances": chances,
        "contention": (1.0, 1.0),
        "bytes": 100,
        "load_s": 0.1,
        "measured_at": 0.0,
    }
    return DraftProfile(**{**fields, **changes})


def plan(t: TargetProfile, *drafts: DraftProfile, **options: Any) -> Any:
    return make_plan([Profiles(t, {d.kind: d for d in drafts})], **options)
