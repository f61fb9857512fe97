"""The reduced vocabulary of a draft bundle: which token each logits column is of.

The first columns are the tokens that the bundle lists, the rest are a call's own: tokens of the context that the list
lacks. Knows ids, not graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError
from edgespec.types import IntArray

__all__ = ["ReducedVocabulary"]


@dataclass(frozen=True)
class ReducedVocabulary:
    """ids: [V] int64, ascending. n_full: tokens of the whole vocabulary. n_extra: columns after the first V."""

    ids: IntArray
    n_full: int
    n_extra: int

    @classmethod
    def of(cls, bundle: Bundle) -> ReducedVocabulary | None:
        """The vocabulary of a draft, None for a target; raises BundleError where the file does not fit the bundle."""
        ids, draft = bundle.vocabulary(), bundle.info.draft
        if ids is None or draft is None:
            return None
        return cls(ids, draft["target"]["n_vocab"], draft["n_extra"])

    def check_extra(self, name: str, ids: Sequence[int]) -> None:
        """Raise ConfigError unless `ids` are at most `n_extra` different tokens that the list lacks."""
        if len(ids) > self.n_extra:
            raise ConfigError(f"{name}: {len(ids)} extra tokens, it takes at most {self.n_extra}.")
        extra = np.array(ids, np.int64)
        if len(extra) and (extra.min() < 0 or extra.max() >= self.n_full):
            raise ConfigError(f"{name}: extra tokens {list(ids)} reach outside the {self.n_full} of the vocabulary.")
        near = self.ids[np.minimum(np.searchsorted(self.ids, extra), len(self.ids) - 1)]
        if len(set(ids)) != len(ids) or (near == extra).any():
            raise ConfigError(f"{name}: extra tokens {list(ids)} hold one twice, or one that the draft's list has.")
