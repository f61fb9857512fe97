"""The tutorial's phone figure, 3 -> 8 to 10 tok/s for 7 B on a Snapdragon 8 Gen 3, asked of the simulator.

No phone is measured here. Inputs are stated in each row: the plain speed is the tutorial's, draft step and acceptance
are typed in, and the cost of verifying several rows is either free, as the tutorial has it, or has the shape that was
measured on this machine. Owns these inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.sim import Scenario, predict

__all__ = ["PLAIN_TOK_S", "WANTED_TOK_S", "phone_rows"]

PLAIN_TOK_S = 3.0
WANTED_TOK_S = (8.0, 10.0)
_MOST_ROWS = 9
# Milliseconds of MatMulNBits, int4 in blocks of 128, at 1, 2, ... 9 rows on the machine of bench/LOG.md.
_MEASURED_SHAPE = (0.83, 1.01, 1.46, 1.79, 2.18, 2.53, 2.90, 3.28, 3.90)


@dataclass(frozen=True)
class Phone:
    """draft_ms: a step of the draft. acceptance: of each position."""

    what: str
    draft_ms: float
    acceptance: float
    k: int


PHONES = (
    Phone("TinyDraft, under 100 M, on the NPU", 10.0, 0.6, 5),
    Phone("0.5 B draft on the NPU", 25.0, 0.7, 5),
    Phone("0.5 B draft on the NPU", 25.0, 0.8, 5),
    Phone("0.5 B draft on the NPU", 25.0, 0.8, 8),
    Phone("0.5 B draft on the CPU, beside the target", 50.0, 0.8, 5),
)


def phone_rows(shape_ms: Mapping[int, float] | None = None) -> list[dict[str, Any]]:
    """A row for each phone, schedule and cost of verifying. shape_ms: a target's times here by rows, from 1; None for
    onnxruntime's kernel."""
    shape = dict(enumerate(_MEASURED_SHAPE, 1)) if shape_ms is None else dict(shape_ms)
    plain_s = 1 / PLAIN_TOK_S
    verifying = {
        "free, as on an NPU or a GPU": {1: plain_s, _MOST_ROWS: plain_s},
        "shaped as on this CPU": {rows: plain_s * ms / shape[1] for rows, ms in shape.items()},
    }
    rows = []
    for phone in PHONES:
        for how, target_s in verifying.items():
            scenario = Scenario(target_s, phone.draft_ms / 1e3, (phone.acceptance,))
            for schedule in ("serial", "overlapped"):
                k = min(phone.k, scenario.most_k)
                found = predict(scenario, k, schedule)
                best_k = max(range(1, scenario.most_k + 1), key=lambda n: predict(scenario, n, schedule).speedup)
                best = predict(scenario, best_k, schedule)
                rows.append({"what": "phone", "draft": phone.what, "draft_ms": phone.draft_ms, "k": k,
                             "acceptance": phone.acceptance, "verifying": how, "schedule": schedule,
                             "tok_s": round(PLAIN_TOK_S * found.speedup, 2), "speedup": round(found.speedup, 2),
                             "best_k": best_k, "best_tok_s": round(PLAIN_TOK_S * best.speedup, 2)})  # fmt: skip
    return rows
