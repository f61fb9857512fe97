"""What a target usually writes after the last few tokens: a table counted from its own texts, and its drafter.

Static lookup: nothing runs for a proposal, so that all it costs is the rows that the target verifies. Owns the table's
file, which need not be trusted: a wrong entry costs a row and never a token. Counting is in edgespec_models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.draft.base import DraftSetup
from edgespec.draft.track import AcceptanceTrack
from edgespec.errors import ConfigError, FormatError
from edgespec.types import DraftContext, FloatArray, Offer, Proposal
from edgespec.zoo_config import CONFIG, declared_format

__all__ = ["ENTRIES", "MOST_ORDER", "NgramTable", "TableDrafter", "context_keys", "entry_type", "is_table",
           "read_facts"]  # fmt: skip

FORMAT, VERSION = "edgespec-table", 1
ENTRIES = "table.npy"
MOST_ORDER = 8  # tokens of a context
MOST_BYTES = 16 << 20  # two million entries, which take 0.3 GB in memory
FACTOR, MASK = 0x9E3779B1, 0xFFFFFFFF
WHOLE = 255  # chances are kept in 1 / WHOLE
MOST_TOKENS = 4  # of a proposal: beyond, hardly any survives
LEAST_SURVIVAL = 0.2  # of a proposal's last token, by the table's own chances
STEPS = (0.2, 0.35, 0.55, 0.8)  # chances of the first token that divide proposals into buckets
PRIORS = ((0.15, 1.0), (0.25, 1.0), (0.4, 1.0), (0.6, 1.0), (0.8, 1.0))  # hits and tokens judged, for each bucket


def context_keys(tokens: NDArray[np.int64], order: int) -> NDArray[np.int64]:
    """Keys of the `order` tokens before every place of `tokens` [..., n] that has so many: [..., n - order + 1]."""
    n = tokens.shape[-1] - order + 1
    keys = np.zeros((*tokens.shape[:-1], n), np.int64)
    for back in range(order):
        first = order - 1 - back
        keys = (keys * FACTOR + tokens[..., first : first + n] + 1) & MASK
    return keys


def entry_type(n_vocab: int) -> np.dtype[Any]:
    """context: its key; token: what follows it most often; chance: how often, in 1 / WHOLE."""
    return np.dtype([("context", "<u4"), ("token", "<u2" if n_vocab <= 1 << 16 else "<u4"), ("chance", "u1")])


def is_table(folder: Path) -> bool:
    """Whether `folder` holds a table."""
    return bool(declared_format(folder) == FORMAT)


@dataclass(frozen=True)
class NgramTable:
    """entries: a context's key -> chance << 32 | token. order: tokens of the longest context.

    n_vocab, tokenizer_hash: of the targets that it is for. facts: config.json. largest: of its tokens.
    """

    entries: Mapping[int, int]
    order: int
    n_vocab: int
    tokenizer_hash: str | None
    facts: Mapping[str, Any]
    largest: int = 0

    @classmethod
    def read(cls, folder: Path) -> NgramTable:
        """From a folder of config.json and table.npy. Raises ConfigError or FormatError, naming the file."""
        facts = read_facts(folder)
        path, dtype = folder / ENTRIES, entry_type(facts["n_vocab"])
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise FormatError(f"{folder} must hold {ENTRIES}, of at most {MOST_BYTES} bytes.")
        try:
            with path.open("rb") as file:
                found = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # whatever numpy finds wrong with a file that anyone may have made
            raise FormatError(f"{path} is no array of numpy: {error}.") from error
        if found.dtype != dtype or found.ndim != 1 or (len(found) and int(found["token"].max()) >= facts["n_vocab"]):
            raise FormatError(f"{path} must be rows of {dtype.descr} with tokens below {facts['n_vocab']}.")
        packed = (found["chance"].astype(np.int64) << 32) | found["token"]
        entries = dict(zip(found["context"].tolist(), packed.tolist(), strict=True))
        largest = int(found["token"].max()) if len(found) else 0
        return cls(entries, facts["order"], facts["n_vocab"], facts.get("tokenizer_hash"), facts, largest)

    @property
    def n_bytes(self) -> int:
        """About what it takes in memory: a dictionary of numbers."""
        return 150 * len(self.entries)

    def guess(self, tokens: Sequence[int]) -> tuple[int, float] | None:
        """The likeliest token after these and its chance, by the surest of the contexts that are known; None."""
        best, key, entries = 0, 0, self.entries
        for n in range(1, min(self.order, len(tokens)) + 1):
            key = (key * FACTOR + tokens[-n] + 1) & MASK
            found = entries.get(key, 0)
            if found > best:
                best = found
        return (best & MASK, (best >> 32) / WHOLE) if best else None

    def chain(self, tokens: Sequence[int]) -> tuple[list[int], float]:
        """What may follow, as far as it is likely enough, and the chance of its first token."""
        last = list(tokens[-self.order :])
        chain: list[int] = []
        first, survival = 0.0, 1.0
        while len(chain) < MOST_TOKENS and (found := self.guess(last)) is not None:
            survival *= found[1]
            if survival < LEAST_SURVIVAL:
                break
            first = first or found[1]
            chain.append(found[0])
            last.append(found[0])
        return chain, first


def read_facts(folder: Path) -> dict[str, Any]:
    """config.json of a table, checked. Raises ConfigError naming the file and the key."""
    path = folder / CONFIG
    if not is_table(folder):
        raise ConfigError(f"{folder} holds no table: it must have a {CONFIG} that says {FORMAT!r}, and {ENTRIES}.")
    facts: dict[str, Any] = json.loads(path.read_bytes())
    if facts.get("version") != VERSION:
        raise ConfigError(f"{path}: version is {facts.get('version')!r}; {VERSION} is read here: update edgespec.")
    for key, most in (("order", MOST_ORDER), ("n_vocab", 1 << 31)):
        value = facts.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{path}: {key} is {value!r}; a whole number from 1 to {most} is wanted.")
    if not isinstance(facts.get("tokenizer_hash"), str | None):
        raise ConfigError(f"{path}: tokenizer_hash is {facts['tokenizer_hash']!r}; a string is wanted.")
    return facts


class TableDrafter:
    """Proposes what the table says, MOST_TOKENS tokens at most; sure ones are judged apart from others (`Offer`)."""

    source = "table"
    taps: tuple[str, ...] = ()

    def __init__(self, table: NgramTable) -> None:
        self.table = table
        self.reset()

    def reset(self) -> None:
        self._track = AcceptanceTrack(PRIORS)
        self._at, self._bucket = -1, 0
        self._chain: list[int] = []

    def offer(self, context: DraftContext) -> Offer:
        judged = self._track.learn(context.tokens)
        if self._at != len(context.tokens):
            self._at = len(context.tokens)
            self._chain, chance = self.table.chain(context.tokens)
            self._bucket = sum(chance >= step for step in STEPS)
            # judged also where another drafter gets the round
            self._track.ask(Proposal(self._chain, self.source), self._at, self._bucket)
        if not self._chain:
            return Offer(max_k=0, judged=judged)
        return Offer(len(self._chain), self._track.rate(self._bucket), self._bucket, 0, judged)

    def propose(self, context: DraftContext, k: int) -> Proposal:
        self.offer(context)
        return Proposal(self._chain[:k], self.source)

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """Needs no features."""

    def close(self) -> None:
        self.reset()


def create(setup: DraftSetup) -> TableDrafter:
    if setup.table is None:
        raise ConfigError("draft='table' has no table here: give its folder as draft_model, or use draft='ngram'")
    return TableDrafter(setup.table)
