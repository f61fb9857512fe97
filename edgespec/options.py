"""Engine options: one name each in the CLI, the Python API and the config file, validated when they are made.

Sampling settings are in `edgespec.sampling.SamplingParams`. What only a loaded model can tell (its context, its
vocabulary) is checked by `edgespec.llm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edgespec.devices import Device, read_device_options
from edgespec.draft.base import DRAFT_DRAFTS, DRAFTERS
from edgespec.engine.controller import CONTROLLERS
from edgespec.engine.scheduler import SCHEDULES
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.trace import check_trace_path
from edgespec.verify import VERIFIERS

__all__ = ["AUTO", "BUNDLED_DRAFTS", "DEFAULT_K", "IN_FLIGHT_DRAFTS", "EngineOptions"]

AUTO = "auto"  # as a draft: what the planner chooses

DEFAULT_K = 3
MOST_THREADS = 256
BUNDLED_DRAFTS = {"tinydraft": "tinydraft", "eagle": "eagle", "medusa": "medusa", "early-exit": "exit"}
"""Draft kinds whose weights are made for one target -> what their files call the kind."""
IN_FLIGHT_DRAFTS = {
    "eagle": "it drafts from the target's features of the round in flight",
    "medusa": "it drafts from the target's features of the round in flight",
    "early-exit": "it drafts on the target's own layers",
}
"""Draft kinds that can do nothing while the target verifies -> why."""


@dataclass(frozen=True)
class EngineOptions:
    """draft: comma-separated kinds in order of priority, none, or auto (the plan's). exact: rows that do not depend on
    their neighbours.

    num_speculative_tokens: most tokens drafted a round, >= 1; None: DEFAULT_K or the fewest if those are more, less
    where a context is short, and with draft="auto" the plan's. min_speculative_tokens: a round that could draft
    fewer drafts none. controller: fixed | adaptive | window | multiplicative; None: fixed, and with draft="auto"
    adaptive. prompt_lookup_min: shortest n-gram match. draft_p_min: a draft stops after a token that it gives less
    probability than this. draft_draft: none | ngram | tinydraft, what guesses the tokens of a draft that is a
    model, for it to judge several in one pass. tree: verify several continuations in one pass, of at most tree_rows
    tokens, up to tree_width after each; needs exact=False. n_ctx, draft_n_ctx, threads: None lets the model and the
    machine decide. device, draft_device: names of `edgespec.devices`; device_options, draft_device_options: of
    their providers, as a mapping or `KEY=VALUE` texts. strict_device: refuse a device that does not run all of its
    model, and a draft that fails. schedule: serial | overlapped (the draft prepares for a round's outcomes while
    the target verifies it); None: serial, or with draft="auto" the plan's.
    trace: file that gets a trace of the requests, for Perfetto. verifier: coupled | rejection | block | typical
    (the last only with lossy="typical").
    Raises ConfigError with the allowed range, or naming the two settings that exclude each other.
    """

    draft: str = "ngram"
    num_speculative_tokens: int | None = None
    min_speculative_tokens: int = 0
    controller: str | None = None
    verifier: str = "coupled"
    lossy: str | None = None
    exact: bool = True
    prompt_lookup_min: int = 2
    draft_p_min: float = 0.0
    draft_draft: str = "none"
    tree: bool = False
    tree_rows: int = 8
    tree_width: int = 3
    n_ctx: int | None = None
    draft_n_ctx: int | None = None
    threads: int | None = None
    device: str = "cpu"
    draft_device: str = "cpu"
    device_options: Mapping[str, str] | Sequence[str] = ()
    draft_device_options: Mapping[str, str] | Sequence[str] = ()
    strict_device: bool = False
    schedule: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_range("num_speculative_tokens", 1, "for plain decoding use draft='none' (--draft none)")
        self._check_range("min_speculative_tokens", 0)
        if self.min_speculative_tokens > self.depth:
            raise ConfigError(
                f"min_speculative_tokens={self.min_speculative_tokens} is over num_speculative_tokens={self.depth}: "
                "nothing would ever be drafted"
            )
        for name, lowest in (("prompt_lookup_min", 1), ("tree_rows", 1), ("tree_width", 1)):
            self._check_range(name, lowest)
        for name, lowest in (("n_ctx", 2), ("draft_n_ctx", 2), ("threads", 1)):
            self._check_range(name, lowest)
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads={self.threads}: at most {MOST_THREADS}; more than the fast cores slows down")
        p_min = self.draft_p_min
        if isinstance(p_min, bool) or not isinstance(p_min, (int, float)) or not 0 <= p_min < 1:
            raise ConfigError(f"draft_p_min={p_min!r}: it is a probability, from 0 (never stops early) to below 1")
        self._check_devices()
        self._check_cascade()
        self._check_tree()
        self._check_schedule()
        if self.trace is not None:
            check_trace_path(self.trace)

    def _check_names(self) -> None:
        for kind in self.drafts:
            if kind not in DRAFTERS and self.draft != AUTO:
                raise ConfigError(f"draft={kind!r} is not known: use none, {', '.join(DRAFTERS)}")
        if len(set(self.drafts)) < len(self.drafts):
            raise ConfigError(f"draft={self.draft!r} names a kind twice: give each once, in order of priority")
        if self.controller is not None and self.controller not in CONTROLLERS:
            raise ConfigError(f"controller={self.controller!r} is not known: use {', '.join(CONTROLLERS)}")
        kinds: dict[str, type] = {
            "exact": bool,
            "tree": bool,
            "device": str,
            "draft_device": str,
            "strict_device": bool,
        }
        if not isinstance(self.trace, str | None):
            raise ConfigError(f"trace={self.trace!r}: it must be the name of a file")
        for name, wanted in kinds.items():
            if not isinstance(getattr(self, name), wanted):
                raise ConfigError(f"{name}={getattr(self, name)!r}: it must be a {wanted.__name__}")

    def _check_devices(self) -> None:
        """Names and the form of options; whether a device is here is for the backend that loads."""
        for name in ("device", "draft_device"):
            Device.parse(getattr(self, name))
            given = read_device_options(getattr(self, f"{name}_options"), f"{name}_options")
            object.__setattr__(self, f"{name}_options", given or ())

    def _check_cascade(self) -> None:
        if self.draft_draft == "none":
            return
        chosen = f"draft_draft={self.draft_draft!r} (--draft-draft {self.draft_draft})"
        if self.draft_draft not in DRAFT_DRAFTS:
            raise ConfigError(f"draft_draft={self.draft_draft!r} is not known: use {', '.join(DRAFT_DRAFTS)}")
        able = DRAFT_DRAFTS[self.draft_draft]
        if self.draft == AUTO:
            raise IncompatibleError(f"{chosen} with draft='auto': name the draft, {' or '.join(able)}")
        if not set(able) & set(self.drafts):
            raise IncompatibleError(
                f"{chosen} guesses for a draft that is a model, and draft={self.draft!r} has none: use "
                f"draft={' or '.join(map(repr, able))}, or draft_draft='none'"
            )
        if self.tree:
            raise IncompatibleError(f"{chosen} with tree=True (--tree): it guesses along chains; drop one of them")

    def _check_tree(self) -> None:
        if not self.tree:
            return
        if self.exact:
            raise ConfigError(
                "tree=True (--tree) with exact=True: the rows of a tree are not those of a chain bit for bit; use "
                "exact=False (--fast), or drop the tree"
            )
        if self.verifier in VERIFIERS and not VERIFIERS[self.verifier].supports_tree:
            able = ", ".join(name for name, rule in VERIFIERS.items() if rule.supports_tree and rule.lossless)
            raise IncompatibleError(
                f"tree=True (--tree) with verifier={self.verifier!r}: that rule judges chains; use one of {able}, or "
                "drop the tree"
            )
        if "early-exit" in self.drafts:
            raise IncompatibleError(
                f"tree=True (--tree) with draft={self.draft!r}: an early exit drafts chains on the target's own "
                "cache; use draft='eagle' (or medusa, tinydraft), or drop the tree"
            )
        if self.controller not in (None, "fixed"):
            raise IncompatibleError(
                f"tree=True (--tree) with controller={self.controller!r}: that rule goes by the share of tokens "
                "accepted, which is low for any tree; use controller='fixed', or drop the tree"
            )
        if not self.drafts:
            raise ConfigError("tree=True (--tree) would have no effect, as draft='none' drafts nothing")

    def _check_schedule(self) -> None:
        if self.schedule in (None, "serial"):
            return
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is not known: use {', '.join(SCHEDULES)}")
        chosen = "schedule='overlapped' (--schedule overlapped)"
        if not self.drafts:
            raise ConfigError(f"{chosen} would have no effect, as draft='none' drafts nothing")
        for kind in self.drafts:
            if kind in IN_FLIGHT_DRAFTS:
                raise IncompatibleError(
                    f"{chosen} with draft={kind!r}: {IN_FLIGHT_DRAFTS[kind]}, so it cannot draft meanwhile; use "
                    "draft='model' (or tinydraft, ngram), or schedule='serial'"
                )
        if self.tree:
            raise IncompatibleError(
                f"{chosen} with tree=True (--tree): it prepares chains; use schedule='serial', or drop the tree"
            )

    def _check_range(self, name: str, lowest: int, hint: str = "") -> None:
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(
                f"{name}={value!r}: it must be a whole number from {lowest} up{'; ' if hint else ''}{hint}"
            )

    @property
    def depth(self) -> int:
        """Most tokens after each other that a round drafts."""
        given = self.num_speculative_tokens
        return max(DEFAULT_K, self.min_speculative_tokens) if given is None else given

    @property
    def most_drafted(self) -> int:
        """Most tokens that a round drafts: the length of a chain, or the nodes of a tree."""
        return self.tree_rows if self.tree else self.depth

    @property
    def target_place(self) -> dict[str, Any]:
        """The keywords of `edgespec.backends.load_model` that say where the target runs, and with what context."""
        return {
            "device": self.device,
            "device_options": self.device_options,
            "strict_device": self.strict_device,
            "n_ctx": self.n_ctx,
            "threads": self.threads,
        }

    @property
    def draft_place(self) -> dict[str, Any]:
        """The same of the draft."""
        return {
            "device": self.draft_device,
            "device_options": self.draft_device_options,
            "strict_device": self.strict_device,
            "n_ctx": self.draft_n_ctx,
            "threads": self.threads,
        }

    @property
    def loaded_drafts(self) -> tuple[str, ...]:
        """The draft kinds, and with them what drafts for a draft, where that has weights."""
        extra = (self.draft_draft,) if self.draft_draft in BUNDLED_DRAFTS else ()
        return tuple(dict.fromkeys((*self.drafts, *extra)))

    @property
    def drafts(self) -> tuple[str, ...]:
        """The draft kinds in order of priority; empty for plain decoding."""
        return () if self.draft == "none" else tuple(part.strip() for part in self.draft.split(","))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
