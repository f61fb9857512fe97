"""A wrapper that gives any model a cost: so many seconds a call and a row, on a clock that a test can own.

With real sleeps it stands for a device; with a `FakeClock` and a `VirtualWorker` even two devices side by side run in
no time, and the same way every time. Knows nothing of how logits are made; it forwards every call and counts.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from edgespec.types import Model, ModelInfo, Rows, Session

__all__ = ["FakeClock", "LatencyModel", "LatencySession", "VirtualTask", "VirtualWorker"]

Result = TypeVar("Result")


class FakeClock:
    """A clock that moves only when somebody sleeps: pass it as `clock` and its `sleep` as `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualWorker:
    """Stands in for the target's thread on a FakeClock: a call runs at once, and the clock goes back to its start.

    Pass `lambda: VirtualWorker(clock)` as `start_worker` of `edgespec.engine.scheduler.run_overlapped`.
    """

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def submit(self, call: Callable[[], Result]) -> VirtualTask[Result]:
        started_s = self._clock.now_s
        result = call()
        task = VirtualTask(self._clock, self._clock.now_s, result)
        self._clock.now_s = started_s
        return task

    def close(self) -> None:
        """Nothing is in flight."""


class VirtualTask(Generic[Result]):
    """A call that takes until `end_s`."""

    def __init__(self, clock: FakeClock, end_s: float, result: Result) -> None:
        self._clock, self._end_s, self._result = clock, end_s, result

    def done(self) -> bool:
        return self._clock.now_s >= self._end_s

    def result(self) -> Result:
        """Waits: the clock moves on to the call's end."""
        self._clock.now_s = max(self._clock.now_s, self._end_s)
        return self._result


class LatencyModel:
    """`model`, with step_s + per_row_s * rows added to every forward call, times 1 +- jitter.

    The cost is a minimum as a device's would be: what the wrapped call itself took on `clock` is part of it. Results
    report the whole as their `run_s`. By how much a sleep was too long is taken off the next one, so that many short
    calls cost what they should. device: what it says it runs on, None for what the model says.
    `n_calls` counts forward calls, `rows` how many had each row count, `cost_s` the seconds charged.
    """

    def __init__(
        self,
        model: Model,
        step_s: float,
        per_row_s: float = 0.0,
        *,
        jitter: float = 0.0,
        seed: int = 0,
        device: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self._info = model.info if device is None else dataclasses.replace(model.info, device=device)
        self.step_s, self.per_row_s, self.jitter = step_s, per_row_s, jitter
        self.n_calls = 0
        self.rows: Counter[int] = Counter()
        self.cost_s = 0.0
        self._clock, self._sleep = clock, sleep
        self._overslept_s = 0.0
        self._random = random.Random(seed)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def open_session(self) -> LatencySession:
        return LatencySession(self, self.model.open_session())

    def close(self) -> None:
        self.model.close()

    def charge(self, n_rows: int, started_s: float) -> None:
        """Sleep until a call of `n_rows` rows that began at `started_s` has taken its time."""
        cost_s = self.step_s + self.per_row_s * n_rows
        if self.jitter:
            cost_s *= 1 + self.jitter * self._random.uniform(-1, 1)
        self.n_calls += 1
        self.rows[n_rows] += 1
        self.cost_s += cost_s
        slept_from_s = self._clock()
        remaining_s = cost_s - (slept_from_s - started_s)
        if remaining_s <= 0:
            return
        wanted_s = remaining_s - self._overslept_s
        if wanted_s > 0:
            self._sleep(wanted_s)
        # No more than this call's own cost: on a busy machine one late wake-up must not make the next calls free.
        self._overslept_s = min(self._clock() - slept_from_s - wanted_s, cost_s)


class LatencySession:
    """A session of the wrapped model whose forward calls cost time."""

    def __init__(self, model: LatencyModel, session: Session) -> None:
        self._model = model
        self._session = session

    @property
    def n_past(self) -> int:
        return self._session.n_past

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        started_s = self._model._clock()
        rows = self._session.forward(tokens, parents=parents, logits_rows=logits_rows, taps=taps)
        self._model.charge(len(tokens), started_s)
        return dataclasses.replace(rows, run_s=self._model._clock() - started_s)

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        self._session.keep(n_past, path)

    def close(self) -> None:
        self._session.close()
