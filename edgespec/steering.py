"""What steers drafting over the requests of an LLM: the controller of each request and what earlier ones taught it.

Knows options and controllers; how rounds run, and what a controller weighs, is in `edgespec.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.engine.adaptive import Learned
from edgespec.engine.controller import Controller, create_controller
from edgespec.options import EngineOptions
from edgespec.types import Drafter, ExactRows

__all__ = ["Steering"]


class Steering:
    """One for each LLM. learned: by the adaptive controller; it changes speed and never text."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.learned = Learned()

    def controller(self, drafters: Sequence[Drafter], exact: ExactRows | None) -> Controller:
        """The controller of one request. exact: the row counts that its calls are padded to."""
        options = self.options
        state: dict[str, Any] = {"memory": self.learned, "exact": exact} if options.controller == "adaptive" else {}
        most = options.tree_rows if options.tree else options.num_speculative_tokens
        controller = create_controller(options.controller, most, options.min_speculative_tokens, **state)
        if not drafters:
            controller.max_k = 0
        return controller
