"""How much longer target and draft take when both run at once, each on a thread of its own.

Knows slots of an LLM and clocks; what follows from the figures is for the planner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.noise import Noise
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import DraftContext

if TYPE_CHECKING:
    from edgespec.llm import LLM

__all__ = ["measure_contention"]

WINDOW_S = 0.3  # each of the four measurements
VERIFIED_ROWS = 4


def measure_contention(llm: LLM, kind: str, prompt: list[int]) -> tuple[float, float]:
    """(target, draft): time of a call beside the other one over its time alone, at least 1.

    The target verifies a few rows on a session of its own, the draft proposes for the same text over and over.
    """
    variant = llm.variant(draft=kind, controller="fixed", tree=False, schedule="serial", draft_p_min=0.0)
    output = variant.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
    slot = variant.slots.idle.pop()  # its caches hold that text
    tokens = [*prompt, *output.token_ids][: slot.session.n_past + 1]
    context = DraftContext(
        tokens,
        Sampler(SamplingParams(temperature=0.0), n_vocab=llm.target.info.n_vocab, eos_ids=(), n_prompt=len(prompt)),
        Noise(0),
        variant.verifier_factory(),
        1,
    )
    session = llm.target.open_session()
    n_rows = llm.exact.width(VERIFIED_ROWS) if llm.exact else min(VERIFIED_ROWS, llm.target.info.max_rows or 1)

    def verify() -> None:
        session.forward(tokens[:n_rows] if len(tokens) >= n_rows else [tokens[0]] * n_rows)
        session.keep(0)

    def propose() -> None:
        slot.drafters[0].propose(context, 2)

    try:
        alone = _pace(verify), _pace(propose)
        both = _together(verify, propose)
    finally:
        session.close()
        slot.close()
    return max(1.0, both[0] / alone[0]), max(1.0, both[1] / alone[1])


def _pace(call: Callable[[], None]) -> float:
    """Mean seconds of a call, over WINDOW_S."""
    call()
    began, n = time.perf_counter(), 0
    while n == 0 or time.perf_counter() - began < WINDOW_S:
        call()
        n += 1
    return (time.perf_counter() - began) / n


def _together(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Mean seconds of a call of each while the other one runs as well."""
    paces: dict[int, float] = {}
    errors: list[BaseException] = []
    others: dict[int, bool] = {0: False, 1: False}

    def work(place: int, call: Callable[[], None]) -> None:
        try:
            paces[place] = _pace(call)
            others[place] = True
            while not others[1 - place]:  # keep the other one company until it is done
                call()
        except BaseException as error:
            others[place] = True
            errors.append(error)

    thread = threading.Thread(target=work, args=(1, second), daemon=True)
    thread.start()
    work(0, first)
    thread.join()
    if errors:
        raise errors[0]
    return paces[0], paces[1]
