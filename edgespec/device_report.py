"""Where the loaded models run: nodes by provider, what a device left to the CPU, in words and as plain data.

Reads what backends put into ModelInfo; knows no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.devices import Device, fixed_shapes_hint, name_some
from edgespec.types import ModelInfo

__all__ = ["DeviceUse", "device_line", "device_notes", "devices_json", "use_of"]


@dataclass(frozen=True)
class DeviceUse:
    """What one model uses. nodes: provider -> how many of the graph's nodes it runs; empty where a backend cannot say.

    fallbacks: operators that the device left to the CPU. max_rows: rows that one call can bring, None for any number.
    """

    device: str
    nodes: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    max_rows: int | None = None

    @property
    def n_fallen(self) -> int:
        """Nodes that run on the CPU and should not."""
        return self.nodes.get("CPUExecutionProvider", 0) if self.fallbacks else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "device": self.device,
            "nodes": dict(self.nodes),
            "n_fallen": self.n_fallen,
            "fallbacks": list(self.fallbacks),
            "max_rows": self.max_rows,
        }

    def note(self, what: str) -> str | None:
        """What the user should know, if anything."""
        if not self.fallbacks:
            return None
        n_nodes = sum(self.nodes.values())
        hint = fixed_shapes_hint(Device.parse(self.device), self.n_fallen, n_nodes)
        return (
            f"{what} on {self.device}: {self.n_fallen} of {n_nodes} nodes run on the CPU instead "
            f"({name_some(self.fallbacks)}); strict_device (--strict-device) makes this an error{hint}"
        )


def use_of(info: ModelInfo) -> DeviceUse:
    """What a loaded model says about itself."""
    return DeviceUse(info.device, info.placement, info.fallbacks, info.max_rows)


def devices_json(target: DeviceUse, drafts: Mapping[str, DeviceUse]) -> dict[str, Any]:
    """The run report's entry: `target`, and `draft` by kind."""
    return {"target": target.to_dict(), "draft": {kind: use.to_dict() for kind, use in drafts.items()}}


def device_line(devices: Mapping[str, Any]) -> str:
    """The same for people, in one line; empty where nothing is known."""
    uses = {**({"target": devices["target"]} if devices else {}), **devices.get("draft", {})}
    parts = []
    for what, use in uses.items():
        unit = "layers" if Device.parse(use["device"]).runtime == "llamacpp" else "nodes"
        nodes = ", ".join(f"{provider}: {count} {unit}" for provider, count in use["nodes"].items())
        parts.append(f"{what} on {use['device']}{f' ({nodes})' if nodes else ''}")
    return "; ".join(parts)


def device_notes(target: DeviceUse, drafts: Mapping[str, DeviceUse]) -> list[str]:
    """One note for each model whose device left something to the CPU."""
    uses = {"target": target, **{f"draft {kind}": use for kind, use in drafts.items()}}
    return [note for what, use in uses.items() if (note := use.note(what))]
