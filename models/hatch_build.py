"""What of this folder goes into a wheel besides the manifests: the training package and the zoo.

hatchling maps a folder to one place, the shorter of two prefixes first, and `models` is mapped for the manifests. An
editable installation needs nothing: there this folder is on the path, and copies would hide it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {"edgespec_models": "edgespec_models", "zoo": "edgespec/zoo"}  # in this folder -> in the wheel


class WheelContents(BuildHookInterface):
    """Adds the folders of PLACES that are there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is built."""
        if version == "editable":
            return
        for name, place in PLACES.items():
            folder = Path(self.root) / "models" / name
            if folder.is_dir():
                build_data["force_include"][str(folder)] = place
