"""What a loaded draft head offers its drafter, beyond what every model and session does.

Protocols only. A head with a KV cache (TinyDraft, EAGLE) is a `Model` whose sessions take features and extra tokens; a
head without one (Medusa, early exit, the fusion in front of EAGLE) is a function from named arrays to named arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import IncompatibleError
from edgespec.types import FloatArray, IntArray, Model, Rows, Session

__all__ = ["EagleModel", "ExitSession", "HeadSession", "ReducedModel", "StatelessHead", "check_taps", "kind_of"]

Arrays = Mapping[str, NDArray[Any]]


class HeadSession(Session, Protocol):
    """A session whose graph may have the ports `features` and `extra_ids`."""

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
        features: FloatArray | None = None,
    ) -> Rows:
        """features: [n_tokens, d] float32, one row for every token."""

    def set_extra(self, ids: Sequence[int]) -> None:
        """Tokens outside the reduced vocabulary whose logits are wanted from now on, in this order."""


class ReducedModel(Model, Protocol):
    """A draft model whose logits are over `vocabulary` and the extra tokens; None: over the whole vocabulary."""

    @property
    def vocabulary(self) -> IntArray | None: ...

    @property
    def draft(self) -> Mapping[str, Any] | None:
        """The bundle's entry `draft`: kind, taps, n_heads, n_extra, target, acceptance."""


class StatelessHead(Protocol):
    """A graph without a cache. `run_s`: seconds inside the runtime of the last call."""

    run_s: float

    def run(self, feeds: Arrays) -> Arrays:
        """Outputs by name; views that hold until the next call."""


class LoadedHead(StatelessHead, Protocol):
    """A draft bundle of one stateless graph: Medusa, early exit."""

    @property
    def vocabulary(self) -> IntArray | None: ...

    @property
    def draft(self) -> Mapping[str, Any] | None: ...


class EagleModel(ReducedModel, Protocol):
    """An EAGLE head: a model whose sessions take features, and the fusion of the target's taps into one."""

    @property
    def fuse(self) -> StatelessHead: ...


class ExitSession(Session, Protocol):
    """A target session that can run its lower layers ahead of the rest."""

    def exit_rows(self, tokens: Sequence[int]) -> tuple[FloatArray, float]:
        """(hidden [n, d] after the lower layers, seconds in the runtime); the rows are kept for the next forward."""


def kind_of(head: ReducedModel | LoadedHead) -> Mapping[str, Any]:
    """The bundle's entry `draft`; raises IncompatibleError for a bundle that is no draft head."""
    if head.draft is None:
        raise IncompatibleError(
            "This bundle is a target, not a draft head: give a folder whose bundle.json has `draft`."
        )
    return head.draft


def check_taps(kind: str, wanted: Sequence[str], target: Model | None) -> tuple[str, ...]:
    """`wanted` as a tuple; raises IncompatibleError where the target's graph does not give one of them."""
    offered = None if target is None else target.info.taps
    missing = [tap for tap in wanted if offered is not None and tap not in offered]
    if missing:
        raise IncompatibleError(
            f"The {kind} head reads the target's features {list(wanted)}, this target offers {list(offered or ())}: "
            "export it again with these taps (edgespec pull makes them for known pairs), or use another draft."
        )
    return tuple(wanted)


def as_row(values: NDArray[Any]) -> FloatArray:
    """[1, d] float32 copy of one feature."""
    return np.array(values, dtype=np.float32).reshape(1, -1)
