"""The fixed prompts that everything is measured on, by kind. Owns bench/prompts/*.jsonl and their format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ConfigError

__all__ = ["KINDS", "Prompt", "load_prompts"]

KINDS = ("chat", "code", "summarise", "edit", "json", "translation", "long")
_HERE = Path(__file__).resolve().parent
_FOLDER = next((folder for folder in (_HERE / "prompts", _HERE.parent / "prompts") if folder.is_dir()), _HERE)
"""In the wheel they lie in the package, in a checkout beside it."""


@dataclass(frozen=True)
class Prompt:
    """One user message; `id` is unique over all kinds."""

    id: str
    kind: str
    prompt: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that a chat template takes."""
        return [{"role": "user", "content": self.prompt}]


def load_prompts(kind: str, folder: Path = _FOLDER) -> list[Prompt]:
    """The prompts of one kind, in file order. Raises ConfigError where the kind or its file is missing or malformed."""
    if kind not in KINDS:
        raise ConfigError(f"there are no prompts of kind {kind!r}: use one of {', '.join(KINDS)}")
    path = folder / f"{kind}.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: take it from the repository's folder bench/prompts")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            prompts.append(Prompt(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number} is no prompt ({error}): it needs id, kind and prompt") from error
    return prompts
