"""How much longer target and draft take when both run at once, each on a thread of its own.

Measured as decoding uses it: the same text once serially and once overlapped, by the production code, round against
round. Apart from a run it is easily wrong: beside a draft that passes without a rest the first calls of a new thread
took twice as long, until the system gave it a core of its own, and a few such calls were all that was seen.
What follows from the figures is for the planner; whether the two have cores of their own at all is said here too.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from edgespec.cpu import default_threads
from edgespec.devices import Device
from edgespec.options import IN_FLIGHT_DRAFTS
from edgespec.sampling import SamplingParams
from edgespec.types import RoundRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec.llm import LLM

__all__ = ["compare_rounds", "measure_contention", "shared_place"]

DRAFTED, N_TOKENS = 3, 64  # of the runs: drafted a round, and in all (some 30 rounds)
STALLED = 4.0


def measure_contention(llm: LLM, kind: str, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """(target, draft): time of a verify call, and of a draft pass, overlapped over serial; (1, 1) where none can be.

    Under 1 where taking turns costs more, as each then evicts what the other has cached.
    """
    if kind in IN_FLIGHT_DRAFTS:
        return 1.0, 1.0
    info = llm.target.info
    limits = [info.n_ctx, info.max_rows, llm.exact.max_rows if llm.exact else None]
    k = max(1, min(DRAFTED, *(n - 1 for n in limits if n is not None)))
    runs: dict[str, list[RoundRecord]] = {}
    for schedule in ("serial", "overlapped"):
        variant = llm.variant(
            draft=kind,
            num_speculative_tokens=k,
            min_speculative_tokens=0,
            controller="fixed",
            tree=False,
            schedule=schedule,
            draft_p_min=0.0,
        )
        runs[schedule] = []
        for prompt in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
            runs[schedule] += variant.generate([prompt], params)[0].outputs[0].stats.records
        variant.forget()
    return compare_rounds(runs["serial"], runs["overlapped"])


def compare_rounds(serial: Sequence[RoundRecord], overlapped: Sequence[RoundRecord]) -> tuple[float, float]:
    """The same from the records of two runs with the same rounds; those that hold a prompt are left out.

    Of sums, not medians: a call that waited for a core now and then is part of what overlapping costs. One that took
    STALLED times the usual waited for something else.
    """
    pairs = [
        (one, other)
        for one, other in zip(serial, overlapped, strict=False)
        if one.index and other.ahead and one.n_rows == other.n_rows and one.target_s > 0
    ]
    alone = [record.propose_s / record.drafted for record in serial if record.index and record.drafted]
    if not pairs or not alone or not sum(alone):
        return 1.0, 1.0
    usual = median(other.target_s / one.target_s for one, other in pairs)
    pairs = [(one, other) for one, other in pairs if other.target_s <= STALLED * usual * one.target_s]
    target = sum(other.target_s for _, other in pairs) / sum(one.target_s for one, _ in pairs)
    draft = fmean(other.ahead_s / other.ahead for _, other in pairs) / fmean(alone)
    return target, draft


def shared_place(target: str, draft: str, threads: int | None) -> str | None:
    """What two models on these devices would take from each other side by side; None where each has its own.

    On processors that is a thread for each of the fast cores, and half of them for either at most. threads: of each
    model, None for the default.
    """
    if {Device.parse(target).kind, Device.parse(draft).kind} != {"cpu"}:
        return f"target and draft share {target}" if target == draft else None
    n_cores = default_threads()
    n_threads = threads or n_cores
    if 2 * n_threads <= n_cores:
        return None
    hint = f"; --threads {n_cores // 2}" if n_cores > 1 else ""
    return f"target and draft share {n_cores} cores with {n_threads} threads each{hint}"
