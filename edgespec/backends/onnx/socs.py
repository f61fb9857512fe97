"""Snapdragon chips by name, as Qualcomm's compiler numbers them.

Ids are those of the QNN SDK's list. A chip that is not here is refused, since code for another one does not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config import nearest
from edgespec.errors import ConfigError

__all__ = ["SOCS", "Soc", "find_soc"]

# the option htp_arch of the provider knows no other; for these chips the model number alone says it
_ARCHES = (68, 69, 73, 75, 81)


@dataclass(frozen=True)
class Soc:
    """name: as part numbers go, in lower case. soc_model, htp_arch: the SDK's numbers; title: what people call it."""

    name: str
    title: str
    soc_model: int
    htp_arch: int

    @property
    def options(self) -> dict[str, str]:
        """Provider options that mean this chip."""
        arch = {"htp_arch": str(self.htp_arch)} if self.htp_arch in _ARCHES else {}
        return {"soc_model": str(self.soc_model), **arch}


SOCS: dict[str, Soc] = {
    soc.name: soc
    for soc in (
        Soc("sm8550", "Snapdragon 8 Gen 2", 43, 73),
        Soc("sm8635", "Snapdragon 8s Gen 3", 68, 73),
        Soc("sm8650", "Snapdragon 8 Gen 3", 57, 75),
        Soc("sm8735", "Snapdragon 8s Gen 4", 85, 79),
        Soc("sm8750", "Snapdragon 8 Elite", 69, 79),
        Soc("sm8850", "Snapdragon 8 Elite Gen 5", 87, 81),
        Soc("x-elite", "Snapdragon X Elite", 60, 73),
    )
}


def find_soc(name: str) -> Soc:
    """The chip called `name` (`sm8650`, `SM8650`, `x elite`); raises ConfigError listing the known ones."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key not in SOCS:
        known = ", ".join(f"{soc.name} ({soc.title})" for soc in SOCS.values())
        raise ConfigError(f"chip {name!r} is unknown{nearest(key, SOCS) or ':'} known are {known}")
    return SOCS[key]
