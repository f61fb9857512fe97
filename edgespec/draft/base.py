"""The registry of drafters, and what they share.

A drafter kind is a name and a factory `(DraftSetup) -> Drafter`, looked up lazily so that a kind's imports load on use.
Adding one: a class with the methods of `edgespec.types.Drafter`, and a row in `DRAFTERS` (or `register_drafter`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.errors import ConfigError
from edgespec.types import Drafter, Model

__all__ = ["DRAFTERS", "DraftSetup", "create_drafter", "register_drafter"]


@dataclass(frozen=True)
class DraftSetup:
    """What a factory may use. `model` is the loaded draft model, None for kinds that need none."""

    n_vocab: int
    prompt_lookup_min: int = 2
    model: Model | None = None


Factory = Callable[[DraftSetup], Drafter]

DRAFTERS: dict[str, str | Factory] = {
    "ngram": "edgespec.draft.ngram:create",
    "model": "edgespec.draft.model:create",
}


def register_drafter(name: str, factory: str | Factory) -> None:
    """Add a kind; `factory` is a callable or "module:callable"."""
    DRAFTERS[name] = factory


def create_drafter(name: str, setup: DraftSetup) -> Drafter:
    """Raises ConfigError for an unknown kind."""
    if name not in DRAFTERS:
        raise ConfigError(f"unknown draft kind {name!r}: use one of none, {', '.join(DRAFTERS)}")
    factory = DRAFTERS[name]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    assert callable(factory)
    return factory(setup)
