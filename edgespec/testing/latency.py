"""A wrapper that gives any model a cost: so many seconds a call and a row, on a clock that a test can own.

Knows nothing of how logits are made; it forwards every call and counts.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from edgespec.types import Model, ModelInfo, Rows, Session

__all__ = ["FakeClock", "LatencyModel", "LatencySession"]


class FakeClock:
    """A clock that moves only when somebody sleeps: pass it as `clock` and its `sleep` as `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class LatencyModel:
    """`model`, with step_s + per_row_s * rows added to every forward call, times 1 +- jitter.

    The cost is a minimum as a device's would be: what the wrapped call itself took on `clock` is part of it. Results
    report the whole as their `run_s`.
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
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.step_s, self.per_row_s, self.jitter = step_s, per_row_s, jitter
        self.n_calls = 0
        self.rows: Counter[int] = Counter()
        self.cost_s = 0.0
        self._clock, self._sleep = clock, sleep
        self._random = random.Random(seed)

    @property
    def info(self) -> ModelInfo:
        return self.model.info

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
        remaining_s = cost_s - (self._clock() - started_s)
        if remaining_s > 0:
            self._sleep(remaining_s)


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
