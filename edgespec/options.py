"""Engine options: one name each in the CLI, the Python API and the config file, validated when they are made.

Sampling settings are in `edgespec.sampling.SamplingParams`. What only a loaded model can tell (its context, its
vocabulary) is checked by `edgespec.llm`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgespec.draft.base import DRAFTERS
from edgespec.engine.controller import CONTROLLERS
from edgespec.errors import ConfigError

__all__ = ["EngineOptions"]

MOST_THREADS = 256


@dataclass(frozen=True)
class EngineOptions:
    """draft: comma-separated kinds in order of priority, or none. exact: rows that do not depend on their neighbours.

    num_speculative_tokens: most tokens drafted a round, >= 1. min_speculative_tokens: a round that could draft fewer
    drafts none. prompt_lookup_min: shortest n-gram match. n_ctx, draft_n_ctx, threads: None lets the model and the
    machine decide. verifier: coupled | rejection | block | typical (the last only with lossy="typical").
    Raises ConfigError with the allowed range.
    """

    draft: str = "ngram"
    num_speculative_tokens: int = 3
    min_speculative_tokens: int = 0
    controller: str = "fixed"
    verifier: str = "coupled"
    lossy: str | None = None
    exact: bool = True
    prompt_lookup_min: int = 2
    n_ctx: int | None = None
    draft_n_ctx: int | None = None
    threads: int | None = None
    device: str = "cpu"
    draft_device: str = "cpu"

    def __post_init__(self) -> None:
        for kind in self.drafts:
            if kind not in DRAFTERS:
                raise ConfigError(f"draft={kind!r} is not known: use none, {', '.join(DRAFTERS)}")
        if self.controller not in CONTROLLERS:
            raise ConfigError(f"controller={self.controller!r} is not known: use {', '.join(CONTROLLERS)}")
        kinds: dict[str, type] = {"exact": bool, "device": str, "draft_device": str}
        for name, wanted in kinds.items():
            if not isinstance(getattr(self, name), wanted):
                raise ConfigError(f"{name}={getattr(self, name)!r}: it must be a {wanted.__name__}")
        self._check_range("num_speculative_tokens", 1, "for plain decoding use draft='none' (--draft none)")
        self._check_range("min_speculative_tokens", 0)
        if self.min_speculative_tokens > self.num_speculative_tokens:
            raise ConfigError(
                f"min_speculative_tokens={self.min_speculative_tokens} is over num_speculative_tokens="
                f"{self.num_speculative_tokens}: nothing would ever be drafted"
            )
        self._check_range("prompt_lookup_min", 1)
        self._check_range("n_ctx", 2)
        self._check_range("draft_n_ctx", 2)
        self._check_range("threads", 1)
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads={self.threads}: at most {MOST_THREADS}; more than the fast cores slows down")
        if len(set(self.drafts)) < len(self.drafts):
            raise ConfigError(f"draft={self.draft!r} names a kind twice: give each once, in order of priority")

    def _check_range(self, name: str, lowest: int, hint: str = "") -> None:
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(
                f"{name}={value!r}: it must be a whole number from {lowest} up{'; ' if hint else ''}{hint}"
            )

    @property
    def drafts(self) -> tuple[str, ...]:
        """The draft kinds in order of priority; empty for plain decoding."""
        return () if self.draft == "none" else tuple(part.strip() for part in self.draft.split(","))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
