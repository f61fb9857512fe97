"""What steers drafting over the requests of an LLM: each request's controller and schedule, what earlier ones taught.

Knows options and controllers; how rounds run, and what a controller weighs, is in `edgespec.engine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgespec.engine.adaptive import Learned
from edgespec.engine.controller import Controller, create_controller
from edgespec.engine.scheduler import Events, run_schedule
from edgespec.loading import Loaded
from edgespec.options import EngineOptions
from edgespec.telemetry import PowerMonitor
from edgespec.trace import Trace
from edgespec.types import Committed, Drafter, ExactRows

__all__ = ["Steering"]


class Steering:
    """One for each LLM. learned: by the adaptive controller, from the profile on; it changes speed and never text.

    trace: of all requests.
    """

    def __init__(self, options: EngineOptions, loaded: Loaded) -> None:
        self.options = options
        self.plan = loaded.plan
        self.learned = Learned.expecting(loaded.expected)
        self.power = PowerMonitor()
        self.trace = Trace(path=options.trace) if options.trace else None

    def controller(self, drafters: Sequence[Drafter], exact: ExactRows | None) -> Controller:
        """The controller of one request. exact: the row counts that its calls are padded to."""
        options = self.options
        state: dict[str, Any] = {}
        if options.controller == "adaptive":
            state = {"memory": self.learned, "exact": exact, "most_k": self.power.limit}
        name = options.controller or "fixed"
        controller = create_controller(name, options.most_drafted, options.min_speculative_tokens, **state)
        if not drafters:
            controller.max_k = 0
        return controller

    def run(self, events: Events, drafters: Sequence[Drafter]) -> Iterator[Committed]:
        """Drive one request's round loop; closing this iterator cancels it. The trace is written at its end."""
        try:
            yield from run_schedule(self.options.schedule or "serial", events, drafters, self.trace)
        finally:
            if self.trace:
                self.trace.save()

    def summary(self, controller: Controller) -> dict[str, Any]:
        """What a request's controller decided and why, and the plan that the drafts come from, for its report."""
        found = controller.summary()
        return {**found, "plan": self.plan} if self.plan else found
