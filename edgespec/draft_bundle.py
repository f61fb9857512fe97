"""Opens the bundle of a trained draft as what its drafter expects: a model with a KV cache, or a plain function.

`edgespec.draft.heads` says what each kind offers. Everything opened here is shared by all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bundle import Bundle
from edgespec.cpu import default_threads
from edgespec.device_report import DeviceUse
from edgespec.devices import read_device_options
from edgespec.errors import BundleError
from edgespec.options import EngineOptions
from edgespec.types import IntArray, Model

if TYPE_CHECKING:
    from edgespec.backends.onnx.stateless import StatelessGraph

__all__ = ["PlainHead", "open_draft"]

TREE_GRAPH = "tree.onnx"
PLAIN_KINDS = ("medusa", "exit")  # without a KV cache


class PlainHead:
    """A draft without a cache (Medusa, early exit): arrays by name in and out."""

    def __init__(
        self, graph: StatelessGraph, draft: Mapping[str, Any], vocabulary: IntArray | None, device: str = "cpu"
    ) -> None:
        self.graph = graph
        self.draft = draft
        self.vocabulary = vocabulary
        self.device = device

    @property
    def run_s(self) -> float:
        """Seconds inside the runtime of the last call."""
        return self.graph.run_s

    def run(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Outputs by name; views that hold until the next call."""
        return self.graph.run(feeds)

    @property
    def use(self) -> DeviceUse:
        """Where it runs."""
        return DeviceUse(self.device, self.graph.placement.nodes, self.graph.placement.fallbacks)

    def close(self) -> None:
        self.graph.close()


def open_draft(folder: Path, options: EngineOptions) -> Model | PlainHead:
    """Load the draft bundle in `folder` on the draft's device. Raises BundleError for the bundle of a target."""
    bundle = Bundle.open(folder)
    draft = bundle.info.draft
    if draft is None:
        raise BundleError(f"{folder} is the bundle of a target, not of a trained draft: use it as a model")
    if draft["kind"] in PLAIN_KINDS:
        from edgespec.backends.onnx.devices import Place, find_device
        from edgespec.backends.onnx.stateless import StatelessGraph

        device, threads = find_device(options.draft_device), options.threads or default_threads()
        given = read_device_options(options.draft_device_options)
        graph = StatelessGraph(bundle.model_path, place=Place(device, threads, given, options.strict_device))
        return PlainHead(graph, draft, bundle.vocabulary(), device.name)
    from edgespec.backends import load_model

    tree = options.tree and bundle.has(TREE_GRAPH)
    return load_model(folder, tree=tree, **options.draft_place)
